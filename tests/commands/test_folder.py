"""`jaxlm prepare DIR`: kinds by suffix, a recipe, what took much is named, and nothing that is in the way gets lost."""

import argparse
import json
import shlex

import pytest
import tiny_manual
from tiny_keys import words

from jaxlm.cli import cli
from jaxlm.commands import folder
from jaxlm.corpus import documents

QUICK = ("--config.prepare.workers=1", "--config.prepare.report_mb=0", "--config.prepare.stages.near.bands=1")
COMMON = words("the of and to in is that for on with as was at by an be this")


def prose(seed: int) -> str:
    words = [COMMON[(seed * 7 + i * i + i * seed) % len(COMMON)] for i in range(90)]
    return ". ".join(" ".join([*words[i : i + 9], f"number {seed * 10 + i}"]) for i in range(0, 90, 9)) + ".\n"


def prepare(capsys, *argv):
    code = cli.main(["prepare", *argv])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return code, said.out, said.err.splitlines()


def write(place, files):
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)


def left(data):
    return {name: sorted(i for i, _ in documents.read_texts(paths)) for name, paths in documents.find(data).items()}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


MIXED = {
    "arrays.html": tiny_manual.ARRAYS,
    "options.html": tiny_manual.OPTIONS,
    "heapq.md": tiny_manual.SHORT,
    "rmi.md": tiny_manual.RMI,
    "de.md": tiny_manual.GERMAN,
    "guide.txt": prose(1),
    "notes.jsonl": "".join(json.dumps({"text": prose(i)}) + "\n" for i in (2, 3)),
    "src/add.py": tiny_manual.CODE,
    "src/README": prose(4),
    "_static/jquery.js": "var a = 1;\n",
    ".git/description.txt": "unnamed",
    "paper.pdf": "%PDF",
    "paper2.PDF": "%PDF",
    "pom.xml": "<project/>",
    "logo.png": "",
}


def test_a_mixed_folder_in_one_command(here, capsys):
    write(here / "my docs", MIXED)
    code, out, err = prepare(capsys, "my docs", *QUICK)
    assert code == 0, err
    assert err[0].startswith("my docs: ")
    assert "2 HTML files" in err[0]
    assert "1 source file (" in err[0]
    assert err[1] == "preset docs (--preset=web|code|books), into data/my docs (--out=DATA)"
    assert "my docs: 2 .pdf files are not read: convert with pdftotext or docling" in err
    assert "my docs: 1 .png file is in no supported format" in err
    assert any("1 .xml file is not read: make a .jsonl" in line for line in err)
    data = here / "data/my docs"
    assert left(data) == {
        "code": ["src/add.py"],
        "html": ["arrays.html", "options.html"],
        "jsonl": ["notes.jsonl:1", "notes.jsonl:2"],
        "markdown": ["heapq.md", "rmi.md"],
        "readme": ["src/README"],
        "text": ["guide.txt"],
    }
    (taken,) = [line for line in err if "language took" in line]
    assert taken.startswith("language took 1 of 3 documents of markdown (33%)")
    assert "such as de.md (de (" in taken
    keep = next(line for line in err if "to keep" in line)
    assert keep == "  to keep them: --config.prepare.stages.language.languages=\"('en', 'de')\""
    assert err[-1] == "next: jaxlm train quickstart --config.data.dir='data/my docs'"
    assert max(map(len, out.splitlines())) <= 100
    weights = documents.mixture(data)
    sources = json.loads((data / "prepared.json").read_text())["sources"]
    kept = {name: source["kept"]["bytes"] for name, source in sources.items()}
    assert {name: round(weight * 1e6) for name, weight in weights.items()} == kept

    code, _, err = prepare(capsys, "my docs", *QUICK, *shlex.split(keep.partition(": ")[2]), "--out=all")
    assert code == 0, err
    assert "de.md" in left(here / "all")["markdown"]
    code, _, err = prepare(capsys, "my docs", *QUICK, "--config.prepare.sources.text.weight=3")
    assert (code, "data/my docs is prepared already" in err) == (0, True)
    assert documents.mixture(data) == weights | {"text": 3 * weights["text"]}


