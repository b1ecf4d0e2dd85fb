"""The pages of a training run: written on the way, linked to each other, and never a reason to end a run."""

import dataclasses
import json
import shutil

import pytest

from jaxlm import config
from jaxlm.commands.train import pages
from jaxlm.config import config_files
from jaxlm.corpus import prepare
from jaxlm.run.checkpoints.mirror import Mirror
from jaxlm.train.loop import Every, Moment

TEXT = "the lamps of the harbour were lit and the boats came home over quiet water number"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with a config and its prepared documents, for which nobody has written a page yet."""
    root = tmp_path_factory.mktemp("prepared")
    (root / "texts.jsonl").write_text("".join(json.dumps({"text": f"{TEXT} {i}"}) + "\n" for i in range(20)))
    lines = ["from jaxlm.configs import base", "def get_config():", "    c = base.get_config()"]
    lines.append("    c.prepare.workers = 1")
    lines += [f"    c.prepare.sources.tales = base.source({str(root / 'texts.jsonl')!r}, ('unicode', 'exact'))"]
    (root / "tales.py").write_text("\n".join([*lines, "    return c"]))
    c = config.resolve(config_files.load(str(root / "tales.py"), [f"workdir={root / 'runs/one'}"]))
    prepare.prepare(c.prepare, c.data, c.engine, print)
    return root


@pytest.fixture
def run(prepared, tmp_path, monkeypatch):
    """The config of a run in a copy of that folder."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return config.resolve(config_files.load("tales.py", ["workdir=runs/one"]))


def test_the_pages_link_to_each_other(run, tmp_path, capsys):
    folder = tmp_path / "runs/one"
    pages.of_data(run)
    assert "what the data is made of: runs/one/data/report.html" in capsys.readouterr().err
    data = (folder / "data/report.html").read_text()
    assert '<a href="../report.html">run one</a>' in data
    assert "jaxlm prepare" in data
    assert "Duplicate clusters" in data
    (folder / "config.json").write_text(config.to_json(run))
    (folder / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0, "wall_s": 1.0, "tokens": 10}\n')
    pages.of_run(run, folder)
    assert '<a href="data/report.html">' in (folder / "report.html").read_text()
    assert pages.to_open(folder) == [f"open {folder}/report.html"]


def test_a_page_that_is_there_stays_as_it_is(run, tmp_path):
    """`jaxlm prepare` wrote it, with the audit that training leaves out."""
    path = tmp_path / "runs/one/data/report.html"
    path.write_text("audited")
    pages.of_data(run)
    assert path.read_text() == "audited"


def test_data_that_was_not_prepared_has_no_page(run, tmp_path, capsys):
    (tmp_path / "runs/one/data/prepared.json").unlink()
    capsys.readouterr()
    pages.of_data(run)
    assert not (tmp_path / "runs/one/data/report.html").exists()
    assert capsys.readouterr().err == ""


def test_a_page_that_cannot_be_written_is_a_line(run, tmp_path, capsys):
    (tmp_path / "runs/one/data/prepared.json").write_text("{}")
    pages.of_data(run)
    assert "runs/one/data/report.html is not written: " in capsys.readouterr().err
    pages.of_run(run, tmp_path / "absent")
    assert pages.to_open(tmp_path / "nothing") == []


def test_the_page_of_a_run_that_goes_on_stands_in_its_mirror(run, tmp_path):
    folder, place = tmp_path / "runs/one", tmp_path / "mirror"
    c = dataclasses.replace(run, checkpoint=dataclasses.replace(run.checkpoint, mirror=str(place)))
    (folder / "config.json").write_text(config.to_json(c))
    (folder / "metrics.jsonl").write_text('{"step": 7, "train/loss": 2.0, "wall_s": 1.0, "tokens": 10}\n')
    mirror = Mirror(str(place), c.checkpoint, folder)
    mirror.restore()
    hook = pages.Shown(c, folder, mirror, Every(10, end=False))
    assert [hook.due(step, 30) for step in (9, 10, 30)] == [False, True, False]
    hook(Moment(10, None, {}, print))
    assert mirror.close(60)
    assert "<b>7</b>" in (place / "report.html").read_text()
    dataclasses.replace(hook, mirror=None)(Moment(20, None, {}, print))  # of another process
    assert not pages.Shown(run, folder, None, Every(10)).due(10, 30)


@pytest.mark.parametrize("ended", [True, False])
def test_a_page_for_the_mirror_that_comes_late_does_not_replace_the_last_one(run, tmp_path, ended):
    folder = tmp_path / "runs/one"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"starts": [{"ended": {"code": 0, "why": ""}} if ended else {}]}))
    (folder / "report.html").write_text("the last one")
    pages.of_run(run, folder, foretells=False)
    assert ((folder / "report.html").read_text() == "the last one") == ended
