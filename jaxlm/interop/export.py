"""Exports a run's model for other programs: writes a temporary folder, checks it, and only then renames it."""

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import shutil
import time
import typing
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxlm.config import ConfigError, ModelConfig, RunError
from jaxlm.data.shards.verify import file_sha256
from jaxlm.data.tokenizer import ids
from jaxlm.data.tokenizer.coder import Coder
from jaxlm.host import files
from jaxlm.host.console import Tell, size, told, working
from jaxlm.interop import gguf, hf_folder, peft
from jaxlm.interop.hf_folder import MARK

# The first type is the default.
TARGETS = {"hf": tuple(hf_folder.DTYPES), "gguf": gguf.DTYPES, "peft": ("f32", "bf16", "f16")}
_PROBES = (
    "",
    " two  spaces",
    "1,024 = 2^10\n\n\tdef f(x):\n    return",
    "日本語 😀 café ▁",
    "</s><s><|im_start|><0x41>\x00\x7f",
)


@dataclasses.dataclass(frozen=True)
class Source:
    """A model or adapter to export.

    Attributes:
      read: leaf -> its value.
      about: the run and the step, written into the file MARK.
      card: the text of README.md.
      scores: True for a reward model; `read` returns its scalar head too.
      adapted: the adapter, for "peft"; then `read` and `config` are of the adapter's base.
      base: the folder and checkpoint of the adapter's base.
      receipt: the text of receipt.json; "" for none.
    """

    read: Callable[[str], np.ndarray]
    config: ModelConfig
    tokenizer: Coder
    name: str
    about: dict
    card: str
    scores: bool = False
    adapted: peft.Adapted | None = None
    base: peft.Base = ("", None)
    receipt: str = ""


class Done(typing.NamedTuple):
    """The result of an export: its folder or file, its number of tensors, how long writing and checking took."""

    place: pathlib.Path
    tensors: int
    writing_s: float
    checking_s: float


def dtypes_of(to: str, dtypes: str | None) -> tuple[str, list[str]]:
    """Returns (the type of the weights, the types of further GGUF files) that a list with commas names.

    Raises ConfigError if the format has no such type.
    """
    first, *more = dict.fromkeys(word.strip().lower() for word in (dtypes or TARGETS[to][0]).split(","))
    if first not in TARGETS[to]:
        other = next((f"; give --to={name} for {first}" for name, types in TARGETS.items() if first in types), "")
        raise ConfigError(f"--dtype={dtypes}: --to={to} writes {', '.join(TARGETS[to])}{other}")
    if more and (to == "peft" or set(more) - set(gguf.DTYPES)):
        beside = "one type alone" if to == "peft" else f"GGUF files in {', '.join(gguf.DTYPES)} after the first type"
        raise ConfigError(f"--dtype={dtypes}: --to={to} writes {beside}")
    return first, more


def refuse(out: pathlib.Path, to: str) -> None:
    """Raises ConfigError if `out` may not be replaced: it holds anything but an earlier export to the same format."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out={out} is a file: give a folder")
    if not out.is_dir() or not any(out.iterdir()):
        return
    try:
        mark = files.json_of((out / MARK).read_bytes())
        earlier, wrote = mark["to"], {MARK, *mark["files"]}
    except (OSError, *files.MANGLED):
        raise ConfigError(f"--out={out} is not empty, and not an earlier export: give a new folder") from None
    if earlier != to:
        raise ConfigError(f"--out={out} holds an export to {earlier}: give another folder for {to}")
    others = sorted(path.name + "/" * path.is_dir() for path in out.iterdir() if path.name not in wrote)
    if others:
        named = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
        scores = " (eval/ has the scores of the earlier export)" if "eval/" in others else ""
        raise ConfigError(
            f"--out={out} holds {named} beside an earlier export{scores}, which a new one would delete: "
            "give another folder, or move them away"
        )


def check_source(source: Source, to: str, more: Sequence[str] = ()) -> None:
    """Raises ConfigError if a format can't hold the model: `to`, or GGUF if there are `more` types."""
    if source.scores and (to != "hf" or more):
        raise ConfigError("only --to=hf can export a reward model's score head")
    if more or to == "gguf":
        gguf.check(source.config, source.tokenizer)


