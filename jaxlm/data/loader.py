"""Delivers batches to the train loop.

`ahead` runs the threads, the worker processes and the read-ahead. Only `rows.RowPlan` decides which rows a batch holds,
so the numbers of threads, workers, hosts and restarts never change a batch. The step is the only state of an iterator.

Shapes: B batch, b rows of it that this process needs, T tokens, T1 = T + 1.
"""

import queue
import typing
import weakref
from collections.abc import Iterator

import numpy as np

from jaxlm.config import ConfigError, RunError
from jaxlm.data import ahead
from jaxlm.data.order import Order
from jaxlm.data.verify import Verifier


class Items:
    """Gives random access to batches: item j is this process's part of item `start_step` + j of the order."""

    def __init__(self, order: Order, row_indices: np.ndarray, start_step: int):
        self._order, self._slots, self._start = order, np.asarray(row_indices, np.int64).reshape(-1), start_step

    def __getitem__(self, j: int) -> typing.Any:
        return self._order.batch(self._start + j, self._slots.tolist())

    def waits_for(self) -> str:
        """Returns the file that is being read, and since when; "" if none is."""
        return self._order.data.verifier.oldest_read()


class TrainLoader(Iterator[dict[str, np.ndarray]]):
    """Yields the batches of steps start_step, start_step + 1, ... for ever. Close it, or use it in a `with`.

    Args:
      order: decides which row is in which slot of which batch.
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
        order: Order,
        *,
        row_indices: np.ndarray | None = None,
        start_step: int = 0,
        num_threads: int = 2,
        num_workers: int = 0,
        prefetch: int = 4,
        stall_seconds: float = 600.0,
    ):
        size = order.plan.batch_size  # in this thread: what is wrong with a mixture is an error here
        slots = np.arange(size) if row_indices is None else row_indices
        if len(slots) and not (min(slots) >= 0 and max(slots) < size):
            raise ValueError(f"row_indices must lie in [0, {size}), got {min(slots)}..{max(slots)}")
        made, num_threads, prefetch = Items(order, slots, start_step), max(1, num_threads), max(1, prefetch)
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


def _close(items: ahead.Threads | ahead.Workers, verifier: Verifier) -> None:
    verifier.end()
    items.close()
