"""Batches are the same on any number of hosts and threads and after any resume, read ahead in order; failures are errors."""

import dataclasses
import itertools
import os
import pathlib
import random
import shutil
import subprocess
import sys
import threading
import time

import grain
import numpy as np
import pytest
from faults import harness

from jaxlm import config as config_lib
from jaxlm.config import ConfigError, RunError, config_files
from jaxlm.data.batches import document_rows, loader
from jaxlm.data.batches.loader import Ahead
from jaxlm.data.batches.order import check_fingerprint
from jaxlm.data.shards import shards, verify
from jaxlm.data.shards.mixture import Final

MIXTURE = {"prose": 87, "math": 10, "code": 3}
OPTIONS = {"seed": 7, "seq_len": 24, "batch_size": 8}


def take(data, n, mixture=MIXTURE, **options):
    asked = {name: options.pop(name, value) for name, value in OPTIONS.items()}
    with loader.TrainLoader(document_rows.Rows(data, mixture, **asked), **options) as batches:
        return list(itertools.islice(batches, n))


def same(a, b):
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(np.array_equal(x[k], y[k]) for k in x) for x, y in zip(a, b, strict=True)
    )


@pytest.fixture(scope="module")
def expected(data):
    """Thirty batches made one row at a time, from the streams."""
    plan = document_rows.plan_rows(data.token_counts(), MIXTURE, seed=7, seq_len=24, batch_size=8)
    batches = []
    for step in range(30):
        source, _, row = plan.locate(step, np.arange(8))
        read = [data.stream(plan.names[k]).read(r * 24, r * 24 + 25) for k, r in zip(source, row, strict=True)]
        batches.append(document_rows.make_batch(np.stack(read), data.separator_id))
    return batches


@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_thread_count_changes_nothing(data, expected, num_threads):
    assert same(take(data, 30, num_threads=num_threads, prefetch=1 + num_threads), expected)


def test_the_comparison_can_fail(data, expected):
    assert not same(take(data, 30, seed=8), expected)
    assert not same(take(data, 30, mixture={"prose": 86, "math": 11, "code": 3}), expected)
    assert not same(take(data, 30, start_step=1), expected)
    assert not same(take(data, 29), expected)


@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_together_make_the_batch_of_one(data, expected, hosts):
    with pytest.raises(ValueError, match="row_indices must lie in"):
        take(data, 1, row_indices=np.array([8]))
    shares = [take(data, 30, row_indices=np.arange(8)[h::hosts]) for h in range(hosts)]
    for step, whole in enumerate(expected):
        for key in whole:
            for h in range(hosts):
                assert np.array_equal(shares[h][step][key], whole[key][h::hosts])


@pytest.mark.parametrize("step", [1, 13])
def test_resuming_at_any_step_continues(data, expected, step):
    assert same(take(data, 30 - step, start_step=step, num_threads=3), expected[step:])


def test_from_step_37_come_the_batches_of_step_37(data):
    """Counted once: a source that began there, and was sliced from there as well, would give those of step 74."""
    final = Final({"math": 60, "code": 40}, share=0.4, steps=64)  # from batch 39 on, which step 36 trains on
    order = document_rows.Rows(data, MIXTURE, **OPTIONS, passed_over=[(3, 4), (38, 38)], final=final)
    with loader.TrainLoader(order) as batches:
        whole = list(itertools.islice(batches, 44))
    for options in ({}, {"num_threads": 3}, {"num_threads": 1, "prefetch": 1}):
        with loader.TrainLoader(order, start_step=37, **options) as batches:
            assert same(whole[37:], list(itertools.islice(batches, 7)))
    plan = order.plan
    for step, number in ((36, 39), (37, 40), (43, 46)):
        source, _, row = plan.locate(number, np.arange(8))
        read = [data.stream(plan.names[k]).read(r * 24, r * 24 + 25) for k, r in zip(source, row, strict=True)]
        assert same([whole[step]], [document_rows.make_batch(np.stack(read), data.separator_id)])


