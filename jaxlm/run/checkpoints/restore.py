"""Reads one checkpoint. If it is damaged or unreadable, all processes learn it before any of them begins to restore."""

import contextlib
import functools
import pathlib
import typing
from collections.abc import Callable, Collection, Iterable

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxlm.config import RunError
from jaxlm.devices import tree
from jaxlm.devices.processes import say, together
from jaxlm.host.files import plain_path
from jaxlm.run.checkpoints import damage, digest, meta, verify
from jaxlm.run.checkpoints.damage import CorruptCheckpointError, reading

Reader = Callable[[str], np.ndarray]


class UnreadableError(CorruptCheckpointError):
    """Raised on all processes if one of several can't read a checkpoint's file: all go back to the previous checkpoint."""


def restore(folder: pathlib.Path, wanted: dict[str, dict]) -> dict[str, dict]:
    """Returns the items of a checkpoint that `wanted` names: item -> tree of ShapeDtypeStructs with shardings.

    Raises CorruptCheckpointError if an array differs from what was saved, RunError if it can't be read for another reason.
    """
    step, names = int(folder.name), {*wanted, "meta"}
    digests, wrong = together(lambda: _inspect(folder, names), errors=(CorruptCheckpointError, RunError))
    same_tree = {name for name, _ in tree.named_leaves(wanted)} == digests.keys()
    args = {name: ocp.args.StandardRestore(item) for name, item in wanted.items()}
    try:
        with (
            reading(step, wrong, same_tree),
            plain_path(folder) as plain,
            ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer,
        ):
            restored = checkpointer.restore(plain, args=ocp.args.Composite(**args))
    except CorruptCheckpointError as error:
        if jax.process_count() == 1:
            raise
        # The other processes wait for this one inside Orbax, so they can't be told to try an older checkpoint.
        raise RunError(f"{error}; move {folder} away and run the same command again") from error
    items = {name: restored[name] for name in wanted}
    if different := digest.differing(items, digests):
        first, more = (wrong or different)[0], len(different) - 1
        raise CorruptCheckpointError(
            f"checkpoint {step} is damaged: {first} "
            + ("differs from what was saved" if wrong else "is not what was saved")
            + (f", nor are {more} other arrays" if more and not wrong else "")
        )
    if wrong:
        say(f"checkpoint {step}: {wrong[0]} differs from what was saved, but all arrays are whole, so it is used")
    return items


def read_meta(folder: pathlib.Path) -> dict:
    """Returns the metadata of a checkpoint; see `meta.read`. Raises RunError in place of an OSError."""
    with _readable(folder):
        return meta.read(folder)


def _inspect(folder: pathlib.Path, names: Collection[str]) -> tuple[dict[str, int], list[str] | None]:
    """Returns the digests of the items `names`, and their files that differ from their checksums (None without checksums)."""
    several, first = jax.process_count() > 1, jax.process_index() == 0
    with _readable(folder):
        wrong = verify.differing(folder, names, (jax.process_index(), jax.process_count()))
        saved = meta.read(folder, must_be_sealed=any(name.startswith("meta/") for name in wrong or ()))
        digests = {name: value for name, value in saved["digests"].items() if name.split("/")[0] in names}
        # Some files (a list of shardings, a mark) can differ and harm nothing. But if one of several processes fails inside
        # Orbax, the others wait for it.
        look = first and (wrong is None if several else bool(wrong))
        differs = verify.read_back(folder, digests) if look else ""
        if differs or (wrong and several):
            what = f"{wrong[0]} differs from what was saved" if wrong else differs
            raise CorruptCheckpointError(f"checkpoint {folder.name} is damaged: {what}")
    return digests, wrong


@contextlib.contextmanager
def _readable(folder: pathlib.Path) -> typing.Iterator[None]:
    """Turns an OSError in its `with` block into a RunError; with several processes into UnreadableError, so all go back."""
    try:
        yield
    except OSError as error:
        why = damage.words(error, folder)
        if jax.process_count() > 1:
            raise UnreadableError(f"checkpoint {folder.name} can't be read: {why}") from error
        raise RunError(f"checkpoint {folder.name} can't be restored: {why}; nothing was changed") from error


def with_shardings(abstract: typing.Any, shardings: typing.Any) -> typing.Any:
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings)


def read_metas(directory: pathlib.Path, steps: Iterable[int]) -> dict[int, dict]:
    """Returns step -> metadata, without checkpoints whose metadata are damaged."""
    metas = {}
    for step in steps:
        with contextlib.suppress(CorruptCheckpointError):
            metas[step] = read_meta(directory / str(step))
    return metas


def reader(folder: pathlib.Path, item: str = "params") -> Reader:
    """Returns a function that reads an array of a checkpoint's `item` by its name, such as `layers_0/attn/q/kernel`.

    The function raises CorruptCheckpointError if the array differs from the saved array, RunError if it can't be read.
    """
    digests = functools.cache(lambda: read_meta(folder)["digests"])

    def read(name: str) -> np.ndarray:
        saved = digests().get(f"{item}/{name}")
        with reading(int(folder.name)), plain_path(folder) as plain:
            array = np.asarray(verify.open_array(plain, f"{item}/{name}").result().read().result())
        if digest.of_piece(array, (0,) * array.ndim, array.shape) != saved:
            raise CorruptCheckpointError(f"checkpoint {folder.name} is damaged: {item}/{name} is not what was saved")
        return array

    return read
