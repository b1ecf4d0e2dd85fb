"""Makes the items of a source ahead of their use: in threads, or in worker processes that have such threads.

Items are made in lanes: lane j of n makes items j, j + n, j + 2n, ..., each in order, and the reader takes from one lane
after the other. So the order of items does not depend on who is fast.

A read from a disk that hangs can't be interrupted. So nothing here waits for a thread or a worker without a time limit: the
threads are daemons, and a worker is a plain subprocess, which can be killed at any moment, since it holds nothing. (Grain's
threads and processes serve as well until one hangs or is killed: then its `close`, and the exit of the interpreter, wait
for ever.) A worker ends by itself when its parent is gone, and ignores ctrl-C and SIGTERM, so that a run that is told to stop
still gets its batches up to the last step.
"""

import contextlib
import itertools
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import typing
from collections.abc import Iterator, Sequence

from jaxlm.config import ConfigError, RunError

_MAIN = """
import signal
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
from jaxlm.data import ahead
ahead.serve()
"""
_SIGN_SECONDS = 1.0  # a worker without an item says this often which file it waits for


class Source(typing.Protocol):
    """What lanes read from; can be pickled if it is read by workers."""

    def __getitem__(self, i: int) -> typing.Any:
        """Returns item i. Thread-safe."""

    def waits_for(self) -> str:
        """Returns the file that is being read, and since when; "" if none is."""


class Lanes:
    """Takes the items of several iterators in turn. Each is run ahead in a daemon thread of its own.

    Args:
      makers: the iterators, endless or ended by an exception.
      ahead: the number of items that each makes ahead.
    """

    def __init__(self, makers: Sequence[Iterator], ahead: int):
        self._lanes = [queue.Queue(maxsize=ahead) for _ in makers]
        self._turns = itertools.cycle(self._lanes)
        self._lane = next(self._turns)
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._fill, args=pair, name=f"read-ahead-{i}", daemon=True)
            for i, pair in enumerate(zip(self._lanes, makers, strict=True))
        ]
        for thread in self._threads:
            thread.start()

    def _fill(self, lane: queue.Queue, maker: Iterator) -> None:
        while not self._closed.is_set():
            try:
                item = next(maker)
            except Exception as e:
                lane.put(e)
                return
            lane.put(item)

    def get(self, timeout: float) -> typing.Any:
        """Returns the next item. Raises what its lane raised, or queue.Empty after `timeout` seconds."""
        item = self._lane.get(timeout=timeout)
        if isinstance(item, Exception):
            raise item
        self._lane = next(self._turns)
        return item

    @property
    def turn(self) -> int:
        """The index of the lane whose item is next."""
        return self._lanes.index(self._lane)

    def close(self, timeout: float = 1.0) -> None:
        """Ends the threads. One that hangs in a read is left behind after `timeout` seconds; it ends with the process."""
        self._closed.set()
        end = time.monotonic() + timeout
        for lane, thread in zip(self._lanes, self._threads, strict=True):
            while thread.is_alive() and time.monotonic() < end:
                _empty(lane)
                thread.join(0.02)


def _empty(lane: queue.Queue) -> None:
    try:
        while True:
            lane.get_nowait()
    except queue.Empty:
        pass


