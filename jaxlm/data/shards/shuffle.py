"""Documents in a random order that a key decides, by an external sort: memory does not grow with the corpus."""

import hashlib
import pathlib
import shutil
import struct
from collections.abc import Iterable, Iterator

_BITS = 6  # 64 buckets a level
BUCKETS = 1 << _BITS
_HEADER = struct.Struct("<QQII")  # order, content hash, bytes of the id, bytes of the text
_MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    """The finaliser of splitmix64 (Steele et al. 2014). It is one to one, so that no two positions have the same order."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


class Shuffle:
    """Yields documents in a random order, which `key` decides. Beyond `memory_bytes` of text they are on disk."""

    def __init__(self, folder: pathlib.Path, key: str, memory_bytes: int = 256 << 20, *, level: int = 0):
        self._folder, self._memory, self._level = folder, memory_bytes, level
        self._start = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
        self._buckets = [bytearray() for _ in range(BUCKETS)]
        self.on_disk = [0] * BUCKETS  # bytes
        self._held = 0
        self.documents = 0

    @classmethod
    def opened(cls, folder: pathlib.Path, on_disk: list[int], documents: int) -> "Shuffle | None":
        """Returns the shuffle that `spill` left in this folder, to be read; None if its files differ in size."""
        shuffle = cls(folder, "")
        shuffle.on_disk, shuffle.documents = on_disk, documents
        sizes = [path.stat().st_size if path.exists() else 0 for path in map(shuffle._file, range(BUCKETS))]
        return shuffle if sizes == on_disk else None

    def _file(self, bucket: int) -> pathlib.Path:
        return self._folder / f"{bucket:02d}"

    def add(self, doc_id: str, text: str, content_hash: int) -> None:
        """Adds a document to the shuffle. `content_hash` (uint64) is yielded with the document later."""
        raw_id, raw = doc_id.encode("utf-8", "replace"), text.encode()
        order = _mix((self._start + self.documents * 0x9E3779B97F4A7C15) & _MASK)
        self._put(order, _HEADER.pack(order, content_hash, len(raw_id), len(raw)) + raw_id + raw)

    def _put(self, order: int, record: bytes) -> None:
        bucket = order >> (64 - _BITS * (self._level + 1)) & (BUCKETS - 1)
        self._buckets[bucket] += record
        self._held += len(record)
        self.documents += 1
        if self._held > self._memory:
            self.spill()

    def spill(self) -> None:
        """Moves all documents to the disk."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for i, bucket in enumerate(self._buckets):
            if bucket:
                with self._file(i).open("ab") as file:
                    file.write(bucket)
                self.on_disk[i] += len(bucket)
                self._buckets[i] = bytearray()
        self._held = 0

    def __iter__(self) -> Iterator[tuple[str, bytes, int]]:
        """Yields (doc_id, text in UTF-8, content hash) of every document, in the random order."""
        return self.read(range(BUCKETS))

    def read(self, buckets: Iterable[int]) -> Iterator[tuple[str, bytes, int]]:
        """Yields as `__iter__` does, from some of the `BUCKETS` consecutive parts of the order."""
        if any(self.on_disk):
            self.spill()  # frees the memory for the bucket that is read
        for i in buckets:
            if self.on_disk[i] > self._memory and _BITS * (self._level + 2) <= 64:
                yield from self._split(i)
            elif self.on_disk[i]:
                yield from _in_order(self._file(i).read_bytes())
            else:
                yield from _in_order(self._buckets[i])

    def _split(self, bucket: int) -> Iterator[tuple[str, bytes, int]]:
        """Yields a bucket larger than the memory, in order; first splits the bucket by the next bits of the orders."""
        inner = Shuffle(self._folder / f"{bucket:02d}.split", "", self._memory, level=self._level + 1)
        inner.close()  # a process that was killed may have left a part of it
        try:
            with self._file(bucket).open("rb") as file:
                while head := file.read(_HEADER.size):
                    order, _, id_bytes, text_bytes = _HEADER.unpack(head)
                    inner._put(order, head + file.read(id_bytes + text_bytes))
            yield from inner
        finally:
            inner.close()

    def close(self) -> None:
        self._buckets = [bytearray() for _ in self._buckets]
        shutil.rmtree(self._folder, ignore_errors=True)


def _in_order(records: bytes | bytearray) -> Iterator[tuple[str, bytes, int]]:
    places, at = [], 0
    while at < len(records):
        order, content_hash, id_bytes, text_bytes = _HEADER.unpack_from(records, at)
        at += _HEADER.size
        places.append((order, at, id_bytes, text_bytes, content_hash))
        at += id_bytes + text_bytes
    places.sort()
    view = memoryview(records)
    for _, start, id_bytes, text_bytes, content_hash in places:
        middle = start + id_bytes
        yield bytes(view[start:middle]).decode(), bytes(view[middle : middle + text_bytes]), content_hash
    view.release()
