"""Files as others may hand them over: damaged at random. What is mangled is drawn by a `random.Random`."""

import contextlib
import copy as copy_lib
import gzip
import json
import pathlib
import shutil
import struct

from backports import zstd

DEEP = "[" * 100_000 + "]" * 100_000
TEXTS = (
    "null",
    "1",
    '"text"',
    "[]",
    "{}",
    "<html>",
    "NaN",
    "{{ x",
    "[1, 2",
    DEEP,
    "{" + '"a":{' * 50_000,
    "1" * 10_000,
)
_HERE = "\x00here\x00"  # where DEEP will stand
ODD = (
    None, True, False, 0, -1, 3.5, 10**30, 10**400, float("inf"), float("nan"), "", "text", "²", "\ud800", "a/../b", "\x00",
    [], {}, [[]], [1], [None], {"a": 1}, {"type": []}, "x" * 10_000, _HERE,
)  # fmt: skip


def mangle(path: pathlib.Path, draw) -> str:
    """Damages a file in place, or puts something else there; returns what was done."""
    ways = [_bits, _cut, _no_utf8, _empty, _folder, _text]
    structured = [_values] * 8 if path.suffix in (".json", ".jsonl") or _packed(path) else []
    structured += [_header] * 6 if path.suffix == ".safetensors" else []
    way = draw.choice(ways + structured)
    return f"{path.name}: {way.__name__} {way(path, draw)}"


def _packed(path: pathlib.Path) -> bool:
    return path.suffix in (".gz", ".zst")


@contextlib.contextmanager
def _content(path: pathlib.Path, draw, inside: bool = False):
    """A file's bytes to be changed in place; of a compressed file what it holds, sometimes or if `inside`."""
    inside = _packed(path) and (inside or draw.random() < 0.5)
    raw = path.read_bytes()
    if inside:
        raw = gzip.decompress(raw) if path.suffix == ".gz" else zstd.ZstdDecompressor().decompress(raw, 1 << 24)
    content = bytearray(raw or b"{}")
    yield content
    if inside:
        content = gzip.compress(content) if path.suffix == ".gz" else zstd.compress(bytes(content))
    path.write_bytes(content)


def _bits(path, draw):
    with _content(path, draw) as content:
        for _ in range(draw.choice((1, 1, 8, 64))):
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)


def _cut(path, draw):
    with _content(path, draw) as content:
        del content[draw.randrange(len(content)) :]


def _no_utf8(path, draw):
    with _content(path, draw) as content:
        at = draw.randrange(len(content))
        content[at:at] = draw.choice((b"\xff\xfe", b"\xed\xa0\x80", b"\xc3", b"\x00" * 9))


def _empty(path, draw):
    path.write_bytes(draw.choice((b"", b"\n", b" ")))


def _folder(path, draw):
    path.unlink()
    path.mkdir()


def _text(path, draw):
    with _content(path, draw) as content:
        content[:] = draw.choice(TEXTS).encode()


def _values(path, draw):
    """Puts odd values at random keys of a JSON file, or of a line of it; takes keys away; adds some."""
    done = []
    with _content(path, draw, inside=True) as content:
        try:
            parts = content.decode().split("\n") if ".jsonl" in path.name else [content.decode()]
            at = draw.choice([i for i, part in enumerate(parts) if part.strip()])
            root = [json.loads(parts[at])]
        except (ValueError, IndexError):
            return "no JSON"
        for _ in range(draw.choice((1, 1, 2))):
            done.append(_one_value(root, draw))
        parts[at] = json.dumps(root[0]).replace(json.dumps(_HERE), DEEP)
        content[:] = "\n".join(parts).encode()
    return str(done)


def _one_value(root: list, draw) -> str:
    where, key, depth = root, 0, draw.choice((0, 1, 1, 2, 2, 3, 4, 9))
    while depth and isinstance(where[key], dict | list) and where[key]:
        where, depth = where[key], depth - 1
        key = draw.choice(list(where)) if isinstance(where, dict) else draw.randrange(len(where))
    if isinstance(where, dict) and draw.random() < 0.2:
        del where[key]
        if not where:
            return f"{key!r} gone"
        key = draw.choice(list(where))
    where[key] = copy_lib.deepcopy(draw.choice(ODD))  # else a second one may be put into itself
    return f"{key!r}={str(where[key])[:30]!r}"


def _header(path, draw):
    """Odd values in the header of a safetensors file."""
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    root = [json.loads(raw[8 : 8 + size])]
    done = _one_value(root, draw)
    header = json.dumps(root[0]).replace(json.dumps(_HERE), DEEP).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + size :])
    return done


def copy(folder: pathlib.Path, to: pathlib.Path) -> pathlib.Path:
    shutil.rmtree(to, ignore_errors=True)
    return pathlib.Path(shutil.copytree(folder, to))
