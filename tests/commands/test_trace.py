"""`jaxlm trace` shows the documents that a step of the run trained on."""

import json

import pytest
import tiny_data

from jaxlm.cli import cli


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_data.make(tmp_path_factory.mktemp("data") / "d", {"a": 1.0})


def argv(data, workdir) -> list[str]:
    keys = {"workdir": workdir, "data.dir": data.path, "model.vocab_size": 300, "train.seq_len": 32}
    return ["trace", "quickstart", "--config.train.batch_size=2", *(f"--config.{k}={v}" for k, v in keys.items())]


def trace(capsys, data, workdir, step):
    assert cli.main([*argv(data, workdir), f"--step={step}", "--json"]) == 0
    return json.loads("[" + ",".join(capsys.readouterr().out.splitlines()) + "]")


def test_batches_that_the_run_passed_over_are_no_steps(capsys, data, tmp_path):
    plain, run = tmp_path / "plain", tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"starts": [], "passed_over": [[5, 6], [3, 3]]}))
    for step, batch in ((2, 2), (3, 4), (4, 7), (5, 8)):
        shown = trace(capsys, data, run, step)
        assert shown == trace(capsys, data, plain, batch)
        assert step == batch or shown != trace(capsys, data, plain, step)


def test_a_step_beyond_the_run_is_said(capsys, data, tmp_path):
    words = argv(data, tmp_path)
    assert cli.main([*words, "--step=461"]) == 2
    assert "--step=461: the run ends at step 460 (train.steps)" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text('{"step": 10}\n{"step": 20}\n')
    assert cli.main([*words, "--step=20"]) == 0
    assert "to come" not in capsys.readouterr().err
    assert cli.main([*words, "--step=21"]) == 0
    assert f"step 21 is still to come, {tmp_path} is at step 20: this" in capsys.readouterr().err


def said(capsys, *words) -> tuple[int, str, str]:
    code = cli.main([*map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_string_is_found_and_its_documents_taken_out(capsys, data, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 9}\n')
    code, out, err = said(capsys, *argv(data, tmp_path), "--string=sea", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert {row["split"] for row in rows} == {"train", "val"}
    step = next(row["steps"][0] for row in rows if row["steps"])
    documents = {row["document"] for row in trace(capsys, data, tmp_path, step)}
    assert documents >= {row["doc_id"] for row in rows if step in row["steps"]}
    code, out, err = said(capsys, "trace", data.path, "--string=sea was", f"--remove={tmp_path}/list.jsonl")
    assert code == 0
    assert "100.0%" in out
    assert f"jaxlm tokenize {data.path} --without={tmp_path}/list.jsonl --out={data.path}-without" in err
    assert said(capsys, "tokenize", data.path, f"--without={tmp_path}/list.jsonl", f"--out={tmp_path}/new")[0] == 0
    code, out, err = said(capsys, "trace", tmp_path / "new", "--string=sea was", "--json")
    assert {json.loads(line)["split"] for line in out.splitlines()} <= {"val"}
    (tmp_path / "run.json").write_text(json.dumps({"starts": [{"manifest_sha256": data.sha256}]}))
    other = [word.replace(str(data.path), f"{tmp_path}/new") for word in argv(data, tmp_path)]
    assert "new is not the data that" in said(capsys, *other, "--string=sea")[2]


def test_what_a_text_copies(capsys, data, tmp_path):
    code, out, err = said(capsys, "trace", data.path, "--string=sea", "--json")
    stream, row = data.stream("a"), next(row for row in map(json.loads, out.splitlines()) if row["tokens"] > 60)
    text = data.tokenizer().decode(stream.read(row["start"] + 1, row["start"] + row["tokens"]).tolist())
    (tmp_path / "answer.txt").write_text(f"It says: {text}")
    code, out, err = said(capsys, "trace", data.path, f"--text={tmp_path}/answer.txt")
    assert (code, row["doc_id"] in out) == (0, True)
    assert f"{len(text)} of {len(text) + 9} bytes are copied, in 1 stretches" in err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--string=x", "--step=3"], "give one of --step=N, --string=TEXT"),
        ([], "give one of --step=N, --string=TEXT"),
        (["--step=3"], "--step needs a run or a config"),
        (["--string="], "found in every document"),
        (["--regex=x*"], "found in every document"),
        (["--regex=(["], "unterminated character set"),
        (["--regex=a{99999999999999999999}"], "as Python's re writes patterns"),
        (["--string-file=nofile"], "nofile can't be read: No such file"),
        (["--text=nofile"], "nofile can't be read: No such file"),
        (["--string=sea", "--remove=nodir/list.jsonl"], "nodir is no folder"),
        (["--text=nofile", "--remove=list.jsonl"], "--remove writes the documents that hold a string"),
    ],
)
def test_what_is_wrong_is_said_before_the_search(capsys, data, words, line):
    code, out, err = said(capsys, "trace", data.path, *words)
    assert (code, out) == (2, "")
    assert line in err
    assert len(err.splitlines()) == 1