def export(source: Source, to: str, dtype: str, out: pathlib.Path, more: Sequence[str] = ()) -> Done:
    """Writes the model to `out`, reads every tensor back and compares it bit by bit with the source.

    Args:
      more: the types of further GGUF files in the folder.

    Raises:
      ConfigError: the format can't hold this model, or `out` holds anything but an earlier export to the format.
      RunError: the disk is full, or a written tensor differs from the source.
    """
    refuse(out, to)
    check_source(source, to, more)
    if (to == "peft") != (source.adapted is not None):
        raise ValueError(f"--to={to} of a source with{'' if source.adapted else 'out'} an adapter")
    with _replacing(out) as folder:
        parts = _parts(source, to, dtype, folder, more)
        files.check_room(out.parent, sum(part.bytes for part in parts), f"--out={out}")
        began = time.perf_counter()
        for part in parts:
            with working(f"writing {size(part.bytes)}", part.count, "tensors") as tell:
                part.write(source.read, source.tokenizer, tell)
        if to != "gguf":
            check_tokenizer(folder, source.tokenizer)
        read_at, count = time.perf_counter(), 0
        for part in parts:
            with working("reading it back", part.count, "tensors") as tell:
                count += check(part, source.read, tell)
        for name, text in {"README.md": source.card, "receipt.json": source.receipt}.items():
            if text:
                (folder / name).write_text(text, encoding="utf-8")
        names = sorted(path.name for path in folder.iterdir())
        sums = {name: file_sha256(folder / name) for name in names if name != "README.md"}  # users edit the card
        about = {
            "to": to,
            "dtype": ",".join([dtype, *more]),
            **source.about,
            "files": names,
            "sha256": sums,
            "checked": {"tensors": count},
        }
        (folder / MARK).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        writing_s, checking_s = read_at - began, time.perf_counter() - read_at
    return Done(out / gguf.file_name(source.name, dtype) if to == "gguf" else out, count, writing_s, checking_s)


Written = hf_folder.HfFolder | gguf.GgufFile | peft.PeftFolder


def _parts(source: Source, to: str, dtype: str, folder: pathlib.Path, more: Sequence[str]) -> list[Written]:
    parts: list[Written] = [gguf.GgufFile(folder, source.config, each, source.name) for each in more]
    if to == "gguf":
        return [gguf.GgufFile(folder, source.config, dtype, source.name), *parts]
    if source.adapted:
        return [peft.PeftFolder(folder, source.config, dtype, source.adapted, source.base)]
    return [hf_folder.HfFolder(folder, source.config, dtype, source.scores), *parts]


def check(written: Written, read: Callable[[str], np.ndarray], tell: Tell) -> int:
    """Returns how many tensors the files hold. Raises RunError if a tensor differs, in any bit, from the run's leaves."""
    count = 0
    for name, leaves, value in told(written.contents(read), tell):
        if not _same_bits(value, written.held(name)):
            named = f"{', '.join(leaves)} ({name})" if leaves else name
            raise RunError(f"what was written is not the run's: {named} differs; export again")
        count += 1
    return count


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    kind = f"u{a.dtype.itemsize}"  # as bits, since nan != nan and 0 == -0
    return (a.dtype, a.shape) == (b.dtype, b.shape) and np.array_equal(a.view(kind), b.view(kind))


def check_tokenizer(folder: pathlib.Path, tokenizer: Coder) -> None:
    """Raises RunError if the written tokenizer.json gives a test text other ids. Does nothing if `tokenizers` is missing."""
    try:
        import tokenizers
    except ImportError:
        return
    if not (folder / "tokenizer.json").is_file():
        return
    written = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    written.encode_special_tokens = True
    for text in _PROBES:
        if written.encode(text).ids != ids.document(tokenizer, text):
            raise RunError(f"the written tokenizer.json gives {text!r} other ids than the run's tokenizer")


@contextlib.contextmanager
def _replacing(out: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a new folder beside `out`. It replaces `out` if the `with` block ends without an error, and is deleted if not."""
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = out.with_name(f".{out.name}.{os.getpid()}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        try:
            yield folder
        except OSError as error:
            if error.errno not in (None, errno.ENOSPC):
                raise
            raise RunError(f"the disk of {out} is full ({error}): free some room and run it again") from error
        for path in folder.iterdir():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        old = out.with_name(f".{out.name}.{os.getpid()}.old")
        if out.exists():
            out.rename(old)
        folder.rename(out)
        files.flush_folder(out.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
