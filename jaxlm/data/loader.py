"""Delivers batches to the train loop.

`ahead` runs the threads, the worker processes and the read-ahead. Only `rows.RowPlan` decides which rows a batch holds,
so the numbers of threads, workers, hosts and restarts never change a batch. The step is the only state of an iterator.

Shapes: B batch, b rows of it that this process needs, T tokens, T1 = T + 1.
"""

import queue
import typing
import weakref
from collections.abc import Callable, Iterator

import numpy as np

from jaxlm.config import ConfigError, DataConfig, RunError
from jaxlm.data import ahead, rows, shards
from jaxlm.data.verify import Entry

_FIRST_STEPS = 16  # the background verifies the shards of this many steps before all others


class Batched(typing.Protocol):
    """What decides the batches: `rows.Order`, `packed.Packed`. Its `data` has a `verifier` of its files."""

    data: typing.Any
    batch_size: int


class BatchSource:
    """Gives random access to batches: item i is this process's part of the batch of step `start_step` + i.

    Args:
      order: decides which row is in which slot of which batch.
      row_indices: the slots of the batch that this process makes.
      start_step: the step of item 0.
    """

    def __init__(self, order: rows.Order, row_indices: np.ndarray, start_step: int):
        self._plan, self._seq_len, self._start = order.plan(), order.seq_len, start_step
        self._separator_id, self._verifier, plan = order.data.separator_id, order.data.verifier, self._plan
        self._slots = np.asarray(row_indices, np.int64).reshape(-1)
        if self._slots.size and not (self._slots.min() >= 0 and self._slots.max() < plan.batch_size):
            raise ValueError(
                f"row_indices must lie in [0, {plan.batch_size}), got {self._slots.min()}..{self._slots.max()}"
            )
        self._streams = [order.data.stream(name) for name in plan.names]

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        source, _, row = self._plan.locate(self._start + int(i), self._slots)
        T = self._seq_len
        rows_bxT1 = np.empty((self._slots.size, T + 1), np.int32)
        for out_T1, k, r in zip(rows_bxT1, source.tolist(), row.tolist(), strict=True):
            out_T1[:] = self._streams[k].read(r * T, r * T + T + 1)
        return rows.make_batch(rows_bxT1, self._separator_id)

    def waits_for(self) -> str:
        """Returns the file that is being read, and since when; "" if none is."""
        return self._verifier.oldest_read()


class TrainLoader(Iterator[dict[str, np.ndarray]]):
    """Yields the batches of steps start_step, start_step + 1, ... for ever. Close it, or use it in a `with`.

    Args:
      order: decides which row is in which slot of which batch.
      source: makes the source of batches of (order, row_indices, start_step).
      row_indices: the indices of the rows (of B) that this process yields, in this order; all by default.
      start_step: the step of the first batch, from 0.
      num_threads: the number of threads that make batches (in each process).
      num_workers: the number of worker processes. With 0 this process makes the batches, fast enough for millions of
        tokens a second.
      prefetch: the number of batches made ahead (in each process).
      stall_seconds: the seconds to wait for a batch before RunError is raised (a dead disk blocks a read for ever).

    Yields:
      The dict that `rows.make_batch` returns, with arrays [b, T].

    Raises:
      RunError: a file can't be read (after three tries), a worker died, or a batch took too long.
      DamagedData: a shard is not the one in the manifest.
    """

    def __init__(
        self,
        order: Batched,
        *,
        source: Callable[[Batched, np.ndarray, int], ahead.Source] = BatchSource,
        row_indices: np.ndarray | None = None,
        start_step: int = 0,
        num_threads: int = 2,
        num_workers: int = 0,
        prefetch: int = 4,
        stall_seconds: float = 600.0,
    ):
        slots = np.arange(order.batch_size) if row_indices is None else row_indices
        made, num_threads, prefetch = source(order, slots, start_step), max(1, num_threads), max(1, prefetch)
        if num_workers:
            self._items = ahead.Workers(made, num_workers, num_threads, prefetch)
        else:
            self._items = ahead.Threads(made, num_threads, prefetch)
        self.step = start_step
        self._verifier, self.stall_seconds = order.data.verifier, stall_seconds
        self._failed: Exception | None = None
        # Also at exit, if nobody closed it: a thread in the middle of a read must not meet a finalised interpreter.
        self._close = weakref.finalize(self, _close, self._items, self._verifier)

    def __next__(self) -> dict[str, np.ndarray]:
        if not self._close.alive:
            raise RuntimeError("the loader is closed")
        if self._failed is None:
            try:
                if self._verifier.damage:
                    raise self._verifier.damage
                item = self._items.get(self.stall_seconds)
                self.step += 1
                return item
            except ConfigError as e:
                self._failed = e
            except queue.Empty:
                waits = self.waits_for() or "no file is being read, so the machine does too much else"
                self._failed = self._failure(f"no batch within {self.stall_seconds:g} s (data.timeout_s): {waits}")
            except Exception as e:
                self._failed = self._failure(str(e) or type(e).__name__, e)
        raise self._failed

    def _failure(self, why: str, cause: Exception | None = None) -> RunError:
        error = RunError(
            f"the loader failed at step {self.step}: {why}; the same command goes on from the last checkpoint"
        )
        error.__cause__ = cause
        return error

    def waits_for(self) -> str:
        """Returns what the next batch waits for: the worker process and the file that is read; "" if nothing is known."""
        return self._items.waits_for()

    def close(self) -> None:
        """Stops threads and workers, within seconds whatever hangs. A second call does nothing."""
        self._close()

    def __enter__(self) -> "TrainLoader":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def _close(items: ahead.Threads | ahead.Workers, verifier: shards.Verifier) -> None:
    verifier.end()
    items.close()


def open_train(
    order: Batched,
    config: DataConfig,
    *,
    row_indices: np.ndarray,
    start_step: int,
    verify: bool = False,
    source: Callable[[Batched, np.ndarray, int], ahead.Source] = BatchSource,
) -> TrainLoader:
    """Returns the loader with the threads, workers, read-ahead and timeout of `config.data`.

    Args:
      row_indices, start_step, source: as for `TrainLoader`.
      verify: True to compare all shards with the manifest in the background, those of the first steps first. If one is
        damaged, the next batch raises DamagedData. With several processes one of them is enough; all of them check the
        shards that they read.
    """
    loader = TrainLoader(
        order,
        source=source,
        row_indices=row_indices,
        start_step=start_step,
        num_threads=config.num_threads,
        num_workers=config.num_workers,
        prefetch=config.prefetch,
        stall_seconds=config.timeout_s,
    )
    if verify:
        order.data.verifier.begin(_shards(order, start_step))
    return loader


def _shards(order: rows.Order, start_step: int) -> list[Entry]:
    """Returns the shards of the run, each once, those that the first steps read first, and the held-out ones last."""
    plan, found = order.plan(), {}
    streams = [order.data.stream(name) for name in plan.names]
    for step in range(start_step, start_step + _FIRST_STEPS):
        source, _, row = plan.locate(step, np.arange(order.batch_size))
        for k, r in zip(source.tolist(), row.tolist(), strict=True):
            shard = streams[k].shard(r * order.seq_len)
            found[shard["file"]] = shard
    for split in shards.SPLITS:
        for name in plan.names:
            found |= {s["file"]: s for s in order.data.entry(name, split)["shards"] if s["file"] not in found}
    return list(found.values())
