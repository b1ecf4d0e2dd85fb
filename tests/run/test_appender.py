"""Files that are appended to: a disk that fails costs nothing but the wait."""

import errno
import os
import subprocess
import sys
import threading

import pytest

from jaxlm.run import metrics


class Disk:
    """Lets `os.write` write only `room` bytes more, then fail."""

    def __init__(self, monkeypatch, code=errno.ENOSPC):
        self.room, self._code, self._write = 10**9, code, os.write
        monkeypatch.setattr(metrics.os, "write", self.write)

    def write(self, descriptor, data):
        if threading.current_thread() is not threading.main_thread():  # a log.txt of another test
            return self._write(descriptor, data)
        if not self.room:
            raise OSError(self._code, os.strerror(self._code))
        written = self._write(descriptor, bytes(data[: self.room]))
        self.room -= written
        return written


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EROFS])
def test_what_the_disk_does_not_take_is_written_later_and_never_in_parts(tmp_path, monkeypatch, capsys, code):
    path, disk = tmp_path / "new" / "log", Disk(monkeypatch, code)
    file = metrics.Appender(path)
    file.append(b"one\n")
    disk.room = 2  # the half of a line
    for word in (b"two\n", b"three\n"):
        file.append(word)
        assert path.read_bytes() == b"one\n"
        disk.room = 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{path} can't be written ({os.strerror(code)})" in said
    disk.room = 10**9
    file.append(b"four\n")
    file.close()
    assert path.read_bytes() == b"one\ntwo\nthree\nfour\n"
    assert capsys.readouterr().err == f"{path} is written again; nothing was lost\n"


def test_room_that_is_made_is_used_at_once(tmp_path, monkeypatch, capsys):
    disk, asked = Disk(monkeypatch), []

    def free():
        asked.append(1)
        disk.room = 6

    file = metrics.Appender(tmp_path / "log", on_full=free)
    disk.room = 0
    file.append(b"one\n")
    assert (tmp_path / "log").read_bytes() == b"one\n"
    assert capsys.readouterr().err == ""
    file.append(b"two\n")  # full again: the reserve may have been made again too
    file.append(b"three\n")
    file.close()
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\nthree\n"
    assert asked == [1, 1, 1]


def test_no_more_than_so_many_records_wait(tmp_path, monkeypatch, capsys):
    disk = Disk(monkeypatch)
    file = metrics.Appender(tmp_path / "log", keep=3)
    disk.room = 0
    for i in range(5):
        file.append(b"%d\n" % i)
    disk.room = 100
    file.append(b"5\n")
    assert (tmp_path / "log").read_bytes() == b"3\n4\n5\n"
    assert "3 records were lost" in capsys.readouterr().err


def test_the_end_says_what_is_lost(tmp_path, monkeypatch, capsys):
    disk = Disk(monkeypatch)
    file = metrics.Appender(tmp_path / "log")
    disk.room = 0
    file.append(b"one\n")
    file.close()
    assert capsys.readouterr().err.splitlines()[1:] == [
        f"{tmp_path / 'log'} lacks its last 1 records: No space left on device"
    ]


def test_a_folder_that_can_t_be_made_stops_nothing(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    file = metrics.Appender(tmp_path / "file" / "log")
    file.append(b"one\n")
    (tmp_path / "file").unlink()
    file.append(b"two\n")
    file.close()
    assert (tmp_path / "file" / "log").read_bytes() == b"one\ntwo\n"
    assert capsys.readouterr().err.count("\n") == 2


def test_a_real_limit_on_the_size_of_files(tmp_path):
    """The system's own short write and error, not one of ours."""
    program = f"""
import pathlib, resource, signal
from jaxlm.run import metrics
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = pathlib.Path({str(tmp_path / "log")!r})
file = metrics.Appender(path)
resource.setrlimit(resource.RLIMIT_FSIZE, (1003, resource.RLIM_INFINITY))
for i in range(300):
    file.append(b"%09d\\n" % i)
assert path.stat().st_size == 1000
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
file.close()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert (tmp_path / "log").read_bytes() == b"".join(b"%09d\n" % i for i in range(300))