class Threads:
    """The items of a source, made by threads of this process.

    Args:
      source: where the items come from.
      first, stride: items first, first + stride, first + 2 * stride, ... are made.
      num_threads, prefetch: how many threads, and how many items ahead, all together (at least one a thread).
    """

    def __init__(self, source: Source, num_threads: int, prefetch: int, *, first: int = 0, stride: int = 1):
        self._source = source
        makers = [
            (source[i] for i in itertools.count(first + j * stride, stride * num_threads)) for j in range(num_threads)
        ]
        self._lanes = Lanes(makers, -(-prefetch // num_threads))

    def get(self, timeout: float) -> typing.Any:
        """Returns the next item. Raises what the source raised, or queue.Empty after `timeout` seconds."""
        return self._lanes.get(timeout)

    def waits_for(self) -> str:
        """Returns the file that is being read, and since when; "" if none is."""
        return self._source.waits_for()

    def close(self) -> None:
        """Ends the threads, within a second."""
        self._lanes.close()


class Workers:
    """The items of a source, made by processes: worker k of n makes items k, k + n, ... in `num_threads` threads."""

    def __init__(self, source: Source, num_workers: int, num_threads: int, prefetch: int):
        jobs = [(source, num_threads, prefetch, k, num_workers) for k in range(num_workers)]
        self._workers = [_Worker(job) for job in jobs]
        self._lanes = Lanes([worker.items() for worker in self._workers], 1)

    def get(self, timeout: float) -> typing.Any:
        """Returns the next item. Raises what the source raised, or queue.Empty after `timeout` seconds.

        Raises RunError if the worker whose turn it is was killed or ended, and says which one and how.
        """
        return self._lanes.get(timeout)

    def waits_for(self) -> str:
        """Returns the worker whose item is awaited, and the file that it reads, if it says so."""
        worker = self._workers[self._lanes.turn]
        return f"{worker.name}: {worker.waits_for}" if worker.waits_for else worker.name

    def close(self) -> None:
        """Kills the workers and ends the threads, within a few seconds. One that can't be killed is left behind."""
        for worker in self._workers:
            worker.process.kill()
        self._lanes.close()
        for worker in self._workers:
            worker.wait()


class _Worker:
    """A worker process and its two pipes.

    No other process holds their ends (as with `multiprocessing`'s queues), so a worker that dies, even in the middle of an
    item, is the end of the file for its reader.
    """

    def __init__(self, job: tuple):
        *_, k, n = job
        self.name = f"worker process {k + 1} of {n} of the loader"
        self.waits_for = "it is starting"
        self._job, self._items = job, 0
        path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _MAIN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
        )
        self.name += f" (pid {self.process.pid})"

    def items(self) -> Iterator[typing.Any]:
        """Yields the worker's items. Raises what it raised, or RunError if it ended."""
        try:
            pickle.dump(self._job, self.process.stdin)
            self.process.stdin.flush()  # it stays open: its end tells the worker that this process is gone
            while True:
                kind, content = pickle.load(self.process.stdout)
                if kind == "error":
                    raise content
                self.waits_for = content if kind == "waits" else ""
                if kind == "item":
                    self._items += 1
                    yield content
        except (EOFError, OSError, pickle.UnpicklingError) as e:
            raise RunError(self._ending()) from e
        finally:
            for pipe in (self.process.stdin, self.process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()

    def _ending(self) -> str:
        code, began = self.wait(), "" if self._items else " before its first batch"
        if code is None:
            return f"{self.name} closed its pipe{began}"
        if code < 0:
            more = (
                ": often the memory is full; lower data.num_workers or data.prefetch" if code == -signal.SIGKILL else ""
            )
            return f"{self.name} was ended by {signal.Signals(-code).name}{began}{more}"
        return f"{self.name} ended with exit code {code}{began}; what it wrote on standard error says why"

    def wait(self) -> int | None:
        """Returns the exit code; None if the process still lives after five seconds."""
        try:
            return self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return None


def serve() -> None:
    """Runs a worker process: reads its job from standard input, writes items to standard output, for ever."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not come between the items
    # `pickle.load` reads no further than the job; the thread then waits for the end of the file.
    source, num_threads, prefetch, k, num_workers = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    items = Threads(source, num_threads, prefetch, first=k, stride=num_workers)
    frame: tuple[str, typing.Any] = ("", None)
    while frame[0] != "error":
        try:
            frame = ("item", items.get(_SIGN_SECONDS))
        except queue.Empty:
            frame = ("waits", items.waits_for())
        except (ConfigError, RunError) as e:
            frame = ("error", e)
        except Exception as e:
            frame = ("error", RunError(f"{type(e).__name__}: {e}"))
        try:
            pickle.dump(frame, out, protocol=5)
            out.flush()
        except BrokenPipeError:
            break
    os._exit(0)


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(0)
