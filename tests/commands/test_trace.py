"""`jaxlm trace` shows the documents that a step of the run trained on."""

import json
import pathlib
import shutil

import pytest
import tiny_chats
import tiny_data

from jaxlm import config
from jaxlm.cli import cli
from jaxlm.commands import trace as trace_program
from jaxlm.config import config_files
from jaxlm.data.tokenizer import coder


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
    assert out.splitlines()[1].split()[-2:] == ["100%", "100%"]
    assert f"jaxlm tokenize {data.path} --without={tmp_path}/list.jsonl --out={data.path}-without" in err
    listed = len((tmp_path / "list.jsonl").read_text().splitlines())
    assert f"wrote {tmp_path}/list.jsonl: {listed} document" + "s" * (listed > 1) in err.splitlines()
    assert said(capsys, "tokenize", data.path, f"--without={tmp_path}/list.jsonl", f"--out={tmp_path}/new")[0] == 0
    code, out, err = said(capsys, "trace", tmp_path / "new", "--string=sea was", "--json")
    assert {json.loads(line)["split"] for line in out.splitlines()} <= {"val"}
    held_out = [json.dumps(row) for row in rows if row["split"] == "val"]
    (tmp_path / "val.jsonl").write_text("\n".join(held_out))
    words = "tokenize", data.path, f"--without={tmp_path}/val.jsonl", f"--out={tmp_path}/less", "--held-out"
    before = data.entry("a", "val")["documents"]
    assert f"a: {before - len(held_out)} of {before} held-out documents stay" in said(capsys, *words)[2]
    (tmp_path / "run.json").write_text(json.dumps({"starts": [{"manifest_sha256": data.sha256}]}))
    other = [word.replace(str(data.path), f"{tmp_path}/new") for word in argv(data, tmp_path)]
    assert "new is not the data that" in said(capsys, *other, "--string=sea")[2]


def test_a_list_that_can_not_be_written_is_said_before_the_search(capsys, data, tmp_path, monkeypatch):
    monkeypatch.setattr(trace_program.search, "matches", lambda *args: pytest.fail("searched"))
    monkeypatch.chdir(tmp_path)
    assert said(capsys, "trace", data.path, "--string=sea", "--remove=") == (
        2,
        "",
        "jaxlm: . exists: name another file for the list\n",
    )
    assert said(capsys, "trace", data.path, "--text=a.txt", "--remove=")[0] == 2
    monkeypatch.setattr(trace_program.removal.os, "access", lambda path, mode: False)  # root may write anywhere
    line = f"jaxlm: {tmp_path}/l.jsonl can't be written: name a file in another folder\n"
    assert said(capsys, "trace", data.path, "--string=sea", f"--remove={tmp_path}/l.jsonl") == (2, "", line)


def test_a_folder_that_is_no_data_yet(capsys, tmp_path):
    assert "takes a config or the folder of a run or of data" in said(capsys, "trace", tmp_path, "--string=sea")[2]
    (tmp_path / trace_program.removal.LIST).touch()
    line = f"jaxlm: {tmp_path} is unfinished: run the same jaxlm tokenize --without again, or delete it\n"
    assert said(capsys, "trace", tmp_path, "--string=sea") == (2, "", line)


def test_data_of_a_run_and_its_origin_are_named_once(capsys, data, tmp_path):
    for name, origin in (("a", ""), ("b", tmp_path / "a")):
        (tmp_path / name).mkdir()
        given = [f"workdir={tmp_path / name}", f"data.dir={data.path}", f"origin={origin}", "model.vocab_size=300"]
        (tmp_path / name / "config.json").write_text(config.to_json(config.resolve(config_files.load("base", given))))
    code, out, err = said(capsys, "trace", tmp_path / "b", "--string=zzz")
    assert (code, out, err) == (0, "", f"no document of {data.path} holds it\n")


def test_what_a_text_copies(capsys, data, tmp_path):
    code, out, err = said(capsys, "trace", data.path, "--string=sea", "--json")
    stream, row = data.stream("a"), next(row for row in map(json.loads, out.splitlines()) if row["tokens"] > 60)
    text = data.tokenizer().decode(stream.read(row["start"] + 1, row["start"] + row["tokens"]).tolist())
    (tmp_path / "answer.txt").write_text(f"It says: {text}")
    code, out, err = said(capsys, "trace", data.path, f"--text={tmp_path}/answer.txt")
    assert (code, row["doc_id"] in out) == (0, True)
    assert f"{len(text)} of {len(text) + 9} bytes are copied, in 1 stretch of 64 bytes or more" in err


