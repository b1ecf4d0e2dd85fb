"""`jaxlm eval` of a model from elsewhere: what is refused, what is kept, what is said."""

import json
import pathlib

import numpy as np
import pytest
import tiny_hf

from jaxlm import cli
from jaxlm.eval import results

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
