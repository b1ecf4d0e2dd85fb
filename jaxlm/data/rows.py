"""Which row sits in which slot of which batch, and what a batch of rows looks like. Pure functions.

The batch of step s is a pure function of (seed, manifest, mixture, s). Slot b of step s is the global slot
g = s * batch_size + b; a short repeating cycle maps g to a source and to the source's k-th draw, and a keyed
permutation of each epoch maps k to a row. Both are O(1) and know nothing of hosts, threads or workers.

Grain's `MapDataset.mix` was not used for this: it truncates the weights to integers (87/10/3 becomes 2899/333/100)
and refuses a weight of zero; its `shuffle` adds the epoch to the seed, so that seed 0 epoch 1 repeats seed 1 epoch 0.

Shapes: B batch, T tokens, T1 = T + 1, K sources.
"""

import dataclasses
import fractions
import functools
import hashlib
import json
import math
import typing
from collections.abc import Mapping, Sequence

import numpy as np

from jaxlm.config import ConfigError, PrepareSourceConfig, SourceConfig
from jaxlm.data.shards import DataDir

MAX_CYCLE = 65536
_ROUNDS = 6


def normalise_mixture(mixture: Mapping[str, float], names: Sequence[str]) -> dict[str, fractions.Fraction]:
    """Exact shares, summing to one, of the sources with a positive weight, in the order of `names`.

    Weights are read as decimals (0.87 is 87/100). Raises ConfigError for an unknown source, a negative or non-finite
    weight, or nothing positive.
    """
    for name, weight in mixture.items():
        if name not in names:
            raise ConfigError(f"mixture names source '{name}', but the data has {', '.join(sorted(names))}")
        if not math.isfinite(weight) or weight < 0:
            raise ConfigError(f"mixture weight of '{name}' is {weight}; give a number of at least 0")
    weights = {name: fractions.Fraction(repr(float(mixture[name]))) for name in names if mixture.get(name, 0) > 0}
    if not weights:
        raise ConfigError("every mixture weight is 0; give at least one source a positive weight")
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def weights_of(listed: Mapping[str, SourceConfig | PrepareSourceConfig], names: Sequence[str]) -> dict[str, float]:
    """Name -> weight in the mixture, as the config lists it; all alike where it lists no source at all.

    Raises ConfigError for a name that the list leaves out.
    """
    if not listed:
        return {name: 1.0 for name in names}
    if missing := [name for name in names if name not in listed]:
        raise ConfigError(
            f"the data has the source '{missing[0]}', but the config gives it no weight: add data.sources."
            f'{missing[0]} = dict(path="", weight=...) to the config, 0 to leave it out'
        )
    return {name: listed[name].weight for name in names}


