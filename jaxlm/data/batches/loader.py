"""Delivers the batches of an order to the train loop. Grain indexes and slices them; our own threads read them ahead.

Thread j of n puts the items start + j, start + j + n, ... into its queue, a lane; the reader takes an item from each lane in
turn, so their order depends on no thread. The threads are daemons, and waits for them have a limit, since a hung read can't be
interrupted; Python joins Grain's own threads when it ends. Shapes: B batch, b rows of it that this process needs, T tokens.
"""

import contextlib
import itertools
import queue
import threading
import time
import typing
import weakref
from collections.abc import Iterator, Sequence

import grain
import numpy as np

from jaxlm.config import ConfigError, RunError
from jaxlm.data.batches.order import Order
from jaxlm.data.shards.verify import Verifier
from jaxlm.host import files

_AHEAD = 8  # batches
_ENDLESS = 1 << 62  # no order ends
_IN_OUR_THREAD = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


class _Source:
    """An order as Grain reads it: some rows of each of its batches."""

    def __init__(self, order: Order, rows: Sequence[int] | None):
        self._order, self._rows = order, rows

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, item: int) -> typing.Any:
        return self._order.batch(item, self._rows)


def dataset(order: Order, rows: Sequence[int] | None = None) -> grain.MapDataset:
    """Returns the batches of an order, or these rows of each. Item i is what step i + 1 trains on."""
    return grain.MapDataset.source(_Source(order, rows))


class Ahead:
    """Reads the items from `start` on in daemon threads, up to `prefetch` items ahead of their use."""

    def __init__(self, items: grain.MapDataset, start: int, num_threads: int, prefetch: int):
        self._lanes = [queue.Queue(maxsize=-(-prefetch // num_threads)) for _ in range(num_threads)]
        self._turns = itertools.cycle(self._lanes)
        self._lane = next(self._turns)
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._fill, args=(lane, items[start + j :: num_threads]), daemon=True)
            for j, lane in enumerate(self._lanes)
        ]
        for thread in self._threads:
            thread.start()

    def _fill(self, lane: queue.Queue, items: grain.MapDataset) -> None:
        try:
            for item in items.to_iter_dataset(_IN_OUR_THREAD):
                lane.put(item)
                if self._closed.is_set():
                    return
        except Exception as error:
            lane.put(error)

    def get(self, timeout: float) -> typing.Any:
        """Returns the next item. Raises the error of the thread that reads it, or queue.Empty after `timeout` seconds."""
        item = self._lane.get(timeout=timeout)
        if isinstance(item, Exception):
            raise item
        self._lane = next(self._turns)
        return item

    def close(self, timeout: float = 1.0) -> None:
        """Ends the threads. A thread that hangs in a read is abandoned after `timeout` seconds; it ends with the process."""
        self._closed.set()
        end = time.monotonic() + timeout
        for lane, thread in zip(self._lanes, self._threads, strict=True):
            while thread.is_alive() and time.monotonic() < end:
                with contextlib.suppress(queue.Empty):
                    lane.get_nowait()  # the thread may wait for room
                thread.join(0.02)


class TrainLoader(Iterator[dict[str, np.ndarray]], contextlib.AbstractContextManager):
    """Yields the rows `row_indices` of the batches of steps start_step + 1, ... without end. Close it, or use `with`.

    Raises RunError if a file can't be read or a batch takes over `stall_seconds` (a dead disk blocks a read for ever);
    DamagedData if a shard differs from the manifest.
    """

    def __init__(
        self,
        order: Order,
        *,
        row_indices: Sequence[int] | np.ndarray | None = None,
        start_step: int = 0,
        num_threads: int = 0,
        prefetch: int = _AHEAD,
        stall_seconds: float = 600.0,
    ):
        size = order.plan.batch_size  # in this thread, so that a wrong mixture is an error here
        rows = None if row_indices is None else np.asarray(row_indices).tolist()
        if rows and not 0 <= min(rows) <= max(rows) < size:
            raise ValueError(f"row_indices must lie in [0, {size}), got {min(rows)}..{max(rows)}")
        self.step, self.stall_seconds, self._verifier = start_step, stall_seconds, order.data.verifier
        self._items = Ahead(dataset(order, rows), start_step, num_threads or files.threads(), prefetch)
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
                waits = self.waits_for() or "no file is being read: the machine is busy with other work"
                self._failed = self._failure(f"no batch within {self.stall_seconds:g} s (data.timeout_s): {waits}")
            except Exception as e:
                self._failed = self._failure(str(e) or type(e).__name__, e)
        raise self._failed

    def _failure(self, why: str, cause: Exception | None = None) -> RunError:
        again = "the same command goes on from the last checkpoint"
        error = RunError(f"the loader failed at step {self.step}: {why}; {again}")
        error.__cause__ = cause
        return error

    def waits_for(self) -> str:
        return self._verifier.oldest_read()

    def close(self) -> None:
        """Stops the threads, within a second even if a read hangs. A second call does nothing."""
        self._close()

    def __exit__(self, *exc) -> None:
        self.close()


def _close(items: Ahead, verifier: Verifier) -> None:
    verifier.end()
    items.close()