def test_a_far_step_is_reached_at_once(data):
    began = time.perf_counter()
    take(data, 1, start_step=10**12)
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize("seq_len", [5, 100])
def test_any_sequence_length_from_the_same_shards(data, seq_len):
    """Every row of an epoch, put in order, is the stream again."""
    tokens = data.token_counts()["math"]
    count = document_rows.count_rows(tokens, seq_len)
    plan = document_rows.plan_rows(data.token_counts(), {"math": 1}, seed=7, seq_len=seq_len, batch_size=1)
    batches = take(data, count, {"math": 1}, seq_len=seq_len, batch_size=1)
    by_row = {int(plan.locate(s, np.arange(1))[2][0]): batch for s, batch in enumerate(batches)}
    stream = data.stream("math").read(0, count * seq_len + 1)
    assert np.array_equal(np.concatenate([by_row[r]["tokens"][0] for r in range(count)]), stream[:-1])
    assert np.array_equal(np.concatenate([by_row[r]["targets"][0] for r in range(count)]), stream[1:])


@pytest.fixture
def copy(data, tmp_path):
    """The data directory, to be damaged."""
    return shards.open_data(shutil.copytree(data.path, tmp_path / "copy"))


def shards_of(data, source):
    return sorted((data.path / "train" / source).glob("*.array_record"))


def test_a_damaged_shard_is_bad_input_that_names_it_again_and_again(copy):
    for shard in shards_of(copy, "prose"):
        shard.write_bytes(b"\0" * shard.stat().st_size)
    with loader.TrainLoader(document_rows.Rows(copy, MIXTURE, **OPTIONS)) as batches:
        for _ in range(2):
            with pytest.raises(verify.DamagedData, match=r"prose/\d+.array_record is damaged .*copy it again"):
                next(batches)


def test_a_sound_shard_in_the_place_of_another_is_noticed_before_its_first_record(copy, monkeypatch):
    """ArrayRecord itself can't see this one."""
    first, second, *_ = shards_of(copy, "prose")
    swapped = second.read_bytes(), first.read_bytes()
    first.write_bytes(swapped[0])
    second.write_bytes(swapped[1])
    with pytest.raises(verify.DamagedData):
        take(copy, 30)
    monkeypatch.setattr(verify, "FIRST_READ_SECONDS", -1.0)  # the mutation: what is too slow is left to the background
    assert len(take(shards.open_data(copy.path), 30)) == 30


def open_verified(data):
    order = document_rows.Rows(data, MIXTURE, **OPTIONS)
    data.verifier.begin(order.shards(0))
    return loader.TrainLoader(order, stall_seconds=30.0)


def test_damage_that_the_background_finds_ends_the_run_at_the_next_batch(copy, data, expected):
    """Held-out text: no batch reads it."""
    damaged = next((copy.path / "val" / "math").glob("*.array_record"))
    raw = damaged.read_bytes()
    damaged.write_bytes(raw[:70] + bytes([raw[70] ^ 1]) + raw[71:])
    with open_verified(copy) as batches:
        slowly = (time.sleep(0.01) or next(batches) for _ in range(1000))
        with pytest.raises(verify.DamagedData, match=f"{damaged} is damaged"):
            list(slowly)
    with open_verified(data) as batches:
        assert same([next(batches) for _ in range(30)], expected)


def test_a_read_that_fails_once_is_tried_again_and_the_batches_are_the_same(copy, expected):
    with loader.TrainLoader(document_rows.Rows(copy, MIXTURE, **OPTIONS), prefetch=1) as batches:
        before = [next(batches) for _ in range(2)]
        away = copy.path.with_name("away")
        (copy.path / "train").rename(away)
        threading.Timer(0.2, away.rename, [copy.path / "train"]).start()
        assert same(before + [next(batches) for _ in range(28)], expected)


def test_a_read_that_fails_three_times_names_the_shard_and_the_same_command_may_do_better(copy, monkeypatch):
    monkeypatch.setattr(verify, "RETRY_SECONDS", (0.01, 0.01))
    order = document_rows.Rows(copy, {"prose": 1}, **OPTIONS)
    shutil.rmtree(copy.path / "train")
    with loader.TrainLoader(order) as batches:
        for _ in range(2):
            with pytest.raises(RunError, match=r"failed at step 0: cannot read record \d+ of .*prose/\d+.array_record"):
                next(batches)


