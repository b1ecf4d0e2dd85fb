"""Chats and pairs as the data of a run: encoded, held out in part, packed into rows.

Pair p of a row, from 0, is its segments 2p + 1 (chosen) and 2p + 2 (rejected). A text of n ids takes n - 1 tokens, so no
target belongs to the next segment; padding is the last segment, without weight. Legend: B rows, b of them, T tokens, P
pairs in a row.
"""

import dataclasses
import functools
import hashlib
import pathlib
import threading
import typing
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxlm.config import ConfigError, DataConfig, EvalConfig, ExamplesConfig
from jaxlm.data.batches import document_rows, encoded, pack_examples
from jaxlm.data.batches import replay as replays
from jaxlm.data.batches.order import Order
from jaxlm.data.chats import examples, masks, records
from jaxlm.data.shards.mixture import Windows
from jaxlm.data.shards.verify import Verifier
from jaxlm.data.tokenizer.coder import Coder, virtual_ids

_EPOCHS = 4  # whose orders are remembered
_FEW = 20  # held-out examples by which a model can't be judged


class Item(typing.NamedTuple):
    """The example of this number, or the `number`-th piece of pretraining text of the run (`replay`)."""

    number: int
    replay: bool = False


class _At(typing.NamedTuple):
    """Where a batch begins: how many examples and pieces came before, and how many of these examples' targets count."""

    examples: int = 0
    pieces: int = 0
    counted: int = 0


class Plan:
    """The map from batches to rows of examples.

    `lengths`: the tokens that each example takes; `counted`: the targets of each that count; `most`: examples in a row,
    0 for any number; `share`: of all targets that count, below 1, in pieces of pretraining text of `piece` tokens.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        counted: np.ndarray,
        *,
        seed: int,
        seq_len: int,
        batch_size: int,
        most: int = 0,
        share: float = 0.0,
        piece: int = 0,
    ):
        self._lengths, self._counted, self._seed = lengths.tolist(), counted.tolist(), seed
        self._seq_len, self.batch_size, self._most = seq_len, batch_size, most or seq_len
        self._share, self._piece = share, piece
        # A batch's begin depends on all batches before it. The loader's threads ask for several batches at once.
        self._begins, self._lock = [_At()], threading.Lock()
        self._order = functools.lru_cache(maxsize=_EPOCHS)(self._order)

    def rows(self, batch: int) -> list[list[Item]]:
        """Returns the items in each row of a batch, which counts from 0. The first time, plans all batches before it."""
        return self._fill(self._begin(batch))[0]

    def used(self, batches: int) -> tuple[int, int]:
        """Returns (examples, pieces of pretraining text) in the first `batches` batches; repeated examples count again."""
        return self._begin(batches)[:2]

    def _begin(self, batch: int) -> _At:
        with self._lock:
            while len(self._begins) <= batch:
                self._begins.append(self._fill(self._begins[-1])[1])
            return self._begins[batch]

    def _fill(self, at: _At) -> tuple[list[list[Item]], _At]:
        """Returns (the rows of the batch that begins at `at`, the place where the next batch begins)."""
        examples, pieces, counted = at
        rows: list[list[Item]] = [[] for _ in range(self.batch_size)]
        room = [self._seq_len] * self.batch_size
        slots = [self._most] * self.batch_size
        while True:
            item = self._next(examples, pieces, counted)
            length = self._piece if item.replay else self._lengths[item.number]
            row = pack_examples.first_fit(length, room, slots)
            if row is None:  # this item begins the next batch: nothing overtakes it, so no example waits for ever
                return rows, _At(examples, pieces, counted)
            rows[row].append(item)
            if item.replay:
                pieces += 1
            else:
                examples, counted = examples + 1, counted + self._counted[item.number]

    def _next(self, examples: int, pieces: int, counted: int) -> Item:
        """Returns the next example or, if replay has less than its share of the targets, the next piece."""
        # With p pieces of t tokens and c targets of examples, replay has its share where p * t = share * (p * t + c).
        if pieces * self._piece * (1 - self._share) < self._share * counted:
            return Item(pieces, replay=True)
        epoch, position = divmod(examples, len(self._lengths))
        return Item(int(self._order(epoch)[position]))

    def _order(self, epoch: int) -> np.ndarray:
        n = len(self._lengths)
        return document_rows.permute(np.arange(n, dtype=np.int64), n, f"{self._seed}/examples/{epoch}")


Batch = dict[str, np.ndarray]
_PLANNED = 256  # batches from which the number of passes is estimated


class Sizes(typing.NamedTuple):
    """The seed of the examples' order, T and B: with the examples they decide the batches."""

    seed: int
    seq_len: int
    batch_size: int


