"""`jaxlm prepare` and `tokenize` as commands: table, report, target, one line for bad input."""

import hashlib
import json

import pytest
from tiny_keys import words

from jaxlm.cli import cli

WORDS = words("the harbour of night and lamps were lit over quiet water boats came home")


def text(seed: int) -> str:
    sentences = (" ".join(WORDS[(seed * 7 + i * k) % 14] for i in range(9)) for k in range(1, 12))
    return ". ".join(sentences) + f" number {seed}."


@pytest.fixture
def folder(tmp_path):
    for name in ("tales", "notes"):
        lines = [json.dumps({"text": text(i) if name == "tales" else f"{text(i + 50)} {i * i}"}) for i in range(30)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "target").mkdir()
    for i in range(30):
        (tmp_path / "target" / f"{i}.md").write_text(f"# Title\n\n{text(i + 100)}\n")
    sources = "".join(
        f"    c.prepare.sources.{name} = base.source({str(tmp_path / name)!r} + '.jsonl', ('unicode', 'exact'))\n"
        for name in ("tales", "notes")
    )
    (tmp_path / "config.py").write_text(
        "from jaxlm.configs import base\n\n\ndef get_config():\n    c = base.get_config()\n    c.model.vocab_size = 320\n"
        f"    c.data.dir = {str(tmp_path / 'data')!r}\n    c.prepare.workers = 1\n{sources}    return c\n"
    )
    return tmp_path


def jaxlm(capsys, folder, verb, *words):
    code = cli.main([verb, f"--config={folder / 'config.py'}", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_prepare_then_tokenize_write_one_report(capsys, folder):
    code, out, err = jaxlm(capsys, folder, "prepare", "--json", f"--config.prepare.target={folder / 'target'}")
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["source"], row["read"], row["kept"]) for row in rows] == [("notes", 30, 30), ("tales", 30, 30)]
    digest = hashlib.sha256((folder / "data" / "prepared.json").read_bytes()).hexdigest()
    assert f"prepared, sha256 {digest[:12]}; open {folder / 'data' / 'report.html'}\n" in err
    found = json.loads((folder / "data" / "findings.json").read_text())
    assert found["mismatch"]["mixture"]["nearest"]
    page = (folder / "data" / "report.html").read_text()
    assert "Tokenizer fit" not in page
    code, out, err = jaxlm(capsys, folder, "tokenize", "--reference=none")
    assert code == 0, err
    assert [line.split()[0] for line in out.splitlines()] == ["source", "notes", "tales"]
    assert "Tokenizer fit" in (folder / "data" / "report.html").read_text()
    manifest = json.loads((folder / "data" / "manifest.json").read_text())
    assert manifest["recipe"]["prepared"] == digest


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config.prepare.target=nowhere"], "nowhere"),
        (
            ["--config.prepare.sources.tales.text_key=body"],
            "has no text in field 'body'; its fields are text: set text_key",
        ),
        (["--config.prepare.sources.tales.stages=('exakt',)"], "did you mean 'exact'"),
        (["--config.engine=spark"], "choose one of local, ray, slurm"),
    ],
)
def test_bad_input_is_one_line(capsys, folder, words, message):
    code, _, err = jaxlm(capsys, folder, "prepare", *words)
    assert code == 2
    assert message in err.splitlines()[-1]
    assert "Traceback" not in err
