"""Writes a run's model for other programs: into a temporary folder, checked, and only then renamed."""

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import shutil
import time
import typing
from collections.abc import Callable, Iterator

import numpy as np

from jaxlm.config import ConfigError, ModelConfig, RunError
from jaxlm.data.tokenizer import ids
from jaxlm.data.tokenizer.coder import Coder
from jaxlm.host import files
from jaxlm.host.console import Tell, size, told, working
from jaxlm.interop import gguf, hf_folder, hf_weights, peft
from jaxlm.interop.hf_weights import MARK

# The first type is the default.
TARGETS = {"hf": tuple(hf_folder.DTYPES), "gguf": gguf.DTYPES, "peft": ("f32", "bf16", "f16")}
_PROBES = ("", " two  spaces", "1,024 = 2^10\n\n\tdef f(x):", "日本語 😀 café ▁", "</s><s><|im_start|><0x41>\x00\x7f")


@dataclasses.dataclass(frozen=True)
class Source:
    """What is exported.

    Attributes:
      read: leaf -> its value.
      about: what MARK says of the source: the run, the step.
      card: the text of README.md.
      scores: True for a reward model; `read` gives its head too.
      adapted: the adapter, for "peft"; `read`, `config` are its base's then.
      base: which model the adapter's base is.
    """

    read: Callable[[str], np.ndarray]
    config: ModelConfig
    tokenizer: Coder
    name: str
    about: dict[str, typing.Any]
    card: str
    scores: bool = False
    adapted: peft.Adapted | None = None
    base: peft.Base = ("", None)


class Done(typing.NamedTuple):
    """What an export came to: the folder or the file, how many tensors it holds, how long writing and checking took."""

    place: pathlib.Path
    tensors: int
    writing_s: float
    checking_s: float


def dtype_of(to: str, dtype: str | None) -> str:
    """Returns the type of the weights to write. Raises ConfigError if the format has no such type."""
    if dtype is not None and dtype not in TARGETS[to]:
        raise ConfigError(f"--dtype={dtype}: --to={to} writes {', '.join(TARGETS[to])}")
    return dtype or TARGETS[to][0]


def refuse(out: pathlib.Path, to: str) -> None:
    """Raises ConfigError if `out` may not be replaced: it holds more than an earlier export of this kind."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out={out} is a file: give a folder")
    if not out.is_dir() or not any(out.iterdir()):
        return
    try:
        mark = files.json_of((out / MARK).read_bytes())
        earlier, wrote = mark["to"], {MARK, *mark["files"]}
    except (OSError, *files.MANGLED):
        raise ConfigError(f"--out={out} is not empty and no earlier export: give a new folder") from None
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


def export(source: Source, to: str, dtype: str, out: pathlib.Path) -> Done:
    """Writes the model to `out`, reads every tensor back and compares it, to the bit, with the source.

    Raises:
      ConfigError: the format has no place for this model, or `out` holds something else.
      RunError: the disk is full, or what was written is not the source.
    """
    refuse(out, to)
    if source.scores and to != "hf":
        raise ConfigError("a reward model gives a score, for which GGUF has no place: export with --to=hf")
    if (to == "peft") != (source.adapted is not None):
        raise ValueError(f"--to={to} of a source with{'' if source.adapted else 'out'} an adapter")
    file = f"{source.name}-{dtype}.gguf"
    with _replacing(out) as folder:
        if source.adapted:
            written = peft.PeftFolder(folder, source.config, dtype, source.adapted, source.base)
        elif to == "gguf":
            written = gguf.GgufFile(folder / file, source.config, dtype, source.name)
        else:
            written = hf_folder.HfFolder(folder, source.config, dtype, source.scores)
        if written.bytes > (free := shutil.disk_usage(out.parent).free):
            raise RunError(f"--out={out} needs {size(written.bytes)}, and {size(free)} are free there: free some room")
        began = time.perf_counter()
        with working(f"writing {size(written.bytes)}", written.count, "tensors") as tell:
            written.write(source.read, source.tokenizer, tell)
        if to != "gguf":
            check_tokenizer(folder, source.tokenizer)
        read_at = time.perf_counter()
        with working("reading it back", written.count, "tensors") as tell:
            count = check(written, source.read, tell)
        (folder / "README.md").write_text(source.card, encoding="utf-8")
        names = sorted(path.name for path in folder.iterdir())
        sums = {name: hf_weights.sha256(folder / name) for name in names if name != "README.md"}  # people rewrite cards
        about = {
            "to": to,
            "dtype": dtype,
            **source.about,
            "files": names,
            "sha256": sums,
            "checked": {"tensors": count},
        }
        (folder / MARK).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        writing_s, checking_s = read_at - began, time.perf_counter() - read_at
    return Done(out / file if to == "gguf" else out, count, writing_s, checking_s)


Written = hf_folder.HfFolder | gguf.GgufFile | peft.PeftFolder


def check(written: Written, read: Callable[[str], np.ndarray], tell: Tell) -> int:
    """Returns how many tensors the files hold. Raises RunError if one is not, to the bit, what the run's leaves become."""
    count = 0
    for name, leaves, value in told(written.contents(read), tell):
        if not _same_bits(value, written.held(name)):
            named = f"{', '.join(leaves)} ({name})" if leaves else name
            raise RunError(f"what was written is not the run's: {named} differs; export again")
        count += 1
    return count


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    kind = f"u{a.dtype.itemsize}"  # nan is no nan's equal, and 0 is -0's
    return (a.dtype, a.shape) == (b.dtype, b.shape) and np.array_equal(a.view(kind), b.view(kind))


def check_tokenizer(folder: pathlib.Path, tokenizer: Coder) -> None:
    """Raises RunError if the written tokenizer.json has other ids for some texts. Needs `tokenizers`; without it, nothing."""
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
            raise RunError(f"the written tokenizer.json has other ids than the run's tokenizer for {text!r}")


@contextlib.contextmanager
def _replacing(out: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a new folder beside `out`, which takes its name if the `with` block ends well, and else goes."""
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
