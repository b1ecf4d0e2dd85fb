"""`jaxlm tokenize` as a user runs it: tables, JSON lines, the fit kept in a file, a sweep that writes nothing."""

import json
import random

import pytest

from jaxlm.cli import cli
from jaxlm.commands import tokenize


@pytest.fixture
def place(tmp_path):
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 8))) for _ in range(300)]
    lines = ["from jaxlm.configs import base", "def get_config():", "    c = base.get_config()"]
    for source, weight in (("a", 3.0), ("b", 1.0)):
        texts = (" ".join(rng.choices(words, k=rng.randint(5, 60))) for _ in range(200))
        (tmp_path / f"{source}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        lines.append(f"    c.data.sources.{source} = dict(path={str(tmp_path / source)!r} + '.jsonl', weight={weight})")
    lines += ["    c.model.vocab_size = 400", f"    c.data.dir = {str(tmp_path / 'data')!r}", "    return c"]
    (tmp_path / "tiny.py").write_text("\n".join(lines) + "\n")
    return tmp_path


def run(capsys, place, *argv):
    code = cli.main(["tokenize", f"--config={place / 'tiny.py'}", "--reference=none", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_fit_stands_in_the_table_and_in_a_file(place, capsys):
    code, out, err = run(capsys, place)
    assert code == 0
    head, *rows = [line.split() for line in out.splitlines()]
    assert head[0] == "source"
    assert {"bytes_per_token", "tokens_per_word", "byte_fallback", "unused_pieces"} <= set(head)
    assert [row[0] for row in rows] == ["a", "b"]
    assert "all text comes back exactly" in err
    kept = json.loads((place / "data/tokenizer_fit.json").read_text())
    assert [row["source"] for row in kept["sources"]] == ["a", "b"]
    _, out, _ = run(capsys, place, "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["source"] for row in rows] == ["a", "b"]
    assert rows[0]["tokens_per_word"] == kept["sources"][0]["tokens_per_word"]
    assert rows[0]["lossy_documents"] == 0
    assert "tokens_saved" not in rows[0]


def test_the_fit_is_made_once_for_each_reference(place, capsys, monkeypatch):
    run(capsys, place)
    calls, original = [], tokenize.tokenizer_fit.report
    monkeypatch.setattr(tokenize.tokenizer_fit, "report", lambda *args: calls.append(args) or original(*args))
    run(capsys, place)
    assert not calls
    _, out, _ = run(capsys, place, f"--reference={place / 'data/tokenizer.model'}", "--json")
    assert len(calls) == 1
    assert json.loads(out.splitlines()[0])["tokens_saved"] == 0
    (place / "data/tokenizer_fit.json").write_text("{")
    run(capsys, place)
    assert len(calls) == 2


def test_a_sweep_writes_nothing_and_works_before_and_after_the_build(place, capsys):
    code, out, _ = run(capsys, place, "--sweep=320,400", "--json")
    assert code == 0
    assert not (place / "data").exists()
    before = [json.loads(line) for line in out.splitlines()]
    assert [row["vocab_size"] for row in before] == [320, 400]
    assert before[0]["parameters"] == 384 * 512
    assert before[0]["tokens_per_gb"] > before[1]["tokens_per_gb"]
    run(capsys, place)
    kept = (place / "data/manifest.json").read_text()
    _, out, _ = run(capsys, place, "--sweep=320", "--json")
    after = json.loads(out)
    assert after["bytes_per_token"] == pytest.approx(before[0]["bytes_per_token"], rel=0.1)
    n_bytes = sum(source["train"]["bytes"] for source in json.loads(kept)["sources"].values())
    assert after["tokens"] == round(n_bytes / after["bytes_per_token"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sweep=4096,x"], "give sizes of the vocabulary, as in --sweep=4096,8192,16384"),
        (["--reference=none.model"], "cannot read the tokenizer none.model"),
        (["--config.data.tokenizer_model=wordpiece"], "tokenizer_model='wordpiece': choose one of bpe, unigram"),
        (["--config.data.tokenizer=none.model"], "cannot read the tokenizer none.model"),
    ],
)
def test_bad_input_is_one_line(place, capsys, argv, message):
    code, out, err = run(capsys, place, *argv)
    assert code == 2
    assert out == ""
    assert message in err.splitlines()[-1]


def test_a_tokenizer_can_be_given(place, capsys):
    run(capsys, place)
    model = place / "data/tokenizer.model"
    code, _, _ = run(capsys, place, f"--config.data.tokenizer={model}", f"--config.data.dir={place / 'other'}")
    assert code == 0
    assert (place / "other/tokenizer.model").read_bytes() == model.read_bytes()


def test_a_unigram_model_is_trained_where_asked(place, capsys):
    code, _, err = run(capsys, place, "--config.data.tokenizer_model=unigram")
    assert code == 0
    assert "all text comes back exactly" in err
    code, _, err = run(capsys, place)
    assert code == 2
    assert "was built with tokenizer = unigram trained on these sources" in err
