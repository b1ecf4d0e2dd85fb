"""Training whose data fails: workers that die, shards that are damaged or can't be read."""

import signal
import time

import psutil
import pytest
from faults import harness

pytestmark = pytest.mark.faults
MENDS = "copy it again from where the data was built"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Data and a run that nothing happened to."""
    made = harness.Place(tmp_path_factory.mktemp("faults"))
    assert made.whole
    return made


def workers_of(pid):
    return [p for p in psutil.Process(pid).children(recursive=True) if "ahead.serve" in " ".join(p.cmdline())]


def test_a_run_with_workers_exits_with_the_same_numbers_and_leaves_none(place):
    run = place.start("workers", data__num_workers=2)
    run.wait_for_step(3)
    workers = workers_of(run.process.pid)
    assert len(workers) == 2
    run.end(0, seconds=60)
    assert not psutil.wait_procs(workers, timeout=5)[1]
    place.assert_exact("workers")


def test_a_killed_worker_ends_the_run_with_its_state_saved(place):
    run = place.start("killed", data__num_workers=2, data__prefetch=1, train__steps=5000, checkpoint__every_steps=5000)
    run.wait_for_step(5)
    workers_of(run.process.pid)[0].send_signal(signal.SIGKILL)
    began = time.monotonic()
    said = run.end(1, seconds=60)
    assert time.monotonic() - began < 30
    assert "worker process 1 of 2 of the loader" in said
    assert "was ended by SIGKILL" in said
    (saved,) = run.saved()
    assert saved >= 5


def test_a_damaged_shard_is_exit_code_2_until_it_is_mended(place):
    shard = next((place.root / "data" / "train" / "a").glob("*.array_record"))
    raw = shard.read_bytes()
    shard.write_bytes(raw[:200] + bytes([raw[200] ^ 8]) + raw[201:])
    for _ in range(2):
        said = place.run("damaged", code=2)
        assert f"{shard} is damaged" in said
        assert MENDS in said
        assert "Traceback" not in said
    shard.write_bytes(raw)
    place.run("damaged")
    place.assert_exact("damaged")


def test_an_io_error_or_two_cost_nothing(place):
    run = place.start("eio", rules=("read EIO data/train/a 2",))
    assert "trying again" in run.end(0)
    place.assert_exact("eio")


SLOWLY = {
    "rules": ("read slow data/train/",),
    "data__prefetch": 1,
    "data__num_threads": 1,
}  # so that faults come in time


def test_a_shard_that_cannot_be_read_is_exit_code_1_and_the_same_command_goes_on(place):
    run = place.start("unread", **SLOWLY)
    run.wait_for_words("step 1/")
    run.fault("read EIO data/train/")
    said = run.end(1)
    assert "cannot read" in said
    assert "array_record" in said
    assert "Traceback" not in said
    place.run("unread")
    place.assert_exact("unread")


def test_a_hung_read_names_the_shard_and_the_process_ends(place):
    run = place.start("hung", **SLOWLY, data__timeout_s=15)
    run.wait_for_words("step 1/")
    run.fault("read hang data/train/")
    said = run.end(1, seconds=60)
    assert "no batch within 15 s" in said
    assert "00000.array_record, for" in said
    assert run.saved()
    place.run("hung")
    place.assert_exact("hung")
