"""Files elsewhere: patient with what passes, quick to give up on what does not."""

import errno
import random

import fsspec
import pytest
import tiny_mirror
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from jaxlm.run.checkpoints.remote import Remote, seal, unseal


class Flaky(AbstractFileSystem):
    """A storage that is no local disk, for all that jaxlm knows, and of which three of ten requests fail."""

    protocol = "flaky"
    cachable = False
    files = LocalFileSystem(auto_mkdir=True)
    rng, error = random.Random(0), OSError(errno.EIO, "500 Internal Server Error")
    asked = 0

    def _ask(self):
        type(self).asked += 1
        if self.rng.random() < 0.3:
            raise self.error

    def ls(self, path, detail=True, **_):
        self._ask()
        return self.files.ls(path, detail=detail)

    def info(self, path, **_):
        return self.files.info(path)

    def put_file(self, source, path, **_):
        self.files.put_file(source, path)
        self._ask()  # as when the answer to a request is lost

    def pipe_file(self, path, value, **_):
        self._ask()
        self.files.pipe_file(path, value)

    def open(self, path, mode="rb", **_):
        self._ask()
        return self.files.open(path, mode)

    def rm_file(self, path):
        self._ask()
        self.files.rm_file(path)


@pytest.fixture
def flaky(tmp_path):
    fsspec.register_implementation("flaky", type("New", (Flaky,), {}), clobber=True)
    return f"flaky://{tmp_path}/there"


def test_three_of_ten_requests_that_fail_cost_nothing(flaky, tmp_path):
    run = tiny_mirror.make_run(tmp_path / "run", 10, 20)
    remote = Remote(flaky, pause_s=0)
    for step in (10, 20):
        assert step in tiny_mirror.copy(remote, run, step)["whole"]
    step, lines = tiny_mirror.restore(flaky, tmp_path / "back" / "run")
    assert (step, lines) == (20, [])
    back = tiny_mirror.content(tmp_path / "back" / "run")
    assert back == {n: c for n, c in tiny_mirror.content(run).items() if "checkpoints/10" not in n}


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 1),
        (PermissionError("403 Forbidden"), 1),
        (OSError(errno.EIO, "Input/output error"), 8),
        (TimeoutError("slow"), 8),
    ],
)
def test_an_error_that_lasts_is_raised_at_once_and_others_after_eight_attempts(flaky, error, attempts):
    kind = fsspec.get_filesystem_class("flaky")
    kind.rng, kind.error, kind.asked = type("Always", (), {"random": staticmethod(lambda: 0.0)}), error, 0
    with pytest.raises(type(error)):
        Remote(flaky, pause_s=0).read("a")
    assert kind.asked == attempts


def test_what_is_absent_is_no_error_where_nothing_is_expected(tmp_path):
    remote = Remote(str(tmp_path / "there"))
    assert remote.names("checkpoints") == remote.folders("checkpoints") == []
    remote.delete(["a", "b/c"])
    with pytest.raises(FileNotFoundError):
        remote.read("a")


def test_a_sealed_record_is_whole_or_none():
    record = {"step": 3, "files": {"a": [1, "x"]}}
    sealed = seal(record)
    assert unseal(sealed) == record
    for bit in range(8 * len(sealed)):
        broken = bytearray(sealed)
        broken[bit // 8] ^= 1 << bit % 8
        assert unseal(bytes(broken)) in (None, record)
    for broken in (b"", b"5", b"[]", b"{}", b'{"record": 5}', b"\xff", b"[" * 10**5):
        assert unseal(broken) is None
