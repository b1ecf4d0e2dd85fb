"""Keeps the reference's log-probabilities of preference pairs in the run's folder: training overwrites the reference.

WORKDIR/reference.npz     train, val: log p of both answers of each pair, in nats, float32 [N, 2]; about: their hashes
"""

import hashlib
import io
import json
import pathlib
import zipfile
from collections.abc import Callable

import numpy as np

from jaxlm.config import ConfigError
from jaxlm.data.batches.example_rows import Packed
from jaxlm.devices.processes import from_first, together
from jaxlm.host.files import MANGLED, json_of, write_atomically
from jaxlm.run.checkpoints import digest
from jaxlm.step.objectives.base import Variables

FILE = "reference.npz"
Judged = tuple[np.ndarray, np.ndarray]  # of the training pairs, of the held-out pairs


def of_run(folder: pathlib.Path, data: Packed, done: int, variables: Variables, judge: Callable[[], Judged]) -> Packed:
    """Returns the pairs with the reference's log-probabilities, from the run's file; if it is unfit before step 1, by `judge`.

    Raises ConfigError if steps are `done` and the file is missing, damaged or of other pairs.
    """
    path, pairs = folder / FILE, _of_pairs(data)
    model = "" if done else _of_model(variables)
    fault = from_first(lambda: _fault(path, pairs, model))
    if fault and done:
        raise ConfigError(
            f"{path} {fault}: it holds what the reference says of the pairs, and after {done} steps the model is not the "
            "reference any more; put it back, or begin in a new workdir"
        )
    if fault:
        judged = judge()
        together(lambda: _write(path, judged, pairs, model), first_only=True)
        return data.with_reference(*judged)
    return data.with_reference(*together(lambda: _read(path)[0]))


def _of_pairs(data: Packed) -> str:
    return hashlib.sha256(f"{data.train.sha256()} {data.val.sha256()}".encode()).hexdigest()


def _of_model(variables: Variables) -> str:
    hashes = {name: digest.table(part) for name, part in variables.items()}
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


def _fault(path: pathlib.Path, pairs: str, model: str) -> str:
    """Returns words that follow the file's name and say what is wrong with it; "" if nothing is. `model`: "" for any model."""
    if not path.is_file():
        return "is missing"
    try:
        judged, about = _read(path)
        if about["sha256"] != _hash(judged):
            return "is damaged"
    except (OSError, zipfile.BadZipFile, *MANGLED):
        return "is damaged"
    if about["pairs"] != pairs:
        return "is of other pairs"
    return "is of another model" if model and about["model"] != model else ""


def _read(path: pathlib.Path) -> tuple[Judged, dict[str, str]]:
    with np.load(path) as file:
        return (file["train"], file["val"]), json_of(str(file["about"]))


def _write(path: pathlib.Path, judged: Judged, pairs: str, model: str) -> None:
    content = io.BytesIO()
    about = json.dumps({"pairs": pairs, "model": model, "sha256": _hash(judged)})
    np.savez(content, train=judged[0], val=judged[1], about=np.asarray(about))
    write_atomically(path, content.getvalue())


def _hash(judged: Judged) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(x).tobytes() for x in judged)).hexdigest()
