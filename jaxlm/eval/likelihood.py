"""Scores texts: computes log p of a continuation after a context, for benchmarks, text files and the red team.

Texts share their common prefixes: the choices of a question share its context, and questions the same few-shot examples.
The texts are sorted, so that texts with a common prefix are neighbours, and packed into a row like a trie in depth-first
order: each text adds only the tokens after its common prefix with the text before it. A token is attended to by the later
tokens of its branch; `until` says where the branch ends (`until_BxT` of `ops.attention.attention`). So the scores are those
of each text alone, and shared prefixes are computed once.

Legend: B rows, T tokens of a row, M scored tokens of a row, D model.
"""

import collections
import dataclasses
import functools
import itertools
import typing
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxlm import models
from jaxlm.config import Config, RunError
from jaxlm.data.shards.shards import DataDir
from jaxlm.data.tokenizer.coder import Coder
from jaxlm.devices import processes, sharding
from jaxlm.eval.model import Restored
from jaxlm.host.console import told
from jaxlm.models.decode.engine import Engine, power_of_two
from jaxlm.models.transformer import Transformer
from jaxlm.ops import attention, spmd, xent
from jaxlm.step.objectives import base
from jaxlm.step.objectives.base import Batch, Variables
from jaxlm.step.step import cast

Request = tuple[Sequence[int], Sequence[int]]  # (ids of the context, at least one; ids to score)
_SHORT, _LONG = 256, 4096  # tokens of a row: at least, and at most unless a text is longer
_AHEAD = 2  # batches that the host is ahead of the device


@dataclasses.dataclass
class Row:
    """One row: a tree of texts.

    Attributes:
      tokens, positions, until: of each token; see the module.
      sources: for each scored token, the index in the row of the token that predicts it.
      targets: the scored tokens.
      spans: (request number, start in `targets`, end in `targets`).
    """

    tokens: list[int] = dataclasses.field(default_factory=list)
    positions: list[int] = dataclasses.field(default_factory=list)
    until: list[int] = dataclasses.field(default_factory=list)
    sources: list[int] = dataclasses.field(default_factory=list)
    targets: list[int] = dataclasses.field(default_factory=list)
    spans: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    _path: list[int] = dataclasses.field(default_factory=list)  # the indices in the row of the newest text's tokens

    def add(self, number: int, ids: Sequence[int], shared: int, targets: Sequence[int]) -> None:
        """Adds a text, whose first `shared` tokens it shares with the text added before."""
        for index in self._path[shared:]:
            self.until[index] = len(self.tokens)
        del self._path[shared:]
        for position in range(shared, len(ids)):
            self._path.append(len(self.tokens))
            self.tokens.append(ids[position])
            self.positions.append(position)
            self.until.append(-1)
        first = len(self.targets)
        self.sources += self._path[len(ids) - len(targets) :] if targets else []
        self.targets += targets
        self.spans.append((number, first, len(self.targets)))

    def close(self) -> "Row":
        self.until = [len(self.tokens) if end < 0 else end for end in self.until]
        return self


def pack(requests: Sequence[Request], length: int) -> list[Row]:
    """Returns rows of at most `length` tokens that hold all requests.

    A request's inputs are all its ids but the last, and must be at most `length`. Requests with the same context go into one
    row if they fit.
    """
    inputs = [(*context, *scored[:-1]) for context, scored in requests]
    order = sorted(range(len(requests)), key=inputs.__getitem__)
    rows, row, before = [], Row(), ()
    for _, numbers in itertools.groupby(order, key=lambda number: requests[number][0]):
        texts = [(number, inputs[number]) for number in numbers]
        need = len(texts[0][1]) + sum(len(b) - _shared(a, b) for (_, a), (_, b) in itertools.pairwise(texts))
        for number, ids in texts:
            shared = _shared(before, ids) if row.tokens else 0
            together = number == texts[0][0] and need <= length
            if len(row.tokens) + (need if together else len(ids)) - shared > length:
                rows.append(row.close())
                row, shared = Row(), 0
            row.add(number, ids, shared, list(requests[number][1]))
            before = ids
    return [*rows, row.close()] if row.spans else rows


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns the length of the common prefix of two texts."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def batch(rows: Sequence[Row], count: int, length: int, scored: int) -> dict[str, np.ndarray]:
    """Returns rows as arrays: `tokens`, `positions` and `until` [B, T], `sources` and `targets` [B, M].

    B = `count`, T = `length`, M = `scored`. Padding tokens attend to themselves alone.
    """
    arrays = {name: np.zeros((count, length), np.int32) for name in ("tokens", "positions")}
    arrays["until"] = np.tile(np.arange(1, length + 1, dtype=np.int32), (count, 1))
    arrays |= {name: np.zeros((count, scored), np.int32) for name in ("sources", "targets")}
    for place, row in enumerate(rows):
        for name, array in arrays.items():
            values = getattr(row, name)
            array[place, : len(values)] = values
    return arrays


