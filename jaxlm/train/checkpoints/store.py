"""Saves and restores the train state of one run."""

import contextlib
import errno
import logging
import pathlib
import shutil
import threading
import typing

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jaxlm.config import CheckpointConfig, ConfigError, RunError
from jaxlm.processes import from_first
from jaxlm.step.state import TrainState
from jaxlm.train.checkpoints import digest, keep, layout
from jaxlm.train.checkpoints.damage import CorruptCheckpointError, reading

_DELETING = ".deleting"  # the end of a folder's name while it is deleted


class Checkpointer:
    """The checkpoints of one run.

    Args:
      directory: `WORKDIR/checkpoints`.
      config: `config.checkpoint`, which says which checkpoints to keep; None keeps all.
      losses: step -> held-out loss, by which the best checkpoints are chosen. The caller may add steps later.
      read_only: True for programs that only restore; nothing is then written.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        config: CheckpointConfig | None = None,
        *,
        losses: typing.Mapping[int, float] | None = None,
        read_only: bool = False,
    ):
        self.directory = pathlib.Path(directory).resolve()
        if read_only and not self.directory.is_dir():
            raise ConfigError(f"no checkpoints in {self.directory}: is --config.workdir the folder of a run?")
        self._config, self._losses = config, {} if losses is None else losses
        self._closed = False
        self._saving: int | None = None  # the step whose save is in flight
        self._deleting: list[threading.Thread] = []
        # Orbax is told to keep all. It would delete at once, but the best are known only after the step was evaluated.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=None, cleanup_tmp_directories=not read_only, read_only=read_only
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)
        # All processes must agree on what is there, because they save together.
        self._steps = set(self._listed() if read_only else from_first(self._listed))
        if not read_only:
            self._delete([path for path in self.directory.glob(f"*{_DELETING}")])  # a crash left them half gone

    def save(self, state: TrainState, meta: dict) -> bool:
        """Starts to save `state` as the checkpoint of its step. Returns False if that checkpoint exists already.

        Waits for the previous save, the digests and the copy to the host. A thread then writes the files.

        Args:
          state: the state, on the devices. Its memory may be reused as soon as `save` returns.
          meta: JSON values to save beside the arrays.

        Raises:
          RunError: the disk was full during this save or at the end of the previous one.
        """
        self.wait()
        step = int(state.step)
        if step in self._steps:
            return False
        items = layout.to_items(state)
        # The next step takes over the state's memory. Orbax has copied the state when `save` returns.
        args = {name: ocp.args.StandardSave(item) for name, item in items.items()}
        args["meta"] = ocp.args.JsonSave({**meta, "step": step, "digests": digest.table(items)})
        self._saving = step
        self._steps.add(step)
        with self._disk_errors():
            return self._manager.save(step, args=ocp.args.Composite(**args))

    def check(self) -> None:
        """Finishes the current save if its files are written, else does nothing. Cheap: the loop calls it after every step.

        To finish a save means: raise its error if it failed, else delete the checkpoints that need not be kept any
        more.
        """
        if self._saving is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits until the current save is on disk, then deletes checkpoints that need not be kept.

        Raises if the save failed.
        """
        with self._disk_errors():
            self._manager.wait_until_finished()
        if self._saving is not None:
            self._saving = None
            self._rotate()

    def close(self) -> None:
        """Waits for the current save and all deletions, then closes Orbax. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self.wait()
        for thread in self._deleting:
            thread.join()
        with self._disk_errors():
            self._manager.close()

    @contextlib.contextmanager
    def _disk_errors(self) -> typing.Iterator[None]:
        """Turns the error of a full disk, which Orbax may wrap, into one line that says what to do."""
        try:
            yield
        except Exception as error:
            # The step is not there: it must not count as the newest when others are deleted.
            self._steps.discard(self._saving)
            if getattr(error, "errno", None) != errno.ENOSPC and "No space left" not in str(error):
                raise
            whole = self._listed()
            then = f"it goes on from step {whole[-1]}" if whole else "no checkpoint is whole yet, so it starts anew"
            raise RunError(
                f"disk full while writing checkpoint {self._saving} in {self.directory}: free some room and run the same "
                f"command again; {then}"
            ) from error

    def _rotate(self) -> None:
        """Deletes what need not be kept."""
        # Why on the first process alone: it writes metrics.jsonl, so it alone is sure to know the losses of earlier starts.
        # And no other process has to wait for a deletion.
        if self._config and jax.process_index() == 0:
            there = self._listed()  # what is on disk, so that a save that failed never costs a whole checkpoint
            gone = keep.obsolete([step for step in self.steps() if step in there], self._losses, self._config)
            self._delete([self.directory / str(step) for step in gone])
            self._steps -= set(gone)

    def _delete(self, folders: list[pathlib.Path]) -> None:
        """Deletes folders in a thread, beside the training; on the first process only. What can't be deleted stays."""
        if jax.process_index() or not folders:
            return
        # Why it renames first: deleting takes time and may be cut short, and then half a checkpoint under its own name would
        # pass for a whole one. A rename is atomic. The next start deletes what is left under the new name.
        gone = []
        for path in folders:
            name = path if path.name.endswith(_DELETING) else path.with_name(path.name + _DELETING)
            try:
                gone.append(path if path == name else path.rename(name))
            except OSError as error:  # an old checkpoint too many is no reason to end a run
                logging.warning("%s can't be deleted: %s", path, error.strerror)
        thread = threading.Thread(target=lambda: [shutil.rmtree(p, ignore_errors=True) for p in gone], daemon=True)
        thread.start()
        self._deleting = [*(t for t in self._deleting if t.is_alive()), thread]

    def steps(self) -> list[int]:
        """Returns the steps of the whole checkpoints, ascending, without one that is still being written."""
        return sorted(self._steps - {self._saving})

    def _listed(self) -> list[int]:
        """Returns the steps of the checkpoints on disk, ascending."""
        return sorted(int(p.name) for p in self.directory.iterdir() if p.name.isdigit())

    def find(self, which: str | int) -> int:
        """Returns the step of the checkpoint `which`: "latest", "best" or a step.

        Raises ConfigError if there is no such checkpoint.
        """
        steps = self.steps()
        if not steps:
            raise ConfigError(f"no checkpoints in {self.directory}: train first")
        step = {"latest": steps[-1], "best": keep.best(steps, self._losses)}.get(str(which), which)
        if step is None or not str(step).isdigit() or int(step) not in steps:
            raise ConfigError(f"no checkpoint {which!r}; there are {', '.join(map(str, steps))}, latest and best")
        return int(step)

    def meta(self, step: int) -> dict:
        """Returns the dict that was saved beside the arrays: `config`, `fingerprint`, `digests`, ..."""
        with reading(step):
            return self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]

    def restore(self, step: int, abstract: TrainState, shardings: TrainState) -> TrainState:
        """Restores the state of `step`, laid out as `shardings` says. Another mesh may have written the checkpoint.

        Raises:
          CorruptCheckpointError: an array differs from the saved one, or a file is damaged.
          RunError: the checkpoint can't be read for another reason.
        """
        items = self._restore(step, layout.to_items(_with_shardings(abstract, shardings)))
        return layout.from_items(items, like=abstract)

    def restore_latest(self, abstract: TrainState, shardings: TrainState) -> tuple[TrainState, dict]:
        """Restores the newest checkpoint that is not damaged. Returns (state, meta).

        Moves newer checkpoints, which are damaged, to `WORKDIR/damaged/` with a warning. If all checkpoints are damaged
        it moves none, so that a run never starts from scratch by accident.

        Raises:
          CorruptCheckpointError: all checkpoints are damaged.
          RunError: a checkpoint can't be read for another reason (memory, permissions, a device), or one of several
            processes can't read its part. Nothing is moved.
        """
        damaged = []
        for step in reversed(self.steps()):
            try:
                state, meta = self.restore(step, abstract, shardings), self.meta(step)
            except CorruptCheckpointError as error:
                logging.warning("%s; going back to the checkpoint before it", error)
                damaged.append(step)
                continue
            for bad in damaged:
                self._set_aside(bad)
            return state, meta
        raise CorruptCheckpointError(
            f"none of the checkpoints {sorted(damaged)} in {self.directory} reads back as it was saved; to train from the "
            "start give another config.workdir"
        )

    def restore_params(self, step: int, abstract: dict, shardings: dict) -> dict:
        """Restores only the collection "params". Raises the same errors as `restore`."""
        folder = self.directory / str(step)
        if (folder / "train").is_dir() and not (folder / "params").is_dir():
            raise RunError(f"checkpoint {folder} has no parameters of its own, only what was trained beside them")
        return self._restore(step, {"params": _with_shardings(abstract, shardings)})["params"]

    def _set_aside(self, step: int) -> None:
        """Moves a damaged checkpoint out of the way, so that its step can be saved again."""
        if jax.process_index() == 0:
            folder = self.directory.parent / "damaged"
            folder.mkdir(exist_ok=True)
            target = next(p for n in range(10**6) if not (p := folder / f"{step}.{n}").exists())
            (self.directory / str(step)).rename(target)
        multihost_utils.sync_global_devices("damaged checkpoint set aside")
        self._steps.discard(step)
        self._manager.reload()

    def _restore(self, step: int, wanted: dict[str, dict]) -> dict[str, dict]:
        args = {name: ocp.args.StandardRestore(item) for name, item in wanted.items()}
        try:
            saved = self.meta(step)["digests"]
            with reading(step):
                restored = self._manager.restore(step, args=ocp.args.Composite(**args))
        except CorruptCheckpointError as error:
            if jax.process_count() == 1:
                raise
            # The other processes wait for this one inside Orbax, so they can't be told to try an older checkpoint.
            raise RunError(f"{error}; move {self.directory / str(step)} away and run the same command again") from error
        items = {name: restored[name] for name in wanted}
        if wrong := digest.differing(items, saved):
            raise CorruptCheckpointError(
                f"checkpoint {step} is damaged: {wrong[0]} is not what was saved"
                + (f", nor are {len(wrong) - 1} other arrays" if len(wrong) > 1 else "")
            )
        return items


def _with_shardings(abstract: typing.Any, shardings: typing.Any) -> typing.Any:
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings)
