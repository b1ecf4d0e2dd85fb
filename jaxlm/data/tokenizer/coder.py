"""The interface of all tokenizers, and the code that loads them: ours, or a Hugging Face model's, unchanged.

An imported tokenizer is tokenizer.json (or tokenizer.model), COMPANIONS, and `IDS`, made from the model's folder.
"""

import contextlib
import hashlib
import os
import pathlib
import typing
from collections.abc import Iterable, Iterator, Mapping

from jaxlm.config import ConfigError
from jaxlm.data.tokenizer import imported
from jaxlm.data.tokenizer.imported import COMPANIONS, IDS, JSON, MODEL
from jaxlm.data.tokenizer.ours import Tokenizer, content_of
from jaxlm.host import files as files_lib


class Prompted:
    """A tokenizer whose every text begins with virtual tokens, which stand for trained vectors (prompt tuning).

    Their ids begin at `first`, the model's `vocab_size`. No text is encoded to them, they decode to no text, and no
    model generates them.
    """

    def __init__(self, coder: "Coder", length: int, first: int):
        self._made = (coder, length, first)
        self.virtual = range(first, first + length)
        self.opening: tuple[int, ...] = (*self.virtual, *coder.opening)
        self.sha256 = hashlib.sha256(f"{coder.sha256} {self.virtual}".encode()).hexdigest()

    def __reduce__(self):
        return Prompted, self._made

    def __getattr__(self, name: str) -> typing.Any:
        return getattr(self.__dict__["_made"][0], name)

    def decode(self, ids: Iterable[int], follows: bool = False) -> str:
        return self._made[0].decode([i for i in map(int, ids) if i not in self.virtual], follows)


# `Tokenizer` documents the interface. Two tokenizers with the same `sha256` return the same ids for every text.
Coder = Tokenizer | imported.HfTokenizer | Prompted


def virtual_ids(coder: Coder) -> tuple[int, ...]:
    return tuple(coder.virtual) if isinstance(coder, Prompted) else ()


def plain(coder: Coder) -> Coder:
    return coder._made[0] if isinstance(coder, Prompted) else coder


class Encoded(typing.Protocol):
    """Text that a run trains on, encoded: a data directory (`shards.DataDir`) or examples (`packed.Texts`)."""

    vocab_size: int
    sha256: str  # of all the text, in hex
    as_before: str  # how older versions read the same text, in words; "" if in the same way

    def tokenizer(self) -> Coder:
        """Returns the tokenizer that encoded the text."""

    def token_counts(self, split: str = "train") -> dict[str, int]:
        """Returns source -> number of tokens."""


def ours(tokenizer: Coder) -> bool:
    """Returns True if jaxlm trained the tokenizer; False if it came with an imported model."""
    return IDS not in tokenizer.files


def load(path: str | os.PathLike) -> Coder:
    """Reads a tokenizer: a `.model`, a tokenizer.json, or the folder of either. Raises ConfigError if none is there."""
    path = files_lib.expanded(path)
    if path.suffix == ".json":
        path = path.parent
    if not path.is_dir():
        return Tokenizer.load(path)
    files = {name: content_of(path / name) for name in (JSON, MODEL, IDS, *COMPANIONS) if (path / name).is_file()}
    if not {JSON, MODEL} & files.keys():
        raise ConfigError(f"no tokenizer in {path}: it has neither {JSON} nor {MODEL}")
    if JSON in files:
        files.pop(MODEL, None)
    elif not (path / "config.json").is_file() and IDS not in files:
        return Tokenizer.load(path / MODEL)  # ours, in a data directory
    if IDS not in files:
        with _named(path):
            files[IDS] = imported.ids_file(path, files)
    return read(files, path)


def read(files: Mapping[str, bytes], where: str | os.PathLike) -> Coder:
    """Returns the tokenizer of these files (name -> content), as in `Tokenizer.files`."""
    if IDS not in files:
        return Tokenizer(files[MODEL])
    with _named(where):
        return imported.HfTokenizer(files) if JSON in files else imported.HfSentencePiece(files)


@contextlib.contextmanager
def _named(where: str | os.PathLike) -> Iterator[None]:
    """Puts the folder in front of errors about its tokenizer."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except files_lib.MANGLED as error:
        raise ConfigError(f"{where}: its tokenizer is damaged ({error!r:.200}): copy it again") from None


def write(coder: Coder, folder: pathlib.Path) -> None:
    """Writes a tokenizer's files into a folder, from which `load` reads it again."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in coder.files.items():
        (folder / name).write_bytes(content)


def names(files: Iterable[str]) -> list[str]:
    """Returns the names among a data directory's files that belong to its tokenizer."""
    return [name for name in files if name in (JSON, MODEL, IDS, *COMPANIONS)]
