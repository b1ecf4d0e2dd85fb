"""Weights from elsewhere: a run's checkpoint, or a folder whose format a reader knows."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import tiny_data
import tiny_models as tiny
from tiny_steps import make_mesh

from jaxlm import config
from jaxlm.config import ConfigError, RunError, config_files
from jaxlm.data.chats import chat
from jaxlm.devices import tree
from jaxlm.models import adapters
from jaxlm.run.checkpoints.store import Checkpointer
from jaxlm.step import parts
from jaxlm.step.objectives import lm
from jaxlm.train import origin

KEYS = [f"model.{name}={value}" for name, value in (tiny.BASE | {"vocab_size": 300, "n_layers": 1}).items()]


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
    with pytest.raises(ConfigError, match=r"is a model, not a run: it has no checkpoint best"):
        origin.open(tmp_path, "best", readers)
    with pytest.raises(ConfigError, match=r"no run to begin from in .* no config\.json"):
        origin.open(tmp_path, readers=readers[:1])


def test_what_is_not_there_is_one_line(made, tmp_path):
    folder, _, _ = made
    with pytest.raises(ConfigError, match="no folder"):
        origin.open(tmp_path / "none")
    with pytest.raises(ConfigError, match="no checkpoint '7'; there are 1, 2"):
        origin.open(folder, "7")


class Adapted:
    """A run in `folder` that trained a LoRA and rows beside the second checkpoint of `made`; its adapter is nowhere 0."""

    def __init__(self, folder, made, origin_folder=None, **keys):
        base, run, state = made
        c = dataclasses.replace(
            run.config,
            program="sft",
            workdir=str(folder),
            origin=str(origin_folder or base),
            adapter=dataclasses.replace(run.config.adapter, kind="lora", rank=2, alpha=3.0, rows=("</s>", "s")),
            **keys,
        )
        folder.mkdir()
        (folder / "config.json").write_text(config.to_json(c))
        self.folder, self.origin = folder, origin.begin(c)
        self.adapter = adapters.of(c.adapter, origin.trained_rows(c.adapter, origin.open(base).tokenizer()))
        self.parts = parts.make(c, make_mesh(), lm.make, self.adapter)
        state, self.frozen = self.parts.create(self.origin)
        self.state = jax.tree.map(lambda x: x + 0.1 if x.ndim else x, state)
        with Saved(folder / "checkpoints") as saver:
            saver.save(self.state, {"base": self.origin.identity()})

    def merged(self):
        return adapters.merge(self.frozen["params"], self.state.params, self.adapter)


def opened(found, made):
    """All parameters of an origin, and each of them as the host reads it."""
    _, run, _ = made
    params = found.params(run.abstract.params["params"], run.shardings.params["params"])
    for name, value in tree.named_leaves(params):
        np.testing.assert_allclose(found.leaf(name), value, rtol=1e-6)
    return params


@pytest.fixture(scope="module")
def adapted(made, tmp_path_factory):
    return Adapted(tmp_path_factory.mktemp("runs") / "lora", made)


def test_a_run_of_an_adapter_is_merged_with_its_base(made, adapted):
    found = origin.open(adapted.folder)
    params = opened(found, made)
    assert tiny.difference(params, jax.device_get(adapted.merged())) < 1e-6
    assert tiny.difference(params, jax.device_get(adapted.frozen["params"])) > 1e-2  # so the test can fail
    assert (found.trained(), found.adapter, found.provenance["step"]) == ({}, None, 0)
    assert found.tokenizer().vocab_size == 300


def test_or_they_are_left_apart_and_the_same_adapter_is_trained_on(made, adapted):
    found = origin.open(adapted.folder, merge=False)
    assert_same(opened(found, made), adapted.frozen["params"])
    assert_same(found.trained(), adapted.state.params)
    state, frozen = adapted.parts.create(found)
    assert_same(state.params, adapted.state.params)
    assert_same(frozen, adapted.frozen)


def test_adapters_on_adapters_are_merged_one_after_the_other(made, adapted, tmp_path):
    above = Adapted(tmp_path / "more", made, adapted.folder)
    assert tiny.difference(jax.device_get(above.frozen["params"]), jax.device_get(adapted.merged())) < 1e-6
    params = opened(origin.open(above.folder), made)
    assert tiny.difference(params, jax.device_get(above.merged())) < 1e-6
    on = Adapted(tmp_path / "on", made, adapted.folder, origin_merge=False)
    assert on.origin.digest() == adapted.origin.digest()
    base = opened(origin.open(on.folder, merge=False), made)
    assert_same(base, adapted.frozen["params"])


def test_the_digest_is_of_the_parameters(made, adapted, tmp_path):
    folder, _, _ = made
    names = {origin.open(folder, 1).digest(), origin.open(folder, 2).digest(), origin.open(adapted.folder).digest()}
    assert len(names) == 3
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert origin.open(copy, 2).digest() == origin.open(folder, 2).digest()
    assert origin.open(adapted.folder, merge=False).digest() == origin.open(folder, 2).digest()


def test_the_base_may_move_with_its_adapter_but_another_one_is_refused(made, adapted, tmp_path):
    folder, _, _ = made
    shutil.copytree(folder, tmp_path / folder.name)
    moved = tmp_path / "lora"
    shutil.copytree(adapted.folder, moved)
    saved = json.loads((moved / "config.json").read_text())
    saved["origin"] = f"/gone/{folder.name}"
    (moved / "config.json").write_text(json.dumps(saved))
    assert tiny.difference(opened(origin.open(moved), made), jax.device_get(adapted.merged())) < 1e-6
    shutil.rmtree(tmp_path / folder.name / "checkpoints/2")
    with pytest.raises(ConfigError, match="no checkpoint '2'; there are 1"):
        origin.open(moved)
    shutil.copytree(folder / "checkpoints/1", tmp_path / folder.name / "checkpoints/2")
    meta = tmp_path / folder.name / "checkpoints/2/meta/metadata"
    said = json.loads(meta.read_text())
    del said["sha256"]
    meta.write_text(json.dumps(said | {"step": 2}))
    with pytest.raises(ConfigError, match=r"is not the model that .* began with") as error:
        opened(origin.open(moved), made)
    assert "\n" not in str(error.value)


def test_which_rows_are_trained(made):
    folder, run, _ = made
    tokenizer, settings = origin.open(folder).tokenizer(), run.config.adapter
    rows = dataclasses.replace(settings, rows=("auto",))
    with pytest.raises(ConfigError, match="im_start"):
        origin.trained_rows(rows, tokenizer)
    assert origin.trained_rows(rows, chat.grown(tokenizer)) == tuple(range(300, 305))
    assert origin.trained_rows(dataclasses.replace(settings, rows=("s", "</s>")), tokenizer) == (
        2,
        tokenizer.id_of("s"),
    )


def test_more_ids_than_the_origin_has(made):
    """A model that grows: its own parameters stay, and its digest is another."""
    folder, run, state = made
    c = dataclasses.replace(run.config, origin=str(folder), model=dataclasses.replace(run.config.model, vocab_size=305))
    found = origin.begin(c)
    assert found.config.model.vocab_size == 305
    assert found.digest() != origin.open(folder).digest()
    grown = parts.make(c, make_mesh(), lm.make)
    begun, _ = grown.create(found)
    params = begun.params["params"]
    np.testing.assert_array_equal(
        params["embed"]["embedding"][:300], state.params["params"]["embed"]["embedding"][:300]
    )
    assert_same(params["layers_0"], state.params["params"]["layers_0"])
    assert origin.open(folder).grown(run.config.model).digest() == origin.open(folder).digest()


def test_the_text_that_a_model_was_pretrained_on(made, adapted, tmp_path):
    folder, _, _ = made
    assert origin.pretrained_on(str(folder)) == str(folder / "data")
    saved = json.loads((adapted.folder / "config.json").read_text())
    for program, path, expected in (("sft", "", str(folder / "data")), ("dpo", "texts", "texts")):
        given = saved | {"program": program, "replay": {"share": 0.1, "path": path}}
        (tmp_path / "config.json").write_text(json.dumps(given))
        assert origin.pretrained_on(str(tmp_path)) == expected
    assert origin.pretrained_on(str(tmp_path / "none")) == ""


def test_damage_names_another_checkpoint(made):
    folder, run, _ = made
    for file in (folder / "checkpoints/2/params").rglob("*"):
        if file.is_file() and file.stat().st_size > 1000:
            file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(RunError, match="try --checkpoint=1"):
        origin.open(folder, 2).params(run.abstract.params["params"], run.shardings.params["params"])
