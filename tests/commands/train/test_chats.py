"""What SFT, reward model and DPO share, and SFT from its command to what it leaves behind."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import tiny_chats
from tiny_keys import keys

from jaxlm import config
from jaxlm.cli import cli
from jaxlm.commands.train import posttraining
from jaxlm.config import CHAT_TOKENS, ConfigError, MeshConfig, config_files
from jaxlm.data.chats import chat
from jaxlm.data.tokenizer import coder
from jaxlm.plan import lower, memory
from jaxlm.run import metrics
from jaxlm.run.checkpoints import store
from jaxlm.train import average, origin

SMALL = keys("""
    train.steps=4 train.batch_size=8 train.seq_len=64 train.eval_every_steps=2 eval.max_mb=0.003 eval.max_examples=40
    sample.prompts=('one',) sample.max_new_tokens=8 runs.supervise=off log.tensorboard=False log.every_steps=1
    data.val_fraction=0.2
""")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base of ours: parameters, data and a tokenizer without ChatML's tokens."""
    folder = tiny_chats.base(tmp_path_factory.mktemp("base"), n_layers=1)
    tiny_chats.chats(folder / "chats.jsonl", 80)
    return folder


def command(base, **changed):
    given = SMALL | {"origin": base, "data.path": base / "chats.jsonl"}
    given |= {name.replace("__", "."): value for name, value in changed.items()}
    return ["train", "sft", *(f"--config.{key}={value}" for key, value in given.items())]


@pytest.fixture(scope="module")
def run(base):
    """(the folder of a finished run of SFT, what it said)."""
    folder = base.parent / "sft-run"
    assert cli.main(command(base, workdir=folder)) == 0
    return folder, (folder / "log.txt").read_text()


def test_what_a_run_says(base, run):
    folder, said = run
    assert f"{base} has no chat tokens: its tokenizer, embedding and head get the 5 of ChatML" in said
    assert "the first one; marked is what counts" in said
    assert "[[" in said
    assert "the base's own text: " in said
    assert f"next: jaxlm chat {folder}" in said


def test_what_a_run_measures(run):
    folder, _ = run
    found = metrics.read(folder / "metrics.jsonl")
    for step in (0, 2, 4):
        assert {"val/loss", "val/text_loss", "val/base/bits_per_byte"} <= found[step].keys()
    assert "val/base/change" not in found[0]
    before, after = (found[step]["val/base/bits_per_byte"] for step in (0, 4))
    assert found[4]["val/base/change"] == pytest.approx(after / before - 1)
    assert 0 <= found[4]["samples/ended"] <= 1
    (record,) = map(json.loads, (folder / "samples/4.jsonl").read_text().splitlines())
    assert record["ended"] == bool(found[4]["samples/ended"])


def test_the_run_stands_alone(base, run):
    """It keeps the tokenizer that grew, and all its rows; whoever opens it finds them."""
    folder, _ = run
    found, theirs = origin.open(folder), origin.open(base)
    tokenizer = found.tokenizer()
    assert [tokenizer.id_of(piece) for piece in CHAT_TOKENS] == list(range(300, 305))
    assert tokenizer.encode("one two") == theirs.tokenizer().encode("one two")
    assert found.config.model.vocab_size == 305
    assert found.leaf("embed/embedding").shape == (384, 32)
    assert (folder / "examples.json").is_file()
    begun = origin.begin(found.config)
    np.testing.assert_array_equal(begun.leaf("embed/embedding")[:300], theirs.leaf("embed/embedding")[:300])


def test_other_kinds_of_training_only_change_what_they_must(base):
    c = resolved(base)
    pairs = posttraining.Pairs(dataclasses.replace(c, program="reward"))
    assert (pairs.adapter, pairs.trained) == (None, "")
    adapted = posttraining.Chats(resolved(base, adapter__kind="lora"))
    assert adapted.adapter.row_ids == tuple(range(300, 305))
    assert adapted.trained == "LoRA r 16 + 5 rows"
    quantised = {
        "adapter__kind": "lora",
        "adapter__quantize": "nf4",
        "adapter__without_rows": True,
        "adapter__rows": (),
    }
    assert posttraining.Chats(resolved(base, **quantised)).trained == "LoRA r 16, on nf4"


