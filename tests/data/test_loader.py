"""Batches are the same on any number of hosts, threads and processes and after any resume; failures are errors."""

import itertools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest

from jaxlm.config import ConfigError
from jaxlm.data import loader, rows, shards

MIXTURE = {"prose": 87, "math": 10, "code": 3}
OPTIONS = {"seed": 7, "seq_len": 24, "batch_size": 8}


def take(data, n, mixture=MIXTURE, **options):
    asked = {name: options.pop(name, value) for name, value in OPTIONS.items()}
    with loader.TrainLoader(rows.Order(data, mixture, **asked), **options) as batches:
        return list(itertools.islice(batches, n))


def same(a, b):
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(np.array_equal(x[k], y[k]) for k in x) for x, y in zip(a, b, strict=True)
    )


@pytest.fixture(scope="module")
def expected(data):
    """Thirty batches made one row at a time, from the streams."""
    plan = rows.plan_rows(data.token_counts(), MIXTURE, seed=7, seq_len=24, batch_size=8)
    batches = []
    for step in range(30):
        source, _, row = plan.locate(step, np.arange(8))
        read = [data.stream(plan.names[k]).read(r * 24, r * 24 + 25) for k, r in zip(source, row, strict=True)]
        batches.append(rows.make_batch(np.stack(read), data.eos_id))
    return batches


@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_thread_count_changes_nothing(data, expected, num_threads):
    assert same(take(data, 30, num_threads=num_threads, prefetch=1 + num_threads), expected)


def test_worker_processes_change_nothing(data, expected):
    assert same(take(data, 30, num_workers=2), expected)


def test_the_comparison_can_fail(data, expected):
    assert not same(take(data, 30, seed=8), expected)
    assert not same(take(data, 30, mixture={"prose": 86, "math": 11, "code": 3}), expected)
    assert not same(take(data, 30, start_step=1), expected)
    assert not same(take(data, 29), expected)


@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_together_make_the_batch_of_one(data, expected, hosts):
    shares = [take(data, 30, row_indices=np.arange(8)[h::hosts]) for h in range(hosts)]
    for step, whole in enumerate(expected):
        for key in whole:
            for h in range(hosts):
                assert np.array_equal(shares[h][step][key], whole[key][h::hosts])


def test_row_indices_in_any_order(data, expected):
    order = np.array([5, 0, 3])
    for got, whole in zip(take(data, 30, row_indices=order), expected, strict=True):
        assert np.array_equal(got["tokens"], whole["tokens"][order])
    with pytest.raises(ValueError, match="row_indices must lie in"):
        take(data, 1, row_indices=np.array([8]))


@pytest.mark.parametrize("step", [0, 1, 13, 29])
def test_resuming_at_any_step_continues(data, expected, step):
    assert same(take(data, 30 - step, start_step=step, num_threads=3), expected[step:])


def test_a_far_step_is_reached_at_once(data):
    began = time.perf_counter()
    take(data, 1, start_step=10**12)
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize("seq_len", [5, 64, 100])
def test_any_sequence_length_from_the_same_shards(data, seq_len):
    """Every row of an epoch, put in order, is the stream again."""
    tokens = data.token_counts()["math"]
    count = rows.count_rows(tokens, seq_len)
    plan = rows.plan_rows(data.token_counts(), {"math": 1}, seed=7, seq_len=seq_len, batch_size=1)
    batches = take(data, count, {"math": 1}, seq_len=seq_len, batch_size=1)
    by_row = {int(plan.locate(s, np.arange(1))[2][0]): batch for s, batch in enumerate(batches)}
    stream = data.stream("math").read(0, count * seq_len + 1)
    assert np.array_equal(np.concatenate([by_row[r]["tokens"][0] for r in range(count)]), stream[:-1])
    assert np.array_equal(np.concatenate([by_row[r]["targets"][0] for r in range(count)]), stream[1:])


def test_segments_hold_one_document_each(data):
    """The shared corpus begins each document with its name: within a segment no other name follows."""
    coder = data.tokenizer()
    for batch in take(data, 20):
        for tokens, segments, positions in zip(batch["tokens"], batch["segment_ids"], batch["positions"], strict=True):
            for segment in np.unique(segments):
                inside = segments == segment
                assert np.array_equal(positions[inside], np.arange(inside.sum()))
                text = coder.decode(tokens[inside])
                named = [text.find(f"{name} ", 1) for name in MIXTURE]
                assert max(named) < 0, text


def test_a_read_error_is_raised_with_the_step_and_again(data, tmp_path):
    copy = shutil.copytree(data.path, tmp_path / "copy")
    opened = shards.open_data(copy)
    for shard in (copy / "train" / "prose").glob("*.array_record"):
        shard.write_bytes(b"\0" * shard.stat().st_size)
    with loader.TrainLoader(rows.Order(opened, MIXTURE, **OPTIONS)) as batches:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"failed at step 0: cannot read record \d+ of .*prose"):
                next(batches)


