"""Decides which row is in which slot of which batch, and makes batches of rows. Pure functions.

The batch of step s is a pure function of (seed, manifest, mixture, s). Slot b of step s is the global slot g = s *
batch_size + b. A short repeating cycle maps g to a source and to the number k of the draw from that source. A
permutation, which differs for each epoch, maps k to a row. Both take O(1) time and do not depend on hosts, threads and
workers. Batches that a run passes over (spoiled ones) are left out before that: step s then has the s-th batch of the rest.

Grain's `MapDataset.mix` and `shuffle` do not serve: `mix` truncates weights to integers (87/10/3 becomes 2899/333/100)
and refuses a weight of zero; `shuffle` adds the epoch to the seed, so that seed 0 epoch 1 repeats seed 1 epoch 0.

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
from jaxlm.data.windows import Windows, batch_number, merge_windows

MAX_CYCLE = 65536
_ROUNDS = 6


def normalise_mixture(mixture: Mapping[str, float], names: Sequence[str]) -> dict[str, fractions.Fraction]:
    """Returns source -> exact share, for the sources with a positive weight, in the order of `names`. The shares sum to one.

    Weights are read as decimals (0.87 is 87/100). Raises ConfigError if a source is unknown, a weight is negative or not
    finite, or no weight is positive.
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
    """Returns name -> weight in the mixture, for all `names`: the weights in the config, or 1 for each if it has none.

    Raises ConfigError if the config lists some sources, but not all of `names`.
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
    """Returns one period of the mixture, int32[C]: the source of each slot. The period is repeated for ever.

    After any number of slots, the draws of each source differ from its exact share by less than 1. To achieve that,
    each draw has a first slot and a deadline, and among the draws that may start, the one with the earliest deadline
    goes first (Tijdeman 1980, the chairman assignment problem; Baruah et al. 1996, Pfair scheduling). C is the common
    denominator of the shares. If that exceeds 65,536, the shares are rounded to 65,536ths.
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
    """Rounds shares to integers of at least 1 that sum to `total` (largest remainder)."""
    counts = [max(1, math.floor(share * total)) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda k: (counts[k] - shares[k] * total, k))
    for k in by_remainder[: max(0, total - sum(counts))]:
        counts[k] += 1
    while sum(counts) > total:
        counts[counts.index(max(counts))] -= 1
    return counts


def permute(positions: np.ndarray, n: int, key: str) -> np.ndarray:
    """Maps each of `positions` (int64, in [0, n)) by a permutation of [0, n), which `key` chooses.

    Takes O(1) memory for any n below 2**62, and does not depend on the version of any library. A six-round Feistel
    network permutes all numbers of an even number of bits, the smallest that holds n. It is applied again to results of
    n or above (cycle walking: Black and Rogaway 2002, format-preserving encryption).
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
    """The map from slots to rows; `plan_rows` makes it.

    Attributes:
      seed: the seed of the order of rows.
      names: the names of the sources with a positive weight.
      shares: the share of each source, from `normalise_mixture`.
      row_counts: the number of rows of each source.
      batch_size: the number of slots of a batch.
      passed_over: the batches that no step trains on, from `merge_windows`.
    """

    seed: int
    names: tuple[str, ...]
    shares: tuple[fractions.Fraction, ...]
    row_counts: tuple[int, ...]
    batch_size: int
    passed_over: Windows = ()

    def locate(self, step: int, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns which rows are in these slots of the batch of `step`, which counts from 0.

        Each epoch of a source has every row once, in an order that depends on seed, source and epoch.

        Args:
          slots: ints in [0, batch_size).

        Returns:
          (source, epoch, row), int64 arrays with an element for each slot: the source's index in `names`, the epoch
          from 0, the row's index in the source.
        """
        cycle = mixture_cycle(self.shares)
        rank, per_cycle = _cycle_ranks(self.shares)
        before = np.int64(batch_number(int(step) + 1, self.passed_over) - 1)  # batches in front of this one
        turn, place = np.divmod(before * self.batch_size + np.asarray(slots, np.int64), cycle.size)
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
    """Returns (how often each slot's source came before in the cycle, int64[C]; slots of each source, int64[K])."""
    cycle = mixture_cycle(shares)
    rank = np.empty(cycle.size, np.int64)
    per_cycle = np.bincount(cycle, minlength=len(shares)).astype(np.int64)
    for k in range(len(shares)):
        rank[cycle == k] = np.arange(per_cycle[k])
    return rank, per_cycle


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
    passed_over: Windows = (),
) -> RowPlan:
    """Returns the row plan for sources with these numbers of training tokens.

    Raises ConfigError if the mixture is wrong, a size is below 1, or a source has fewer than `seq_len` + 1 tokens.
    """
    if seq_len < 1 or batch_size < 1:
        raise ConfigError(f"seq_len is {seq_len} and batch_size {batch_size}; both must be at least 1")
    # Sorted by name, so that the order of the manifest or the mixture changes no batch.
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
        passed_over=passed_over,
    )


