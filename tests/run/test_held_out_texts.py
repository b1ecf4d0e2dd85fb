"""Figures of different held-out texts are said to be so, wherever they stand side by side."""

import argparse
import dataclasses
import json

import pytest
import tiny_data

from jaxlm import config
from jaxlm.commands import diff
from jaxlm.config import Config, config_files
from jaxlm.data.shards import manifest, shards
from jaxlm.report.run_page import took
from jaxlm.run import held_out_texts, lineage

MIXTURE = {"a": 3.0, "b": 1.0}


def make_run(folder, texts, origin=""):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"train": {"steps": 2}, "origin": str(origin)}))
    (folder / "run.json").write_text(json.dumps({"starts": [{"held_out": texts, "step": 0}]}))
    lines = [{"step": step, "train/loss": 3.0, "val/loss": 3.0 + len(texts)} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def by_diff(a, b, c: Config, capsys) -> str:
    diff.run(dataclasses.replace(c, workdir=str(a)), argparse.Namespace(other=str(b), json=False))
    return capsys.readouterr().out


def by_report(a, b, c: Config, capsys) -> str:
    return str(took({"stages": lineage.stages(lineage.origins(b), b)}))


@pytest.mark.parametrize("show", [by_diff, by_report])
@pytest.mark.parametrize(
    ("was", "now", "named"),
    [
        ({"a": "1", "b": "2"}, {"a": "1", "b": "3"}, "(b)"),
        ({"a": "1"}, {"a": "1 4 MB"}, "(a)"),
        ({"a": "1"}, {"a": "1", "c": "2"}, "(c)"),
        ({"a": "1", "b": "2"}, {"a": "1", "b": "2"}, ""),
        ({"a": "1"}, {}, ""),  # not known
    ],
)
def test_runs_on_other_held_out_texts_are_told_apart(tmp_path, capsys, show, was, now, named):
    a = make_run(tmp_path / "a", was)
    b = make_run(tmp_path / "b", now, origin=a)
    said = show(a, b, config.resolve(config_files.load("base", ["data.path=x"])), capsys)
    assert (f"held-out texts differ {named}" in said) == bool(named)
    assert ("jaxlm eval RUN --text=FOLDER" in said) == bool(named)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same documents by two tokenizers."""
    folder = tmp_path_factory.mktemp("data")
    return [tiny_data.make(folder / str(size), MIXTURE, vocab_size=size).path for size in (300, 350)]


def test_two_tokenizers_name_the_same_held_out_bytes(folders):
    one, other = map(shards.open_data, folders)
    assert one.manifest["tokenizer"]["sha256"] != other.manifest["tokenizer"]["sha256"]
    assert one.held_out_texts() == other.held_out_texts() == one.manifest["held_out"]
    assert len(set(one.held_out_texts().values())) == len(MIXTURE)


def test_of_older_data_the_hashes_are_computed_once(folders, tmp_path):
    """Its manifest says nothing of them, and stays as it is: runs know their data by its hash."""
    new = shards.open_data(folders[0])
    old = {key: value for key, value in new.manifest.items() if key not in (manifest.HELD_OUT, "format")}
    for path in folders[0].iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / manifest.MANIFEST).unlink()
    manifest.write(tmp_path, old)
    data = shards.open_data(tmp_path)
    assert data.sha256 == new.sha256
    assert not held_out_texts.known(data)
    assert data.held_out_texts() == new.held_out_texts()
    kept = tmp_path / "held_out.json"
    kept.write_text(kept.read_text().replace(new.held_out_texts()["a"], "kept"))
    assert data.held_out_texts()["a"] == "kept"
    kept.write_text("{")
    assert data.held_out_texts() == new.held_out_texts()


def test_how_much_is_measured_counts_too(folders):
    data = shards.open_data(folders[0])
    c = config.resolve(config_files.load("base", ["data.path=x", "train.seq_len=16"]))

    def of(**evaluation) -> str:
        settings = dataclasses.replace(c.eval, **evaluation)
        return held_out_texts.of_data(data, dataclasses.replace(c, eval=settings))["a"].partition(" ")[2]

    size = data.entry("a", "val")["bytes"] / 1e6
    assert [of(max_mb=mb) for mb in (0.0, 1.0, size, 0.0001)] == ["", "", "", "0.0001 MB"]
    assert [of(older_batches=(n, 4)) for n in (0, 2, 10**6)] == ["", "8 rows of 16", ""]


def test_eval_names_a_text_that_training_did_not_measure(folders, tmp_path):
    """As with another --config.data.dir, or another limit."""
    data = shards.open_data(folders[0])
    c = config.resolve(config_files.load("base", ["data.path=x"]))
    measured = held_out_texts.of_data(data, c)
    same, other = make_run(tmp_path / "a", measured), make_run(tmp_path / "b", measured | {"a": "1"})
    assert held_out_texts.since_training(same, data, c) == ""
    said = held_out_texts.since_training(other, data, c)
    assert said.startswith("not the text that training measured: held-out texts differ (a)")
