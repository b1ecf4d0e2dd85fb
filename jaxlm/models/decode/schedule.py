"""Gives the rows of a decode engine to requests: to those of a server as to a batch that is known beforehand.

A turn starts to read prompts, then steps of all rows, and only then waits for the work of the previous turn, so that the
device is never idle. By then a row whose text ended has drawn more tokens, which are discarded. All decisions follow from the
requests and the drawn tokens, so that the processes of a cluster decide alike.
"""

import collections
import contextlib
import dataclasses
import itertools
import time
import typing
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from jaxlm.config import RunError
from jaxlm.models.decode.drafts import Draft
from jaxlm.models.decode.engine import Drawn, Engine, LogProbs, Prefill, Settings, check_prompts, power_of_two
from jaxlm.models.decode.sampling import NO_PENALTIES

PATIENCE = 64  # steps for which a ring longer than needed is kept: the next request may need it
TOGETHER = 2048  # about how many tokens of a batch's prompts are read at once
ROWS = 64  # of a batch that are answered at once
BURST = 8  # steps of a batch between two looks at its tokens: nobody waits for them, and a look costs the device time


class Guide(typing.Protocol):
    """Says which ids may come next in one row."""

    def mask(self) -> np.ndarray:
        """Returns the bits of the ids, uint32[ceil(V / 32)]."""

    def accept(self, token: int) -> None:
        """Takes the id that was drawn."""


@dataclasses.dataclass(frozen=True)
class Ask(Settings):
    """A request.

    Attributes:
      ids: the prompt, with a document's opening tokens; the caller checks it (`engine.check_prompts`).
      max_new_tokens: 0 for no new tokens, only the prompt's log-probabilities, with `echo`, or its mean, with `pools`.
      stop_ids: the ids that end the text; they are part of it only with `keeps_stop`.
    """

    ids: tuple[int, ...]
    max_new_tokens: int
    stop_ids: tuple[int, ...] = ()
    guide: Guide | None = None
    keeps_stop: bool = False


class Token(typing.NamedTuple):
    """A token, with log-probabilities of the model's own distribution: before all that a request asks for."""

    id: int
    logp: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Update(typing.NamedTuple):
    """The news of a request: new tokens; once, with `echo`, the prompt's tokens, with `pools`, float32 (D,); how it ended.

    `ended` is "" while the request runs; then "stop", "length", "cancelled", or "failed", for the reason `why`.
    """

    tokens: tuple[Token, ...]
    prompt: tuple[Token, ...] | None = None
    ended: str = ""
    why: str = ""
    pooled: np.ndarray | None = None


class Ticket:
    """A submitted request. `tell` is called on the scheduler's thread, so it must be quick; if it raises, nobody listens."""

    def __init__(
        self, ask: Ask, tell: Callable[[Update], None] = lambda _: None, wake: Callable[[], None] = lambda: None
    ):
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
    room: int  # new tokens that it may have
    prefill: Prefill | None = None
    started: int = 0  # new tokens of the steps that were started
    said: int = 0  # new tokens that were told
    began: float = dataclasses.field(default_factory=time.monotonic)
    draft: Draft | None = None

    @property
    def ask(self) -> Ask:
        return self.ticket.ask

    def slots(self, steps: int) -> int:
        return len(self.ask.ids) + min(self.started + steps - 1, self.room)


class _Started(typing.NamedTuple):
    """What a turn started: the steps of some requests, a chunk of a prompt."""

    runs: list[_Run]
    drawn: Drawn | None
    proposed: Sequence[int] = ()  # to the only request
    chunk: jax.Array | None = None


_NOTHING = _Started([], None)
_DIVERGED = "the logits are not finite: have the weights diverged?"
_NO_TOKEN = "no token can follow: the guide or the bias allows none, or the logits are not finite"


