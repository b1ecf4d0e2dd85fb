"""The checkpoints of one run: saves, verifies, rotates and restores them. A disk that fails never ends the training.

If a checkpoint is damaged or unreadable, all processes learn it before any of them begins to restore.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
import shutil
import threading
import time
import typing
from collections.abc import Callable, Collection, Iterable, Sequence

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxlm.config import CheckpointConfig, ConfigError, RunError
from jaxlm.devices import processes, tree
from jaxlm.devices.processes import from_first, say, together, working
from jaxlm.host import files
from jaxlm.run.checkpoints import damage, digest, keep, meta, verify
from jaxlm.run.checkpoints.damage import CorruptCheckpointError, NoWholeCheckpointError, move_aside, reading
from jaxlm.run.checkpoints.saving import TEMPORARY, Saving, remove_partial, wait
from jaxlm.step.state import TrainState, average_shardings

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
            files.plain_path(folder) as plain,
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
        others = f", nor are {len(different) - 1} other arrays" if len(different) > 1 else ""
        what = f"{wrong[0]} differs from what was saved" if wrong else f"{different[0]} is not what was saved{others}"
        raise CorruptCheckpointError(f"checkpoint {step} is damaged: {what}")
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
        with reading(int(folder.name)), files.plain_path(folder) as plain:
            array = np.asarray(verify.open_array(plain, f"{item}/{name}").result().read().result())
        if digest.of_array(array) != saved:
            raise CorruptCheckpointError(f"checkpoint {folder.name} is damaged: {item}/{name} is not what was saved")
        return array

    return read


if typing.TYPE_CHECKING:  # mirror imports fsspec, and `jaxlm sample` should not wait for that
    from jaxlm.run.checkpoints.mirror import Mirror

_DAMAGE = (CorruptCheckpointError, RunError)
_DELETING = ".deleting"  # the end of a folder's name while it is deleted
_RETRY_S, _NEXT_RETRY_S = 10.0, 60.0  # after the first failure, and after each further one
_PATIENCE_S, _PATIENCE_STOPPING_S = 1200.0, 120.0  # for a save in flight at the end, or when the run was asked to stop
_HANGS_S = 600.0  # a save that takes longer, and over five times the longest earlier one, hangs


class Checkpointer:
    """The checkpoints of one run.

    Args:
      config: which checkpoints to keep; None keeps all.
      scores: step -> score (`run.metrics`); the checkpoint with the lowest score is best. The caller may add steps later.
      pinned: steps that rotation never deletes.
      mirror: gets each checkpoint once it is verified, before rotation deletes it; None on all processes but the first.
      saved: called on the first process with (the step, name -> sha256 of each array, the steps that stay) of each whole save.
      stopping: True once the run was asked to stop; waits are then short.
      read_only: True for programs that only restore; then nothing is written.

    Attributes:
      failing: why saving fails now, in one line; "" if it works.
      abandoned: True if a save hangs and was given up; there are no more saves then.
      left_behind: True if Python can't end by itself, because of threads that read or write: end it by `os._exit`.
      verify_s: the seconds that verifying the last checkpoint took.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        config: CheckpointConfig | None = None,
        *,
        scores: typing.Mapping[int, float] | None = None,
        pinned: Collection[int] = (),
        mirror: "Mirror | None" = None,
        saved: Callable[[int, dict[str, str], Collection[int]], object] | None = None,
        stopping: Callable[[], bool] = lambda: False,
        read_only: bool = False,
    ):
        self.directory = pathlib.Path(directory).resolve()
        if read_only and not self.directory.is_dir():
            raise ConfigError(f"no checkpoints in {self.directory}: is --config.workdir the folder of a run?")
        self._config, self._scores = config, {} if scores is None else scores
        self._pinned, self._mirror, self._stopping = {*pinned}, mirror, stopping
        self._held, self._saved = -1, saved  # the step that `hold` keeps
        self.failing, self.abandoned, self.left_behind, self.verify_s = "", False, False, 0.0
        self._saving: Saving | None = None
        self._longest_s, self._partial = 0.0, set()  # of all saves; the steps of those that failed
        self._owed, self._retry_at, self._ending = False, 0.0, False
        self._safe_since = time.monotonic()  # when the save of the newest whole checkpoint began
        self._deleting: list[threading.Thread] = []
        self._aside = []  # folders of checkpoints that did not read back
        if read_only:  # else all processes must agree on the steps, because they save together
            self.reserve, self._steps = None, set(keep.steps(self.directory))
            return
        together(lambda: self.directory.mkdir(parents=True, exist_ok=True), first_only=True)
        self._steps, self._place = set(from_first(lambda: keep.steps(self.directory))), os.stat(self.directory.parent)
        self.reserve = keep.Reserve(self.directory.parent, config.reserve_mb if config else 0)
        left = [*self.directory.glob(f"*{_DELETING}"), *self.directory.glob(f"*.{TEMPORARY}*")]
        self._delete(left)  # a crash left them half gone or half written

    def prepare(self, state: TrainState, steps: int) -> None:
        """Writes the reserve in the background; warns if the checkpoints of `steps` steps do not seem to fit on the disk."""
        if jax.process_index():
            return
        average = state.params if self._config.average else {}  # not begun yet
        leaves = jax.tree.leaves(meta.to_items(dataclasses.replace(state, average=average)))
        size = float(sum(x.size * x.dtype.itemsize for x in leaves))
        if warning := keep.lacking(self.directory, len(self._steps), size, self._config, len(self._pinned), steps):
            say(warning)
        self._beside(lambda: self.reserve.make(size))

    def skips(self, step: int) -> bool:
        """True, and says so, if the previous save has not ended: then a save of `step` would hold up the training.

        All processes call it at the same step, and get the same answer. `wants_save` then asks for a save at a later step.
        """

        def free() -> None:
            self.check()
            if self._saving is not None:
                took = time.monotonic() - self._saving.began
                raise RunError(
                    f"step {step} is not saved now: the save of step {self._saving.step} has taken {took:.0f} s and is "
                    f"still {self._saving.at} ({self._saving.folder})"
                )

        try:
            together(free)
        except RunError as error:
            say(str(error))
            self._owed = True
            return True
        return False

    def save(self, state: TrainState, meta_of_run: dict) -> bool:
        """Starts to save `state` as the checkpoint of its step. Returns False if it starts no save.

        It starts none if the checkpoint exists, the run's folder was moved, a number is not finite, or a save hangs. Waits for
        the previous save, the digests and the copy to the host. A thread then writes the files, reads them back from the disk
        and writes their checksums. An error of the disk is reported by `check`, and never raised.
        """
        self.wait()
        step = int(state.step)
        if from_first(lambda: self.abandoned or bool(self.moved()) or step in self._steps):
            return False
        items = meta.to_items(state)
        digests, bad = digest.look(items)
        if bad:
            say(f"step {step} is not saved: {bad[0]} has a number that is not finite; the older checkpoints stay")
            return False
        self._partial.discard(step)
        sealed = meta.sealed(meta_of_run, step, digests)
        self._saving = Saving(self.directory / str(step), items, sealed, hashed=self._saved is not None)
        self._wait(self._saving.copied)  # the next step donates the state
        return True

    def save_last(self, step: int, state: TrainState, meta_of_run: dict) -> str:
        """Saves the state after the last `step` of a run, and waits for the save. Tries twice. Returns "" or why it failed."""
        self._ending = True
        for _ in range(2):
            begun = self.save(state, meta_of_run)
            self.wait()
            if from_first(lambda: step in self._steps):
                return ""
            if not begun:
                break
        return self.moved() or self.failing or "a number in it is not finite"

    def check(self) -> None:
        """Ends the current save if its thread is done, else does nothing. Cheap: the loop calls it after every step.

        Ending a failed save says in one line why it failed, and cleans up. Ending a good save deletes the checkpoints that
        need not be kept any more.
        """
        if self._saving is not None and self._saving.done.is_set():
            self._end(self._saving)

    def wait(self) -> None:
        """Waits until the current save is done and verified, and ends it as `check` does. Gives up a save that hangs."""
        if self._saving is not None and self._wait(self._saving.done):
            self._end(self._saving)

    def close(self) -> None:
        """Waits for the current save, and for threads in the background. A second call does nothing."""
        self.wait()
        for thread in self._deleting:
            thread.join(timeout=60)
            self.left_behind |= thread.is_alive()  # TensorStore aborts a process whose Python ends while it reads
        if self.left_behind:
            processes.left_behind.set()

    def wants_save(self) -> bool:
        """True if a save should be made at the next step, because a save failed or was skipped. For the first process."""
        return self._owed and self._saving is None and time.monotonic() >= self._retry_at

    def moved(self) -> str:
        """Returns one line if the run's folder was moved or deleted since it was opened, else ""."""
        if not files.moved(self.directory.parent, self._place):
            return ""
        return (
            f"{self.directory.parent} was moved or deleted under the run, and what came after its last checkpoint is not "
            "saved: give its new place by --config.workdir"
        )

    def holds(self, most_s: float) -> bool:
        """True if a finished run should try again to save: saving fails now, may work later, and `unprotected_s` < `most_s`."""
        lost = self.abandoned or not self.failing or self.moved() or self._stopping()
        return not lost and self.unprotected_s() < most_s

    def unprotected_s(self) -> float:
        return time.monotonic() - self._safe_since

    def hangs(self) -> str:
        """Returns one line about the save in flight if it takes suspiciously long, else ""."""
        saving = self._saving
        took = time.monotonic() - saving.began if saving else 0.0
        if saving is None or took < max(_HANGS_S, 5 * self._longest_s):
            return ""
        return f"the save of step {saving.step} hangs for {took / 60:.0f} minutes, {saving.at}: {saving.folder}"

    def verified(self, step: int) -> bool:
        return verify.read_checksums(self.directory / str(step)) is not None

    def _wait(self, event: threading.Event) -> bool:
        least = _PATIENCE_STOPPING_S if self._stopping() else _PATIENCE_S
        if wait(self._saving, event, say, self._stopping, max(least, 3 * self._longest_s)):
            return True
        took = time.monotonic() - self._saving.began
        self.failing = f"checkpoint {self._saving.step} was not done after {took:.0f} s: {self._saving.folder}"
        say(f"{self.failing}; it is given up")
        self._saving.left = True
        self._saving, self.abandoned, self.left_behind = None, True, True
        return False

    def _end(self, saving: Saving) -> None:
        self._saving, self.left_behind = None, self.left_behind or saving.left_behind
        self._longest_s = max(self._longest_s, time.monotonic() - saving.began)
        if saving.failed or saving.differs:
            self._failed(saving)
            return
        self._steps.add(saving.step)
        self._safe_since, self.failing, self._owed = saving.began, "", False
        if jax.process_index():
            return
        self.verify_s = saving.verify_s
        if self._mirror:
            try:
                self._mirror.begin(saving.step)
            except Exception as error:  # a mirror that fails must not end the run
                say(f"checkpoint {saving.step}: {error}")
        self._remove_partial()  # once more: threads of Orbax may have written on after their save had failed
        if self._config:
            with contextlib.suppress(OSError):  # a folder that can't be listed now is rotated after the next save
                self._rotate()
            self._beside(self.reserve.make)
        if self._saved:
            self._saved(saving.step, saving.sha256s, self._steps)

    def _failed(self, saving: Saving) -> None:
        """Says that a save failed, cleans up after it, and sets the time of the next try."""
        told = self._ending and self.failing  # each minute
        self._owed, self._retry_at = True, time.monotonic() + (_NEXT_RETRY_S if self.failing else _RETRY_S)
        if saving.differs:
            self.failing = f"checkpoint {saving.step} is not what was saved: {saving.differs} ({saving.folder})"
        else:
            cant = "verified" if saving.written else "saved"
            self.failing = f"checkpoint {saving.step} can't be {cant}: {saving.failed}"
        stays = f"step {max(self._steps)} stays" if self._steps else "no checkpoint is whole yet"
        if not told:
            say(f"{self.failing}; {'it is tried again' if self._ending else 'training goes on'}, {stays}")
        if jax.process_index():
            return
        if saving.differs:
            with contextlib.suppress(OSError):
                self._aside.append(move_aside(self.directory, saving.step))
            self._delete(self._aside[:-1])  # a disk that corrupts data must not be filled with damaged checkpoints
            self._aside = self._aside[-1:]
        elif saving.written:
            self._steps.add(saving.step)  # it may be whole: it stays, but does not count
        else:
            self._partial.add(saving.step)
            self._remove_partial()
        if saving.full:
            self.reserve.free()

    # Deleting

    def _remove_partial(self) -> None:
        for step in self._partial:
            self._beside(functools.partial(remove_partial, self.directory, step))

    def _rotate(self) -> None:
        # Only on the first process: it writes metrics.jsonl, so only it surely knows the scores of earlier starts. And no
        # other process has to wait for a deletion.
        there = [step for step in keep.steps(self.directory) if step in self._steps]  # what is on disk
        whole = [step for step in there if self.verified(step)]
        gone = keep.obsolete(there, self._scores, self._config, whole, self._pinned | keep.needed(self.directory))
        gone = set(gone) - {*(self._mirror.wanted() if self._mirror else ()), self._held}
        self._delete([self.directory / str(step) for step in gone])
        self._steps -= gone

    def _delete(self, folders: list[pathlib.Path]) -> None:
        """Deletes folders in a background thread; on the first process only. Folders that can't be deleted stay."""
        if jax.process_index() or not folders:
            return
        # Why it renames first: deleting takes time and may be cut short, and then half a checkpoint under its own name would
        # look whole. A rename is atomic. The next start deletes what is left under the new name.
        gone = []
        for path in folders:
            name = path if path.name.endswith(_DELETING) else path.with_name(path.name + _DELETING)
            try:
                gone.append(path if path == name else path.rename(name))
            except OSError as error:  # an old checkpoint too many is no reason to end a run
                say(f"{path} can't be deleted: {error.strerror}")
        self._beside(lambda: [shutil.rmtree(p, ignore_errors=True) for p in gone])

    def _beside(self, action: Callable[[], object]) -> None:
        def act() -> None:
            # Of a disk: rmtree with ignore_errors still raises the error of a close. Or Python ends, and starts no threads.
            with contextlib.suppress(OSError, RuntimeError):
                action()

        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        self._deleting = [*(t for t in self._deleting if t.is_alive()), thread]

    # Restoring

    def steps(self) -> list[int]:
        """Returns the steps of the checkpoints on disk, ascending, without one that is still being saved."""
        return sorted(self._steps)

    def find(self, which: str | int) -> int:
        """Returns the step of the checkpoint `which`: "latest", "best" or a step. Raises ConfigError if there is none."""
        steps = self.steps()
        if not steps:
            raise ConfigError(f"no checkpoints in {self.directory}: train first")
        step = {"latest": steps[-1], "best": keep.best(steps, self._scores)}.get(str(which), which)
        if step is None or not files.is_step(str(step)) or int(step) not in steps:
            raise ConfigError(f"no checkpoint {which!r}; there are {', '.join(map(str, steps))}, latest and best")
        return int(step)

    def restore(self, step: int, abstract: TrainState, shardings: TrainState) -> TrainState:
        """Returns the state of checkpoint `step`, sharded by `shardings`; any mesh may have saved it. See `restore.restore`.

        Its `average` is the checkpoint's, whether or not the run still keeps one.
        """
        names = together(lambda: read_meta(self.directory / str(step))["digests"], errors=_DAMAGE)
        if any(name.startswith(meta.AVERAGE) for name in names):  # Orbax refuses any other tree
            abstract = dataclasses.replace(abstract, average=abstract.params)
            shardings = dataclasses.replace(shardings, average=average_shardings(shardings))
        wanted = meta.to_items(with_shardings(abstract, shardings))
        with working(f"restoring checkpoint {step}"):
            return meta.from_items(restore(self.directory / str(step), wanted), like=abstract)

    def restore_latest(
        self, abstract: TrainState, shardings: TrainState, needs: Sequence[str] = ()
    ) -> tuple[TrainState, dict]:
        """Restores the newest checkpoint that is not damaged, and that all processes can read. Returns (state, meta).

        A checkpoint whose meta lacks a key of `needs` counts as damaged. Moves the newer, damaged checkpoints to
        `WORKDIR/damaged/`. Raises NoWholeCheckpointError if all are damaged, and moves none: a run never starts from scratch by
        accident. Raises RunError if a checkpoint can't be read for another reason.
        """
        damaged = []
        for step in reversed(self.steps()):
            try:
                saved = together(lambda s=step: read_meta(self.directory / str(s)), errors=_DAMAGE)
                if lacking := [key for key in needs if not isinstance(saved.get(key), dict)]:
                    raise CorruptCheckpointError(f"checkpoint {step} is damaged: its meta lacks {lacking[0]}")
                state = self.restore(step, abstract, shardings)
            except CorruptCheckpointError as error:
                say(f"{error}; going back to the checkpoint before it")
                damaged.append(step)
                continue
            for bad in damaged:
                self.set_aside(bad)
            self._seal(step, saved["digests"])
            return state, saved
        raise NoWholeCheckpointError(
            f"none of the checkpoints {sorted(damaged)} in {self.directory} reads back as it was saved; to train from the "
            "start give another config.workdir"
        )

    def restore_params(self, step: int, abstract: dict, shardings: dict) -> dict:
        """Returns the collection "params" of checkpoint `step`. Raises as `restore` does; RunError if there are no params."""
        folder = self.directory / str(step)
        if (folder / "train").is_dir() and not (folder / "params").is_dir():
            raise RunError(f"checkpoint {folder} has no parameters of its own, only what was trained in addition")
        with working(f"restoring checkpoint {step}"):
            return restore(folder, {"params": with_shardings(abstract, shardings)})["params"]

    def with_moments(self, state: TrainState) -> TrainState:
        """Returns a run's first state, with the moments that `jaxlm grow` put into checkpoint 0 if there are any."""
        folder = self.directory / "0"
        if not from_first(lambda: (folder / meta.MOMENTS).is_dir()):
            return state
        empty = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state.opt_state)
        jax.tree.map(lambda x: x.delete(), state.opt_state)  # its memory is needed
        with working("restoring the moments"):
            items = restore(folder, {meta.MOMENTS: {"opt_state": empty}})
        return dataclasses.replace(state, opt_state=items[meta.MOMENTS]["opt_state"])

    def _seal(self, step: int, digests: dict[str, int]) -> None:
        """Verifies a restored checkpoint in the background if it has no checksums: it is old, or its save was cut short."""
        if self._config and not jax.process_index() and not self.verified(step):
            self._beside(lambda: verify.verify(self.directory / str(step), digests))

    def hold(self, first: int) -> None:
        """Keeps the newest checkpoint before step `first` from rotation, for a rollback, until the next call of `hold`."""
        self._held = max((step for step in self.steps() if step < first), default=-1)

    def set_aside(self, step: int) -> None:
        """Moves an unusable checkpoint to `WORKDIR/damaged/`. All processes call it."""
        together(lambda: move_aside(self.directory, step), first_only=True)
        self._steps.discard(step)
