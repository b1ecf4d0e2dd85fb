"""Checkpoints: Orbax, asynchronous, rotated, verified, independent of the mesh that wrote them.

`checkpoints/<step>/` holds `params` (so that sampling and export read nothing else), `train` (optimizer state and
counters) and `meta` (step, resolved config, data fingerprint, and a digest of every array). Orbax itself verifies
nothing: a flipped bit in an array file restores silently. The digests are computed on the device from the arrays that
were meant to be saved, so garbage from a disk, a network filesystem or memory is found when it is read back.
"""

import contextlib
import errno
import json
import logging
import pathlib
import typing

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers

from jaxlm import tree
from jaxlm.config import CheckpointConfig, ConfigError, RunError
from jaxlm.ops.bits import mix, numbers
from jaxlm.train.state import TrainState

BEST_METRIC = "val/loss"
_UINTS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


class CorruptCheckpointError(RunError):
    """A checkpoint whose arrays are not those that were saved."""


@jax.jit
def digest(x: jax.Array) -> jax.Array:
    """One uint32 of an array, independent of how it is sharded.

    Each element's bits are mixed with its global index (murmur3's finaliser, a bijection) and the results added
    modulo 2^32: the order of addition is free, and any change of one element changes the sum.
    """
    x = jax.device_put(x, jax.memory.Space.Device)  # an optimizer's state may wait in the host's memory
    bits = jax.lax.bitcast_convert_type(x, _UINTS[x.dtype.itemsize]).astype(jnp.uint32)
    return jnp.sum(mix(bits ^ numbers(x.shape)), dtype=jnp.uint32)


def _digest_table(items: dict[str, typing.Any]) -> dict[str, int]:
    """Leaf name -> digest, fetched to the host. One leaf after the other: an offloaded state need not fit at once."""
    return {name: int(jax.device_get(digest(leaf))) for name, leaf in tree.named_leaves(items)}


def _items(state: TrainState) -> dict[str, typing.Any]:
    counters = {"step": state.step, "skipped": state.skipped, "skipped_in_a_row": state.skipped_in_a_row}
    return {"params": state.params, "train": {"opt_state": state.opt_state, **counters}}