def post_trained(folder, program: str, origin, file: str) -> pathlib.Path:
    """A run's folder, as its training leaves it, but for checkpoints."""
    folder.mkdir()
    keys = {"workdir": folder, "data.path": file, "origin": origin, "data.val_fraction": 0.2, "train.seq_len": 192}
    c = config.resolve(config_files.load(program, [f"{key}={value}" for key, value in keys.items()]))
    (folder / "config.json").write_text(config.to_json(c))
    coder.write(tiny_chats.tokenizer(), folder / config_files.TOKENIZER)
    return folder


@pytest.fixture(scope="module")
def lineage(tmp_path_factory):
    """Three runs: a base, its sft, that one's dpo."""
    root = tmp_path_factory.mktemp("runs")
    base = tiny_chats.base(root / "base")
    sft = post_trained(root / "sft", "sft", base, tiny_chats.chats(root / "chats.jsonl", turns=2))
    return base, sft, post_trained(root / "dpo", "dpo", sft, tiny_chats.pairs(root / "pairs.jsonl"))


def rows_of(capsys, run, *words) -> list[dict]:
    code, out, _ = said(capsys, "trace", run, *words, "--json")
    assert code == 0
    return [json.loads(line) for line in out.splitlines()]


def test_a_post_trained_run_searches_its_examples_and_its_bases(capsys, lineage):
    base, sft, dpo = lineage
    lines = [json.loads(line) for line in (sft.parent / "chats.jsonl").read_text().splitlines()]
    wanted = {
        f"{sft.parent}/chats.jsonl:{number}"
        for number, line in enumerate(lines, start=1)
        if any("sea sun" in message["content"] for message in line["messages"])
    }
    rows = rows_of(capsys, sft, "--string=sea sun")
    assert {row["doc_id"] for row in rows if row["run"] == str(sft)} == wanted
    assert {row["split"] for row in rows_of(capsys, sft, "--string=sea")} == {"train", "val"}
    of_base = [row for row in rows if row["run"] == str(base)]
    assert of_base == [row | {"run": str(base)} for row in rows_of(capsys, base / "data", "--string=sea sun")]
    assert {row["run"] for row in rows_of(capsys, dpo, "--string=sea")} == {str(dpo), str(sft), str(base)}
    # The template's tokens are spelt, and each side of a pair is a document.
    assert {row["run"] for row in rows_of(capsys, dpo, "--string=<|im_end|>")} == {str(dpo), str(sft)}
    sides = rows_of(capsys, dpo, r"--regex= sun<\|im_end\|>\s*\Z")
    assert {row["doc_id"].split()[-1] for row in sides if row["run"] == str(dpo)} == {"chosen"}
    assert len([row for row in rows_of(capsys, dpo, "--regex=(?s)^.+$") if row["run"] == str(dpo)]) == 80


def test_what_a_text_copies_from_an_example(capsys, lineage, tmp_path):
    _, sft, _ = lineage
    messages = json.loads((sft.parent / "chats.jsonl").read_text().splitlines()[2])["messages"]
    text = "\n".join(f"<|im_start|><|{message['role']}|>\n{message['content']}<|im_end|>" for message in messages)
    (tmp_path / "answer.txt").write_text(f"### {text}")
    copied = rows_of(capsys, sft, f"--text={tmp_path}/answer.txt")
    assert (copied[0]["source"], copied[0]["length"], copied[0]["start"]) == ("chats", len(text), 4)
    assert copied[0]["doc_id"].endswith("chats.jsonl:3")


def test_what_is_not_here_is_said(capsys, lineage, tmp_path):
    _, sft, _ = lineage
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "config.json").write_text('{"model_type": "llama"}')
    shutil.copytree(sft, tmp_path / "run")
    saved = json.loads((sft / "config.json").read_text()) | {"workdir": str(tmp_path / "run"), "origin": str(theirs)}
    (tmp_path / "run/config.json").write_text(json.dumps(saved))
    code, out, err = said(capsys, "trace", tmp_path / "run", "--string=sea")
    assert (code, "chats.jsonl:" in out) == (0, True)
    assert f"what {theirs} was trained on is not here" in err
    saved["data"]["path"] = str(tmp_path / "gone.jsonl")
    (tmp_path / "run/config.json").write_text(json.dumps(saved))
    code, out, err = said(capsys, "trace", tmp_path / "run", "--string=sea")
    assert code == 2
    assert f"what {tmp_path / 'run'} was trained on is not here" in err
    for flag in ("--step=1", "--string=sea --remove=x"):
        code, out, err = said(capsys, "trace", sft, *flag.split())
        assert (code, "--step and --remove are about shards" in err) == (2, True)


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
