"""What the help knows of each key: what the schema says."""

import pytest

from jaxlm.config import ConfigError, config_files, key_help

BASE = config_files.module(config_files.find_config("base"))
KNOWN = key_help.read()


def test_every_section_and_key_has_a_comment():
    assert all(KNOWN.sections.values())
    assert all(key.comment for key in KNOWN.keys)
    assert {key.name: key.comment for key in KNOWN.keys}["optim.clip_norm"] == "of the global gradient norm; 0 = off"


def test_the_keys_are_those_of_base_with_its_defaults():
    defaults = config_files.load("base")
    flat = config_files.flat_keys(defaults)
    named = {key.name: key for key in KNOWN.keys if ".NAME." not in key.name}
    assert {*named, *KNOWN.sections} == {*flat, "prepare.sources.NAME", "phases.plan.NAME"}
    for name, key in named.items():
        value = defaults
        for part in name.split("."):
            value = value[part]
        assert (value.to_dict() if name in ("data.sources", "data.final.weights") else value) == key.default, name


@pytest.mark.parametrize(
    ("section", "own"), [("prepare.sources.NAME", BASE.source("texts")), ("phases.plan.NAME", BASE.phase())]
)
def test_the_keys_of_a_source_and_of_a_phase_are_those_that_base_makes(section, own):
    known = {key.name.rpartition(".")[2]: key.default for key in KNOWN.keys if key.section == section}
    assert known | {"path": ""} == dict(own) | {"path": ""}
    assert known.keys() == own.keys()
    with pytest.raises(ValueError, match="phase has no key \\['max_loss'\\]"):
        BASE.phase(steps=1, max_loss=3.0)


# A key, its type, its limits.
TYPES = """
train.steps | int | at least 1
train.microbatch_size | int | at least -1
optim.lr | float | at least 0
optim.b1 | float | at least 0 and below 1
model.family | str | one of llama, gpt2
log.wandb | str | one of '', offline, online
mesh.fsdp | int | at least 1, or -1 for all remaining devices
model.bias | bool |
sample.prompts | tuple of str |
tune.remat | tuple of str | each one of none, names, dots, full
prepare.sources.NAME.priority | int | in -128 to 127
phases.plan.NAME.max_nonfinite_steps | int | at least 0, or -1 for no gate
prepare.stages.near.threshold | float | in 0 to 1
"""


def test_types_and_limits_are_those_of_the_schema():
    known = {key.name: (key.type, key.limits) for key in KNOWN.keys}
    for row in TYPES.strip().splitlines():
        name, *told = (cell.strip() for cell in row.split("|"))
        assert known[name] == tuple(told), name


def test_a_page_has_values_defaults_types_limits_and_comments():
    config = config_files.load("local_35m", ["optim.lr=1"])
    page = key_help.page(KNOWN, "optim", config)
    assert "  optim.lr = 1.0  (default 0.001; float, at least 0)\n      peak learning rate; 0 = by rule" in page
    assert "  optim.b1 = 0.9  (default; float, at least 0 and below 1)\n" in page
    assert "optim: optimizer and learning rate\n" in page
    assert "model." not in page
    assert max(map(len, page.splitlines())) <= key_help.WIDTH


@pytest.mark.parametrize(
    ("wanted", "line"),
    [
        ("train.seq_len", "  train.seq_len = 512  (default; int, at least 1)"),
        ("prepare.stages.near", "prepare.stages.near.ngram = 5"),
        ("prepare.stages.exact", "prepare.stages.exact: the same text"),
        ("seed", "  seed = 0  (default"),
    ],
)
def test_a_page_of_one_key_of_a_section_inside_another_and_of_one_without_keys(wanted, line):
    page = key_help.page(KNOWN, wanted, config_files.load("base"))
    assert line in page
    assert page.count("\n  train.") <= 1


def test_the_page_of_everything_has_each_key_once():
    page = key_help.page(KNOWN, "all", config_files.load("base")).splitlines()
    for key in KNOWN.keys:
        assert len([line for line in page if line.startswith(f"  {key.name} = ")]) == 1, key.name


def test_sources_are_named_and_shown_with_their_own_values():
    config = config_files.load("quickstart")
    assert "in this config: code, math, prose" in key_help.page(KNOWN, "prepare.sources", config)
    page = key_help.page(KNOWN, "prepare.sources.math", config)
    assert "prepare.sources.math.weight = 10.0  (default 1.0; float, at least 0)" in page
    assert "NAME" not in page.replace("tfds:NAME", "").replace("embedded:NAME", "")


@pytest.mark.parametrize(
    ("wanted", "hint"),
    [
        ("opitm", "did you mean optim?"),
        ("near", "did you mean prepare.stages.near?"),
        ("lr", "did you mean optim.lr?"),
        ("zzz", "there are model, data, adapter"),
        ("mod", ""),
        ("prepare.sources.NAMES.path", ""),
    ],
)
def test_an_unknown_section_is_one_line_with_the_nearest(wanted, hint):
    with pytest.raises(ConfigError, match="no section or key") as error:
        key_help.page(KNOWN, wanted, config_files.load("base"))
    assert hint in str(error.value)
    assert "\n" not in str(error.value)


def test_the_overview_is_in_short_words():
    """Which names it has, and in what order: tests/cli/test_cli.py."""
    top = [name for name in KNOWN.sections if "." not in name]
    assert all(len(KNOWN.sections[name].partition(";")[0]) <= 34 for name in top)
    assert max(map(len, key_help.overview(KNOWN, ("tune", "plan")))) <= key_help.WIDTH
