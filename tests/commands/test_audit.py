"""`jaxlm audit` on sources, on prepared documents and on shards: the same junk first."""

import json
import types

import pytest

from jaxlm.cli import cli
from jaxlm.corpus.documents import DocumentWriter
from jaxlm.corpus.stage import Document
from jaxlm.data.shards import build

JUNK = "one two PersonX three"
PLAIN = "red green blue sun moon sea"


def texts(name):
    return [f"{JUNK if name == 'events' else PLAIN} {i} word" for i in range(30)]


def write_jsonl(path, name):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(name)))


def audit(capsys, *arguments):
    assert cli.main(["audit", "--json", *arguments]) == 0
    out = capsys.readouterr()
    return [json.loads(line) for line in out.out.splitlines()], out.err


def worst_is_person_x(rows):
    assert (rows[0]["text"], rows[0]["source"], rows[0]["documents"]) == ("PersonX", "events", 30)
    assert rows[0]["examples"]
    assert all("PersonX" in example["text"] for example in rows[0]["examples"])


def write_config(folder, section, source):
    """A config whose `section`.sources are the two files; `source` makes one of a path."""
    lines = ["from jaxlm.configs import base", "def get_config():", "  c = base.get_config()"]
    lines.append("  c.data.dir = 'nothing-here'")
    for name in ("events", "web"):
        write_jsonl(folder / f"{name}.jsonl", name)
        lines.append(f"  c.{section}.sources.{name} = {source.format(repr(str(folder / name) + '.jsonl'))}")
    path = folder / f"{section}.py"
    path.write_text("\n".join([*lines, "  return c", ""]))
    return path


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path, "data", "dict(path={}, weight=1.0)")


def test_raw_sources(config, capsys):
    rows, err = audit(capsys, f"--config={config}")
    worst_is_person_x(rows)
    assert rows[0]["examples"][0]["document"].startswith("events.jsonl:")
    assert "events: 30 documents" in err
    assert "raw text" in err
    assert "counts are exact" in err


def test_one_source_a_few_findings_a_part(config, capsys):
    rows, err = audit(capsys, f"--config={config}", "--source=web")
    assert {row["source"] for row in rows} == {"web"}
    assert "events: 30 documents" in err
    rows, err = audit(capsys, f"--config={config}", "--top=1", "--max-bytes=300")
    assert len(rows) == 1
    assert 0 < rows[0]["documents"] < 15
    assert "the worst 1 shown" in err


def test_a_table_for_people(config, capsys):
    assert cli.main(["audit", f"--config={config}"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].startswith("Junk, the worst first")
    assert lines[2].split() == ["score", "found", "what", "it", "is", "source", "times", "in", "docs"]
    assert lines[3].split()[1:] == ["PersonX", "labels", "of", "a", "data", "set", "events", "30", "100%"]
    assert lines[4].strip().startswith("events.jsonl:")
    assert max(map(len, lines)) <= 100
    assert "To remove the junk, put these lines into the config" in out
    shown = out[out.index("c.prepare") :]
    settings = types.SimpleNamespace()
    settings.prepare = types.SimpleNamespace(stages=types.SimpleNamespace(junk=types.SimpleNamespace()))
    exec(shown, {"c": settings})
    # The first is asked for by default too.
    assert settings.prepare.stages.junk.patterns == ("annotation", "chat_tokens")


def test_nothing_to_do_is_said(config, capsys):
    assert cli.main(["audit", f"--config={config}", "--source=web"]) == 0
    out, err = capsys.readouterr()
    assert "no junk: leave it in" in out
    assert "remove" not in out
    assert err.splitlines()[-1] == "nothing looks like junk"


def test_sources_of_prepare(tmp_path, capsys):
    config = write_config(tmp_path, "prepare", "base.source({})")
    rows, _ = audit(capsys, f"--config={config}")
    worst_is_person_x(rows)


def test_prepared_documents_come_before_the_sources(tmp_path, config, capsys):
    for name in ("events", "web"):
        writer = DocumentWriter(tmp_path / "data" / "documents" / name / "00000.parquet")
        for i, text in enumerate(texts(name)):
            writer.add(Document(text=text, id=f"prepared-{i}", metadata={}))
        writer.close()
    rows, err = audit(capsys, f"--config={config}", f"--config.data.dir={tmp_path / 'data'}")
    worst_is_person_x(rows)
    assert rows[0]["examples"][0]["document"] == "prepared-0"
    assert "prepared documents" in err


def test_shards_are_read_back_to_text(tmp_path, config, capsys):
    def read(source, stats):
        for i, text in enumerate(texts(source.name) if source.name == "events" else []):
            stats.documents += 1
            yield f"{source.name}:{i}", text

    settings = build.BuildSettings(vocab_size=300, chat_tokens=False, val_fraction=0.2, block_tokens=64)
    build.build_data(tmp_path / "d", [build.Source("events", "x", 1.0)], settings, read=read, log=lambda line: None)
    rows, err = audit(capsys, f"--config={config}", f"--config.data.dir={tmp_path / 'd'}")
    worst_is_person_x(rows)
    assert "of tokens" in err
    assert "30 documents" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source=wbe"], "did you mean 'web'?"),
        (["--top=-1"], "must not be negative"),
        (["--config.data.sources.web.path=nowhere"], "no such file"),
    ],
)
def test_bad_input_is_one_line(config, capsys, arguments, message):
    assert cli.main(["audit", f"--config={config}", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err.splitlines()[-1]
    assert "Traceback" not in err
