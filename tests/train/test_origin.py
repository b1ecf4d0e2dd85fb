"""Weights from elsewhere: a run's checkpoint, or a folder whose format a reader knows."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny_data
import tiny_models as tiny
from tiny_steps import make_mesh

from jaxlm import config, config_files, tree
from jaxlm.config import ConfigError, RunError
from jaxlm.objectives import lm
from jaxlm.step import parts
from jaxlm.train import origin
from jaxlm.train.checkpoints.store import Checkpointer

KEYS = [f"model.{name}={value}" for name, value in (tiny.BASE | {"vocab_size": 300}).items()]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder of a run with checkpoints at 1 and 2, its parts, its state at step 2)."""
    folder = tmp_path_factory.mktemp("run")
    data = tiny_data.make(folder / "data", {"a": 1.0})
    c = config.resolve(config_files.load("base", [f"workdir={folder}", f"data.dir={data.path}", *KEYS]))
    (folder / "config.json").write_text(config.to_json(c))
    (folder / "metrics.jsonl").write_text('{"step": 1, "val/loss": 2.0}\n{"step": 2, "val/loss": 3.0}\n{"step": 3, "va')
    c = dataclasses.replace(c, model=dataclasses.replace(c.model, attention="xla"))
    run = parts.make(c, make_mesh(), lm.make)
    state, _ = run.create()
    with Saved(folder / "checkpoints") as saver:
        for step in (1, 2):
            state = jax.tree.map(lambda x: x + 1, state)
            saver.save(dataclasses.replace(state, step=jax.numpy.int32(step)), {})
    return folder, run, dataclasses.replace(state, step=jax.numpy.int32(2))


class Saved(Checkpointer):
    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


def test_one_parameter_is_read_on_the_host(made):
    folder, _, state = made
    read = origin.open(folder).leaf
    for name, value in tree.named_leaves(state.params["params"]):
        np.testing.assert_array_equal(read(name), value)
    earlier = origin.open(folder, 1).leaf("final_norm/scale")
    np.testing.assert_allclose(earlier + 1, read("final_norm/scale"), rtol=1e-6)


def test_a_run_is_opened_lazily_and_read_onto_any_mesh(made):
    folder, run, state = made
    found = origin.open(folder)
    assert found.provenance == {"path": str(folder.resolve()), "step": 2}
    assert found.config.model.d_model == run.config.model.d_model
    assert found.tokenizer().vocab_size == 300
    elsewhere = parts.make(run.config, make_mesh(fsdp=4), lm.make)
    placed = elsewhere.shardings.params["params"]
    params = found.params(elsewhere.abstract.params["params"], placed)
    assert_same(params, state.params["params"])
    assert jax.tree.map(lambda x: x.sharding, params) == placed
    assert_same(found.state(elsewhere.abstract, elsewhere.shardings), state)
    assert origin.open(folder, "best").provenance["step"] == origin.open(folder, 1).provenance["step"] == 1


def test_training_begins_from_an_origin(made):
    """Also where the parameters are frozen: then what is trained beside them is new."""
    folder, run, state = made
    begun, frozen = run.create(origin.open(folder))
    assert_same(begun.params, state.params)
    assert (int(begun.step), frozen) == (0, {})
    fresh, _ = run.create()
    with pytest.raises(AssertionError):
        assert_same(fresh.params, begun.params)


def test_a_folder_that_a_reader_knows(made, tmp_path):
    _, run, _ = made
    other = origin.Origin(run.config, lambda: None, {"path": "x"}, lambda abstract, shardings: {}, np.empty)
    readers = [lambda folder: None, lambda folder: other if folder == tmp_path else None]
    assert origin.open(tmp_path, readers=readers) is other
    with pytest.raises(ConfigError, match=r"is no run but a model, which has no checkpoint best"):
        origin.open(tmp_path, "best", readers)
    with pytest.raises(ConfigError, match=r"no run to begin from in .* no config\.json"):
        origin.open(tmp_path, readers=readers[:1])


def test_what_is_not_there_is_one_line(made, tmp_path):
    folder, _, _ = made
    with pytest.raises(ConfigError, match="no folder"):
        origin.open(tmp_path / "none")
    with pytest.raises(ConfigError, match="no checkpoint '7'; there are 1, 2"):
        origin.open(folder, "7")


def test_damage_names_another_checkpoint(made):
    folder, run, _ = made
    for file in (folder / "checkpoints/2/params").rglob("*"):
        if file.is_file() and file.stat().st_size > 1000:
            file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(RunError, match="try --checkpoint=1"):
        origin.open(folder, 2).params(run.abstract.params["params"], run.shardings.params["params"])
