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


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/runs/a", "s3://bucket/runs/a"),
        ("s3://key:pass@word@bucket/a", "s3://***@bucket/a"),
        (
            "https://user@host:80/a?X-Amz-Signature=abc&b=&token#fragment",
            "https://***@host:80/a?X-Amz-Signature=***&b=***&***",
        ),
        ("http://[bad/secret", "http://***"),
        ("/runs/a?b@c", "/runs/a?b@c"),
        ("", ""),
    ],
)
def test_a_url_is_shown_without_its_secrets(url, shown):
    assert files.redact_url(url) == shown
