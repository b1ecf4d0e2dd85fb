"""Continuous batching: one thread owns a decode engine and its scheduler; any thread submits requests."""

import collections
import contextlib
import threading
import typing
from collections.abc import Callable, Iterator, Mapping

import jax

from jaxlm.config import RunError
from jaxlm.host import files
from jaxlm.host.console import working
from jaxlm.models.decode.engine import Engine
from jaxlm.models.decode.schedule import Ask, Scheduler, Ticket, Update
from jaxlm.models.transformer import Transformer


class Busy(Exception):
    """The queue is full; `retry_after_s` says when there may be room."""

    def __init__(self, retry_after_s: float):
        super().__init__(f"all rows are busy and the queue is full: try again in {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s


class Stats(typing.NamedTuple):
    """The batcher's counts so far, and its present state."""

    rows: int
    busy: int  # rows that have a request
    queued: int
    ring: int  # slots
    prompts: int  # requests so far
    prompt_tokens: int
    prefix_tokens: int  # of the prompt tokens, found in the prefix cache
    tokens: int  # new tokens
    steps: int
    step_bytes: int  # of weights and cache, read by the steps
    ended: Mapping[str, int]  # how requests ended
    down: str = ""  # why it no longer answers


class Batcher:
    """Answers requests with one model. For a mesh, create it under `jax.set_mesh`.

    Args:
      rows: how many requests run at once.
      queue: how many more requests may wait.
      more: see `models.decode.engine.Engine`.
    """

    def __init__(self, model: Transformer, variables: dict, rows: int = 8, queue: int = 64, **more: typing.Any):
        self.engine = Engine(model, variables, rows, **more)
        self._scheduler, self._most_queued = Scheduler(self.engine), queue
        self._new = collections.deque[Ticket]()  # not yet the scheduler's
        self._changed = threading.Condition()
        self._closed, self._died = False, ""
        # JAX's mesh belongs to a thread, and the thread that steps is not the one that made the batcher.
        self._mesh = jax.sharding.get_mesh()
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)

    def warm(self, tell: Callable[[str], None]) -> None:
        self.engine.warm(tell)
        files.trim_memory()  # compiling leaves 300 MB

    def submit(self, ask: Ask, tell: Callable[[Update], None]) -> Ticket:
        """Submits a request, from any thread. `tell` is called on the batcher's thread: it must be quick.

        Raises Busy if the queue is full, RunError if the batcher ended.
        """
        ticket = Ticket(ask, tell, self._wake)
        with self._changed:
            if self._died or self._closed:
                raise RunError(f"the model is down: {self.stats().down}")
            if self._queued >= self._most_queued + self._scheduler.free:
                raise Busy(max(1.0, self._scheduler.seconds * self._queued / self.engine.rows))
            self._new.append(ticket)
            if self._thread.ident is None:
                self._thread.start()
            self._changed.notify()
        return ticket

    @property
    def _queued(self) -> int:
        return len(self._new) + len(self._scheduler.waiting)

    def stats(self) -> Stats:
        return Stats(
            rows=self.engine.rows,
            busy=len(self._scheduler.runs),
            queued=self._queued,
            ring=self.engine.slots,
            prefix_tokens=self.engine.prefixes.hits,
            ended=dict(self._scheduler.ended),
            down=self._died or ("it was closed" if self._closed else ""),
            **self._scheduler.counts,
        )

    def close(self) -> None:
        """Ends the thread; requests that still run are cancelled."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.ident and threading.current_thread() is not self._thread:
            self._thread.join()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _run(self) -> None:
        try:
            with contextlib.nullcontext() if self._mesh.empty else jax.set_mesh(self._mesh):
                while self._fetched():
                    self._scheduler.turn()
        except Exception as error:
            self._died = f"{type(error).__name__}: {error}".splitlines()[0]
        finally:
            with self._changed:
                self._closed = True
                self._hand_over()
            self._scheduler.close("failed" if self._died else "cancelled", self._died)

    def _fetched(self) -> bool:
        """Waits for requests and gives them to the scheduler. Returns False once the batcher is closed."""
        with self._changed:
            while not (self._closed or self._new or self._scheduler.busy):
                self._changed.wait()
            self._hand_over()
            return not self._closed

    def _hand_over(self) -> None:
        self._scheduler.waiting.extend(self._new)
        self._new.clear()


@contextlib.contextmanager
def running(model: Transformer, variables: dict, mesh: jax.sharding.Mesh, **sizes: int) -> Iterator[Batcher]:
    """Yields a compiled batcher that speculates. Clears `variables`: the batcher has them, laid out for decoding."""
    with jax.set_mesh(mesh):
        with working("laying out the model"):
            batcher = Batcher(model, variables, **sizes, speculate=True)
            variables.clear()
        with contextlib.closing(batcher):
            with working("compiling") as tell:
                batcher.warm(lambda line: tell(0, line))
            yield batcher
