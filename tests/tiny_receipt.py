"""A tiny run with a receipt, made without training, and random changes of its files."""

import dataclasses
import json
import pathlib
import random

import jax.numpy as jnp
import numpy as np
import optax
import tiny_data

from jaxlm import config
from jaxlm.config import ConfigError, config_files
from jaxlm.data.shards import manifest, shards
from jaxlm.run import held_out_texts, ledger, metrics, receipt
from jaxlm.run.checkpoints import keep, verify
from jaxlm.run.checkpoints.store import Checkpointer
from jaxlm.step import state as states

FACTS = {"hardware": {}, "choices": {}, "changed": []}


def config_of(folder: pathlib.Path, *keys: str) -> config.Config:
    named = ["checkpoint.keep_last=2", "checkpoint.keep_best=0", "checkpoint.reserve_mb=0", *keys]
    return config.resolve(config_files.load("base", [f"workdir={folder}", f"data.dir={folder}/data", *named]))


def state(step: int):
    made = states.init({"params": {"a": jnp.arange(6.0).reshape(2, 3) + step, "b": jnp.bfloat16(step)}}, optax.sgd(1.0))
    return dataclasses.replace(made, step=jnp.int32(step))


def log(folder: pathlib.Path, step: int) -> None:
    lines = metrics.JsonLines(folder / "metrics.jsonl")
    lines.write({"step": step, "time": float(step), "train/loss": 5 - step / 10})
    lines.close()


def checkpointer(folder: pathlib.Path, manifest: str, **options) -> Checkpointer:
    link = receipt.Chain(folder, manifest).link
    return Checkpointer(folder / "checkpoints", config_of(folder).checkpoint, saved=link, **options)


def save(folder: pathlib.Path, saver: Checkpointer, *steps: int) -> None:
    for step in steps:
        log(folder, step)
        saver.save(state(step), {})
        saver.wait()


def make(folder: pathlib.Path, steps=(2, 4, 6)) -> pathlib.Path:
    """Makes a run that saved at these steps, the last two of which are kept, and logged each of them."""
    data = tiny_data.make(folder / "data", {"a": 1.0, "b": 2.0})
    texts = held_out_texts.of_data(data, config_of(folder))
    ledger.record_start(folder, config_of(folder), step=0, manifest_sha256=data.sha256, held_out=texts, **FACTS)
    np.savez(folder / "reference.npz", logp=np.arange(9.0))
    (folder / manifest.LIST).write_text("{}\n")
    ledger.put(folder, "passed_over", [[90, 91], [95, 95]])
    ledger.append(folder, "rollbacks", {"steps": [92, 93], "batches": [92, 93], "time": 1.5})
    saver = checkpointer(folder, data.sha256)
    save(folder, saver, *steps)
    saver.close()
    ledger.end(folder, step=steps[-1], code=0, why="done")
    return folder


def named(folder: pathlib.Path, data: pathlib.Path | None = None) -> list[str]:
    """What the checks of `jaxlm verify` say."""
    try:
        book = ledger.read(folder, mend=False)
    except ConfigError as error:
        return [str(error)]
    links, checkpoints = receipt.valid(book), folder / "checkpoints"
    lines = [*receipt.changed(folder, book), receipt.of_data(str(data or folder / "data"), book)]
    lines += [receipt.of_checkpoint(checkpoints / str(n), links.get(n)) for n in keep.steps(checkpoints)]
    return [line for line in lines if line]


