"""Benchmarks while a model trains: the same questions at each step, without compiling anew."""

import dataclasses
import json
import types

import jax
import pytest
import tiny_data
import tiny_models as tiny

from jaxlm import config, models
from jaxlm.config import ConfigError, config_files
from jaxlm.devices import sharding
from jaxlm.eval import harness, results

TASK = [{"query": f"{word} is", "choices": ["one", "two two"], "gold": n % 2} for n, word in enumerate("abcdefgh")]


@pytest.fixture
def parts(tmp_path):
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "made.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TASK))
    data = tiny_data.make(tmp_path, {"a": 1.0})
    keys = [
        "data.path=x",
        "eval.tasks=('core:made',)",
        f"eval.data_dir={folder}",
        "eval.max_items=6",
        "eval.batch_size=4",
    ]
    c = config.resolve(config_files.load("base", keys))
    model = models.build(tiny.model_config(vocab_size=300, max_seq_len=64, n_layers=1), "blocked")
    return c, model, data, sharding.make_mesh(config.MeshConfig(1, 1, 1, 1), jax.devices()[:1])


def compiled(caplog) -> int:
    return sum("Finished XLA compilation" in message for message in caplog.messages)


def test_metrics_and_files_of_a_step(parts, tmp_path, caplog):
    c, model, data, mesh = parts
    measure = harness.make(harness.find(c.eval), c, model, data, mesh, tmp_path)
    variables = {"params": tiny.random_params(model)}
    found = measure(variables, 5)
    other = jax.tree.map(lambda leaf: leaf * 1.5, variables)
    with jax.log_compiles():
        jax.jit(lambda x: x + 1)(1)
        assert compiled(caplog) == 1
        again = measure(other, 10)
    assert compiled(caplog) == 1
    assert set(found) == set(again) >= {f"eval/made/{name}" for name in ("acc", "bits_per_byte", "margin")}
    assert results.steps(tmp_path) == [5, 10]
    first, second = (results.read(tmp_path / "eval" / step)["made"] for step in ("5", "10"))
    assert len(first.items) == 6
    assert [item.id for item in first.items] == [item.id for item in second.items]
    assert found["eval/made/acc"] == first.metrics["acc"]
    assert found["eval/made/bits_per_byte"] != again["eval/made/bits_per_byte"]  # other weights


def test_a_model_that_diverged_has_no_score_and_goes_on(parts, tmp_path, capsys):
    c, model, data, mesh = parts
    measure = harness.make(harness.find(c.eval), c, model, data, mesh, tmp_path)
    sound = {"params": tiny.random_params(model)}
    assert measure(jax.tree.map(lambda leaf: leaf * float("nan"), sound), 5) == {}
    assert "no benchmark scores at step 5: " in capsys.readouterr().err
    assert measure(sound, 10)
    assert results.steps(tmp_path) == [10]


def test_what_can_not_be_asked_is_refused_before_anything_is_made(parts):
    c = parts[0]
    wrong = types.SimpleNamespace(**{**vars(c.eval), "tasks": ("core:mad",)})
    with pytest.raises(ConfigError, match=r"mad"):
        harness.find(wrong)
    assert harness.find(types.SimpleNamespace(tasks=())) is None
    asked = dataclasses.replace(parts[0], eval=dataclasses.replace(parts[0].eval, chat_template=True))
    with pytest.raises(ConfigError, match=r"^this model has no chat template"):
        harness.make(harness.find(asked.eval), asked, *parts[1:], None)
    assert harness.make(None, *parts[:1], None, None, None, None) is None