@dataclasses.dataclass(frozen=True)
class Texts:
    """What a run records about its examples and their tokenizer; a `coder.Encoded`."""

    encoder: Coder
    sha256: str  # of all examples and the tokenizer
    counts: dict[str, int]  # "examples" and the sources of the replayed text -> their tokens
    verifier: Verifier  # of the files of the replayed text
    as_before: str = ""  # how older versions read the examples (`records.Notes`)

    @property
    def vocab_size(self) -> int:
        return self.encoder.vocab_size

    def tokenizer(self) -> Coder:
        return self.encoder

    def token_counts(self, split: str = "train") -> dict[str, int]:
        """Returns source -> the number of its training tokens; {} for other splits."""
        return dict(self.counts) if split == "train" else {}


@dataclasses.dataclass(frozen=True)
class Packed(Order):
    """The examples of a run and the order in which it trains on them."""

    data: Texts
    train: encoded.Coded
    val: encoded.Coded  # held out; perhaps none
    counts: encoded.Counts
    sizes: Sizes
    replay: replays.Pieces | None = None  # pretraining text between the examples
    replay_share: float = 0.0  # of the targets that count
    passed_over: Windows = ()

    @property
    def batch_size(self) -> int:
        return self.sizes.batch_size

    @property
    def pairs(self) -> bool:
        return self.train.sides == 2

    @functools.cached_property
    def plan(self) -> Plan:
        """The map from batches to rows of examples."""
        pieces = {"share": self.replay_share, "piece": self.replay.tokens} if self.replay else {}
        options = {**self.sizes._asdict(), "most": self._most, **pieces}
        return Plan(self.train.lengths(), self.train.counted(), **options)

    @property
    def _most(self) -> int:
        return pack_examples.pairs_in_row(self.sizes.seq_len) if self.pairs else 0

    def parts(self) -> dict[str, str]:
        text = f"{self.replay.text.sha256}, {self.replay_share} of the targets" if self.replay else "none"
        sizes = {name: str(size) for name, size in self.sizes._asdict().items()}
        return {"data": self.data.sha256, "replay": text, **sizes}

    def made(self, number: int, rows: Sequence[int] | None) -> Batch:
        """See `rows.make_batch`; pairs add `margin` and `pair` (1 where there is a pair), float32[b, P]."""
        planned = self.plan.rows(number)
        return self._stacked(planned if rows is None else [planned[row] for row in rows], self.train)

    def count_held_out(self, config: EvalConfig) -> int:
        """Returns how many held-out examples an evaluation measures: `eval.max_examples`, or those in `eval.older_batches`."""
        if config.older_batches:
            batches, rows_of_each = config.older_batches
            first = self._once(self.val, rows_of_each)[: batches or None]
            return sum(len(items) for planned in first for items in planned)
        return min(len(self.val), config.max_examples or len(self.val))

    def held_out(self, batch_size: int, examples: int | None = None, ends: bool = True) -> Iterator[Batch]:
        """Yields the held-out examples once, in order; without `ends` the tokens that end answers have no weight."""
        for planned in self._once(self.val, batch_size, examples):
            yield self._stacked(planned, self.val, ends)

    def held_out_batches(self, batch_size: int, examples: int | None = None) -> int:
        return len(self._once(self.val, batch_size, examples))

    def judged(self, val: bool, batch_size: int) -> Iterator[tuple[Batch, np.ndarray]]:
        """Yields all pairs once, for a reference model: (a batch, its pairs' numbers, int64[B, P], -1 for none)."""
        source = self.val if val else self.train
        for planned in self._once(source, batch_size):
            numbers_BxP = np.full((batch_size, pack_examples.pairs_in_row(self.sizes.seq_len)), -1, np.int64)
            for row, items in enumerate(planned):
                numbers_BxP[row, : len(items)] = [item.number for item in items]
            yield self._stacked(planned, source), numbers_BxP

    def with_reference(self, train_Ex2: np.ndarray, val_Ex2: np.ndarray) -> "Packed":
        """Returns the pairs with log p in nats of both sides: batches have `reference` too, float32[B, 2P]."""
        splits = (self.train, train_Ex2), (self.val, val_Ex2)
        train, val = (dataclasses.replace(split, reference_Ex2=logp_Ex2) for split, logp_Ex2 in splits)
        return dataclasses.replace(self, train=train, val=val)

    def _once(self, source: encoded.Coded, batch_size: int, examples: int | None = None) -> list[list[list[Item]]]:
        """Returns the rows of batches that hold each example once, in order; the last batch may be partly empty."""
        batches, room, slots = [], [], []
        for number, length in enumerate(source.lengths()[:examples].tolist()):
            row = pack_examples.first_fit(length, room, slots)
            if row is None:
                batches.append([[] for _ in range(batch_size)])
                room = [self.sizes.seq_len] * batch_size
                slots = [self._most or self.sizes.seq_len] * batch_size
                row = pack_examples.first_fit(length, room, slots)
            batches[-1][row].append(Item(number))
        return batches

    def passes(self, steps: int) -> dict[str, float]:
        """Returns "examples" and the sources of the replayed text -> their epochs in a run of `steps` steps."""
        planned = min(steps, _PLANNED)
        many, pieces = (number * steps / max(1, planned) for number in self.plan.used(planned))
        return {"examples": many / len(self.train)} | (self.replay.passes(round(pieces)) if self.replay else {})

    def places(self, step: int) -> list[str]:
        """Returns the places of the examples in a step's batch, "FILE:LINE", for the log. `step` counts from 1."""
        planned = self.plan.rows(self.batch_number(step) - 1)
        return [str(self.train.places[item.number]) for row in planned for item in row if not item.replay]

    def _stacked(self, planned: Sequence[Sequence[Item]], source: encoded.Coded, ends: bool = True) -> Batch:
        """Returns the batch of rows of examples."""
        rows = [[segment for item in items for segment in self._group(item, source, ends)] for items in planned]
        batch = pack_examples.pack(rows, self.sizes.seq_len)
        if virtual := virtual_ids(self.data.encoder):  # virtual tokens have no weight, and no row in the head
            batch["targets"][np.isin(batch["targets"], virtual)] = self.data.encoder.eos_id
        return batch | (self._of_pairs(planned, source) if self.pairs else {})

    def _of_pairs(self, planned: Sequence[Sequence[Item]], source: encoded.Coded) -> Batch:
        """Returns the `margin`, `pair` and, if the source has it, `reference` of a batch of pairs."""
        shape = (len(planned), pack_examples.pairs_in_row(self.sizes.seq_len))
        arrays = {"margin": np.zeros(shape, np.float32), "pair": np.zeros(shape, np.float32)}
        if source.reference_Ex2 is not None:
            arrays["reference"] = np.zeros((shape[0], 2 * shape[1]), np.float32)
        for row, items in enumerate(planned):
            numbers = [item.number for item in items]
            arrays["margin"][row, : len(items)], arrays["pair"][row, : len(items)] = source.margins_E[numbers], 1
            if source.reference_Ex2 is not None:
                arrays["reference"][row, : 2 * len(items)] = source.reference_Ex2[numbers].reshape(-1)
        return arrays

    def _group(self, item: Item, source: encoded.Coded, ends: bool) -> list[pack_examples.Segment]:
        if item.replay:
            return self.replay.segments(item.number)
        weigh = (masks.SAID, masks.ENDS) if ends else (masks.SAID,)
        return [pack_examples.Segment(ids, np.isin(kinds[1:], weigh)) for ids, kinds in source.segments(item.number)]


