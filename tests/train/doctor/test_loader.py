"""The loader on data that are good, damaged, slow, still to be made, or missing."""

import jax
import pytest
import tiny_data

from jaxlm import config, config_files, sharding
from jaxlm.train.doctor import findings, loader
from jaxlm.train.doctor.findings import FAIL, OK, WARN


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(loader, "SECONDS", 0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "d"
    tiny_data.make(path, {"a": 1.0})
    return path


def check(folder, *overrides: str, needed: float = 100.0, certain: bool = True):
    keys = ["train.batch_size=2", "train.seq_len=16", "model.vocab_size=300", f"data.dir={folder}", *overrides]
    c = config.resolve(config_files.load("base", keys))
    return loader.check(c, sharding.make_mesh(c.mesh, jax.devices()[:1]), needed, certain)


def test_a_loader_that_is_fast_enough(folder):
    found = check(folder)
    assert found.verdict == OK
    assert found.figures["tokens_per_second"] == pytest.approx(32 * found.figures["batches_per_second"])
    assert "; the step takes 100" in found.text


def test_a_loader_that_is_slower_than_the_step(folder):
    found = check(folder, needed=1e15)
    assert found.verdict == WARN
    assert "the loader may set the speed" in found.text
    assert "at most 1P" in check(folder, needed=1e15, certain=False).text


def test_data_of_another_vocabulary(folder):
    found = check(folder, "model.vocab_size=400")
    assert found.verdict == FAIL
    assert "--config.model.vocab_size=300" in found.text


@pytest.mark.parametrize("keys", [["data.path=/texts"], []])
def test_without_data_there_is_nothing_to_time(tmp_path, keys):
    found = check(tmp_path / "none", *keys)
    assert (found.verdict, found.text) == (OK, "not timed: there is no data yet")


def test_a_damaged_shard(tmp_path):
    tiny_data.make(tmp_path / "d", {"a": 1.0})
    (shard,) = (tmp_path / "d/train/a").glob("*.array_record")
    shard.write_bytes(bytes(shard.stat().st_size))
    (found,) = findings.examine("loader", lambda: check(tmp_path / "d"))
    assert found.verdict == FAIL
    assert str(shard) in found.text