@dataclasses.dataclass(frozen=True)
class Order:
    """Everything that decides the batches of a run.

    Attributes:
      data: the open data directory.
      mixture: source -> weight; a source that is absent has weight 0.
      seed: the seed of the order of rows.
      seq_len: T, the number of tokens in a row.
      batch_size: B, the number of rows of the global batch.
      passed_over: windows of batches to pass over, (first, last) from 1. They may grow during a run: those that lie behind
        its last step change no batch before it.
    """

    data: DataDir
    mixture: Mapping[str, float]
    seed: int
    seq_len: int
    batch_size: int
    passed_over: Windows = ()

    def __post_init__(self):
        object.__setattr__(self, "passed_over", merge_windows(self.passed_over))

    def plan(self) -> RowPlan:
        """Returns the map from slots to rows. Raises ConfigError as `plan_rows` does."""
        sizes = {"seed": self.seed, "seq_len": self.seq_len, "batch_size": self.batch_size}
        return plan_rows(self.data.token_counts("train"), self.mixture, **sizes, passed_over=self.passed_over)

    def passing_over(self, windows: Windows) -> "Order":
        """Returns the same order without the batches in these windows, and with all others."""
        return dataclasses.replace(self, passed_over=tuple(windows))

    def batch_number(self, step: int) -> int:
        """Returns the number of the batch that a step trains on, both from 1: `step` itself if nothing is passed over."""
        return batch_number(step, self.passed_over)

    def fingerprint(self) -> dict[str, str]:
        """Returns the order as strings for a checkpoint: "data", "mixture", "seed", "seq_len", "batch_size", "sha256".

        "data" is the manifest's hash; "sha256" is the hash of the other five. `check_fingerprint` compares them when a
        run resumes. What is passed over is no part of it, because it may grow when a run is rolled back.
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
    """Raises ConfigError if this run's batches would differ from those of the run that saved.

    The message names what differs.
    """
    changed = [key for key in current if key != "sha256" and saved.get(key) != current[key]]
    if changed:
        what = "; ".join(f"{key} was {str(saved.get(key))[:60]}, is {current[key][:60]}" for key in changed)
        raise ConfigError(
            f"this run's batches would differ from those it was trained on: {what}; set them back or use a new workdir"
        )


def make_batch(rows_BxT1: np.ndarray, separator_id: int) -> dict[str, np.ndarray]:
    """Returns the batch of packed rows: inputs, targets, segments and positions.

    The separator (EOS for our tokenizers) begins a document's segment, as `<|endoftext|>` does for GPT-2. So the last
    token of a document predicts the separator that opens the next one, and a separator, which sees only itself, predicts
    the first token of its document. No target is predicted from another document's tokens, and every target counts.

    Args:
      rows_BxT1: integer tokens, T + 1 of them a row.
      separator_id: the id that begins each document.

    Returns:
      `tokens`, `targets`, `segment_ids` (from 1), `positions` (from 0 in each segment), int32[B, T]; `weights`
      float32[B, T], ones.
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


class Segment(typing.NamedTuple):
    """A text to be packed.

    Attributes:
      ids: the token ids of the text.
      weights: the weight of each token but the first, as a target.
    """

    ids: Sequence[int]
    weights: Sequence[float]


def pack(groups: Sequence[Sequence[Segment]], seq_len: int, rows: int) -> tuple[dict[str, np.ndarray], list[int]]:
    """Packs groups of texts into the rows of one batch. A group stays in one row, so that no microbatch splits it.

    Each group goes to the first row with room, and its texts become neighbouring segments. (If all groups are pairs,
    the pairs of a row are its segments 1 and 2, 3 and 4, ...) The first group that fits in no row ends the batch: the
    caller begins the next batch with that group.

    Args:
      groups: the groups, each of one or more texts; every text has at least two tokens.
      seq_len: T, the number of tokens in a row.
      rows: B, the number of rows.

    Returns:
      (batch, the row of each group that fitted). The batch has the same arrays as one from `make_batch`. Padding is the
      last segment of a row, with weight 0.

    Raises:
      ConfigError: a group is longer than a row, or a text has fewer than two tokens.
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
    """Returns how many tokens of a row a group takes. Raises ConfigError if it can't be packed."""
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
