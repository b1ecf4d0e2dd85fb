"""Files appear whole, and a folder has one writer."""

import pytest

from jaxlm import files
from jaxlm.config import ConfigError


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    files.write_atomically(path, b"old")
    with monkeypatch.context() as patched:
        patched.setattr(files.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space")))
        with pytest.raises(OSError, match="no space"):
            files.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    files.write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_lock_is_held_by_with_and_by_the_returned_file(tmp_path):
    def refused():
        with pytest.raises(ConfigError) as error:
            files.lock(tmp_path, "trains in", "workdir")
        return str(error.value)

    message = f"another process trains in {tmp_path}: wait for it, or give another config.workdir"
    with files.lock(tmp_path, "is writing", "data.dir"):
        assert refused() == message
    held = files.lock(tmp_path, "is writing", "data.dir")
    assert refused() == message
    held.close()
    files.lock(tmp_path, "is writing", "data.dir").close()


def test_a_private_file_is_never_readable_by_others(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"old")
    (tmp_path / "a.json.tmp").write_bytes(b"left by a crash")
    files.write_atomically(path, b"secret", private=True)
    assert path.stat().st_mode & 0o777 == 0o600
    files.write_atomically(path, b"none")
    assert path.read_bytes() == b"none"
