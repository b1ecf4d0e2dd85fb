"""`jaxlm report RUN`: the page, its numbers as JSON, and what the commands of a script took."""

import hashlib
import json

import pytest

from jaxlm import config
from jaxlm.cli import cli
from jaxlm.config import config_files
from jaxlm.eval import results
from jaxlm.eval.results import Item, TaskResult


def test_what_commands_took_is_printed_and_stands_in_page_and_json(tmp_path, capsys):
    run, took = tmp_path / "run", tmp_path / "took"
    run.mkdir()
    took.mkdir()
    given = [f"workdir={run}", "hardware.usd_per_hour=6.0"]
    (run / "config.json").write_text(config.to_json(config.resolve(config_files.load("quickstart", given))))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "wall_s": 5.0, "train/loss": 3.0}) + "\n")
    (took / "03-tokenize").write_text("600\n")
    assert cli.main(["report", str(run), f"--took={took}"]) == 0
    said, err = capsys.readouterr()
    assert err.splitlines()[0] == "no bend of the curve stands out from its noise"
    assert [line.split() for line in said.splitlines() if line.startswith("03")] == [["03-tokenize", "10m00s", "$1.00"]]
    assert "03-tokenize" in (run / "report.html").read_text()
    assert cli.main(["report", str(run), f"--took={took}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["commands"] == [
        {"name": "03-tokenize", "wall_s": 600.0, "cost_usd": 1.0}
    ]
    assert cli.main(["report", str(run)]) == 0
    assert "03-tokenize" not in (run / "report.html").read_text()
    assert cli.main(["report", str(run), f"--took={tmp_path / 'none'}"]) == 2


def _sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


def make_run(folder, text="", steps=40, **changes):
    """A run with a curve of its own; `text` is the sha256 of its held-out text."""
    folder.mkdir(parents=True)
    overrides = [f"workdir={folder}", *(f"{key.replace('__', '.')}={value}" for key, value in changes.items())]
    (folder / "config.json").write_text(config.to_json(config.resolve(config_files.load("quickstart", overrides))))
    lr = changes.get("optim__lr", 1e-3)
    lines = [
        {"step": step, "tokens": 512 * step, "wall_s": step, "train/loss": 5 - lr * step, "train/lr": lr}
        | ({"val/loss": 5.5 - lr * step} if step % 10 == 0 else {})
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "run.json").write_text(
        json.dumps({"starts": [{"held_out": {"prose": text}, "manifest_sha256": _sha256(text)}]})
    )
    return str(folder)


def test_several_runs_stand_on_one_page_with_what_differs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [make_run(tmp_path / name, "x", optim__lr=lr) for name, lr in (("a", 0.001), ("b", 0.002))]
    runs.append(make_run(tmp_path / "c", "y", seed=3))
    assert cli.main(["report", *runs]) == 0
    assert capsys.readouterr().err == "open report-a-b-c.html\n"
    page = (tmp_path / "report-a-b-c.html").read_text()
    assert "compare losses within a column" in page
    assert "held-out loss, text of a" in page
    assert "held-out loss, text of c" in page
    assert page.count("config: optim.lr") == page.count("config: seed") == 1
    assert "config: optim.b1" not in page
    assert f">{_sha256('y')[:12]}<" in page  # the manifest's: whole hashes of three runs fit no page
    assert cli.main(["report", *runs[:2], "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["values"] for row in told["differing"] if row["name"] == "optim.lr"] == [[0.001, 0.002]]
    assert told["held_out"] == {"held-out loss": ["a", "b"]}
    (tmp_path / "refused").mkdir()
    (tmp_path / "refused/log.txt").touch()
    (tmp_path / "refused/metrics.jsonl").touch()  # of a start that was refused late
    assert cli.main(["report", "."]) == 0  # a folder of runs
    assert capsys.readouterr().err == "open report-a-b-c.html\n"
    make_run(tmp_path / "more/d")
    assert cli.main(["report", runs[0], "more"]) == 0
    assert capsys.readouterr().err == "open report-a-d.html\n"
    assert cli.main(["diff", *runs[:2]]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "last held-out loss: A 5.4600, B 5.4200, B - A -0.0400"


def test_a_run_whose_text_is_unknown_stands_apart(tmp_path, capsys):
    runs = [make_run(tmp_path / name, "x") for name in ("a", "b")]
    (tmp_path / "b" / "run.json").write_text("{}")
    assert cli.main(["report", *runs, f"--out={tmp_path / 'p.html'}"]) == 0
    page = (tmp_path / "p.html").read_text()
    assert "held-out loss, text unknown" in page
    assert "Last scores" not in page
    capsys.readouterr()
    assert cli.main(["report", *runs, "--took=x"]) == 2


def test_scores_stand_side_by_side(tmp_path):
    runs = [make_run(tmp_path / name, "x") for name in ("a", "b")]
    scores = TaskResult(
        "mine.jsonl", {"acc": 0.25, "bits_per_byte": 3.5}, {"acc": 0.1}, None, 0, [Item("1", {"acc": 0.0})]
    )
    results.write(tmp_path / "a", [scores], {"step": 40})
    assert cli.main(["report", *runs, f"--out={tmp_path / 'p.html'}"]) == 0
    page = (tmp_path / "p.html").read_text()
    assert "mine.jsonl: acc" in page
    assert "0.250 ± 0.200" in page


def test_what_junk_named_in_each_run_stands_on_one_page(tmp_path):
    runs = [make_run(tmp_path / name, "x") for name in ("a", "b", "c", "d")]
    for run, step, word in (("a", 9, "old"), ("a", 40, "PersonX"), ("b", 40, "marbles")):
        (tmp_path / run / "junk").mkdir(exist_ok=True)
        (tmp_path / run / f"junk/{step}.json").write_text(
            json.dumps({"step": step, "strings": [{"string": word, "texts": 3}]})
        )
    for run, strings in (("c", '[{"string": 3}]'), ("d", "[]")):
        (tmp_path / run / "junk").mkdir()
        (tmp_path / run / "junk/40.json").write_text(f'{{"step": 40, "strings": {strings}}}')
    assert cli.main(["report", *runs, f"--out={tmp_path / 'p.html'}"]) == 0
    junk = (tmp_path / "p.html").read_text().partition("<h2>Junk</h2>")[2].partition("</section>")[0]
    assert [word in junk for word in ("PersonX", "marbles", "old", "<h3>a</h3>", "<h3>b</h3>", "<h3>c</h3>", "<h3>d</h3>")] == [
        True, True, False, True, True, False, True]  # fmt: skip


def test_twelve_runs_take_less_than_a_megabyte(tmp_path):
    runs = [make_run(tmp_path / f"lr{i}", "x", steps=3000, optim__lr=i * 1e-4) for i in range(1, 13)]
    page = tmp_path / "all.html"
    assert cli.main(["report", *runs, f"--out={page}"]) == 0
    assert page.stat().st_size < 1e6
    assert "lr12 (dotted)" in page.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "a"], "a is given twice"),
        (["a", "none"], "no run in none: it has no metrics.jsonl"),
        (["a", "--out=x"], "--out goes"),
    ],
)
def test_runs_that_are_no_two_runs(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "a")
    assert cli.main(["report", *words]) == 2
    assert message in capsys.readouterr().err