@functools.lru_cache(maxsize=64)
def mixture_cycle(shares: tuple[fractions.Fraction, ...]) -> np.ndarray:
    """One period of the mixture: int32[C], the source of each slot, repeated for ever.

    In every prefix of the endless sequence each source has been drawn within 1 of its exact share: each draw has a
    release and a deadline slot and the earliest deadline goes first (Tijdeman 1980, the chairman assignment problem;
    Baruah et al. 1996, Pfair scheduling). C is the common denominator of the shares; beyond 65,536 they are rounded
    to 65,536ths.
    """
    cycle = math.lcm(*(share.denominator for share in shares))
    counts = [int(share * cycle) for share in shares] if cycle <= MAX_CYCLE else _round_shares(shares, MAX_CYCLE)
    cycle = min(cycle, MAX_CYCLE)
    drawn = [0] * len(counts)
    order = np.empty(cycle, np.int32)
    for slot in range(cycle):
        # Draw j of a source with share c/C may start at slot floor(j*C/c) and must be done by slot ceil((j+1)*C/c).
        released = (k for k, c in enumerate(counts) if drawn[k] < c and drawn[k] * cycle // c <= slot)
        source = min(released, key=lambda k: (-(-(drawn[k] + 1) * cycle // counts[k]), k))
        order[slot] = source
        drawn[source] += 1
    return order


def _round_shares(shares: Sequence[fractions.Fraction], total: int) -> list[int]:
    """Integers of at least 1 that sum to `total`, nearest to the shares (largest remainder)."""
    counts = [max(1, math.floor(share * total)) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda k: (counts[k] - shares[k] * total, k))
    for k in by_remainder[: max(0, total - sum(counts))]:
        counts[k] += 1
    while sum(counts) > total:
        counts[counts.index(max(counts))] -= 1
    return counts


def permute(positions: np.ndarray, n: int, key: str) -> np.ndarray:
    """The images of `positions` (int64, each in [0, n)) under the permutation of [0, n) that `key` names.

    A six-round Feistel network over the next even number of bits, walked along its cycles until it lands inside
    (Black and Rogaway 2002, format-preserving encryption): O(1) memory for any n below 2**62, and independent of any
    library's version.
    """
    if n <= 1:
        return np.zeros_like(positions)
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    round_keys = _round_keys(key)
    out = positions.astype(np.uint64)
    todo = np.arange(out.size)
    while todo.size:
        left, right = out[todo] >> half, out[todo] & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right + round_key) & mask)
        out[todo] = (left << half) | right
        todo = todo[out[todo] >= n]
    return out.astype(np.int64)


@functools.lru_cache(maxsize=4096)
def _round_keys(key: str) -> np.ndarray:
    return np.frombuffer(hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest(), "<u8").copy()


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele et al. 2014), wrapping on overflow."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """The map from slots to rows. Build it with `plan_rows`."""

    seed: int
    names: tuple[str, ...]
    shares: tuple[fractions.Fraction, ...]
    row_counts: tuple[int, ...]
    batch_size: int

    def locate(self, step: int, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where the rows of `slots` (int, each in [0, batch_size)) of batch `step` come from.

        Returns three int64 arrays of the length of `slots`: index into `names`, epoch (from 0), row index in the
        source. Every row of a source comes exactly once per epoch, in an order of its own for each (seed, source,
        epoch).
        """
        cycle = mixture_cycle(self.shares)
        rank, per_cycle = _cycle_ranks(self.shares)
        turn, place = np.divmod(np.int64(step) * self.batch_size + np.asarray(slots, np.int64), cycle.size)
        source = cycle[place].astype(np.int64)
        draw = turn * per_cycle[source] + rank[place]
        epoch, position = np.divmod(draw, np.asarray(self.row_counts, np.int64)[source])
        row = np.empty_like(position)
        for k, e in {(int(k), int(e)) for k, e in zip(source, epoch, strict=True)}:
            chosen = (source == k) & (epoch == e)
            row[chosen] = permute(position[chosen], self.row_counts[k], f"{self.seed}/{self.names[k]}/{e}")
        return source, epoch, row


@functools.lru_cache(maxsize=64)
def _cycle_ranks(shares: tuple[fractions.Fraction, ...]) -> tuple[np.ndarray, np.ndarray]:
    """How often the source of each slot of the cycle came before in it, int64[C]; and each one's total, int64[K]."""
    cycle = mixture_cycle(shares)
    rank = np.empty(cycle.size, np.int64)
    per_cycle = np.bincount(cycle, minlength=len(shares)).astype(np.int64)
    for k in range(len(shares)):
        rank[cycle == k] = np.arange(per_cycle[k])
    return rank, per_cycle


def count_rows(tokens: int, seq_len: int) -> int:
    """Rows of a stream of `tokens` tokens: row i is tokens [i*T, (i+1)*T] inclusive, T+1 of them."""
    return max(0, (tokens - 1) // seq_len)


def plan_rows(
    token_counts: Mapping[str, int], mixture: Mapping[str, float], *, seed: int, seq_len: int, batch_size: int
) -> RowPlan:
    """The row plan of a data set whose sources hold `token_counts` training tokens.

    Raises ConfigError for a bad mixture, sizes below 1, or a source too short for one row of `seq_len` + 1 tokens.
    """
    if seq_len < 1 or batch_size < 1:
        raise ConfigError(f"seq_len is {seq_len} and batch_size {batch_size}; both must be at least 1")
    # In the order of names, not of the manifest or the mixture, so that neither's spelling changes a batch.
    shares = normalise_mixture(mixture, sorted(token_counts))
    for name in shares:
        if count_rows(token_counts[name], seq_len) == 0:
            raise ConfigError(
                f"source '{name}' holds {token_counts[name]:,} training tokens, fewer than one row of seq_len + 1 = "
                f"{seq_len + 1:,}; lower train.seq_len or give the source more text"
            )
    return RowPlan(
        seed=int(seed),
        names=tuple(shares),
        shares=tuple(shares.values()),
        row_counts=tuple(count_rows(token_counts[name], seq_len) for name in shares),
        batch_size=int(batch_size),
    )


@dataclasses.dataclass(frozen=True)
class Order:
    """What decides every batch of a run, and nothing else does.

    Attributes:
      mixture: weight by source; absent sources count as 0.
      seed: of the order of rows.
      seq_len: T.
      batch_size: B, rows of the global batch.
    """

    data: DataDir
    mixture: Mapping[str, float]
    seed: int
    seq_len: int
    batch_size: int

    def plan(self) -> RowPlan:
        """The map from slots to rows. Raises ConfigError as `plan_rows` does."""
        sizes = {"seed": self.seed, "seq_len": self.seq_len, "batch_size": self.batch_size}
        return plan_rows(self.data.token_counts("train"), self.mixture, **sizes)

    def fingerprint(self) -> dict[str, str]:
        """For the checkpoint, all strings: "data", "mixture", "seed", "seq_len", "batch_size", and the "sha256" of these.

        `check_fingerprint` compares two when a run resumes.
        """
        shares = normalise_mixture(self.mixture, sorted(self.data.sources))
        parts = {
            "data": self.data.sha256,
            "mixture": ", ".join(f"{name} {share}" for name, share in shares.items()),
            "seed": str(self.seed),
            "seq_len": str(self.seq_len),
            "batch_size": str(self.batch_size),
        }
        return {**parts, "sha256": hashlib.sha256(json.dumps(parts).encode()).hexdigest()}


def check_fingerprint(saved: Mapping[str, str], current: Mapping[str, str]) -> None:
    """Raises ConfigError naming what changed between the run that saved and this one; returns None when nothing did."""
    changed = [key for key in current if key != "sha256" and saved.get(key) != current[key]]
    if changed:
        what = "; ".join(f"{key} was {str(saved.get(key))[:60]}, is {current[key][:60]}" for key in changed)
        raise ConfigError(
            f"this run's batches would differ from those it was trained on: {what}; set them back or use a new workdir"
        )


def make_batch(rows_BxT1: np.ndarray, eos_id: int) -> dict[str, np.ndarray]:
    """Inputs, targets and document boundaries of packed rows.

    EOS opens the segment of the document that follows it (as `<|endoftext|>` does for GPT-2): a document's last token
    predicts EOS, and EOS, which attends to itself alone, predicts the first token of the next document. So no target
    crosses from one document into another's context, and every target counts.

    Args:
      rows_BxT1: integer tokens, T + 1 of them a row.
      eos_id: id of the end-of-document token.

    Returns:
      `tokens`, `targets`, `segment_ids` (from 1), `positions` (from 0 in each segment), int32[B, T]; `weights`
      float32[B, T], ones.
    """
    rows_BxT1 = np.asarray(rows_BxT1).astype(np.int32, copy=False)
    tokens_BxT = np.ascontiguousarray(rows_BxT1[:, :-1])
    starts_BxT = tokens_BxT == eos_id
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


class Segment(typing.NamedTuple):
    """A text to be packed: its tokens, and for each token after the first the weight of predicting it."""

    ids: Sequence[int]
    weights: Sequence[float]


def pack(groups: Sequence[Sequence[Segment]], seq_len: int, rows: int) -> tuple[dict[str, np.ndarray], list[int]]:
    """A batch of as many groups as fit, in their order, each group whole in one row.

    A group's segments follow each other: the texts of a pair are segments 2p - 1 and 2p of their row if all groups are
    pairs, so no microbatch parts them. A group goes to the first row with room. The first group that fits nowhere ends
    the batch; the caller begins the next one with it.

    Args:
      groups: segments that must not be parted, a text of one or more tokens each.
      seq_len: T.
      rows: B.

    Returns:
      The batch as `make_batch` gives it, where padding is a last segment of its row with weight 0; and for each group that
      fitted the row that it is in.

    Raises:
      ConfigError: a group longer than a row, or a text of fewer than two tokens.
    """
    integers = ("tokens", "targets", "segment_ids", "positions")
    batch = {name: np.zeros((rows, seq_len), np.int32) for name in integers}
    batch["weights"] = np.zeros((rows, seq_len), np.float32)
    used, segments, placed = np.zeros(rows, np.int64), np.zeros(rows, np.int64), []
    for group in groups:
        length = _group_length(group, seq_len)
        fitting = np.flatnonzero(used + length <= seq_len)
        if not fitting.size:
            break
        row = int(fitting[0])
        for segment in group:
            segments[row] += 1
            inside = slice(used[row], used[row] + len(segment.ids) - 1)
            batch["tokens"][row, inside] = segment.ids[:-1]
            batch["targets"][row, inside] = segment.ids[1:]
            batch["segment_ids"][row, inside] = segments[row]
            batch["positions"][row, inside] = np.arange(len(segment.ids) - 1)
            batch["weights"][row, inside] = segment.weights
            used[row] = inside.stop
        placed.append(row)
    for row in range(rows):
        batch["segment_ids"][row, used[row] :] = segments[row] + 1
        batch["positions"][row, used[row] :] = np.arange(seq_len - used[row])
    return batch, placed


def _group_length(group: Sequence[Segment], seq_len: int) -> int:
    """Tokens of a row that a group takes. Raises ConfigError."""
    for segment in group:
        if len(segment.ids) < 2 or len(segment.weights) != len(segment.ids) - 1:
            raise ConfigError(
                f"a text of {len(segment.ids)} tokens with {len(segment.weights)} weights can't be packed: it needs two "
                "tokens or more, and a weight for each but the first"
            )
    length = sum(len(segment.ids) - 1 for segment in group)
    if length > seq_len:
        raise ConfigError(
            f"a group of {length:,} tokens is longer than a row of train.seq_len={seq_len:,}: cut it, or raise it"
        )
    return length
