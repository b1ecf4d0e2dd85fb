"""`jaxlm eval` of a model from elsewhere: what is refused, what is kept, what is said."""

import errno
import json
import pathlib

import numpy as np
import pytest
import tiny_eval
import tiny_hf

from jaxlm.cli import cli
from jaxlm.commands import eval as program
from jaxlm.eval import likelihood, results
from jaxlm.host import files

pytest.importorskip("tokenizers")
TASK = [{"query": f"{word} is", "choices": ["one", "two two"], "gold": n % 2} for n, word in enumerate("abcdefgh")]


@pytest.fixture
def model(tmp_path):
    """The folder of a model; its questions are in `bundle` beside it."""
    tiny_hf.weights(tmp_path / "model", vocab_size=450, n_layers=1)
    tiny_hf.byte_level(tmp_path / "model")
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle/made.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TASK))
    return tmp_path / "model"


def ask(model: pathlib.Path, *more: str) -> int:
    return cli.main(
        ["eval", str(model), "--tasks=core:made", f"--config.eval.data_dir={model.parent / 'bundle'}", *more]
    )


@pytest.mark.parametrize("verb", ["eval", "sample"])
def test_a_damaged_model_is_refused_in_a_line(model, capsys, verb):
    import safetensors.numpy

    state = safetensors.numpy.load_file(model / "model.safetensors")
    name = next(name for name in state if "up_proj" in name)
    state[name].view(np.uint8)[:] = 0xFF
    tiny_hf.save(model, state)
    assert (ask(model) if verb == "eval" else cli.main(["sample", str(model), "the cat"])) == 1
    said = capsys.readouterr()
    assert "up/kernel has a number that is not finite" in said.err.splitlines()[-1]
    assert said.out == ""
    assert results.steps(model) == []


def test_a_model_that_gives_no_probability_is_named(model, capsys, monkeypatch):
    def score(self, requests, what):
        raise likelihood.NotFinite(f"{what}: log p of a text is not finite")

    monkeypatch.setattr(likelihood.Scorer, "score", score)
    assert ask(model) == 1
    assert f"jaxlm: the model of {model}: " in capsys.readouterr().err.splitlines()[-1]


def test_what_can_not_be_kept_is_printed(model, capsys):
    (model / "eval").write_text("in the way")  # a read-only folder does not stop root
    assert ask(model) == 0
    said = capsys.readouterr()
    assert "eval/0 can't be written (" in said.err
    assert "written to" not in said.err
    assert "bits_per_byte" in said.out


def test_a_full_disk_is_told_before_anything_is_asked(model, capsys, monkeypatch):
    def full(path, content, private=False):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_atomically", full)
    assert ask(model) == 1
    said = capsys.readouterr()
    assert "eval/0: No space left on device: free some room" in said.err.splitlines()[-1]
    assert said.out == ""
    assert not (model / "eval").exists()


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_disk_that_fills_up_loses_no_table(model, capsys, monkeypatch, options):
    write = files.write_atomically

    def full(path, content, private=False):
        if path.suffix == ".jsonl":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content, private)

    monkeypatch.setattr(files, "write_atomically", full)
    assert ask(model, *options) == 1
    said = capsys.readouterr()
    assert "made is not kept in " in said.err
    assert "No space left on device" in said.err
    assert "written to" not in said.err
    assert "bits_per_byte" in said.out


def test_results_are_written(model, capsys):
    assert ask(model) == 0
    assert "written to " in capsys.readouterr().err
    assert sorted(path.name for path in (model / "eval/0").iterdir()) == ["made.jsonl", "results.json"]


def test_a_model_without_chat_template_is_refused_before_the_held_out_loss(model, tmp_path, capsys, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setattr(program, "_held_out", lambda *given: pytest.fail("the held-out loss was computed"))
    data = tiny_eval.benchmarks(tmp_path / "made") / "hub"
    asked = [f"--config.eval.data_dir={data}", "--tasks=arc_easy", "--config.eval.chat_template=True"]
    assert cli.main(["eval", str(model), *asked]) == 2
    assert "this model has no chat template" in capsys.readouterr().err.splitlines()[-1]
