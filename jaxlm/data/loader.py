"""Delivers batches to the train loop, and held-out rows to evaluation.

Grain runs the threads, the worker processes and the read-ahead. Only `rows.RowPlan` decides which rows a batch holds,
so the numbers of threads, workers, hosts and restarts never change a batch. The step is the only state of an iterator.

Shapes: B batch, b rows of it that this process needs, T tokens, T1 = T + 1.
"""

import ctypes
import dataclasses
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator

import grain
import numpy as np
from absl import flags

from jaxlm.config import DataConfig, RunError
from jaxlm.data import rows, shards


class BatchSource:
    """Gives random access to batches: item i is this process's part of the batch of step `start_step` + i.

    Args:
      order: decides which row is in which slot of which batch.
      row_indices: the slots of the batch that this process makes.
      start_step: the step of item 0.
    """

    def __init__(self, order: rows.Order, row_indices: np.ndarray, start_step: int):
        self._plan, self._seq_len, self._start = order.plan(), order.seq_len, start_step
        self._eos_id, plan = order.data.eos_id, self._plan
        self._slots = np.asarray(row_indices, np.int64).reshape(-1)
        if self._slots.size and not (self._slots.min() >= 0 and self._slots.max() < plan.batch_size):
            raise ValueError(
                f"row_indices must lie in [0, {plan.batch_size}), got {self._slots.min()}..{self._slots.max()}"
            )
        self._streams = [order.data.stream(name) for name in plan.names]

    def __len__(self) -> int:
        return sys.maxsize >> 1

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        source, _, row = self._plan.locate(self._start + int(i), self._slots)
        T = self._seq_len
        rows_bxT1 = np.empty((self._slots.size, T + 1), np.int32)
        for out_T1, k, r in zip(rows_bxT1, source.tolist(), row.tolist(), strict=True):
            out_T1[:] = self._streams[k].read(r * T, r * T + T + 1)
        return rows.make_batch(rows_bxT1, self._eos_id)

    def __repr__(self) -> str:
        return f"BatchSource(start_step={self._start}, rows={self._slots.size}, seq_len={self._seq_len})"