def test_a_hung_read_is_an_error_that_names_the_shard_and_close_does_not_wait(copy):
    for shard in shards_of(copy, "prose"):
        shard.unlink()
        os.mkfifo(shard)  # whoever opens it waits for ever
    order = document_rows.Rows(copy, {"prose": 1}, **OPTIONS)
    batches = loader.TrainLoader(order, stall_seconds=0.3)
    with pytest.raises(RunError, match=rf"no batch within 0.3 s .*{copy.path}/train/prose/\d+.array_record, for"):
        next(batches)
    assert "prose" in batches.waits_for()
    began = time.monotonic()
    batches.close()
    assert time.monotonic() - began < 4


SCRIPT = """
import itertools, sys
from jaxlm.data.batches import document_rows, loader; from jaxlm.data.shards import shards
then = sys.argv[2]
data = shards.open_data(sys.argv[1])
order = document_rows.Rows(data, {"prose": 1}, seed=0, seq_len=8, batch_size=2)
batches = loader.TrainLoader(order, stall_seconds=3)
if then == "hang":
    import os, pathlib
    for shard in (data.path / "train" / "prose").glob("*.array_record"):
        shard.unlink()
        os.mkfifo(shard)
try:
    list(itertools.islice(batches, 50 if then != "hang" else 10**6))
except RuntimeError as error:
    print(error)
print("ready", flush=True)
sys.stdin.readline()
if then == "close":
    batches.close()
"""


def start(tmp_path, data, *arguments):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(data.path), *arguments]
    root = str(pathlib.Path(loader.__file__).parents[2])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, env=os.environ | {"PYTHONPATH": root})


@pytest.mark.faults
@pytest.mark.parametrize("then", ["close", "leave", "hang"])
def test_a_process_with_a_loader_always_exits(copy, tmp_path, then):
    with start(tmp_path, copy, then) as process:
        line = process.stdout.readline()
        assert (b"array_record" in line) == (then == "hang"), line
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.wait(timeout=15) == 0


SUMS = """
import hashlib, itertools, sys
from jaxlm.data.batches import document_rows, loader; from jaxlm.data.shards import shards, verify
verify.RETRY_SECONDS = (0.01, 0.01)
order = document_rows.Rows(shards.open_data(sys.argv[1]), {"prose": 1}, seed=0, seq_len=24, batch_size=8)
with loader.TrainLoader(order) as batches:
    for batch in itertools.islice(batches, 100):
        print(hashlib.sha256(batch["tokens"].tobytes()).hexdigest())
"""


@pytest.mark.faults
def test_an_io_error_or_two_cost_no_batch(data, tmp_path):
    (tmp_path / "rules").write_text("read EIO /train/prose/00001 2\nread EIO /train/prose/00003 1\n")

    def run(**more):
        command = [sys.executable, "-c", SUMS, str(data.path)]
        return subprocess.run(command, capture_output=True, text=True, env=os.environ | more, timeout=60)

    sound, shaken = run(), run(LD_PRELOAD=str(harness.shim()), FAULTS=str(tmp_path / "rules"))
    assert len(sound.stdout.split()) == 100, sound.stderr
    assert "trying again" in shaken.stderr
    assert shaken.stdout == sound.stdout, shaken.stderr


def test_fingerprint_tells_what_changed(data):
    arguments = {"seed": 0, "seq_len": 16, "batch_size": 8}
    saved = document_rows.Rows(data, MIXTURE, **arguments).fingerprint()
    scaled = document_rows.Rows(data, {"prose": 0.87, "math": 0.1, "code": 0.03}, **arguments).fingerprint()
    assert saved == scaled
    check_fingerprint(saved, scaled)
    for change in ({"seed": 1}, {"seq_len": 32}, {"batch_size": 4}):
        now = document_rows.Rows(data, MIXTURE, **(arguments | change)).fingerprint()
        key = next(iter(change))
        with pytest.raises(ConfigError, match=rf"{key} was {arguments[key]}, is {change[key]}; set them back"):
            check_fingerprint(saved, now)
        assert now["sha256"] != saved["sha256"]
    with pytest.raises(ConfigError, match="mixture was"):
        check_fingerprint(saved, document_rows.Rows(data, {"prose": 1}, **arguments).fingerprint())


