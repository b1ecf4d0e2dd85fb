"""The keys of other trainers lead to ours, in the code and in docs/coming_from.md."""

import pathlib

import pytest

from jaxlm.cli import cli
from jaxlm.config import ConfigError, config_files, key_help, theirs

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "coming_from.md"


def test_each_name_leads_to_a_key_that_exists_or_says_why_there_is_none():
    keys = {key.name for key in key_help.read().keys}
    for name, (ours, why) in theirs.table().items():
        assert (ours.partition(" ")[0] in keys) != bool(why), name


def _cell(ours):
    key, _, note = ours.partition(" ")
    return f"`{key}`{' ' * bool(note)}{note}"


def test_the_page_has_the_whole_table():
    rows = dict(line.strip("| ").split(" | ", 1) for line in PAGE.read_text().splitlines() if line.startswith("| `"))
    shown = {name.strip("`"): ours for ours, names in rows.items() for name in names.split()}
    assert shown == {name: _cell(ours) for name, (ours, why) in theirs.table().items() if ours}
    assert all(why in PAGE.read_text() for _, why in theirs.table().values())


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("learning_rate", "did you mean config.optim.lr?"),
        (
            "train.gradient_accumulation_steps",
            "did you mean config.train.microbatch_size (rows at once, not how many times)?",
        ),
        ("train.epochs", "did you mean config.train.steps (steps, not passes)?"),  # policy.epochs is PPO's
        ("lora-r", "did you mean config.adapter.rank?"),
        ("sample_packing", "there is no such key: documents and examples are always packed"),
        ("train.barch_size", "did you mean config.train.batch_size?"),
        ("plan.chat_template", "did you mean config.eval.chat_template?"),  # a key of ours in another section
        ("train.model.name", "did you mean config.model.family?"),  # the longest part that is theirs; not optim.name
        ("train.validation.freq", "did you mean config.train.eval_every_steps?"),
        ("train.seed", "did you mean config.seed?"),  # the run's, not the data's
        ("train.dataset_prepared_path", "did you mean config.data.dir?"),
        ("xyzzy", "jaxlm train --help=all lists all keys"),
        ("plan.xyzzy", "jaxlm train --help=plan lists all keys"),
    ],
)
def test_an_unknown_key(key, hint):
    with pytest.raises(ConfigError) as error:
        config_files.load("base", [f"{key}=1"])
    assert str(error.value).endswith(hint)


def test_an_unknown_flag_and_help_by_its_verb(capsys):
    assert cli.main(["train", "quickstart", "--per_device_train_batch_size=4"]) == 2
    assert "did you mean --config.train.batch_size (rows of all devices together)?" in capsys.readouterr().err
    assert cli.main(["train", "quickstart", "--seed=3"]) == 2
    assert "did you mean --config.seed=3?" in capsys.readouterr().err
    assert cli.main(["help", "tune"]) == 0
    asked = capsys.readouterr().out
    assert cli.main(["tune", "--help"]) == 0
    assert capsys.readouterr().out == asked
