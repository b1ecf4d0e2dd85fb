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

from jaxlm import files
from jaxlm.config import ConfigError, ModelConfig, RunError
from jaxlm.console import size, working
from jaxlm.data import ids
from jaxlm.data.coder import Coder
from jaxlm.interop import check, gguf_file, hf_folder, hf_weights, peft, peft_folder
from jaxlm.interop.ahead import Ahead
from jaxlm.interop.hf_weights import MARK
from jaxlm.interop.leaves import tensors

# The first type is the default.
TARGETS = {"hf": tuple(hf_folder.DTYPES), "gguf": gguf_file.DTYPES, "peft": ("f32", "bf16", "f16")}
_PROBES = ("", " two  spaces", "1,024 = 2^10\n\n\tdef f(x):", "日本語 😀 café ▁", "</s><s><|im_start|><0x41>\x00\x7f")


@dataclasses.dataclass(frozen=True)
class Source:
    """What is exported.

    Attributes:
      read: leaf -> its value.
      config: the model's config.
      tokenizer: the model's tokenizer.
      name: what the model is called.
      about: what MARK says of the source: the run, the step.
      card: what was found equal -> the text of README.md.
      scores: True for a reward model; `read` gives its head too.
      adapted: the adapter, for "peft"; `read`, `config` are its base's then.
      base: which model the adapter's base is.
    """

    read: Callable[[str], np.ndarray]
    config: ModelConfig
    tokenizer: Coder
    name: str
    about: dict[str, typing.Any]
    card: Callable[[check.Verdict], str]
    scores: bool = False
    adapted: peft.Adapted | None = None
    base: peft.Base = ("", None)


@dataclasses.dataclass(frozen=True)
class Done:
    """What an export came to.

    Attributes:
      place: the folder, or the file.
      verdict: what was found equal.
      writing_s, checking_s: how long each took.
    """

    place: pathlib.Path
    verdict: check.Verdict
    writing_s: float
    checking_s: float


def dtype_of(to: str, asked: str | None) -> str:
    """Returns the type of the weights to write. Raises ConfigError if the format has no such type."""
    if asked is not None and asked not in TARGETS[to]:
        raise ConfigError(f"--dtype={asked}: --to={to} writes {', '.join(TARGETS[to])}")
    return asked or TARGETS[to][0]


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
    """Writes the model to `out`, reads it back and compares it with the source.

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
            written = peft_folder.PeftFolder(folder, source.config, dtype, source.adapted, source.base)
        elif to == "gguf":
            written = gguf_file.GgufFile(folder / file, source.config, dtype, source.name)
        else:
            written = hf_folder.HfFolder(folder, source.config, dtype, source.scores)
        _check_room(out, written.bytes)
        began = time.perf_counter()
        whole = list(tensors(source.config, source.scores))
        order = [] if source.adapted else [leaf for tensor in whole for leaf in tensor.leaves]
        said, count = f"writing {size(written.bytes)}", 1 if source.adapted else len(whole)
        with working(said, count, "tensors" if count > 1 else "adapter") as tell, Ahead(source.read, order) as read:
            written.write(read, source.tokenizer, tell)
        if to != "gguf":
            check_tokenizer(folder, source.tokenizer)
        read_at = time.perf_counter()
        twice = source.config.tie_embeddings and not source.scores  # a tied embedding is the head too
        with working("reading it back", len(whole) + twice, "tensors") as tell:
            if source.adapted:
                verdict = check.check_adapter(source.adapted, *written.held(), source.read, source.config, tell)
            else:
                verdict = check.check(source.read, written, source.config, tell)
        (folder / "README.md").write_text(source.card(verdict), encoding="utf-8")
        names = sorted(path.name for path in folder.iterdir())
        sums = {name: hf_weights.sha256(folder / name) for name in names if name != "README.md"}  # people rewrite cards
        about = {"to": to, "dtype": dtype, **source.about, "files": names, "sha256": sums}
        about |= {"checked": dataclasses.asdict(verdict)}
        (folder / MARK).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        writing_s, checking_s = read_at - began, time.perf_counter() - read_at
    return Done(out / file if to == "gguf" else out, verdict, writing_s, checking_s)


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


def _check_room(out: pathlib.Path, needed: int) -> None:
    free = shutil.disk_usage(out.parent).free
    if needed > free:
        raise RunError(f"--out={out} needs {size(needed)}, and {size(free)} are free there: free some room")


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
            raise RunError(
                f"the disk of {out} is full ({error}): free some room and run the same command again"
            ) from error
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
