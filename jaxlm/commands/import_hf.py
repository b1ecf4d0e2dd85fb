"""`jaxlm import`: makes a run of a Hugging Face model: its weights as checkpoint 0, its tokenizer, its config."""

import argparse
import contextlib
import dataclasses
import os
import pathlib
import shlex
import shutil
import time
from collections.abc import Iterator

import jax

from jaxlm.config import Config, ConfigError
from jaxlm.data.chats import chat
from jaxlm.data.tokenizer import coder
from jaxlm.devices import tree
from jaxlm.devices.processes import say, together
from jaxlm.eval import model
from jaxlm.host import files
from jaxlm.host.console import size
from jaxlm.host.redact import redact
from jaxlm.interop import hf_folder, peft, peft_config
from jaxlm.run import ledger
from jaxlm.run.checkpoints import saving
from jaxlm.run.workdir import TOKENIZER
from jaxlm.train import origin, start

_ROWS = 1024  # that an embedding may have beyond the tokenizer's ids, without a warning


def run(config: Config, args: argparse.Namespace) -> int:
    """Imports the model in the folder that `config.workdir` names into the run `args.out`."""
    folder = pathlib.Path(config.workdir)
    out = pathlib.Path(args.out).expanduser().resolve()
    if peft_config.is_adapter(folder):
        raise ConfigError(f"{folder} is an adapter: begin with it, --config.origin={folder}, or import its base")
    together(lambda: _check(folder, out), first_only=True)
    began, opened = time.perf_counter(), origin.open(folder, readers=peft.READERS)
    tokenizer = opened.tokenizer()
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"{folder}: its tokenizer has {tokenizer.vocab_size:,} ids, its model {config.model.vocab_size:,}"
        )
    if (idle := config.model.vocab_size - tokenizer.vocab_size) > max(_ROWS, config.model.vocab_size / 10):
        say(f"warning: {idle:,} of the model's {config.model.vocab_size:,} rows have no id: is this its tokenizer?")
    _, _, abstract, shardings = model.laid_out(config)
    data = dataclasses.replace(config.data, dir=str(out / "data"), tokenizer=str(out / TOKENIZER))
    made = dataclasses.replace(config, workdir=str(out), origin=str(folder.resolve()), data=data)
    open_ = {"train": dataclasses.replace(config.train, microbatch_size=0)}  # derived again when the run is trained
    made = dataclasses.replace(made, **open_, eval=dataclasses.replace(config.eval, batch_size=0))
    with becoming(out, hf_folder.size(folder), f"--out={out}") as part:
        saving.save_weights(
            part / "checkpoints", lambda: opened.params(abstract, shardings), redact(dataclasses.asdict(made))
        )
        together(lambda: write(made, tokenizer, part, f"imported from {folder.resolve()}"), first_only=True)
    say(
        f"imported {folder}: {tree.count(abstract):,} parameters ({size(4 * tree.count(abstract))} in float32), "
        f"{tokenizer.vocab_size:,} ids, {_opening(tokenizer)} in front of each text ({time.perf_counter() - began:.0f} s)"
    )
    name = shlex.quote(args.out)
    say(
        f'next: jaxlm sample {name} "Once upon a time", or jaxlm train base --config.origin={name} --config.data.path=TEXTS'
    )
    return 0


def _opening(tokenizer: coder.Coder) -> str:
    named = {tokenizer.separator_id: "BOS", tokenizer.eos_id: "EOS"}
    return " ".join(named.get(i, f"id {i}") for i in tokenizer.opening) or "nothing"


def _check(folder: pathlib.Path, out: pathlib.Path) -> None:
    if out.resolve() == folder.resolve():
        raise ConfigError(f"--out={out} is the model itself: give another folder")
    check_new(out, "--out")


def check_new(out: pathlib.Path, flag: str) -> None:
    if (out / "config.json").exists():
        raise ConfigError(f"{flag}={out} holds a run or a model already: give another folder, or delete it")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{flag}={out} is a file: give a folder")
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"{flag}={out} is not empty: give a new folder")


@contextlib.contextmanager
def becoming(out: pathlib.Path, needed: int, name: str, replaces: bool = False) -> Iterator[pathlib.Path]:
    """Yields a new folder next to `out`, if the disk has room; renames it to `out` if the block succeeds, else deletes it.

    `name`: the folder in the refusal. `replaces`: `out` may be there, and goes.
    """
    part, held = out.with_name(f".{out.name}.importing"), contextlib.ExitStack()

    def begin() -> None:
        part.mkdir(parents=True, exist_ok=True)
        held.enter_context(files.lock(part, "is writing", "folder"))
        for old in [path for path in part.iterdir() if path.name != ".lock"]:  # of an import that was killed
            shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()

    def end() -> None:
        if replaces:
            shutil.rmtree(out, ignore_errors=True)
        os.rename(part, out)
        (out / ".lock").unlink()

    with held:
        together(begin, first_only=True)
        try:
            together(lambda: files.check_room(part, needed, name), first_only=True)
            yield part
            together(end, first_only=True)
        finally:
            if jax.process_index() == 0:
                shutil.rmtree(part, ignore_errors=True)


def write(config: Config, tokenizer: coder.Coder | None, out: pathlib.Path, why: str) -> None:
    """Writes a tokenizer, config.json and run.json; config.json makes the folder a run, so it is written last."""
    if tokenizer:
        coder.write(chat.settled(tokenizer), out / TOKENIZER)
    nothing = {"manifest_sha256": "", "choices": {}, "changed": []}
    ledger.record_start(out, config, step=0, hardware=start.hardware(), **nothing)
    ledger.end(out, step=0, code=0, why=why)
