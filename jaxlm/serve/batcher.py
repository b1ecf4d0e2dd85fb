"""Continuous batching: one thread owns a decode engine and keeps its rows busy.

A turn starts to read at most one chunk of a prompt, then a step of all rows, and only then waits for the work of the
previous turn, so that the device is never idle. By then a row whose text ended has drawn more tokens, which are discarded.
"""

import collections
import contextlib
import dataclasses
import threading
import time
import typing
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np

from jaxlm.config import RunError
from jaxlm.models.decode.engine import Drawn, Engine, Entry, LogProbs, Prefill, Settings
from jaxlm.models.transformer import Transformer
from jaxlm.serve.guide import Guide

PATIENCE = 64  # steps for which a ring longer than needed is kept: the next request may need it


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request.

    Attributes:
      ids: the prompt, with a document's opening tokens; the caller checks it (`engine.check_prompts`).
      max_new_tokens: 0 for no new tokens, only the prompt's log-probabilities, with `echo`.
      temperature, top_k, top_p: 0, 0 and 1 for the likeliest token, all tokens, all probability.
      seed: a row's tokens depend on its prompt, its settings and its seed alone, not on its neighbours.
      bias: id -> the number to add to its logit.
      stop_ids: the ids that end the text; they are not part of it.
      logprobs: n asks for the log-probability of each token and of the n likeliest, at most 20; None for none.
      echo: True for the prompt's log-probabilities too; the first token has None.
    """

    ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    stop_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    echo: bool = False
    guide: Guide | None = None


class Token(typing.NamedTuple):
    """A token, with log-probabilities of the model's own distribution: before temperature, bias, top-k, top-p and guide."""

    id: int
    logp: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Update(typing.NamedTuple):
    """The news of a request: new tokens; once, with `echo`, the prompt's tokens; and how the request ended.

    `ended` is "" while the request runs; then "stop", "length", "cancelled", or "failed", for the reason `why`.
    """

    tokens: tuple[Token, ...]
    prompt: tuple[Token, ...] | None = None
    ended: str = ""
    why: str = ""


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


class Ticket:
    """A submitted request."""

    def __init__(self, ask: Ask, tell: Callable[[Update], None], wake: Callable[[], None]):
        self.ask, self.tell, self._wake = ask, tell, wake
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
        self._wake()


@dataclasses.dataclass(eq=False)
class _Run:
    """A request that has a row."""

    ticket: Ticket
    row: int
    prefill: Prefill | None
    room: int  # new tokens that it may have
    started: int = 0  # new tokens of the steps that were started
    said: int = 0  # new tokens that were told
    began: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def ask(self) -> Ask:
        return self.ticket.ask

    def slots(self, steps: int) -> int:
        return len(self.ask.ids) + min(self.started + steps - 1, self.room)


class _Started(typing.NamedTuple):
    """What a turn started: the steps of some requests, a chunk of a prompt."""

    runs: list[_Run]
    drawn: Drawn | None
    chunk: jax.Array | None


_NOTHING = _Started([], None, None)
_NO_TOKEN = "no token can follow: the guide or the bias allows none, or the logits are not finite"