def make(
    data: DataConfig,
    settings: ExamplesConfig,
    tokenizer: Coder,
    *,
    pairs: bool,
    sizes: Sizes,
    replay: replays.Text | None = None,
    share: float = 0.0,
    closed: bool = False,
    say: Callable[[str], None] = lambda line: None,
    see: encoded.See = lambda one, sides: None,
) -> Packed:
    """Reads, checks and encodes the examples of `data.path`; `share` of the targets are those of `replay`.

    Raises ConfigError if an example can't be used, or none is left.
    """
    notes, what = records.Notes(settings.ignore), "pairs" if pairs else "chats"
    options = {"seq_len": sizes.seq_len, "closed": closed, "notes": notes}

    def build(path: str, key: str, name: str, **seen: encoded.See) -> tuple[encoded.Coded, encoded.Counts]:
        read = examples.read(path, settings.format, pairs, key, notes)
        read = (dataclasses.replace(one, last=True) for one in read) if settings.last_only and not pairs else read
        split, counts = encoded.build(read, tokenizer, **options, **seen)
        for line in counts.lines(name, sizes.seq_len):
            say(line)
        return split, counts

    whole, counts = build(data.path, "data.path", what, see=see)
    if not len(whole):
        left_out = "; ".join(counts.lines("examples", sizes.seq_len)) + "; raise train.seq_len, or look at the data"
        why = (notes.left_out or left_out) if counts.read else "it is empty"
        raise ConfigError(f"{data.path}: none of its {counts.read:,} {what} can be trained on: {why}")
    if settings.val_path:
        train, (val, _) = whole, build(settings.val_path, "examples.val_path", f"held-out {what}")
    else:
        out_E = encoded.held_out(whole.keys_E, data.val_fraction)
        train, val = whole.take(~out_E), whole.take(out_E)
        if not len(val):
            why = f"there is one {what[:-1]}" if len(whole) == 1 else f"all {what} have the same prompt"
            say(f"none of the {what} is held out, since {why}: set examples.val_path to measure what is learnt")
        elif len(val) < _FEW:
            more = "a new run may have a larger data.val_fraction, or an examples.val_path"
            say(f"{len(val)} of {len(whole):,} {what} are held out, too few to judge by: {more}")
    for line in notes.lines():
        say(line)
    if pairs or not replay or virtual_ids(tokenizer):  # prompt tuning does not change the model
        share = 0.0
    pieces = _pieces(replay, share, train, sizes) if share else None
    counted = {"examples": int(train.lengths().sum())} | (replay.token_counts() if pieces else {})
    verifier = replay.verifier if pieces else Verifier(pathlib.Path())
    digest = hashlib.sha256(f"{train.sha256()} {tokenizer.sha256}".encode()).hexdigest()
    texts = Texts(tokenizer, digest, counted, verifier, notes.as_before())
    return Packed(texts, train, val, counts, sizes, pieces, share)


def _pieces(replay: replays.Text, share: float, train: encoded.Coded, sizes: Sizes) -> replays.Pieces:
    tokens = replays.piece_tokens(share, train.lengths(), train.counted(), sizes.seq_len, sizes.batch_size)
    return replays.Pieces(replay, tokens, sizes.seed)