def test_a_hung_read_is_an_error_not_a_hang(data, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(loader.BatchSource, "__getitem__", lambda self, i: release.wait(30))
    batches = loader.TrainLoader(rows.Order(data, MIXTURE, **OPTIONS), stall_seconds=0.3)
    with pytest.raises(RuntimeError, match=r"no batch within 0\.3 s"):
        next(batches)
    release.set()
    batches.close()


def test_a_killed_worker_is_an_error_and_close_leaves_none(data):
    before = set(psutil.Process().children(recursive=True))
    batches = loader.TrainLoader(rows.Order(data, MIXTURE, **OPTIONS), num_workers=2, prefetch=1, stall_seconds=60)
    next(batches)
    workers = [p for p in psutil.Process().children(recursive=True) if "spawn_main" in " ".join(p.cmdline())]
    assert len(workers) == 2
    os.kill(workers[0].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="the loader failed at step"):
        list(itertools.islice(batches, 50))
    batches.close()
    psutil.wait_procs(workers, timeout=20)
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [p for p in left if p.pid in {w.pid for w in workers}]


ORPHAN = """
import sys, time
from jaxlm.data import loader, rows, shards
if __name__ == "__main__":
    data = shards.open_data(sys.argv[1])
    batches = loader.TrainLoader(rows.Order(data, {"prose": 1}, seed=0, seq_len=8, batch_size=2), num_workers=1)
    next(batches)
    print("ready", flush=True)
    time.sleep(60)
"""


def test_workers_die_with_a_killed_parent(data, tmp_path):
    (tmp_path / "orphan.py").write_text(ORPHAN)
    command = [sys.executable, str(tmp_path / "orphan.py"), str(data.path)]
    root = str(pathlib.Path(loader.__file__).parents[2])
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": root}) as parent:
        assert parent.stdout.readline() == b"ready\n"
        workers = [p for p in psutil.Process(parent.pid).children(True) if "spawn_main" in " ".join(p.cmdline())]
        assert workers
        parent.kill()
        _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive


def test_a_closed_loader_says_so(data):
    batches = loader.TrainLoader(rows.Order(data, MIXTURE, **OPTIONS))
    next(batches)
    assert batches.step == 1
    batches.close()
    batches.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(batches)


def test_fingerprint_tells_what_changed(data):
    arguments = {"seed": 0, "seq_len": 16, "batch_size": 8}
    saved = rows.Order(data, MIXTURE, **arguments).fingerprint()
    scaled = rows.Order(data, {"prose": 0.87, "math": 0.1, "code": 0.03}, **arguments).fingerprint()
    assert saved == scaled
    rows.check_fingerprint(saved, scaled)
    for change in ({"seed": 1}, {"seq_len": 32}, {"batch_size": 4}):
        now = rows.Order(data, MIXTURE, **(arguments | change)).fingerprint()
        key = next(iter(change))
        with pytest.raises(ConfigError, match=rf"{key} was {arguments[key]}, is {change[key]}; set them back"):
            rows.check_fingerprint(saved, now)
        assert now["sha256"] != saved["sha256"]
    with pytest.raises(ConfigError, match="mixture was"):
        rows.check_fingerprint(saved, rows.Order(data, {"prose": 1}, **arguments).fingerprint())


@pytest.mark.parametrize(("seq_len", "batch_size"), [(24, 4), (7, 3), (10_000, 2)])
def test_validation_counts_every_held_out_target_once(data, seq_len, batch_size):
    tokens = data.stream("prose", "val").read(0, data.token_counts("val")["prose"])
    batches = list(loader.validation_rows(data, "prose", seq_len=seq_len, batch_size=batch_size))
    assert {b.batch["tokens"].shape for b in batches} == {(batch_size, seq_len)}
    targets = np.concatenate([b.batch["targets"][b.batch["weights"] > 0] for b in batches])
    inputs = np.concatenate([b.batch["tokens"][b.batch["weights"] > 0] for b in batches])
    assert np.array_equal(targets, tokens[1:])
    assert np.array_equal(inputs, tokens[:-1])
    assert sum(b.target_tokens for b in batches) == len(tokens) - 1
    text_bytes = data.entry("prose", "val")["bytes"]
    assert sum(b.target_bytes for b in batches) == text_bytes - data.token_bytes()[tokens[0]]


def test_validation_can_be_capped(data):
    whole = list(loader.validation_rows(data, "prose", seq_len=8, batch_size=4))
    capped = list(loader.validation_rows(data, "prose", seq_len=8, batch_size=4, max_rows=6))
    assert len(capped) == 2
    assert np.array_equal(capped[0].batch["tokens"], whole[0].batch["tokens"])
    assert capped[1].batch["weights"].sum() == 2 * 8
    assert np.array_equal(capped[1].batch["tokens"][:2], whole[1].batch["tokens"][:2])