def test_web_limits_take_manuals_and_what_keeps_them_is_named(here, capsys):
    pages = {"arrays.html": tiny_manual.ARRAYS, "options.html": tiny_manual.OPTIONS, "a.html": f"<p>{prose(4)}</p>"}
    write(here / "manual", pages)
    words = ["manual", "--preset=web", *QUICK]
    for attempt in range(6):  # behind a limit that is gone, the next one may take the page
        code, _, err = prepare(capsys, *words, f"--out=try{attempt}")
        assert code == (0 if any(left(here / f"try{attempt}").values()) else 2), err
        keep = [line.partition(": ")[2] for line in err if "to keep them" in line]
        assert ("arrays.html" in left(here / f"try{attempt}")["html"]) or keep
        if not keep:
            break
        words += [word for line in keep for word in shlex.split(line)]
    assert attempt > 0
    assert left(here / f"try{attempt}")["html"] == ["a.html", "arrays.html", "options.html"]


TEXT = {"a.md": "text"}


@pytest.mark.parametrize(
    ("files", "words", "message"),
    [
        ({}, [], "docs holds no documents"),
        ({"a.pdf": "", "b.pdf": "", "c.docx": ""}, [], "docs: 2 .pdf files are not read: convert with pdftotext"),
        (TEXT, ["--preset=dosc"], "no preset 'dosc'; did you mean 'docs'?"),
        (TEXT, ["--out=docs/data"], "docs/data lies in docs, where it would be read as documents: give --out="),
        (TEXT, ["--out=x", "--config.data.dir=y"], "two folders for the result: --out=x and --config.data.dir=y"),
        (TEXT, ["--config.prepare.stages.near.treshold=1"], "did you mean config.prepare.stages.near.threshold"),
        (TEXT, ["--out=mine"], "mine/documents is there, and jaxlm did not make it"),
    ],
)
def test_bad_input_is_one_line(here, capsys, files, words, message):
    (here / "docs").mkdir()
    write(here / "docs", files)
    write(here / "mine", {"documents/letter.txt": "dear"})
    code, _, err = prepare(capsys, "docs", *words)
    assert code == 2
    assert message in err[-1]
    assert not (here / "data").exists()
    assert (here / "mine/documents/letter.txt").read_text() == "dear"


def test_another_folders_data_is_not_replaced(here, capsys):
    write(here / "a", {"a.md": prose(1), "b.md": prose(2)})
    write(here / "b", {"c.md": prose(3)})
    assert prepare(capsys, "a", "--out=data", *QUICK)[0] == 0
    before = (here / "data/prepared.json").read_bytes()
    code, _, err = prepare(capsys, "b", "--out=data", *QUICK)
    assert code == 2
    assert "data was prepared with source markdown = path=a, now it is path=b" in err[-1]
    assert (here / "data/prepared.json").read_bytes() == before
    code, _, err = prepare(capsys, "data", *QUICK)
    assert code == 2
    assert "data holds data that jaxlm made" in err[-1]


def test_a_preset_is_refused_beside_a_config(here, capsys):
    code, _, err = prepare(capsys, "quickstart", "--preset=docs")
    assert code == 2
    assert err == ["jaxlm: --preset and --out go with a folder of documents: jaxlm prepare DIR; a config has its own"]


@pytest.mark.parametrize(
    ("files", "preset", "holds"),
    [
        ({"a.py": tiny_manual.CODE * 9, "README.md": "Adds."}, "code", "1 source file"),
        ({"novel.txt": prose(1) * 200}, "books", "1 text file"),
        ({"a.txt": prose(1), "b.txt": prose(2)}, "docs", "2 text files"),
        ({"wiki.xml": "<mediawiki></mediawiki>"}, "docs", "1 MediaWiki file"),
        ({"config.json": '{"title": "a site"}', "index.html": tiny_manual.ARRAYS, "x.js": "1"}, "docs", "1 HTML file"),
    ],
)
def test_the_recipe_is_guessed_from_what_is_there(here, files, preset, holds):
    write(here / "in", files)
    args = argparse.Namespace(config="in", preset=None, out=None)
    made = folder.config(args, ["prepare.task_mb=3.0"])
    assert args.preset == preset
    assert holds in args.told[0]
    assert (made.data.dir, made.prepare.task_mb) == ("data/in", 3.0)


def test_a_file_and_a_glob(here, capsys):
    write(here / "in", {"a.md": prose(1), "b.md": prose(2), "c.txt": prose(3)})
    assert prepare(capsys, "in/a.md", *QUICK)[0] == 0
    assert left(here / "data/a") == {"markdown": ["a.md"]}
    assert prepare(capsys, "in/*", "--out=both", *QUICK)[0] == 0
    assert left(here / "both") == {"documents": ["a.md", "b.md", "c.txt"]}