class Checkpointer:
    """Saves and restores the TrainState of one run.

    Args:
      directory: `WORKDIR/checkpoints`.
      config: which checkpoints to keep.
      read_only: for programs that only restore.
    """

    def __init__(self, directory: pathlib.Path, config: CheckpointConfig | None = None, *, read_only: bool = False):
        self.directory = pathlib.Path(directory).resolve()
        if read_only and not self.directory.is_dir():
            raise ConfigError(f"no checkpoints in {self.directory}: is --config.workdir the folder of a run?")
        options = ocp.CheckpointManagerOptions(
            preservation_policy=None if config is None else _policy(config),
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
        )
        handlers = {"params": ocp.StandardCheckpointHandler(), "train": ocp.StandardCheckpointHandler()}
        handlers |= {"meta": ocp.JsonCheckpointHandler()}
        self._closed = False
        self._saving: int | None = None  # the step whose save is in flight
        self._manager = ocp.CheckpointManager(self.directory, options=options, item_handlers=handlers)

    def save(self, state: TrainState, meta: dict, metrics: dict[str, float]) -> bool:
        """Starts saving `state` at its step; returns at once but for the copy to the host. False if it is there already.

        Raises:
          RunError: the disk was full, now or when the save before this one was finished.
        """
        self.wait()
        step = int(state.step)
        if step in self._manager.all_steps():
            return False
        items = _items(state)
        # The copy of the state must be whole before the next step takes its memory; Orbax does that before returning.
        args = {name: ocp.args.StandardSave(item) for name, item in items.items()}
        args["meta"] = ocp.args.JsonSave({**meta, "step": step, "metrics": metrics, "digests": _digest_table(items)})
        self._saving = step
        with self._disk_errors():
            return self._manager.save(step, args=ocp.args.Composite(**args), metrics=metrics or None)

    def check(self) -> None:
        """Raises what made the save in flight fail, once it is over; costs nothing while it goes on. For every step."""
        if self._saving is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Blocks until the save in flight is on disk; raises if it failed."""
        with self._disk_errors():
            self._manager.wait_until_finished()
        self._saving = None

    def close(self) -> None:
        """Waits for the save in flight and releases the manager. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self.wait()
        with self._disk_errors():
            self._manager.close()

    @contextlib.contextmanager
    def _disk_errors(self) -> typing.Iterator[None]:
        """Turns a full disk, however deep it was met, into one line that says what to do."""
        try:
            yield
        except Exception as error:
            if getattr(error, "errno", None) != errno.ENOSPC and "No space left" not in str(error):
                raise
            whole = sorted(int(p.name) for p in self.directory.iterdir() if p.name.isdigit())
            then = f"it goes on from step {whole[-1]}" if whole else "no checkpoint is whole yet, so it starts anew"
            raise RunError(
                f"disk full while writing checkpoint {self._saving} in {self.directory}: free some room and run the same "
                f"command again; {then}"
            ) from error

    def steps(self) -> list[int]:
        """Steps of the checkpoints on disk, ascending."""
        return sorted(self._manager.all_steps())

    def best_step(self) -> int | None:
        """The step with the lowest validation loss among those on disk; None if none was evaluated."""
        losses = {step: self.meta(step)["metrics"].get(BEST_METRIC) for step in self.steps()}
        known = {step: loss for step, loss in losses.items() if loss is not None}
        return min(known, key=known.get) if known else None

    def find(self, which: str) -> int:
        """The step meant by `latest`, `best` or a number. Raises ConfigError."""
        steps = self.steps()
        if not steps:
            raise ConfigError(f"no checkpoints in {self.directory}: train first")
        step = steps[-1] if which == "latest" else self.best_step() if which == "best" else which
        if step is None or not str(step).isdigit() or int(step) not in steps:
            raise ConfigError(f"no checkpoint {which!r}; there are {', '.join(map(str, steps))}, latest and best")
        return int(step)

    def meta(self, step: int) -> dict:
        """What was saved beside the arrays: `config`, `fingerprint`, `metrics`, `digests`, ..."""
        with _reading(step):
            return self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]

    def restore(self, step: int, abstract_state: TrainState, shardings: TrainState) -> TrainState:
        """The state saved at `step`, laid out as `shardings` says, whatever mesh wrote it.

        Raises:
          CorruptCheckpointError: an array is not the one that was saved, or can't be read.
        """
        items = self._restore(step, _items(_with_shardings(abstract_state, shardings)))
        train = items["train"]
        counters = {name: train[name] for name in ("step", "skipped", "skipped_in_a_row")}
        return TrainState(params=items["params"], opt_state=train["opt_state"], **counters)

    def restore_latest(self, abstract_state: TrainState, shardings: TrainState) -> tuple[TrainState, dict]:
        """The newest state that reads back as it was saved, and its `meta`.

        Damaged checkpoints newer than it are moved to `WORKDIR/damaged/`, with a warning. When none is whole nothing is
        moved, so that a run never starts anew by accident.

        Raises:
          CorruptCheckpointError: none is whole.
          RunError: a checkpoint can't be read for another reason (memory, permissions, a device), or one of several
            processes can't read its part; nothing is moved.
        """
        damaged = []
        for step in reversed(self.steps()):
            try:
                state, meta = self.restore(step, abstract_state, shardings), self.meta(step)
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

    def restore_params(self, step: int, abstract_params: typing.Any, shardings: typing.Any) -> typing.Any:
        """The parameters alone. Raises CorruptCheckpointError."""
        return self._restore(step, {"params": _with_shardings(abstract_params, shardings)})["params"]

    def _set_aside(self, step: int) -> None:
        """Moves a damaged checkpoint out of the way, so that its step can be saved again."""
        if jax.process_index() == 0:
            place = self.directory.parent / "damaged"
            place.mkdir(exist_ok=True)
            target = next(p for n in range(10**6) if not (p := place / f"{step}.{n}").exists())
            (self.directory / str(step)).rename(target)
        multihost_utils.sync_global_devices("damaged checkpoint set aside")
        self._manager.reload()

    def _restore(self, step: int, wanted: dict[str, typing.Any]) -> dict[str, typing.Any]:
        args = {name: ocp.args.StandardRestore(item) for name, item in wanted.items()}
        try:
            saved = self.meta(step)["digests"]
            with _reading(step):
                restored = self._manager.restore(step, args=ocp.args.Composite(**args))
        except CorruptCheckpointError as error:
            if jax.process_count() == 1:
                raise
            # The other processes wait inside of Orbax for this one: they can't be told to try an older checkpoint.
            raise RunError(f"{error}; move {self.directory / str(step)} away and run the same command again") from error
        items = {name: restored[name] for name in wanted}
        wrong = [name for name, digest in _digest_table(items).items() if saved.get(name) != digest]
        if wrong:
            raise CorruptCheckpointError(
                f"checkpoint {step} is damaged: {wrong[0]} is not what was saved"
                + (f", nor are {len(wrong) - 1} other arrays" if len(wrong) > 1 else "")
            )
        return items


# What a file that is not as it was written makes JSON, Orbax and TensorStore say.
_DAMAGE_TYPES = (json.JSONDecodeError, UnicodeDecodeError, FileNotFoundError, KeyError)
_DAMAGE_WORDS = ("DATA_LOSS", "NOT_FOUND", "OUT_OF_RANGE", "FAILED_PRECONDITION", "INVALID_ARGUMENT")


@contextlib.contextmanager
def _reading(step: int) -> typing.Iterator[None]:
    """Tells a damaged checkpoint from one that this process can't read just now."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        chain = [error]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
            chain.append(cause)  # Orbax wraps what TensorStore said in the text of a whole spec
        reason = (str(chain[-1]).splitlines() or [type(error).__name__])[0]
        if any(isinstance(e, _DAMAGE_TYPES) or str(e).startswith(_DAMAGE_WORDS) for e in chain):
            raise CorruptCheckpointError(f"checkpoint {step} is damaged: {reason}") from error
        raise RunError(f"checkpoint {step} can't be restored: {reason}; nothing was changed") from error


def _with_shardings(abstract: typing.Any, shardings: typing.Any) -> typing.Any:
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings)


def _policy(config: CheckpointConfig) -> checkpoint_managers.PreservationPolicy:
    """The newest `keep_last`, those at multiples of `keep_every`, and the `keep_best` with the lowest validation loss."""
    policies = [checkpoint_managers.LatestN(config.keep_last)]
    if config.keep_every:
        policies.append(checkpoint_managers.EveryNSteps(config.keep_every))
    if config.keep_best:
        policies.append(
            checkpoint_managers.BestN(
                get_metric_fn=lambda metrics: metrics[BEST_METRIC],
                reverse=True,
                n=config.keep_best,
                keep_checkpoints_without_metrics=False,
            )
        )
    return checkpoint_managers.AnyPreservationPolicy(policies)