class NotFinite(RunError):
    """A log p is not finite: the model's weights are damaged, or its training diverged."""


class Score(typing.NamedTuple):
    """The score of a continuation: its log p in nats; whether each token is the likeliest (`greedy`); the number of tokens."""

    logp: float
    greedy: bool
    tokens: int


@dataclasses.dataclass(frozen=True)
class Scorer:
    """Scores texts with a model.

    Attributes:
      variables: on the mesh.
      mesh: rows are sharded over data x fsdp.
      tokens: about how many tokens are in one batch.
      tile: the number of tokens whose logits are in memory at one time; 0 for all.
      data: the data that the model was trained on; None if unknown.
      chats: True if the model answers in a chat (`sample.chat_template` of its run).
    """

    model: Transformer
    variables: Variables
    tokenizer: Coder
    mesh: Mesh
    tokens: int
    tile: int
    data: DataDir | None = None
    chats: bool = False

    @property
    def context(self) -> int:
        return self.model.config.max_seq_len

    @property
    def opening(self) -> int:
        """Returns the id that is the context of a text without one: the last opening token of documents, or EOS."""
        return self.tokenizer.opening[-1] if self.tokenizer.opening else self.tokenizer.eos_id

    def of(self, variables: Variables) -> "Scorer":
        """Returns a scorer of the same model with other weights. It shares the compiled programs, and the messages printed."""
        other = dataclasses.replace(self, variables=variables)
        for name in ("_program", "_told"):
            other.__dict__[name] = getattr(self, name)  # where cached_property keeps it
        return other

    @functools.cached_property
    def engine(self) -> Engine:
        with jax.set_mesh(self.mesh):
            return Engine(self.model, self.variables, prefix_bytes=0)

    def score(self, requests: Sequence[Request], what: str = "scoring") -> list[Score]:
        """Returns the score of each request: (ids of the context, at least one; ids to score after it).

        A text longer than the model's context is cut on the left, as lm-evaluation-harness does; a line says how many. If
        the ids to score are longer than the context, they are scored in windows, each after the ids that still fit.

        Raises NotFinite at the first log p that is not finite.
        """
        self._tell_cut(requests, what)
        parts = [part for number, request in enumerate(requests) for part in _windows(number, *request, self.context)]
        logp, greedy = np.zeros(len(requests)), np.ones(len(requests), bool)
        by_length = collections.defaultdict(list)
        for part in parts:
            by_length[max(_SHORT, power_of_two(len(part[1][0]) + len(part[1][1]) - 1))].append(part)
        with processes.working(what, len(parts), "texts") as tell:
            scored = (part for longest, group in sorted(by_length.items()) for part in self._scored(group, longest))
            for number, values, hits in told(scored, tell):
                if not np.isfinite(values).all():
                    raise NotFinite(
                        f"{what}: log p of a text is not finite: the model's weights are damaged, or its training diverged"
                    )
                logp[number] += np.sum(values, dtype=np.float64)
                greedy[number] &= bool(np.all(hits))
        return [Score(float(logp[n]), bool(greedy[n]), len(scored)) for n, (_, scored) in enumerate(requests)]

    def say_once(self, line: str) -> None:
        """Prints a line, unless this scorer, or one that shares its messages (`of`), printed it before."""
        if line not in self._told:
            self._told.add(line)
            processes.say(line)

    @functools.cached_property
    def _told(self) -> set[str]:
        return set()

    def _tell_cut(self, requests: Sequence[Request], what: str) -> None:
        limit = self.context
        cut = sum(len(context) + len(scored) > limit + 1 and len(scored) <= limit for context, scored in requests)
        if cut:
            self.say_once(
                f"{what}: {cut:,} of {len(requests):,} texts are longer than the model's context of {limit:,} tokens: cut on "
                "the left"
            )

    def _scored(self, parts: list[tuple[int, Request]], longest: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yields (request number, log p of each token, whether each is the likeliest) of parts of at most `longest` inputs."""
        requests = [request for _, request in parts]
        length, rows = self._layout(requests, longest)
        ways = sharding.batch_ways(self.mesh)
        batches = -(-len(rows) // max(1, self.tokens // length))
        count = -(-len(rows) // batches // ways) * ways
        scored = -(-max(len(row.targets) for row in rows) // 64) * 64
        waiting: collections.deque = collections.deque()
        mine = sharding.local_rows(self.mesh, count)
        for start in range(0, len(rows), count):
            taken = rows[start : start + count]
            arrays = batch(taken, count, length, scored)
            with jax.set_mesh(self.mesh):
                placed = sharding.to_global({name: x[mine] for name, x in arrays.items()}, self.mesh, count)
                waiting.append((taken, self._program(self.variables, placed)))
            if len(waiting) > _AHEAD:
                yield from _results(parts, *waiting.popleft())
        while waiting:
            yield from _results(parts, *waiting.popleft())

    def _layout(self, requests: list[Request], longest: int) -> tuple[int, list[Row]]:
        """Returns (tokens of a row, rows) for the row length that costs least."""
        # In long rows more questions share their few-shot examples, but each query attends to more keys.
        width, length, best = self.model.config.d_model, max(_SHORT, longest), None
        while best is None or length <= _LONG:
            rows = pack(requests, length)
            # Multiplications per token in one layer: about 12 D^2 with the weights, and T D with half of the row's keys.
            cost = len(rows) * length * (12 * width + length)
            if best and cost > best[0]:
                break
            best = (cost, length, rows)
            length *= 2
        return best[1:]

    @functools.cached_property
    def _program(self) -> Callable[[Variables, Batch], tuple[jax.Array, jax.Array]]:
        backend = self.model.backend if self.model.backend in attention.TREES else attention.TREES[-1]
        return jax.jit(
            token_scores(self.model.clone(backend=backend), self.tile), out_shardings=sharding.replicated(self.mesh)
        )


def of_restored(restored: Restored, config: Config) -> Scorer:
    """Returns the scorer of a restored model. A batch has about `eval.batch_size` x `train.seq_len` tokens."""
    of_model = (restored.model, restored.variables, restored.tokenizer, restored.mesh)
    sizes = (config.eval.batch_size * config.train.seq_len, config.loss.tile_tokens)
    return Scorer(*of_model, *sizes, restored.data, config.sample.chat_template)


def token_scores(model: Transformer, tile: int) -> Callable[[Variables, Batch], tuple[jax.Array, jax.Array]]:
    """Returns a function `(variables, batch) -> (log p of each scored token, whether it is the likeliest)`, both [B, M].

    The model must have an attention backend of `ops.attention.TREES`.
    """
    config = model.config

    def run(variables: Variables, batch: Batch) -> tuple[jax.Array, jax.Array]:
        variables = cast(variables, jnp.dtype(config.dtype))
        hidden_BxTxD = base.hidden(model, variables, batch, None)
        hidden_BxMxD = jnp.take_along_axis(hidden_BxTxD, batch["sources"][:, :, None], axis=1)
        head_DxV = models.head_kernel(variables["params"], config, variables.get("packed"))
        rows = models.head_rows(model, variables)
        of_tokens = functools.partial(xent.token_scores, vocab_size=config.vocab_size, tile=tile, **rows)
        return spmd.over_tokens(of_tokens, hidden_BxMxD, head_DxV, batch["targets"], summed=False)

    return run


def _results(
    parts: list[tuple[int, Request]], rows: list[Row], scores: tuple[jax.Array, jax.Array]
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    logp_BxM, hits_BxM = jax.device_get(scores)
    for place, row in enumerate(rows):
        for part, first, end in row.spans:
            yield parts[part][0], logp_BxM[place, first:end], hits_BxM[place, first:end]


def _windows(number: int, context: Sequence[int], scored: Sequence[int], limit: int) -> Iterator[tuple[int, Request]]:
    """Yields (number, request), each request of at most `limit` inputs; together the requests score all of `scored`."""
    whole, first = [*context, *scored], len(context)
    for start in range(first, len(whole), limit):
        end = min(start + limit, len(whole))
        yield number, (whole[max(0, end - limit - 1) : start], whole[start:end])
