"""Decides which row is in which slot of which batch, makes batches of rows, and traces them back to documents.

A short repeating cycle maps global slot n * batch_size + b to a source and the number of its draw; a permutation for
each epoch maps the draw to a row, in O(1). Grain's `shuffle` adds the epoch to the seed: seed 0 epoch 1 would repeat
seed 1 epoch 0. Shapes: B batch, T tokens, T1 = T + 1, K sources.
"""

import dataclasses
import fractions
import functools
import hashlib
import math
import typing
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxlm.config import ConfigError, EvalConfig
from jaxlm.corpus.dedup.signatures import mix
from jaxlm.data.batches.order import Order
from jaxlm.data.batches.removed import Removed
from jaxlm.data.shards import mixture as mixtures
from jaxlm.data.shards.shards import SPLITS, DataDir, TokenStream
from jaxlm.data.shards.verify import Entry

# Epochs of a source after which its tokens teach less than new tokens (Muennighoff et al. 2023, arXiv:2305.16264).
MOST_PASSES = 4
_ROUNDS = 6
LEFT_OUT = "(left out: data.without)"  # in place of a document's text
_FIRST_ITEMS = 16  # the shards of these are verified before all others
_CHUNK = 65_536  # tokens read at a time, to count their bytes


def permute(positions: np.ndarray, n: int, key: str, inverse: bool = False) -> np.ndarray:
    """Maps each of `positions` (int64, in [0, n)) by a permutation of [0, n), which `key` chooses, in O(1) memory.

    A six-round Feistel network permutes the smallest even number of bits that holds n; results of n or above are permuted
    again (cycle walking: Black and Rogaway 2002).
    """
    if n <= 1:
        return np.zeros_like(positions)
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    round_keys = _round_keys(key)
    images = positions.astype(np.uint64)
    todo = np.arange(images.size)
    while todo.size:
        left, right = images[todo] >> half, images[todo] & mask
        for round_key in reversed(round_keys) if inverse else round_keys:
            if inverse:
                left, right = right ^ (mix(left + round_key) & mask), left
            else:
                left, right = right, left ^ (mix(right + round_key) & mask)
        images[todo] = (left << half) | right
        todo = todo[images[todo] >= n]
    return images.astype(np.int64)