class Batcher:
    """Answers requests with one model. For a mesh, create it under `jax.set_mesh`.

    Args:
      rows: how many requests run at once.
      queue: how many more requests may wait.
      more: see `models.decode.engine.Engine`.
    """

    def __init__(self, model: Transformer, variables: dict, rows: int = 8, queue: int = 64, **more: typing.Any):
        self.engine = Engine(model, variables, rows, **more)
        self._most_queued, self._queue = queue, collections.deque[Ticket]()
        self._runs: list[_Run] = []
        self._before = _NOTHING  # what the last turn started
        self._free = list(range(rows))[::-1]
        self._changed = threading.Condition()
        self._closed, self._died = False, ""
        self._turns = self._unneeded = 0  # the second: steps for which the ring was longer than needed
        self._counts = dict.fromkeys(("prompts", "prompt_tokens", "tokens", "steps", "step_bytes"), 0)
        self._ended: collections.Counter[str] = collections.Counter()
        self._seconds = 1.0  # for which a request has its row, about
        words = -(-model.config.vocab_size // 32)
        self._open_W = np.full(words, 2**32 - 1, np.uint32)
        # JAX's mesh belongs to a thread, and the thread that steps is not the one that made the batcher.
        self._mesh = jax.sharding.get_mesh()
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)

    def warm(self, tell: Callable[[str], None]) -> None:
        self.engine.warm(tell)

    def submit(self, ask: Ask, tell: Callable[[Update], None]) -> Ticket:
        """Submits a request, from any thread. `tell` is called on the batcher's thread: it must be quick.

        Raises Busy if the queue is full, RunError if the batcher ended.
        """
        ticket = Ticket(ask, tell, self._wake)
        with self._changed:
            if self._died or self._closed:
                raise RunError(f"the model is down: {self.stats().down}")
            if len(self._queue) >= self._most_queued + len(self._free):
                raise Busy(max(1.0, self._seconds * len(self._queue) / self.engine.rows))
            self._queue.append(ticket)
            if self._thread.ident is None:
                self._thread.start()
            self._changed.notify()
        return ticket

    def stats(self) -> Stats:
        return Stats(
            rows=self.engine.rows,
            busy=len(self._runs),
            queued=len(self._queue),
            ring=self.engine.slots,
            prefix_tokens=self.engine.prefixes.hits,
            ended=dict(self._ended),
            down=self._died or ("it was closed" if self._closed else ""),
            **self._counts,
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
                self._serve()
        except Exception as error:
            self._died = f"{type(error).__name__}: {error}".splitlines()[0]
        finally:
            with self._changed:
                self._closed, waiting = True, list(self._queue)
                self._queue.clear()
            how, why = ("failed", self._died) if self._died else ("cancelled", "")
            for run in list(self._runs):
                self._end(run, how, why=why)
            for ticket in waiting:
                self._tell(ticket, Update((), ended=how, why=why))

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not (self._closed or self._queue or self._runs):
                    self._changed.wait()
                if self._closed:
                    return
            self._turn()

    def _turn(self) -> None:
        """Starts one chunk of one prompt, and one step of all rows; then tells the tokens of the previous turn."""
        for run in [run for run in self._runs if run.ticket.cancelled]:
            self._end(run, "cancelled")
        self._admit()
        reading, chunk = [run for run in self._runs if run.prefill], None
        if reading:
            # One chunk a turn, so that a step of the other rows waits no longer than that.
            # Alternately the oldest, so that it ends, and the shortest, so that a long prompt does not block the others.
            self._turns += 1
            chunk = self._read(reading[0] if self._turns % 2 else min(reading, key=lambda run: run.prefill.left))
        if any(run.ask.guide for run in self._runs if run.prefill is None):
            self._deliver_all()  # a guide needs the last token to allow the next
        # The next step is started before the tokens of the last are looked at: the device never waits for the host.
        before, self._before = self._before, _Started(*self._step(), chunk)
        self._deliver_all(before)
        if not self._runs:
            self._before = _NOTHING  # frees its arrays on the device

    def _admit(self) -> None:
        """Gives free rows to waiting requests. A listener is told outside of the lock: it may submit a request itself."""
        while True:
            with self._changed:
                gone = [ticket for ticket in self._queue if ticket.cancelled]
                for ticket in gone:
                    self._queue.remove(ticket)
                ticket = self._queue.popleft() if self._queue and self._free else None
            for other in gone:
                self._tell(other, Update((), ended="cancelled"))
            if ticket is None:
                return
            ask = ticket.ask
            room = min(ask.max_new_tokens, self.engine.model.config.max_seq_len - len(ask.ids))
            run = _Run(ticket, self._free.pop(), None, room)
            self._runs.append(run)
            self._counts["prompts"] += 1
            self._counts["prompt_tokens"] += len(ask.ids)
            with self._only(run):
                run.prefill = self.engine.begin(ask.ids, echo=ask.echo)

    def _read(self, run: _Run) -> jax.Array | None:
        """Starts to read a chunk; returns an array to wait for, or None. After the last chunk the request enters its row."""
        chunk = None
        with self._only(run):
            if run.prefill.left:
                chunk = self.engine.read(run.prefill)
            if not run.prefill.left:
                self._enter(run)
        return chunk

    def _enter(self, run: _Run) -> None:
        """Puts a request whose prompt was read into its row."""
        if run.ask.echo:
            prompt = _echoed(run.ask, run.prefill.echo, self.engine.model.config.vocab_size)
            self._tell_run(run, Update((), prompt=prompt))
        if run not in self._runs:
            return  # the listener is gone
        if run.room <= 0:
            return self._end(run, "length")
        ask = run.ask
        settings = Settings(ask.temperature, ask.top_k, ask.top_p, ask.seed, ask.bias, ask.logprobs)
        self._fit([run])
        self.engine.insert(run.prefill, [Entry(run.row, settings)])
        run.prefill = None

    def _fit(self, new: list[_Run], steps: int = 1) -> None:
        """Makes the ring as long as the next steps need; shortens it only after PATIENCE steps."""
        inside = [run.slots(steps) for run in self._runs if run.prefill is None or run in new]
        length = self.engine.length_for(max(inside, default=0))
        # Resizing copies the whole ring, and each length is compiled separately: so it grows at once and shrinks late.
        self._unneeded = 0 if length >= self.engine.slots else self._unneeded + 1
        if length > self.engine.slots or self._unneeded > PATIENCE:
            self.engine.resize(length)

    def _step(self) -> tuple[list[_Run], Drawn | None]:
        """Starts a step of all requests that may have more tokens than were started."""
        live = [run for run in self._runs if run.prefill is None and run.started < run.room]
        mask_BxW = self._masks(live)
        live = [run for run in live if run in self._runs]  # without those whose guide failed
        if not live:
            return [], None
        steps = 1 if mask_BxW is not None else self.engine.burst  # a mask holds for one token
        self._fit([], steps)
        live_B = np.zeros(self.engine.rows, bool)
        live_B[[run.row for run in live]] = True
        drawn = self.engine.start(live_B, mask_BxW, steps)
        self._counts["steps"] += steps
        self._counts["step_bytes"] += steps * self.engine.step_bytes
        for run in live:
            run.started += steps
        return live, drawn

    def _deliver_all(self, started: _Started | None = None) -> None:
        """Waits for started work, by default the last turn's, and tells its tokens to each request that has not ended."""
        if started is None:
            started, self._before = self._before, _NOTHING
        drawn = started.drawn
        if all(run.ask.logprobs is None for run in started.runs):
            drawn = drawn and drawn._replace(logprobs=None)  # each array that is fetched costs .06 ms
        drawn, _ = jax.device_get((drawn, started.chunk))
        for run in started.runs:
            if run in self._runs:
                with self._only(run):
                    self._deliver(run, drawn)

    def _masks(self, live: list[_Run]) -> np.ndarray | None:
        """Returns the bits of the ids that the guides allow, (B, W); None if no row has a guide."""
        guided = [run for run in live if run.ask.guide]
        if not guided:
            return None
        mask_BxW = np.tile(self._open_W, (self.engine.rows, 1))
        for run in guided:
            with self._only(run):
                mask_BxW[run.row] = run.ask.guide.mask()
        return mask_BxW

    def _deliver(self, run: _Run, drawn: Drawn) -> None:
        """Tells a request its tokens of these steps, up to its end."""
        tokens, ended, why = [], "", ""
        for at in range(len(drawn.token_NxB)):
            token = int(drawn.token_NxB[at, run.row])
            if not drawn.sound_NxB[at, run.row]:
                ended, why = "failed", _NO_TOKEN
                break
            if run.ask.guide:
                run.ask.guide.accept(token)
            if token in run.ask.stop_ids:
                ended = "stop"
                break
            logprobs = drawn.logprobs and jax.tree.map(lambda x, at=at: x[at, run.row], drawn.logprobs)
            tokens.append(_token(token, logprobs, run.ask.logprobs))
            run.said += 1
            if run.said >= run.room:
                ended = "length"
                break
        self._counts["tokens"] += len(tokens)
        if ended:
            self._end(run, ended, tuple(tokens), why)
        elif tokens:
            self._tell_run(run, Update(tuple(tokens)))

    @contextlib.contextmanager
    def _only(self, run: _Run) -> Iterator[None]:
        """Ends only this request if the `with` block raises an error."""
        try:
            yield
        except Exception as error:
            if run in self._runs:
                self._end(run, "failed", why=f"{type(error).__name__}: {error}")

    def _end(self, run: _Run, ended: str, tokens: tuple[Token, ...] = (), why: str = "") -> None:
        # The row's slots in the ring stay as they are: the next prompt overwrites them, and nobody reads them before.
        self._runs.remove(run)
        self._free.append(run.row)
        self._seconds += 0.1 * (time.monotonic() - run.began - self._seconds)
        self._tell(run.ticket, Update(tokens, ended=ended, why=why))

    def _tell_run(self, run: _Run, update: Update) -> None:
        if not self._tell(run.ticket, update):
            self._end(run, "cancelled")

    def _tell(self, ticket: Ticket, update: Update) -> bool:
        """Returns False if the listener raises: it is gone."""
        if update.ended:
            self._ended[update.ended] += 1
        try:
            ticket.tell(update)
        except Exception:
            return False
        return True


def _token(token: int, logprobs: LogProbs | None, likeliest: int | None) -> Token:
    """Returns a Token with log-probabilities of it and of the `likeliest` likeliest; `likeliest` None: without."""
    if likeliest is None:
        return Token(token)
    count = min(likeliest, len(logprobs.top_ids))
    top = zip(logprobs.top_ids[:count].tolist(), logprobs.top[:count].tolist(), strict=True)
    return Token(token, float(logprobs.chosen), tuple(top))


def _echoed(ask: Ask, chunks: list[LogProbs], vocab_size: int) -> tuple[Token, ...]:
    """Returns the prompt's tokens; the first has no log-probability, nor have the virtual tokens of prompt tuning."""
    tokens = [Token(ask.ids[0])]
    for chunk in chunks:
        for at in range(len(chunk.chosen)):
            token = ask.ids[len(tokens)]
            likeliest = (ask.logprobs or 0) if token < vocab_size else None
            tokens.append(_token(token, jax.tree.map(lambda x, at=at: x[at], chunk), likeliest))
    return tuple(tokens)