def test_an_adapters_moving_average_is_measured_and_saved(base, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(average.TOKENS, "cpu", 8 * 64 // 8)  # of a device, of eight: each step
    folder = tmp_path / "lora"
    lora = {"adapter__kind": "lora", "adapter__rank": 2, "checkpoint__average": 0.3, "sample__prompts": "()"}
    assert cli.main(command(base, workdir=folder, **lora)) == 0
    digests = store.read_meta(folder / "checkpoints/4")["digests"]
    begin, trained = "train/average/", {name for name in digests if not name.startswith("train/")}
    assert {name.removeprefix(begin) for name in digests if name.startswith(begin)} == trained
    assert {name.partition("/")[0] for name in trained} == {"lora", "rows"}
    found = metrics.read(folder / "metrics.jsonl")
    assert "val_average/loss" not in found[0]
    assert found[4]["val_average/loss"] != found[4]["val/loss"]
    assert cli.main(["average", str(folder)]) == 2
    assert "only whole models are averaged" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "quantize"), [("none", "none"), ("lora", "nf4"), ("prompt", "none")])
def test_plan_and_tune_make_the_parts_that_training_makes(base, kind, quantize):
    shape = {"model__vocab_size": 305, "model__attention": "xla", "model__dtype": "float32", "model__n_layers": 2}
    c = resolved(base, adapter__kind=kind, adapter__quantize=quantize, **shape)
    mesh = memory.abstract_mesh(MeshConfig(1, 1, 1, 1), 1)
    mine = lower.parts_of(c, mesh)
    theirs = posttraining.Chats(c).parts(c, mesh)
    assert (mine.abstract, mine.frozen, mine.batch()) == (theirs.abstract, theirs.frozen, theirs.batch())
    assert (mine.model, mine.frozen_shardings) == (theirs.model, theirs.frozen_shardings)


def resolved(base, **keys):
    given = {"origin": base, "data.path": "x", "workdir": "w", "data.tokenizer": base / "data"}
    given |= {name.replace("__", "."): value for name, value in keys.items()}
    c = config_files.load("sft", [f"{name}={value}" for name, value in given.items()])
    return config.resolve(c)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"origin": ""}, "sft begins with a model: --config.origin=RUN"),
        ({"origin_state": True}, "origin_state=True continues the origin's training"),
        ({"adapter__kind": "lora", "adapter__rows": ()}, "leaves out tokens of ChatML"),
        ({"adapter__kind": "prompt", "adapter__rows": "('<|im_end|>',)"}, "hardly learn to end its answers"),
    ],
)
def test_what_can_not_be_is_one_line(base, keys, message):
    with pytest.raises(ConfigError, match=message.replace("|", r"\|")) as error:
        posttraining.Chats(resolved(base, **keys))
    assert "\n" not in str(error.value)


def test_an_adapter_names_its_base_where_another_has_no_such_step(base, tmp_path, capsys):
    other = shutil.copytree(base, tmp_path / "other")
    (step,) = (path for path in (other / "checkpoints").iterdir() if path.name.isdecimal())
    step.rename(step.with_name("77"))
    keys = {"workdir": tmp_path / "lora", "adapter__kind": "lora", "adapter__rank": 2}
    assert cli.main(command(base, **keys)) == 0
    assert cli.main(command(base, **keys | {"origin": other})) == 2
    said = "".join(capsys.readouterr())
    assert f"{tmp_path / 'lora'} began with {base}, step {step.name}, and needs it" in said


def test_a_model_without_a_chat_template(base, tmp_path):
    tiny_hf = pytest.importorskip("tiny_hf")
    tiny_hf.byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"has no chat template: give it one by --config\.examples\.template=chatml"):
        posttraining.tokenizer(resolved(base, data__tokenizer=tmp_path))


def test_data_is_asked_for(base, capsys):
    assert cli.main(["train", "sft", f"--config.origin={base}"]) == 2
    assert "sft reads examples: --config.data.path=FILE.jsonl" in capsys.readouterr().err
    assert cli.main(["train", "quickstart", "--config.adapter.kind=lora", f"--config.workdir={base / 'no'}"]) == 2
    assert "adapter.kind=lora is for sft, reward and dpo" in capsys.readouterr().err


def test_a_prompt_begins_as_rows_of_the_embedding(base):
    c = resolved(base, adapter__kind="prompt", adapter__prompt_tokens=5, adapter__prompt_text="one two three")
    c = dataclasses.replace(c, model=origin.open(base).config.model)
    tokenizer = posttraining.tokenizer(c)
    table = origin.open(base).leaf("embed/embedding")

    def vectors(settings):
        found = origin.begin(c).with_prompt(settings, tokenizer, 0)
        return found.trained()["prompt"]["embed"]["prompt"]

    named = chat.grown(coder.load(base / "data")).encode("one two three")
    np.testing.assert_array_equal(vectors(c.adapter), table[np.resize(named, 5)])
    drawn = vectors(dataclasses.replace(c.adapter, prompt_text=""))
    assert drawn.shape == (5, 32)
    assert all((row == table[:300]).all(1).any() for row in drawn)
    assert origin.begin(c).with_prompt(dataclasses.replace(c.adapter, kind="lora"), tokenizer, 0).trained() == {}
