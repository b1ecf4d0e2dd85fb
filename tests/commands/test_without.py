"""`jaxlm train RUN --without=FILE`: a branch before the first batch that holds one of a list's documents."""

import argparse
import json

import pytest
import tiny_data
from tiny_keys import keys

from jaxlm.cli import cli
from jaxlm.commands.train import without
from jaxlm.run import ledger, metrics
from jaxlm.run.checkpoints import keep

TINY = keys("""
    model.n_layers=1 model.d_model=16 model.n_heads=2 model.d_ff=16 train.batch_size=8 train.seq_len=16 train.steps=12
    train.eval_every_steps=0 eval.max_mb=0.0005 checkpoint.every_steps=3 checkpoint.keep_every=3 runs.supervise=off
    optim.warmup_steps=0 optim.lr=0.01 log.every_steps=1 log.tensorboard=False sample.prompts=()
""")


def said(capsys, *words) -> tuple[int, str, str]:
    code = cli.main([*map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(a finished run of 12 steps with a checkpoint at step 3 at least; its data)."""
    folder = tmp_path_factory.mktemp("trunk")
    data = tiny_data.make(folder / "data", {"a": 1.0})
    all_keys = TINY | {"workdir": folder / "run", "data.dir": folder / "data"}
    assert cli.main(["train", "base", *(f"--config.{name}={value}" for name, value in all_keys.items())]) == 0
    return folder / "run", data


def make_list(capsys, made, first: int):
    """A list of one training document that the run first saw at a step from `first` on; that step."""
    run, _ = made
    rows = [json.loads(line) for line in said(capsys, "trace", run, "--regex=.+", "--json")[1].splitlines()]
    row = min((row for row in rows if row["steps"] and row["steps"][0] >= first), key=lambda row: row["steps"][0])
    path = run.parent / f"list_{first}.jsonl"
    path.write_text(json.dumps({name: row[name] for name in ("source", "split", "doc_id", "sha256")} | {"why": ""}))
    return path, row["steps"][0]


def steps_by_document(capsys, run) -> dict[str, list[int]]:
    rows = map(json.loads, said(capsys, "trace", run, "--regex=.+", "--json")[1].splitlines())
    return {row["doc_id"]: row["steps"] for row in rows if row["split"] == "train"}


def losses(run) -> dict[int, float]:
    return metrics.train_losses(run / "metrics.jsonl", 12)


def test_a_branch_is_the_run_up_to_the_first_batch_with_the_document(capsys, made):
    run, _ = made
    path, first = make_list(capsys, made, 5)
    begins = max(step for step in keep.steps(run / "checkpoints") if step < first)
    whole = steps_by_document(capsys, run)
    code, out, err = said(capsys, "plan", run, f"--without={path}")
    assert code == 0
    assert f"1 training document, first seen at step {first}: from the checkpoint of step {begins}" in out
    assert f"{12 - begins} steps to repeat" in out
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    code, out, err = said(capsys, "train", run, f"--without={path}", "--config.train.steps=10")
    assert code == 0, err
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before
    branch = run.with_name(f"run-without-{begins}")
    old, new = losses(run), losses(branch)
    assert [*new] == [*range(begins + 1, 11)]
    assert {step: new[step] for step in new if step < first} == {step: old[step] for step in new if step < first}
    assert all(new[step] != old[step] for step in new if step >= first)
    path.rename(path.with_suffix(".gone"))  # the branch has its own copy
    assert said(capsys, "train", branch, "--config.train.steps=12")[0] == 0
    assert losses(branch)[12] != old[12]
    path.write_text(path.with_suffix(".gone").read_text() + "\n")  # a later change of the file does not concern it
    assert said(capsys, "train", branch, "--config.train.steps=12")[0] == 0
    path.with_suffix(".gone").rename(path)
    taken = json.loads(path.read_text())["doc_id"]
    assert whole[taken][0] == first
    assert steps_by_document(capsys, branch) == whole | {taken: []}
    assert "does without documents already" in said(capsys, "train", branch, f"--without={path}")[2]
    other, other_first = make_list(capsys, made, 8)
    code, out, err = said(capsys, "train", run, f"--without={other}", f"--config.workdir={branch}")
    assert code == 2
    begins_too = max(step for step in keep.steps(run / "checkpoints") if step < other_first)
    assert ("does without the documents of" if begins_too == begins else "holds another run") in err


def test_a_run_whose_data_was_moved(capsys, made):
    run, data = made
    path, first = make_list(capsys, made, 5)
    data.path.rename(data.path.with_name("elsewhere"))
    words = run, f"--without={path}"
    try:
        assert "no manifest.json in" in said(capsys, "plan", *words)[2]
        moved = *words, f"--config.data.dir={data.path.with_name('elsewhere')}"
        code, out, _ = said(capsys, "plan", *moved)
        assert (code, f"first seen at step {first}" in out) == (0, True)
        more = f"--config.workdir={run.with_name('moved')}", "--config.train.steps=10"
        assert said(capsys, "train", *moved, *more)[0] == 0
        assert [*losses(run.with_name("moved"))][-1] == 10
    finally:
        data.path.with_name("elsewhere").rename(data.path)


def test_a_branch_skips_the_batches_that_the_run_skipped(capsys, made):
    run, _ = made
    path, _ = make_list(capsys, made, 5)
    book = (run / "run.json").read_text()
    ledger.put(run, "passed_over", [[2, 3], [90, 91]])
    args = argparse.Namespace(config=str(run), without=str(path))
    try:
        assert without.config(args, []).stability.skip == ("2:3", "90:91")
    finally:
        (run / "run.json").write_text(book)


def test_from_new_weights_where_no_checkpoint_is_before(capsys, made):
    run, _ = made
    path, first = make_list(capsys, made, 1)
    assert first <= 3
    code, _, err = said(capsys, "train", run, f"--without={path}", "--config.train.steps=3")
    assert code == 0
    assert f"first seen at step {first}: from new weights" in err
    assert "no kept checkpoint is before it: checkpoint.keep_every=N would have kept every N-th" in err
    old, new = losses(run), losses(run.with_name("run-without-0"))
    assert [*new] == [1, 2, 3]
    assert all((new[step] == old[step]) == (step < first) for step in new)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["train", "quickstart", "--without=x"], "--without=x needs the folder of a run"),
        (["plan", "quickstart", "--without=x"], "--without=x needs the folder of a run"),
        (["train", "RUN", "--without=nofile"], "--without=nofile can't be read: No such file"),
        (["plan", "RUN", "--without="], "--without=. can't be read: Is a directory"),
        (["train", "RUN", "--without=nofile", "--branch=decay", "--steps=2"], "leave --branch and --steps out"),
        (["train", "RUN", "--without=LIST", "--config.workdir=RUN"], "is the run that is branched from"),
    ],
)
def test_what_is_wrong_is_said(capsys, made, words, line):
    path, _ = make_list(capsys, made, 5)
    code, out, err = said(capsys, *(word.replace("RUN", str(made[0])).replace("LIST", str(path)) for word in words))
    assert (code, out) == (2, "")
    assert line in err
    assert "Traceback" not in err
