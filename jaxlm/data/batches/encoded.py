"""Examples as flat arrays of ids, cut or left out where they do not fit. A chat is one segment of a row, a pair two."""

import dataclasses
import hashlib
import itertools
import json
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from jaxlm.data.chats.examples import Chat, Example, Pair
from jaxlm.data.chats.masks import GIVEN, INSIDE, UNWRITTEN, Masked, Side, Unmasked, masked
from jaxlm.data.chats.records import ASSISTANT, TOOL, Message, Notes, Place
from jaxlm.data.tokenizer.coder import Coder

See = Callable[[Example, Sequence[Masked]], None]
CHUNK = 2048  # examples encoded at a time


@dataclasses.dataclass(frozen=True)
class Coded:
    """Encoded examples. Legend: N ids of all, S segments, E examples."""

    sides: int  # of an example: 1 (chats) or 2 (pairs)
    ids_N: np.ndarray  # int32
    kinds_N: np.ndarray  # `GIVEN`, SAID or ENDS of each, uint8
    starts_S1: np.ndarray  # where each segment begins, and the last one's end, int64[S + 1]
    margins_E: np.ndarray  # float32; zeros for chats
    keys_E: np.ndarray  # a hash of each example's prompt, uint64
    places: Sequence[Place]
    reference_Ex2: np.ndarray | None = None  # log p of both sides by a reference model, in nats, float32

    def __len__(self) -> int:
        return len(self.margins_E)

    def segments(self, example: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields (ids int32[n], kinds uint8[n]) of each segment of an example."""
        for segment in range(example * self.sides, (example + 1) * self.sides):
            inside = slice(self.starts_S1[segment], self.starts_S1[segment + 1])
            yield self.ids_N[inside], self.kinds_N[inside]

    def lengths(self) -> np.ndarray:
        """Returns the tokens that each example takes in a row, int64[E]: for each segment one less than its ids."""
        return (np.diff(self.starts_S1) - 1).reshape(-1, self.sides).sum(1)

    def counted(self) -> np.ndarray:
        """Returns how many targets of each example count, int64[E]."""
        counts_N = self.kinds_N != GIVEN
        counts_N[self.starts_S1[:-1]] = False  # the first id of a segment is no target
        total_N1 = np.concatenate([[0], np.cumsum(counts_N, dtype=np.int64)])
        return np.diff(total_N1[self.starts_S1]).reshape(-1, self.sides).sum(1)

    def take(self, chosen_E: np.ndarray) -> "Coded":
        """Returns the examples for which `chosen_E`, bool[E], is True."""
        lengths_S, chosen_S = np.diff(self.starts_S1), np.repeat(chosen_E, self.sides)
        chosen_N = np.repeat(chosen_S, lengths_S)
        starts_S1 = np.concatenate([[0], np.cumsum(lengths_S[chosen_S], dtype=np.int64)])
        places = [place for place, taken in zip(self.places, chosen_E.tolist(), strict=True) if taken]
        of_all = (self.margins_E[chosen_E], self.keys_E[chosen_E], places)
        return Coded(self.sides, self.ids_N[chosen_N], self.kinds_N[chosen_N], starts_S1, *of_all)

    def sha256(self) -> str:
        """Returns a hash of all that decides what is learnt, in hex."""
        digest = hashlib.sha256(f"{self.sides}".encode())
        for array in (self.ids_N, self.kinds_N, self.starts_S1, self.margins_E):
            digest.update(np.ascontiguousarray(array).view(np.uint8).data)
        return digest.hexdigest()


@dataclasses.dataclass
class Counts:
    """How many examples were read, cut and left out."""

    read: int = 0
    cut: int = 0  # chats without their oldest turns
    too_long: int = 0  # left out: even the last turn, or a pair, is longer than a row
    same: int = 0  # left out: both sides of a pair are the same
    inside: int = 0  # left out: an answer begins inside a token (see `masked`)
    turns_cut: int = 0  # of the cut chats
    alone: int = 0  # answers in rows of their own: the template writes them differently when more messages follow
    untold: int = 0  # answers of pairs that are not learnt from, for the same reason

    def lines(self, what: str, seq_len: int) -> list[str]:
        """Returns a line for each count above 0; `what`: "chats" or "pairs"."""
        of_all, row = f"of {self.read:,} {what}", f"longer than train.seq_len={seq_len:,} tokens"
        whole = "both sides together are" if what.endswith("pairs") else "even the last turn is"
        inside = "an answer begins inside a token of this tokenizer, mostly with a space or a newline"
        otherwise = "the model's chat template writes them differently when more messages follow"
        last = "examples.last_only=True trains only the last answer of each chat"
        lines = (
            (self.cut, f"{of_all} lost their oldest turns, {self.turns_cut:,} in all: {row}"),
            (self.too_long, f"{of_all} are left out: {whole} {row}"),
            (self.inside, f"{of_all} are left out: {inside}"),
            (self.alone, f"answers get extra rows of their own: {otherwise}; {last}"),
            (self.untold, f"answers inside pairs are given, not learnt: {otherwise}"),
            (self.same, f"{of_all} are left out: chosen and rejected are the same"),
        )
        return [f"{count:,} {line}" for count, line in lines if count]


def build(
    read: Iterable[Example],
    tokenizer: Coder,
    *,
    seq_len: int,
    closed: bool = False,
    see: See = lambda one, sides: None,
    notes: Notes | None = None,
) -> tuple[Coded, Counts]:
    """Encodes examples of one kind. Returns (those that fit into a row, the counts of all).

    `closed` adds a token after each text, a target that does not count, so that a row has the text's last token. `see` gets
    each example and its segments. Raises ConfigError if the template is missing, or does not write a key of an example.
    """
    ids, kinds, lengths, margins, keys, places = bytearray(), bytearray(), [0], [], [], []
    examples, sides, counts, notes = iter(read), 1, Counts(), notes or Notes()
    fit = _Fit(tokenizer, seq_len, closed, counts, notes)
    while chunk := tuple(itertools.islice(examples, CHUNK)):
        counts.read += len(chunk)
        rows = fit.masked(chunk)
        for row in rows:
            if all(isinstance(side, Masked) for side in row.sides):
                see(row.one, row.sides)
        for row in fit.fitted(fit.parted(rows)):
            for side in row.sides:
                ids += side.ids.tobytes()
                kinds += side.kinds.tobytes()
            lengths += [len(side.ids) for side in row.sides]
            margins.append(row.one.margin if isinstance(row.one, Pair) else 0.0)
            keys.append(prompt_key(row.of))
            places.append(row.one.place)
            sides = len(row.sides)
    notes.check()
    of_segments = np.frombuffer(ids, np.int32), np.frombuffer(kinds, np.uint8), np.cumsum(lengths, dtype=np.int64)
    return Coded(sides, *of_segments, np.asarray(margins, np.float32), np.asarray(keys, np.uint64), places), counts


class _Row(typing.NamedTuple):
    """An example and its segments. `of` is the whole example as it was read; `one` is all or a part of it."""

    of: Example
    one: Example
    sides: tuple[Side, ...]

    def otherwise(self) -> list[int]:
        """Returns the answers that are written differently here than when each is the last message."""
        return [number for side in self.sides if isinstance(side, Masked) for number in side.otherwise]

    def empty(self) -> bool:
        return any(isinstance(side, Masked) and not side.kinds.any() for side in self.sides)


@dataclasses.dataclass(frozen=True)
class _Fit:
    """Makes rows of examples, and counts those that it cuts or leaves out. See `build`."""

    tokenizer: Coder
    seq_len: int
    closed: bool
    counts: Counts
    notes: Notes

    def masked(self, examples: Sequence[Example]) -> list[_Row]:
        """Returns a row for each example."""
        segments = [(one,) if isinstance(one, Chat) else one.sides() for one in examples]
        flat = masked(self.tokenizer, [one for of in segments for one in of], self.notes.ignore)
        sides = iter(map(self._closed, flat) if self.closed else flat)
        parts = [tuple(itertools.islice(sides, len(of))) for of in segments]
        return [_Row(one, one, own) for one, own in zip(examples, parts, strict=True)]

    def _closed(self, side: Side) -> Side:
        if isinstance(side, Unmasked):
            return side
        ids, kinds = np.append(side.ids, np.int32(self.tokenizer.eos_id)), np.append(side.kinds, np.uint8(GIVEN))
        return side._replace(ids=ids, kinds=kinds)

    def parted(self, rows: Sequence[_Row]) -> Iterator[_Row]:
        """Yields the rows. Before a chat, for each of its `otherwise` answers, comes a copy that ends with that answer."""
        numbers = [row.otherwise() if isinstance(row.one, Chat) else [] for row in rows]
        parts = [row.one.up_to(number) for row, own in zip(rows, numbers, strict=True) for number in own]
        alone = iter(self.masked(parts) if parts else ())
        for row, own in zip(rows, numbers, strict=True):
            yield from (part._replace(of=row.of) for part in itertools.islice(alone, len(own)))
            if isinstance(row.one, Pair) and row.otherwise():
                self.counts.untold += len(row.otherwise())
                row = row._replace(sides=(Unmasked("its answers are given"),)) if row.empty() else row
            yield row

    def fitted(self, rows: Iterable[_Row]) -> list[_Row]:
        """Returns the rows that fit into T tokens; chats lose their oldest turns if needed."""
        rows, fitted, met = list(rows), {}, set()  # met: (a field of `Counts`, id of an example)
        left, lost = dict(enumerate(rows)), [0] * len(rows)
        while left:  # twice or three times, mostly
            shorter = {}
            for number, row in left.items():
                row = row._replace(of=rows[number].of)
                if (over := self._over(row, met)) is None:
                    continue
                if over <= 0:
                    fitted[number] = row._replace(one=rows[number].one)
                    met |= {("cut", id(row.of))} if lost[number] else set()
                    self.counts.turns_cut += lost[number]
                elif isinstance(row.one, Chat) and (shortened := _shorter(row.one, row.sides[0], over)):
                    shorter[number] = shortened[0]
                    lost[number] += shortened[1]
                else:
                    met.add(("too_long", id(row.of)))
            left = dict(zip(shorter, self.masked([*shorter.values()]) if shorter else (), strict=True))
        self.counts.alone += len(fitted) - len({id(row.of) for row in fitted.values()})
        for name, _ in met:
            setattr(self.counts, name, getattr(self.counts, name) + 1)
        return [fitted[number] for number in sorted(fitted)]

    def _over(self, row: _Row, met: set[tuple[str, int]]) -> int | None:
        """Returns by how many tokens a row is too long; None if it can't be used, and notes why."""
        unmasked = next((side for side in row.sides if isinstance(side, Unmasked)), None)
        if isinstance(row.one, Pair) and row.one.chosen == row.one.rejected:
            met.add(("same", id(row.of)))
        elif unmasked is None:
            return None if row.empty() else sum(len(side.ids) - 1 for side in row.sides) - self.seq_len
        elif unmasked == INSIDE:
            met.add(("inside", id(row.of)))
        else:
            whys = {("refused", key): UNWRITTEN for key in unmasked.keys} or {("unfit", ""): unmasked.why}
            for (kind, name), why in whys.items():
                self.notes.note(kind, name, row.one.place, why)
        return None


def _shorter(one: Chat, side: Masked, over: int) -> tuple[Chat, int] | None:
    """Returns (the chat without its oldest turns, as few as may hold `over` tokens; how many); None if it has one turn."""
    system = len(one.messages) and one.messages[0]["role"] == "system"
    front, roles = one.messages[:system], [message["role"] for message in one.messages]
    # A turn begins where somebody else speaks after the assistant; a tool's results belong to the call.
    begins = [i for i in range(system + 1, len(roles)) if roles[i - 1] == ASSISTANT != roles[i] != TOOL]
    if not begins:
        return None
    # The tokens before the next answer are a little more than those dropped, so never a turn too many is dropped.
    before = (side.turns[roles[:i].count(ASSISTANT)] for i in begins)
    turns = next((n for n, tokens in enumerate(before) if tokens >= over), len(begins) - 1)
    start = begins[turns]
    given = max(0, one.given - start + system)
    return dataclasses.replace(one, messages=front + one.messages[start:], given=given), turns + 1


def held_out(keys_E: np.ndarray, fraction: float) -> np.ndarray:
    """Returns which examples to hold out, bool[E]: about `fraction`, by a hash of the prompt: equal prompts stay together."""
    out_E = keys_E < np.uint64(int(fraction * 2**64))
    if len(keys_E) and (out_E.all() or not out_E.any()):
        out_E = keys_E == keys_E.min()
    return out_E if not out_E.all() else ~out_E


def key(messages: Iterable[Message]) -> int:
    """Returns a hash of a prompt, 64 bits, for `held_out`."""
    return int.from_bytes(_hash(messages)[:8], "little")


def prompt_key(one: Example) -> int:
    """Returns a hash of an example's prompt, 64 bits: equal for equal prompts."""
    return key(one.prompt if isinstance(one, Pair) else one.messages[:-1])


def content_key(one: Example) -> bytes:
    sides = (one.messages,) if isinstance(one, Chat) else (one.prompt, one.chosen, one.rejected)
    return _hash(itertools.chain.from_iterable((*side, {"role": "", "content": ""}) for side in sides))


def _hash(messages: Iterable[Message]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for message in messages:
        more = {key: value for key, value in message.items() if key not in ("role", "content", "weight")}
        parts = [json.dumps(more, sort_keys=True, default=str)] if more else []
        for part in (message["role"], message["content"], *parts):
            raw = part.encode("utf-8", "replace")
            digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.digest()
