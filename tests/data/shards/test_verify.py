"""Files are compared with the manifest: once, before their first use, or beside the run."""

import hashlib
import threading
import time

import pytest

from jaxlm.config import RunError
from jaxlm.data.shards import verify


@pytest.fixture
def entries(tmp_path):
    """Four sound files of 1 MB."""
    found = []
    for i in range(4):
        content = bytes([i]) * 1_000_000
        (tmp_path / f"{i}").write_bytes(content)
        found.append({"file": f"{i}", "size": len(content), "sha256": hashlib.sha256(content).hexdigest()})
    return found


@pytest.fixture
def verifier(tmp_path):
    return verify.Verifier(tmp_path)


def wait(condition):
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def test_damage_names_the_file_and_says_how_to_mend_it(verifier, entries, tmp_path):
    (tmp_path / "1").write_bytes(b"other")
    words = (
        f"{tmp_path}/1 is damaged .*: copy it again from where the data was built, or delete {tmp_path}/manifest.json"
    )
    for act in (verifier.check, verifier.first_read, verifier.content):
        act(entries[0])
        with pytest.raises(verify.DamagedData, match=words):
            act(entries[1])


def test_a_file_is_hashed_once_and_large_ones_are_left_to_the_background(verifier, entries, tmp_path, monkeypatch):
    verifier.first_read(entries[0])
    (tmp_path / "0").write_bytes(b"other")
    verifier.first_read(entries[0])  # was sound
    with pytest.raises(verify.DamagedData):
        verify.Verifier(tmp_path).first_read(entries[0])  # another process looks for itself
    (tmp_path / "1").write_bytes(b"other")
    monkeypatch.setattr(verify, "FIRST_READ_BYTES", 999_999)
    verifier.first_read(entries[1])
    with pytest.raises(verify.DamagedData):
        verifier.first_read(entries[1], always=True)


def test_a_file_that_cannot_be_read_is_no_damage(verifier, entries, tmp_path):
    (tmp_path / "0").unlink()
    with pytest.raises(FileNotFoundError):
        verifier.first_read(entries[0])
    (tmp_path / "3").write_bytes(b"other")
    verifier.begin(entries)
    wait(lambda: verifier.damage)
    assert "/3 is damaged" in str(verifier.damage)


def test_the_background_is_slow_and_ends_when_told(verifier, entries, tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "BACKGROUND_BYTES_PER_SECOND", 10e6)
    began = time.monotonic()
    verifier.begin(entries)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "verify-data"]
    thread.join(10)
    assert time.monotonic() - began > 0.35  # 4 MB at 10 MB/s
    assert verifier.damage is None
    monkeypatch.setattr(verify, "BACKGROUND_BYTES_PER_SECOND", 1e3)
    again = verify.Verifier(tmp_path)
    again.begin(entries)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "verify-data"]
    again.end()
    thread.join(5)
    assert not thread.is_alive()


def test_reading_is_tried_three_times_and_damage_is_told_from_failure(verifier, entries, tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "RETRY_SECONDS", (0.0, 0.0))
    failures = []

    def act(count):
        assert verifier.oldest_read().startswith(f"{tmp_path}/2, for 0.")
        failures.append(1)
        if len(failures) <= count:
            raise OSError("Input/output error")
        return "content"

    assert verifier.read(entries[2], "record 5", lambda: act(2)) == "content"
    failures.clear()
    with pytest.raises(RunError, match=f"cannot read record 5 of {tmp_path}/2: Input/output error; check the disk"):
        verifier.read(entries[2], "record 5", lambda: act(3))
    failures.clear()
    (tmp_path / "2").write_bytes(b"other")
    with pytest.raises(verify.DamagedData):
        verifier.read(entries[2], "record 5", lambda: act(1))
    assert len(failures) == 1
    assert verifier.oldest_read() == ""