class Scheduler:
    """Answers requests with one engine, first come, first served. Not thread-safe.

    Args:
      batch: of requests that are known beforehand, how many steps are run before the host reads their tokens. Then several
        prompts are read together, equal neighbours once, and all free rows are filled before the next step. 0 for others: a
        turn reads one chunk of one prompt, so that the next token of the other rows waits for no more than that.

    Attributes:
      waiting: requests without a row. Append to it, then call `turn` while `busy`.
      runs: requests that have a row.
      counts, ended: figures so far; how requests ended.
      seconds: for how long a request has its row, about.
    """

    def __init__(self, engine: Engine, batch: int = 0):
        self.engine, self._batch, self._burst = engine, bool(batch), batch or engine.burst
        self.waiting, self.runs = collections.deque[Ticket](), list[_Run]()
        self.counts = dict.fromkeys(("prompts", "prompt_tokens", "tokens", "steps", "step_bytes"), 0)
        self.ended, self.seconds = collections.Counter[str](), 1.0
        self._before = _NOTHING  # what the last turn started
        self._free = list(range(engine.rows))[::-1]
        self._places: dict[tuple[int, ...], int] = {}  # of the prompts that a batch read together last
        self._prefill: Prefill | None = None
        self._turns = self._unneeded = 0  # the second: steps for which the ring was longer than needed
        self._open_W = np.full(-(-engine.model.config.vocab_size // 32), 2**32 - 1, np.uint32)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.runs)

    @property
    def free(self) -> int:
        return len(self._free)

    def turn(self) -> None:
        """Starts to read prompts, and steps of all rows; then tells the tokens of the previous turn."""
        for run in [run for run in self.runs if run.ticket.cancelled]:
            self._end(run, "cancelled")
        ahead = not (self._batch and self.waiting)  # else rows that end are filled before the next step
        if not ahead or self._drafting or any(run.ask.guide for run in self.runs if run.prefill is None):
            self._deliver_all()  # a guide needs the last token to allow the next, and a draft to propose it
        self._admit()
        reading, chunk = [run for run in self.runs if run.prefill], None
        if reading:
            # Alternately the oldest, so that it ends, and the shortest, so that a long prompt does not block the others.
            self._turns += 1
            chunk = self._read(reading[0] if self._turns % 2 else min(reading, key=lambda run: run.prefill.left))
        # The next step is started before the tokens of the last are looked at: the device never waits for the host.
        before, self._before = self._before, self._step()._replace(chunk=chunk)
        self._deliver_all(before)
        if not self.runs:
            self._before = _NOTHING  # frees its arrays on the device

    def close(self, ended: str, why: str) -> None:
        """Ends all requests."""
        for run in list(self.runs):
            self._end(run, ended, why=why)
        while self.waiting:
            self._tell(self.waiting.popleft(), Update((), ended=ended, why=why))

    def _admit(self) -> None:
        """Gives free rows to waiting requests."""
        for ticket in [ticket for ticket in self.waiting if ticket.cancelled]:
            self.waiting.remove(ticket)
            self._tell(ticket, Update((), ended="cancelled"))
        while self.waiting and self._free:
            ticket = self.waiting.popleft()
            ask, context = ticket.ask, self.engine.model.config.max_seq_len
            run = _Run(ticket, self._free.pop(), min(ask.max_new_tokens, context - len(ask.ids)))
            self.runs.append(run)
            self.counts["prompts"] += 1
            self.counts["prompt_tokens"] += len(ask.ids)
            with self._only(run):
                if self._batch and not (ask.adapter or ask.echo or ask.pools):
                    self._enter(run, self._of_batch(ask.ids), self._places[ask.ids])
                else:
                    run.prefill = self.engine.begin(ask.ids, settings=ask)

    def _of_batch(self, ids: tuple[int, ...]) -> Prefill:
        """Returns a Prefill with this prompt. If it was not read yet, reads it together with those that are next."""
        if ids not in self._places:
            self._prefill = None  # frees the memory first
            most = min(max(1, TOGETHER // self.engine.chunk), self.engine.rows)
            following = (ticket.ask.ids for ticket in self.waiting)
            prompts = [*itertools.islice(dict.fromkeys(itertools.chain([ids], following)), most)]
            self._places = {prompt: place for place, prompt in enumerate(prompts)}
            self._prefill = self.engine.begin(*prompts)
            while self._prefill.left:
                self.engine.read(self._prefill)
        return self._prefill

    def _read(self, run: _Run) -> jax.Array | None:
        """Starts to read a chunk; returns an array to wait for, or None. After the last chunk the request enters its row."""
        chunk = None
        with self._only(run):
            if run.prefill.left:
                chunk = self.engine.read(run.prefill)
            if not run.prefill.left:
                if run.ask.echo:
                    prompt = _echoed(run.ask, run.prefill.echo, self.engine.model.config.vocab_size)
                    self._tell_run(run, Update((), prompt=prompt))
                if run.ask.pools and not np.isfinite(run.prefill.pooled).all():
                    return self._end(run, "failed", why=_DIVERGED)
                if run.ask.pools:
                    self._tell_run(run, Update((), pooled=run.prefill.pooled / run.prefill.done))
                if run in self.runs:  # else the listener is gone
                    self._enter(run, run.prefill)
        return chunk

    def _enter(self, run: _Run, prefill: Prefill, place: int = 0) -> None:
        """Puts a request into its row, whose prompt is in `prefill` at `place`."""
        if run.room <= 0:
            return self._end(run, "length")
        run.prefill = None
        self._fit()
        self.engine.insert(prefill, run.row, run.ask, place)
        if self.engine.speculates and run.ask.plain and not run.ask.guide and run.row == 0:
            run.draft = self.engine.draft(run.ask.ids)

    @property
    def _drafting(self) -> bool:
        """True if the only request may get proposals as soon as its tokens are known, or got some that may be refused."""
        draft = self.runs[0].draft if len(self.runs) == 1 else None
        return bool(self._before.proposed or (draft and draft.near))

    def _proposed(self, live: list[_Run]) -> list[int]:
        """Returns tokens to propose to the first row if it lives alone, all its tokens are known, and there is room."""
        run = live[0]
        if len(self.runs) > 1 or not run.draft or run.started != run.said:
            return []
        return run.draft.propose() if run.started + run.draft.size < run.room else []

    def _fit(self, steps: int = 1) -> None:
        """Makes the ring as long as the next steps need; shortens it only after PATIENCE steps."""
        length = self.engine.length_for(max((run.slots(steps) for run in self.runs if run.prefill is None), default=0))
        # Resizing copies the whole ring, and each length is compiled separately: so it grows at once and shrinks late.
        self._unneeded = 0 if length >= self.engine.slots else self._unneeded + 1
        if length > self.engine.slots or self._unneeded > PATIENCE:
            self.engine.resize(length)

    def _step(self) -> _Started:
        """Starts a step of all requests that may have more tokens than were started."""
        live = [run for run in self.runs if run.prefill is None and run.started < run.room]
        mask_BxW = self._masks(live)
        live = [run for run in live if run in self.runs]  # without those whose guide failed
        if not live:
            return _NOTHING
        if proposed := self._proposed(live):
            return self._step_of_draft(live[0], proposed)
        # Mask and penalties hold for one token, and a prompt that is being read waits for no more than a step between chunks.
        reading = any(run.prefill for run in self.runs)
        penalised = any(run.ask.penalties != NO_PENALTIES for run in live)
        steps = 1 if mask_BxW is not None or reading or penalised else self._burst
        self._fit(steps)
        live_B = np.zeros(self.engine.rows, bool)
        live_B[[run.row for run in live]] = True
        drawn = self.engine.start(live_B, mask_BxW, steps, penalised)
        self.counts["steps"] += steps
        self.counts["step_bytes"] += steps * self.engine.step_bytes
        for run in live:
            run.started += steps
        return _Started(live, drawn)

    def _step_of_draft(self, run: _Run, proposed: list[int]) -> _Started:
        steps = len(proposed) + 1
        self._fit(steps)
        run.started += steps  # until it is known how many are refused
        self.counts["steps"] += 1
        self.counts["step_bytes"] += self.engine.step_bytes
        return _Started([run], self.engine.start_first(proposed), proposed)

    def _deliver_all(self, started: _Started | None = None) -> None:
        """Waits for started work, by default the last turn's, and tells its tokens to each request that has not ended."""
        if started is None:
            started, self._before = self._before, _NOTHING
        drawn = started.drawn
        if all(run.ask.logprobs is None for run in started.runs):
            drawn = drawn and drawn._replace(logprobs=None)  # each array that is fetched costs .06 ms
        drawn, _ = jax.device_get((drawn, started.chunk))
        for run in started.runs:
            if run in self.runs:
                with self._only(run):
                    self._deliver(run, drawn, started.proposed)

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

    def _deliver(self, run: _Run, drawn: Drawn, proposed: Sequence[int] = ()) -> None:
        """Tells a request its tokens of these steps, up to its end, or up to the first that is not the proposed one."""
        tokens, ended, why, ask = [], "", "", run.ask
        for at in range(len(drawn.token_NxB)):
            token = int(drawn.token_NxB[at, run.row])
            if not drawn.sound_NxB[at, run.row]:
                ended, why = "failed", _NO_TOKEN if ask.guide or ask.bias else _DIVERGED
                break
            if ask.guide:
                ask.guide.accept(token)
            ended = "stop" if token in ask.stop_ids else ""
            if not ended or ask.keeps_stop:
                logprobs = drawn.logprobs and jax.tree.map(lambda x, at=at: x[at, run.row], drawn.logprobs)
                tokens.append(_token(token, logprobs, ask.logprobs))
                run.said += 1
            if not ended and run.said >= run.room:
                ended = "length"
            if run.draft:
                run.draft.add([token])
            if ended or (at < len(proposed) and token != proposed[at]):
                break
        if proposed:
            run.started -= len(proposed) - at
            run.draft.judge(at + 1)
        self.counts["tokens"] += len(tokens)
        if ended:
            self._end(run, ended, tuple(tokens), why)
        elif tokens:
            self._tell_run(run, Update(tuple(tokens)))

    @contextlib.contextmanager
    def _only(self, run: _Run) -> Iterator[None]:
        """Ends only this request if the `with` block raises an error; a batch ends as a whole."""
        try:
            yield
        except Exception as error:
            if self._batch:
                raise
            if run in self.runs:
                self._end(run, "failed", why=f"{type(error).__name__}: {error}")

    def _end(self, run: _Run, ended: str, tokens: tuple[Token, ...] = (), why: str = "") -> None:
        # The row's slots in the ring stay as they are: the next prompt overwrites them, and nobody reads them before.
        self.runs.remove(run)
        self._free = sorted([*self._free, run.row], reverse=True)  # the first is given out first (`Engine.start`)
        self.seconds += 0.1 * (time.monotonic() - run.began - self.seconds)
        self._tell(run.ticket, Update(tokens, ended=ended, why=why))

    def _tell_run(self, run: _Run, update: Update) -> None:
        if not self._tell(run.ticket, update):
            self._end(run, "cancelled")

    def _tell(self, ticket: Ticket, update: Update) -> bool:
        """Returns False if the listener raises: it is gone."""
        if update.ended:
            self.ended[update.ended] += 1
        try:
            ticket.tell(update)
        except Exception:
            return False
        return True


def answers(
    engine: Engine, tickets: Sequence[Ticket], rows: int = 0, places: int = 0, burst: int = BURST
) -> Iterator[tuple[int, Update]]:
    """Answers requests that are known beforehand. Yields (number of the ticket, its news) as they come, until all have ended.

    An answer depends on its request and the weights, and on the other answers only by rounding. The same call gives the same
    bits, whatever the engine did before. All earlier requests of the engine are dropped.

    Args:
      tickets: their listeners are replaced.
      rows: how many are answered at once, at most; 0: a power of two, at most ROWS.
      places: of the longest prompt with its new tokens, at least; several calls with the same compile the same programs.
      burst: how many steps are run before the host reads their tokens, at most; `engine.burst` if somebody waits for them.

    Raises:
      ConfigError: a prompt is empty, has an id outside the vocabulary or leaves no room in the context.
      RunError: the logits are not finite.
    """
    check_prompts(engine.model, [ticket.ask.ids for ticket in tickets])
    places = max([places, *(len(ticket.ask.ids) + ticket.ask.max_new_tokens for ticket in tickets)])
    engine.reset(rows or min(ROWS, power_of_two(len(tickets))), places)
    single = all(ticket.ask.max_new_tokens <= 1 for ticket in tickets)  # two programs at most: each burst compiles one
    scheduler, news = Scheduler(engine, 1 if single else burst), collections.deque[tuple[int, Update]]()
    for number, ticket in enumerate(tickets):
        ticket.tell = lambda update, number=number: news.append((number, update))
    scheduler.waiting.extend(tickets)
    while scheduler.busy:
        scheduler.turn()
        while news:
            number, update = news.popleft()
            if update.ended == "failed":
                raise RunError(update.why)
            yield number, update


def tokens_of(engine: Engine, asks: Sequence[Ask], rows: int = 0, places: int = 0) -> list[list[Token]]:
    """Returns all tokens of each answer (see `answers`)."""
    tokens: list[list[Token]] = [[] for _ in asks]
    for number, update in answers(engine, [Ticket(ask) for ask in asks], rows, places):
        tokens[number] += update.tokens
    return tokens


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
