"""Reads files as chunks of decompressed bytes, with a `Damage` in place of lost bytes, and finds records in them."""

import bz2
import dataclasses
import io
import lzma
import re
import typing
import zlib
from collections.abc import Callable, Iterator

import fsspec.core
from backports import zstd

from jaxlm.corpus.sources import base
from jaxlm.corpus.sources.base import Part, SourceStats

CHUNK_BYTES = 1 << 18
_OUTPUT_BYTES = 1 << 22  # decompressed at a time: a few kB of input may hold gigabytes
TOO_LARGE = f"record over {base.MAX_RECORD_BYTES >> 20} MiB: split it"


class _Gzip:
    """zlib's decompressor of one gzip member, with the interface of the decompressors of bz2, lzma and zstd."""

    def __init__(self):
        self._member = zlib.decompressobj(31)
        self.needs_input = True

    def decompress(self, data: bytes, max_length: int) -> bytes:
        out = self._member.decompress(self._member.unconsumed_tail + data, max_length)
        self.needs_input = not self._member.unconsumed_tail and len(out) < max_length
        return out

    def __getattr__(self, name: str) -> typing.Any:
        return getattr(self._member, name)


Decompressor = _Gzip | zstd.ZstdDecompressor | bz2.BZ2Decompressor | lzma.LZMADecompressor
# Suffix -> name, what makes a decompressor of one member, how a member begins.
COMPRESSIONS: dict[str, tuple[str, Callable[[], Decompressor], re.Pattern[bytes]]] = {
    ".gz": ("gzip", _Gzip, re.compile(rb"(?s)\x1f\x8b\x08[\0-\x1f].{4}[\0\2\4][\0-\x0d\xff]")),
    ".zst": ("zstd", zstd.ZstdDecompressor, re.compile(rb"\x28\xb5\x2f\xfd")),
    ".bz2": ("bzip2", bz2.BZ2Decompressor, re.compile(rb"BZh[1-9]1AY&SY")),
    ".xz": ("xz", lzma.LZMADecompressor, re.compile(rb"\xfd7zXZ\0")),
}
_LONGEST_BEGINNING = 10
_ERRORS = (zlib.error, zstd.ZstdError, lzma.LZMAError, OSError)  # bzip2 raises OSError


@dataclasses.dataclass(frozen=True)
class Damage:
    """Takes the place of lost bytes in a stream; `reason` says why they are lost."""

    reason: str


Stream = Iterator[bytes | Damage]


def compression(name: str) -> str:
    """Returns the suffix of a compressed file's name; "" for a plain file."""
    return next((suffix for suffix in COMPRESSIONS if name.endswith(suffix)), "")


def open_file(url: str) -> typing.BinaryIO:
    """Opens a local path or a URL of fsspec. Errors of the file system are not caught: no record caused them."""
    if "://" not in url:
        return open(url, "rb")
    fs, path = fsspec.core.url_to_fs(url)
    return fs.open(path, "rb")


def read_bytes(url: str, limit: int) -> bytes:
    with open_file(url) as f:
        return f.read(limit)


def chunks(part: Part, start: int = 0) -> Stream:
    """Yields the decompressed bytes of a part's file, from `start` to the end of the file."""
    with open_file(part.url) as f:
        if start:
            f.seek(start)
        raw = iter(lambda: f.read(CHUNK_BYTES), b"")
        suffix = compression(part.name)
        yield from _members(raw, *COMPRESSIONS[suffix]) if suffix else raw


def _members(raw: Iterator[bytes], name: str, new: Callable[[], Decompressor], beginning: re.Pattern[bytes]) -> Stream:
    """Decompresses a file's members one after another. After a damaged member, goes on where the next seems to begin."""
    member, fresh = new(), True  # fresh: nothing has been fed to this member
    for data in raw:
        while data:
            if fresh and not (data := data.lstrip(b"\0")):  # some writers pad
                break
            fresh = False
            try:
                yield from _outputs(member, data)
            except _ERRORS as e:
                yield Damage(f"unreadable: damaged {name} member ({str(e).splitlines()[0]})")
                data = _next_member(data[1:], raw, beginning)
                member, fresh = new(), True
                continue
            if not member.eof:
                break
            data = member.unused_data
            member, fresh = new(), True
    if not fresh:
        yield Damage(f"unreadable: {name} member cut short")