def content(folder: pathlib.Path, data: pathlib.Path | None = None) -> dict:
    """All that the run's batches, metrics, chain and weights consist of; None in the place of what can't be read."""
    data = data or folder / "data"

    def read(ask):
        try:
            return ask()
        except Exception:  # of any library, on any damage
            return None

    def rows() -> list:
        opened = shards.open_data(data)
        opened.tokenizer(), opened.token_bytes()
        streams = [opened.stream(source, split) for source in opened.sources for split in ("train", "val")]
        texts = opened.manifest.get(manifest.HELD_OUT)
        return [opened.sha256, texts, *(stream.read(0, stream.tokens).tobytes() for stream in streams)]

    def decided(book: dict) -> list:
        held_out = [start.get("held_out") for start in book["starts"]]
        return [held_out, *(book[name] for name in ("receipt", "rollbacks", "passed_over"))]

    def arrays(step: int) -> dict:
        place = folder / "checkpoints" / str(step)
        return verify.sha256s(place, json.loads((place / "meta/metadata").read_bytes())["digests"])

    found = {step: read(lambda step=step: arrays(step)) for step in keep.steps(folder / "checkpoints")}
    found |= {"chain": read(lambda: decided(json.loads((folder / "run.json").read_bytes())))}
    found |= {"metrics": read(lambda: metrics.read(folder / "metrics.jsonl")), "rows": read(rows)}
    beside = {path.name: path.read_bytes() for pattern in receipt.FILES for path in folder.glob(pattern)}
    return found | {"config": (folder / "config.json").read_bytes(), "files": beside}


def places(folder: pathlib.Path, data: pathlib.Path | None = None) -> dict[str, list[tuple[pathlib.Path, int, int]]]:
    """What to change, by kind: (file, first byte, the byte after the last)."""
    data, book = data or folder / "data", (folder / "run.json").read_bytes()
    covered = ledger.read(folder)["receipt"][-1]["metrics"][0]
    weights = [path for path in (folder / "checkpoints").rglob("*") if path.is_file()]
    listed = [data / entry["file"] for entry in shards.open_data(data).files()]
    whole = {"data": [*listed, data / shards.MANIFEST], "weights": weights, "config": [folder / "config.json"]}
    whole["files"] = [path for pattern in receipt.FILES for path in folder.glob(pattern)]
    found = {kind: [(path, 0, path.stat().st_size) for path in paths] for kind, paths in whole.items() if paths}
    found["metrics"] = [(folder / "metrics.jsonl", 0, covered)]
    found["chain"] = [
        (folder / "run.json", 0, len(book)),
        (folder / "run.json", book.index(b'"passed_over"'), len(book)),
    ]
    return found


def change(rng: random.Random, path: pathlib.Path, first: int, end: int) -> tuple[bytes, str]:
    """Changes a file at a random place. Returns (its content before, what was done)."""
    before, at = path.read_bytes(), rng.randrange(first, end)
    how = rng.choice(["a bit", "a byte", "cut out", "doubled"])
    if how == "a bit":
        after = before[:at] + bytes([before[at] ^ 1 << rng.randrange(8)]) + before[at + 1 :]
    elif how == "a byte":
        after = (
            before[:at]
            + bytes([rng.choice([b for b in b'0123456789abcdef",{}' if b != before[at]])])
            + before[at + 1 :]
        )
    else:
        stop = min(end, at + rng.randint(1, 40))
        after = before[:at] + before[at:stop] * (2 * (how == "doubled")) + before[stop:]
    path.write_bytes(after)
    return before, f"{path.name}: {how} at byte {at} of {len(before)}"


def missed(folder: pathlib.Path, count: int, seed: int, data: pathlib.Path | None = None) -> tuple[list[str], int]:
    """Makes single changes, and takes each back. Returns (those that changed something and that nothing named, those named)."""
    rng, was, by_kind, lines, times = random.Random(seed), content(folder, data), places(folder, data), [], 0
    assert named(folder, data) == []
    for _ in range(count):
        path, first, end = rng.choice(by_kind[rng.choice(sorted(by_kind))])
        if first == end:
            continue
        before, what = change(rng, path, first, end)
        if named(folder, data):
            times += 1
        elif content(folder, data) != was:
            lines.append(what)
        path.write_bytes(before)
    assert named(folder, data) == []
    return lines, times