class TrainLoader(Iterator[dict[str, np.ndarray]]):
    """Yields the batches of steps start_step, start_step + 1, ... for ever. Close it, or use it in a `with`.

    Args:
      order: decides which row is in which slot of which batch.
      row_indices: the indices of the rows (of B) that this process yields, in this order; all by default.
      start_step: the step of the first batch.
      num_threads: the number of threads that make batches (in each process).
      num_workers: the number of worker processes. With 0 this process makes the batches, fast enough for millions of
        tokens a second. Workers are spawned, so a script with workers needs `if __name__ == "__main__"`.
      prefetch: the number of batches made ahead (in each process).
      stall_seconds: the seconds to wait for a batch before RunError is raised (a dead disk blocks a read for ever).

    Yields:
      The dict that `rows.make_batch` returns, with arrays [b, T].

    Raises:
      RunError: a read failed, a worker died, or a batch took too long.
    """

    def __init__(
        self,
        order: rows.Order,
        *,
        row_indices: np.ndarray | None = None,
        start_step: int = 0,
        num_threads: int = 2,
        num_workers: int = 0,
        prefetch: int = 4,
        stall_seconds: float = 600.0,
    ):
        slots = np.arange(order.batch_size) if row_indices is None else row_indices
        source = BatchSource(order, slots, start_step)
        options = grain.ReadOptions(num_threads=max(1, num_threads), prefetch_buffer_size=max(1, prefetch))
        dataset = grain.MapDataset.source(source).to_iter_dataset(options)
        if num_workers:
            if not flags.FLAGS.is_parsed():
                # Grain reads absl's flags when it starts workers. A console script or a notebook never parses them.
                flags.FLAGS.mark_as_parsed()
            workers = grain.MultiprocessingOptions(num_workers=num_workers, per_worker_buffer_size=max(1, prefetch))
            # Batches come through pipes, since Grain leaks its shared memory if a worker or this process is killed.
            pipes = grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)
            dataset = grain.experimental.WithOptionsIterDataset(dataset, pipes)
            dataset = dataset.mp_prefetch(workers, worker_init_fn=_die_with_parent)
        self.step = start_step
        self._iterator = iter(dataset)
        self._stall_seconds = stall_seconds
        # Why a thread and a queue: Grain's next() would block for ever on a hung read; a queue's get has a timeout.
        self._ready: queue.Queue = queue.Queue(maxsize=1)
        self._closed = threading.Event()
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._pump, name="loader-pump", daemon=True)
        self._thread.start()

    def _pump(self) -> None:
        while not self._closed.is_set():
            try:
                item = next(self._iterator)
            except Exception as e:
                item = e
            while not self._closed.is_set():
                try:
                    self._ready.put(item, timeout=0.2)
                    break
                except queue.Full:
                    continue
            if isinstance(item, Exception):
                return

    def __next__(self) -> dict[str, np.ndarray]:
        if self._closed.is_set():
            raise RuntimeError("the loader is closed")
        if self._failed is None:
            try:
                item = self._ready.get(timeout=self._stall_seconds)
            except queue.Empty:
                item = TimeoutError(f"no batch within {self._stall_seconds:g} s: a read or a worker hangs")
            if not isinstance(item, Exception):
                self.step += 1
                return item
            self._failed = item
        raise RunError(
            f"the loader failed at step {self.step}: {self._failed}; the same command goes on from the last checkpoint"
        ) from self._failed

    def close(self) -> None:
        """Stops threads and workers. A second call does nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join(timeout=10)
        self._iterator.close()

    def __enter__(self) -> "TrainLoader":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def open_train(order: rows.Order, config: DataConfig, *, row_indices: np.ndarray, start_step: int) -> TrainLoader:
    """Returns the loader with the threads, workers, read-ahead and timeout of `config.data`."""
    return TrainLoader(
        order,
        row_indices=row_indices,
        start_step=start_step,
        num_threads=config.num_threads,
        num_workers=config.num_workers,
        prefetch=config.prefetch,
        stall_seconds=config.timeout_s,
    )


def _die_with_parent(worker: int, num_workers: int) -> None:
    """Makes Linux end a worker when its parent was killed. Grain would leave it running for ever."""
    del worker, num_workers
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG
        if os.getppid() == 1:
            os._exit(1)


@dataclasses.dataclass(frozen=True)
class ValidationBatch:
    """A batch of held-out rows.

    Attributes:
      batch: the dict that `rows.make_batch` returns, with weight 0 on padding.
      target_tokens: the number of targets with weight.
      target_bytes: the number of raw UTF-8 bytes of those targets.
    """

    batch: dict[str, np.ndarray]
    target_tokens: int
    target_bytes: int


def validation_rows(
    data: shards.DataDir, source: str, *, seq_len: int, batch_size: int, max_rows: int | None = None
) -> Iterator[ValidationBatch]:
    """Yields a source's held-out tokens in order, in batches [batch_size, seq_len]. Each token is a target once.

    The last row is padded with EOS. Yields nothing if fewer than two tokens are held out. bits_per_byte = summed loss in
    nats / ln 2 / summed `target_bytes`.

    Args:
      data: an open data directory.
      source: the name of one of its sources.
      max_rows: the most rows to read; None for all.
    """
    stream, length = data.stream(source, "val"), data.token_bytes()
    total = max(0, -(-(stream.tokens - 1) // seq_len))
    total = total if max_rows is None else min(total, max_rows)
    for first in range(0, total, batch_size):
        rows_BxT1 = np.full((batch_size, seq_len + 1), data.eos_id, np.int32)
        weights_BxT = np.zeros((batch_size, seq_len), np.float32)
        for b, row in enumerate(range(first, min(total, first + batch_size))):
            tokens = stream.read(row * seq_len, min(stream.tokens, (row + 1) * seq_len + 1))
            rows_BxT1[b, : len(tokens)] = tokens
            weights_BxT[b, : len(tokens) - 1] = 1
        batch = {**rows.make_batch(rows_BxT1, data.eos_id), "weights": weights_BxT}
        counted = batch["targets"][weights_BxT > 0]
        yield ValidationBatch(batch, int(counted.size), int(length[counted].sum()))