def _outputs(member: Decompressor, data: bytes) -> Iterator[bytes]:
    """Yields what a member decompresses `data` to, in chunks of bounded size."""
    while True:
        if out := member.decompress(data, _OUTPUT_BYTES):
            yield out
        if member.eof or member.needs_input:
            return
        data = b""


def _next_member(data: bytes, raw: Iterator[bytes], beginning: re.Pattern[bytes]) -> bytes:
    """Drops bytes up to where a member begins; returns the rest, b"" if none begins."""
    while not (match := beginning.search(data)):
        if not (more := next(raw, b"")):
            return b""
        data = data[-_LONGEST_BEGINNING:] + more
    return data[match.start() :]


def read_whole(part: Part, stats: SourceStats) -> bytes | None:
    """Returns all bytes of a small file; None if it is damaged or too large, which counts as skipped."""
    whole = bytearray()
    for chunk in chunks(part):
        damaged = isinstance(chunk, Damage)
        if damaged or len(whole) + len(chunk) > base.MAX_RECORD_BYTES:
            stats.skip(chunk.reason if damaged else TOO_LARGE, part.name)
            return None
        whole += chunk
    return bytes(whole)


def lines(part: Part) -> Iterator[tuple[int, bytes | Damage]]:
    """Yields (offset, line with its end) for the lines that begin in the part's bytes; a Damage for a line that lost bytes."""
    offset = max(part.start - 1, 0)  # one byte early: the end of the line before tells whether a line begins at start
    # Of the line that begins at `offset`; `rest` holds no line past the limit.
    rest, length, drop = [], 0, bool(part.start)

    def line() -> bytes | Damage:
        return b"".join(rest) if length <= base.MAX_RECORD_BYTES else Damage(TOO_LARGE)

    for chunk in chunks(part, offset):
        if isinstance(chunk, Damage):
            rest, length, drop = [], 0, False
            yield offset, chunk
            continue
        for piece in io.BytesIO(chunk):
            length += len(piece)
            rest = [*rest, piece] if length <= base.MAX_RECORD_BYTES else []
            if not piece.endswith(b"\n"):
                continue
            if 0 <= part.stop <= offset:
                return
            if not drop:
                yield offset, line()
            rest, length, drop, offset = [], 0, False, offset + length
    if length and not drop and not 0 <= part.stop <= offset:
        yield offset, line()


class Cursor:
    """Shows a stream through a window of bytes, for records that are not lines."""

    def __init__(self, stream: Stream, offset: int = 0):
        self._stream = stream
        self._unread: Damage | None = None
        self.offset = offset  # of the window's first byte, in decompressed bytes
        self.window = bytearray()

    def fill(self) -> bool | Damage:
        """Lengthens the window by a chunk and returns True; returns False at the stream's end, a Damage for lost bytes."""
        chunk, self._unread = self._unread or next(self._stream, None), None
        if isinstance(chunk, Damage):
            return chunk
        self.window += chunk or b""
        return chunk is not None

    def unread(self, damage: Damage) -> None:
        self._unread = damage

    def seek(self, mark: bytes) -> bool | Damage:
        """Moves the window to where `mark` comes next and returns True; without one, returns what `fill` returned last."""
        while (at := self.window.find(mark)) < 0:
            self.drop(len(self.window) - len(mark) + 1)
            if (more := self.fill()) is not True:
                return more
        self.drop(at)
        return True

    def drop(self, count: int) -> None:
        """Moves the beginning of the window forward by `count` bytes, if `count` is positive."""
        count = max(0, min(count, len(self.window)))
        del self.window[:count]
        self.offset += count