@functools.lru_cache(maxsize=4096)
def _round_keys(key: str) -> np.ndarray:
    return np.frombuffer(hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest(), "<u8").copy()


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """The map from slots to rows; `plan_rows` makes it."""

    seed: int
    names: tuple[str, ...]  # sources with a weight in one of the mixtures
    shares: tuple[fractions.Fraction, ...]  # in the first mixture
    row_counts: tuple[int, ...]  # of each source
    batch_size: int
    final_shares: tuple[fractions.Fraction, ...] = ()  # () without a final mixture
    final_begins: int = 0  # the last batch before the final mixture

    def locate(self, number: int, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (source, epoch from 0, row) of these slots of a batch from 0, int64 each.

        Each epoch of a source has every row once. In the final mixture, a source's draws continue those of the first.
        """
        shares, first, drawn = self.shares, 0, np.zeros(len(self.names), np.int64)
        if self.final_shares and number >= self.final_begins:
            shares, first = self.final_shares, self.final_begins
            drawn = mixtures.count_draws(self.shares, first * self.batch_size)
        cycle = mixtures.mixture_cycle(shares)
        rank, per_cycle = mixtures.cycle_ranks(shares)
        slot = np.int64((int(number) - first) * self.batch_size) + np.asarray(slots, np.int64)
        turn, place = np.divmod(slot, cycle.size)
        source = cycle[place].astype(np.int64)
        draw = drawn[source] + turn * per_cycle[source] + rank[place]
        epoch, position = np.divmod(draw, np.asarray(self.row_counts, np.int64)[source])
        row = np.empty_like(position)
        for k, e in {(int(k), int(e)) for k, e in zip(source, epoch, strict=True)}:
            chosen = (source == k) & (epoch == e)
            row[chosen] = permute(position[chosen], self.row_counts[k], f"{self.seed}/{self.names[k]}/{e}")
        return source, epoch, row

    def find(self, name: str, rows: np.ndarray, batches: int) -> np.ndarray:
        """Returns the numbers, from 0 and below `batches`, of the batches that have a source's rows: `locate`'s inverse."""
        k, numbers = self.names.index(name), []
        switch = min(self.final_begins, batches) if self.final_shares else batches
        before = mixtures.count_draws(self.shares, switch * self.batch_size)[k]
        for shares, first, last, drawn in ((self.shares, 0, switch, 0), (self.final_shares, switch, batches, before)):
            if first == last or not shares[k]:
                continue
            cycle, count = mixtures.mixture_cycle(shares), self.row_counts[k]
            places = np.flatnonzero(cycle == k)
            end = drawn + mixtures.count_draws(shares, (last - first) * self.batch_size)[k]
            for epoch in range(drawn // count, -(-end // count)):
                draw = epoch * count + permute(rows, count, f"{self.seed}/{name}/{epoch}", inverse=True)
                turn, rank = np.divmod(draw[(draw >= drawn) & (draw < end)] - drawn, len(places))
                numbers.append(first + (turn * cycle.size + places[rank]) // self.batch_size)
        return np.unique(np.concatenate(numbers)) if numbers else np.empty(0, np.int64)


def count_rows(tokens: int, seq_len: int) -> int:
    """Returns the number of rows in a stream of `tokens` tokens. Row i is tokens i*T to (i+1)*T, both included."""
    return max(0, (tokens - 1) // seq_len)


def plan_rows(
    token_counts: Mapping[str, int],
    mixture: Mapping[str, float],
    *,
    seed: int,
    seq_len: int,
    batch_size: int,
    passed_over: mixtures.Windows = (),
    final: mixtures.Final | None = None,
) -> RowPlan:
    """Returns the row plan. `passed_over`, the skipped batches, only decides where a final mixture begins.

    Raises ConfigError if a mixture is wrong, or a source has fewer than `seq_len` + 1 tokens.
    """
    # Sorted by name, so that the order of the manifest or the mixture changes no batch.
    names = sorted(token_counts)
    first = mixtures.normalise_mixture(mixture, names)
    last = mixtures.normalise_mixture(final.mixture, names) if final else {}
    names = [name for name in names if name in first or name in last]
    for name in names:
        if count_rows(token_counts[name], seq_len) == 0:
            few = f"{token_counts[name]:,} training tokens, fewer than one row of seq_len + 1 = {seq_len + 1:,}"
            raise ConfigError(f"source '{name}' holds {few}; lower train.seq_len or give the source more text")
    return RowPlan(
        seed=int(seed),
        names=tuple(names),
        shares=tuple(first.get(name, fractions.Fraction(0)) for name in names),
        row_counts=tuple(count_rows(token_counts[name], seq_len) for name in names),
        batch_size=int(batch_size),
        final_shares=tuple(last.get(name, fractions.Fraction(0)) for name in names) if final else (),
        final_begins=final.begins(passed_over) if final else 0,
    )


@dataclasses.dataclass(frozen=True)
class Rows(Order):
    """The order of a run that trains on all tokens of shards."""

    data: DataDir
    mixture: Mapping[str, float]  # source -> weight; absent: 0
    seed: int
    seq_len: int  # T
    batch_size: int  # B
    passed_over: mixtures.Windows = ()
    final: mixtures.Final | None = None  # the mixture of the last batches
    removed: Removed | None = None  # documents that teach nothing

    @functools.cached_property
    def plan(self) -> RowPlan:
        """The map from slots to rows. Raises ConfigError as `plan_rows` does."""
        sizes = {"seed": self.seed, "seq_len": self.seq_len, "batch_size": self.batch_size}
        both = {"mixture": self.mixture, "final": self.final}
        return plan_rows(self.data.token_counts(), **both, **sizes, passed_over=self.passed_over)

    @functools.cached_property
    def streams(self) -> list[TokenStream]:
        return [self.data.stream(name) for name in self.plan.names]

    def made(self, number: int, rows: Sequence[int] | None) -> dict[str, np.ndarray]:
        """See `Order`: the dict that `make_batch` returns."""
        source, _, row = self.plan.locate(number, np.arange(self.batch_size) if rows is None else rows)
        rows_BxT1 = np.empty((len(row), self.seq_len + 1), np.int32)
        weights_BxT = np.ones((len(row), self.seq_len), np.float32)
        places = zip(source.tolist(), (row * self.seq_len).tolist(), strict=True)
        for row_T1, weights_T, (k, first) in zip(rows_BxT1, weights_BxT, places, strict=True):
            row_T1[:] = self.streams[k].read(first, first + self.seq_len + 1)
            if self.removed:
                self.removed.blank(self.plan.names[k], first, row_T1, weights_T)
        return make_batch(rows_BxT1, self.data.separator_id) | {"weights": weights_BxT}

    def shards(self, item: int) -> list[Entry]:
        """Returns all shards of the sources, each once: first those of the next items from `item` on, last held-out text."""
        entries = {}
        for number in (self.batch_number(step) - 1 for step in range(item + 1, item + 1 + _FIRST_ITEMS)):
            source, _, row = self.plan.locate(number, np.arange(self.batch_size))
            for k, r in zip(source.tolist(), row.tolist(), strict=True):
                shard = self.streams[k].shard(r * self.seq_len)
                entries[shard["file"]] = shard
        streams = (self.data.entry(name, split) for split in SPLITS for name in self.plan.names)
        entries |= {shard["file"]: shard for stream in streams for shard in stream["shards"]}
        return list(entries.values())

    def places(self, step: int) -> list[str]:
        batch = describe_batch(self, step - 1, snippet_chars=0)
        return [traced.document for traced in batch if traced.text != LEFT_OUT]

    def passes(self, steps: int) -> dict[str, float]:
        """See `Order`. Raises ConfigError if a mixture is wrong."""
        tokens, last = self.data.token_counts(), self.switch()
        stretches = [(self.mixture, steps if last is None else min(steps, last))]
        stretches += [(self.final.mixture, steps - stretches[0][1])] if self.final else []
        times: dict[str, float] = {}
        for mixture, length in stretches:
            trained = length * self.batch_size * self.seq_len
            for name, share in mixtures.drawn_mixture(mixture, list(tokens)).items():
                if tokens[name]:
                    times[name] = times.get(name, 0.0) + trained * float(share) / tokens[name]
        return times

    def switch(self) -> int | None:
        return self.final.switch(self.passed_over) if self.final else None

    @functools.cached_property
    def first_removed(self) -> float:
        """The number, from 1, of the first batch that is not passed over and holds a removed document; infinity for none."""
        places = self.removed.places if self.removed else {}
        rows = {name: rows_of(self, name, places_Nx2) for name, places_Nx2 in places.items() if name in self.plan.names}
        rows = {name: of_source for name, of_source in rows.items() if len(of_source)}  # none in a stream's last tokens
        for batches in (1 << power for power in range(10, 41) if rows):
            numbers = np.concatenate([1 + self.plan.find(*of_source, batches) for of_source in rows.items()])
            for first, last in self.passed_over:
                numbers = numbers[(numbers < first) | (numbers > last)]
            if len(numbers):
                return int(numbers.min())
        return math.inf

    def parts(self) -> dict[str, str]:
        """See `Order`: "data" (the manifest's hash), "mixture" and the sizes; a final mixture adds its own."""
        names = sorted(self.data.sources)
        return {
            "data": self.data.sha256,
            "mixture": mixtures.words(mixtures.normalise_mixture(self.mixture, names)),
            "seed": str(self.seed),
            "seq_len": str(self.seq_len),
            "batch_size": str(self.batch_size),
            **(self.final.fingerprint(names) if self.final else {}),
            **({"without": self.removed.sha256, "without_batch": f"{self.first_removed:.0f}"} if self.removed else {}),
        }


def make_batch(rows_BxT1: np.ndarray, separator_id: int) -> dict[str, np.ndarray]:
    """Returns `tokens`, `targets`, `segment_ids` (from 1), `positions`, int32[B, T], and `weights` float32[B, T], ones.

    A separator begins each document's segment, as `<|endoftext|>` in GPT-2: a document's last token predicts the next
    separator; a separator, which sees only itself, predicts its document's first token.
    """
    rows_BxT1 = np.asarray(rows_BxT1).astype(np.int32, copy=False)
    tokens_BxT = np.ascontiguousarray(rows_BxT1[:, :-1])
    starts_BxT = tokens_BxT == separator_id
    starts_BxT[:, 0] = True
    index_T = np.arange(tokens_BxT.shape[1], dtype=np.int32)
    opened_BxT = np.maximum.accumulate(np.where(starts_BxT, index_T, 0), axis=1)
    return {
        "tokens": tokens_BxT,
        "targets": np.ascontiguousarray(rows_BxT1[:, 1:]),
        "segment_ids": np.cumsum(starts_BxT, axis=1, dtype=np.int32),
        "positions": (index_T - opened_BxT).astype(np.int32, copy=False),
        "weights": np.ones(tokens_BxT.shape, np.float32),
    }


@dataclasses.dataclass(frozen=True)
class ValidationBatch:
    """A batch of held-out rows."""

    batch: dict[str, np.ndarray]  # of `make_batch`, with weight 0 on padding
    target_tokens: int
    target_bytes: int  # of raw UTF-8


def count_targets(data: DataDir, source: str, config: EvalConfig, seq_len: int) -> int:
    """Returns how many held-out tokens an evaluation measures: the first `eval.max_mb`, or those of `older_batches`."""
    stream, length = data.stream(source, "val"), data.token_bytes()
    total = max(0, stream.tokens - 1)
    if config.older_batches:
        return min(total, math.prod(config.older_batches) * seq_len or total)
    left = max(1, round(config.max_mb * 1e6)) if config.max_mb else 0
    for first in range(1, total + 1 if left else 0, _CHUNK):
        bytes_C = length[stream.read(first, min(first + _CHUNK, total + 1))]
        before_C = np.cumsum(bytes_C, dtype=np.int64) - bytes_C
        if before_C[-1] >= left:
            return first - 1 + int(np.searchsorted(before_C, left))
        left -= int(bytes_C.sum())
        if left <= 0:
            return first - 1 + len(bytes_C)
    return total


def validation_rows(
    data: DataDir, source: str, *, seq_len: int, batch_size: int, targets: int | None = None
) -> Iterator[ValidationBatch]:
    """Yields a source's held-out tokens in order, each a target once, except the separator that opens the stream.

    The last row is padded at weight 0. bits_per_byte = summed loss in nats / ln 2 / summed `target_bytes`.
    """
    stream, length = data.stream(source, "val"), data.token_bytes()
    targets = max(0, stream.tokens - 1) if targets is None else targets
    total = -(-targets // seq_len)
    for first in range(0, total, batch_size):
        rows_BxT1 = np.full((batch_size, seq_len + 1), data.separator_id, np.int32)
        weights_BxT = np.zeros((batch_size, seq_len), np.float32)
        for b, row in enumerate(range(first, min(total, first + batch_size))):
            tokens = stream.read(row * seq_len, min(targets, (row + 1) * seq_len) + 1)
            rows_BxT1[b, : len(tokens)] = tokens
            weights_BxT[b, : len(tokens) - 1] = 1
        batch = {**make_batch(rows_BxT1, data.separator_id), "weights": weights_BxT}
        counted = batch["targets"][weights_BxT > 0]
        yield ValidationBatch(batch, int(counted.size), int(length[counted].sum()))


def mixture_words(order: Rows, steps: int) -> str:
    """Returns "web 0.9, math 0.1 to step 800, then web 0.6, math 0.4" for a run of `steps`; "" with one mixture."""
    if order.final is None:
        return ""
    names, last = list(order.data.token_counts()), order.switch()
    first, final = (mixtures.drawn_mixture(mixture, names) for mixture in (order.mixture, order.final.mixture))
    beyond = f" (this run ends at step {steps:,})" if last >= steps else ""
    return f"{_shares(first)} to step {last:,}, then {_shares(final)}{beyond}"


def rounded(order: Rows) -> list[str]:
    """Returns a line for each mixture of a run in which a source's drawn share is more than 1% off its weight."""
    names, weights = list(order.data.token_counts()), [order.mixture, *([order.final.mixture] if order.final else [])]
    return [line for line in (mixtures.rounding(mixture, names) for mixture in weights) if line]


def _shares(shares: Mapping[str, fractions.Fraction]) -> str:
    return ", ".join(f"{name} {float(share):.3g}" for name, share in sorted(shares.items(), key=lambda item: -item[1]))


class Traced(typing.NamedTuple):
    """The part of a document that a row of a batch holds."""

    slot: int  # of the row, in the batch
    source: str
    epoch: int  # from 0
    row: int  # its index i in the source: tokens i*T to (i+1)*T, both included
    document: str
    first_token: int  # from its separator, token 0 (in data of recipe version 2, from its text)
    tokens: int
    text: str  # the beginning


def rows_of(order: Rows, source: str, places_Nx2: np.ndarray) -> np.ndarray:
    """Returns the rows of a source that hold one of the tokens [start, end) of a place."""
    size, count = order.seq_len, order.plan.row_counts[order.plan.names.index(source)]
    first_N, last_N = np.maximum(0, -(-places_Nx2[:, 0] // size) - 1), (places_Nx2[:, 1] - 1) // size
    rows = [np.arange(*place) for place in zip(first_N, np.minimum(count, last_N + 1), strict=True)]
    return np.unique(np.concatenate(rows))


def steps_of(order: Rows, source: str, first: int, tokens: int, done: int) -> list[int]:
    """Returns the steps, from 1 to `done`, whose batches hold one of a source's tokens [first, first + tokens)."""
    if source not in order.plan.names or (order.removed and len(order.removed.near(source, first, first + tokens))):
        return []
    rows = rows_of(order, source, np.array([[first, first + tokens]]))
    numbers = order.plan.find(source, rows, order.batch_number(done)) + 1
    steps = (mixtures.step_of(number, order.passed_over) for number in numbers.tolist())
    return [step for number, step in zip(numbers.tolist(), steps, strict=True) if order.batch_number(step) == number]


def describe_batch(order: Rows, item: int, snippet_chars: int = 200) -> Iterator[Traced]:
    """Yields the documents in the batch of step `item` + 1, row by row. Needs no model and no state."""
    data, seq_len, coder = order.data, order.seq_len, order.data.tokenizer()
    located = order.plan.locate(order.batch_number(item + 1) - 1, np.arange(order.batch_size))
    for slot, (source, epoch, row) in enumerate(zip(*(array.tolist() for array in located), strict=True)):
        name, start = order.plan.names[source], row * seq_len
        stop = start + seq_len + 1
        for document in data.documents(name, "train", start, stop):
            first, end = max(start, document.start), min(stop, document.start + document.tokens)
            # No character takes more than four tokens, one for each of its bytes.
            text = coder.decode(order.streams[source].read(first, min(end, first + 4 * snippet_chars)))
            left_out = order.removed and len(order.removed.near(name, document.start, document.start + document.tokens))
            part = document.doc_id, first - document.start, end - first, LEFT_OUT if left_out else text[:snippet_chars]
            yield Traced(slot, name, epoch, row, *part)