@pytest.mark.parametrize(("seq_len", "batch_size"), [(24, 4), (7, 3), (10_000, 2)])
def test_validation_counts_every_held_out_target_once(data, seq_len, batch_size):
    tokens = data.stream("prose", "val").read(0, data.token_counts("val")["prose"])
    batches = list(document_rows.validation_rows(data, "prose", seq_len=seq_len, batch_size=batch_size))
    assert {b.batch["tokens"].shape for b in batches} == {(batch_size, seq_len)}
    targets = np.concatenate([b.batch["targets"][b.batch["weights"] > 0] for b in batches])
    inputs = np.concatenate([b.batch["tokens"][b.batch["weights"] > 0] for b in batches])
    assert np.array_equal(targets, tokens[1:])
    assert np.array_equal(inputs, tokens[:-1])
    assert sum(b.target_tokens for b in batches) == len(tokens) - 1
    text_bytes = data.entry("prose", "val")["bytes"]
    assert sum(b.target_bytes for b in batches) == text_bytes - data.token_bytes()[tokens[0]]


@pytest.mark.parametrize("chunk", [7, 65_536])
def test_the_first_megabytes_of_held_out_text_are_its_tokens_that_begin_in_them(data, chunk, monkeypatch):
    monkeypatch.setattr(document_rows, "_CHUNK", chunk)
    settings = config_lib.resolve(config_files.load("base", ["data.path=x"])).eval
    tokens = data.stream("prose", "val").read(0, data.token_counts("val")["prose"])
    bytes_N = data.token_bytes()[tokens[1:]]
    begins_N = np.cumsum(bytes_N) - bytes_N
    for limit in (1, 2, 50, 51, 52, int(bytes_N.sum()) - 1, int(bytes_N.sum()), 10**9, 0):
        limited = dataclasses.replace(settings, max_mb=limit / 1e6)
        want = int((begins_N < (limit or np.inf)).sum())
        assert document_rows.count_targets(data, "prose", limited, 8) == want
        batches = list(document_rows.validation_rows(data, "prose", seq_len=8, batch_size=4, targets=want))
        targets = np.concatenate([b.batch["targets"][b.batch["weights"] > 0] for b in batches])
        assert np.array_equal(targets, tokens[1 : 1 + want])
    older = dataclasses.replace(settings, older_batches=(3, 2), max_mb=1e-6)
    assert document_rows.count_targets(data, "prose", older, 8) == 48
    assert (
        document_rows.count_targets(data, "prose", dataclasses.replace(older, older_batches=(0, 2)), 8)
        == len(tokens) - 1
    )


class Source:
    """Item i is i, after a random pause; fails at `bad`, and waits for ever at those for which `hangs` is true."""

    def __init__(self, bad=None, hangs=lambda i: False):
        self.bad, self.hangs, self.asked = bad, hangs, []

    def __len__(self):
        return 1 << 62

    def __getitem__(self, i):
        self.asked.append(i)
        time.sleep(random.Random(i).random() / 500)
        if i == self.bad:
            raise OSError(f"item {i}")
        while self.hangs(i):
            time.sleep(0.01)
        return i


def ahead(source, start, num_threads, prefetch):
    return Ahead(grain.MapDataset.source(source), start, num_threads, prefetch)


def take_ahead(items, n):
    return [items.get(5) for _ in range(n)]


@pytest.mark.parametrize(("num_threads", "prefetch"), [(1, 1), (3, 1), (3, 10), (8, 2)])
def test_items_come_in_order_and_not_too_many_ahead(num_threads, prefetch):
    items = ahead(source := Source(), 37, num_threads, prefetch)
    assert take_ahead(items, 50) == list(range(37, 87))
    time.sleep(0.05)
    lane = -(-prefetch // num_threads)
    assert len(source.asked) <= 50 + num_threads * (lane + 1)  # what is ahead, and one in hand for each thread
    items.close()


def test_an_error_comes_in_its_place_and_nothing_of_its_lane_is_asked_for_again():
    items = ahead(source := Source(bad=7), 0, 3, 6)
    assert take_ahead(items, 7) == list(range(7))
    with pytest.raises(OSError, match="item 7"):
        items.get(5)
    time.sleep(0.05)
    assert not {10, 13} & set(source.asked)
    items.close()
