"""Folders whose names mean something in another language (a glob, a URL, SQL, a shell) are held as they are called."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_mirror

from jaxlm.cli import cli
from jaxlm.corpus.benchmarks import reading
from jaxlm.corpus.sources import files as source_files
from jaxlm.run.checkpoints import digest, meta, store
from jaxlm.run.checkpoints.remote import Remote
from jaxlm.run.checkpoints.saving import Saving

HOSTILE = "[]\\#?%|*:~!{}'\"$&;<>()@,= "
ODD = "w*[x]?#|\\::'%20"  # a name that each of these languages reads as another one
NAMES = ["q [2]", "lr#4", "a%20b", "back\\slash", "end\\", "a?b", "a|b", "**", "[a-c]", "gs:", "file:", "~", ODD]
ITEMS = {"params": {"a": {"kernel": np.arange(12.0, dtype=np.float32).reshape(3, 4)}}}


def checkpoint(run: pathlib.Path) -> None:
    """The checkpoint's own save, verify, restore, leaf and mirror."""
    items = jax.tree.map(jnp.asarray, ITEMS)
    folder = run / "checkpoints" / "3"
    folder.parent.mkdir(parents=True)
    saving = Saving(folder, items, meta.sealed({}, 3, digest.look(items)[0]))
    saving.done.wait()
    assert (saving.failed, saving.differs, saving.verified) == ("", "", True)
    mirror = run.with_name(run.name + " mirror")
    tiny_mirror.copy(Remote(str(mirror), pause_s=0), run, 3)
    shutil.rmtree(run)
    assert tiny_mirror.restore(mirror, run)[0] == 3
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), items)
    restored = store.restore(folder, wanted)
    for kernel in (restored["params"]["a"]["kernel"], store.reader(folder)("a/kernel")):
        np.testing.assert_array_equal(kernel, ITEMS["params"]["a"]["kernel"])


def records(folder: pathlib.Path) -> pathlib.Path:
    """A file of records, beside folders that the name would mean if it were a pattern or a URL."""
    for other in (folder, folder.with_name("wax20"), folder.with_name("a b"), folder.with_name("a")):
        other.mkdir(parents=True, exist_ok=True)
        (other / "a.jsonl").write_text(json.dumps({"text": other.name}) + "\n")
    return folder / "a.jsonl"


def benchmarks(folder: pathlib.Path) -> None:
    file = records(folder)
    for path in (file, folder):
        found = reading.files((str(path),), "paths")
        assert [record for file in found for _, record in reading.records(file)] == [{"text": folder.name}]


def sources(folder: pathlib.Path) -> None:
    file = records(folder)
    assert [f.url for path in (file, folder) for f in source_files.find(str(path), "jsonl")] == [str(file)] * 2


def sources_in_the_current_folder(folder: pathlib.Path) -> None:
    file = records(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert [(f.name, f.url) for f in source_files.find("*.jsonl", "jsonl")] == [("a.jsonl", str(file))]
        assert [f.url for f in source_files.find("a.jsonl", "jsonl")] == [str(file)]


def prepared(folder: pathlib.Path) -> None:
    """`jaxlm prepare`, whose deduplication joins tables by SQL."""
    file = records(folder / "in")
    assert cli.main(["prepare", str(file), f"--out={folder / 'out'}", "--config.prepare.workers=1"]) == 0
    assert list((folder / "out" / "documents").rglob("*.parquet"))


PLACES = [checkpoint, benchmarks, sources, sources_in_the_current_folder]


@pytest.mark.parametrize("place", [*PLACES, pytest.param(prepared, marks=pytest.mark.faults)])
def test_a_folder_with_an_odd_name_is_read_and_written(tmp_path, place):
    place(tmp_path / ODD)


@pytest.mark.faults
@pytest.mark.parametrize("name", NAMES)
def test_each_odd_name_at_each_place(tmp_path, name):
    for place in PLACES:
        place(tmp_path / place.__name__ / name)


def test_a_glob_stays_one_unless_a_path_has_that_very_name(tmp_path):
    records(tmp_path / "b")
    for find in (lambda p: reading.files((p,), "paths"), lambda p: [f.url for f in source_files.find(p, "jsonl")]):
        assert find(f"{tmp_path}/[ab]/*.jsonl") == [f"{tmp_path}/{name}/a.jsonl" for name in "ab"]
    file = records(tmp_path / "[ab]")
    for find in (lambda p: reading.files((p,), "paths"), lambda p: [f.url for f in source_files.find(p, "jsonl")]):
        assert find(f"{tmp_path}/[ab]") == [str(file)]


def test_drawn_names_through_a_checkpoint(tmp_path, trials, draw):
    """The number of the issue: `pytest tests/test_paths.py -k drawn --trials=200`."""
    printable = [chr(i) for i in range(0x3000) if chr(i).isprintable() and chr(i) != "/"]
    for number in range(trials(2)):
        name = "".join(draw.choice(draw.choice([HOSTILE, printable])) for _ in range(draw.randint(1, 24)))
        checkpoint(tmp_path / str(number) / name.replace("..", "."))
