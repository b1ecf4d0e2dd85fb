"""The decode engine: requests enter and leave the rows of one batch between steps. Its compiled programs are in `ring`.

Legend: B rows, P prompts read together, C tokens of a chunk, W words of a guide's mask.
"""

import collections
import dataclasses
import hashlib
import time
import typing

import jax
import numpy as np

from jaxlm.config import ConfigError
from jaxlm.devices.tree import layer_of
from jaxlm.models.decode import drafts, ring
from jaxlm.models.decode.ring import Drawn, Layers, LogProbs, lay_out
from jaxlm.models.decode.sampling import NO_PENALTIES, Rows
from jaxlm.models.transformer import Transformer, in_int8

_MEASURED = 8  # steps of each size; the fastest counts
_SIZES: dict[tuple, tuple[int, float]] = {}  # what `drafts.best` returned for the models and machine of this process


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """One row's sampling settings; see `sampling.Rows`.

    Attributes:
      temperature, top_k, top_p: 0, 0 and 1 for the likeliest token, all tokens, all probability.
      seed: a row's tokens depend on its prompt, its settings and its seed alone, not on its neighbours.
      bias: id -> the number to add to its logit.
      adapter: the number of the adapter among those in the collection `adapters`, from 1; 0 for none.
      logprobs: n asks for the log-probability of each token and of the n likeliest, at most 20; None for none.
      echo: True for the prompt's log-probabilities too; the first token has None.
      pools: True for the mean of the last hidden states of the prompt's tokens but the last, which is not read.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    bias: typing.Mapping[int, float] = dataclasses.field(default_factory=dict)
    logprobs: int | None = None
    min_p: float = 0.0
    penalties: tuple[float, float, float] = NO_PENALTIES
    adapter: int = 0
    echo: bool = False
    pools: bool = False

    @property
    def plain(self) -> bool:
        """True without bias, penalties and log-probabilities, which `ring.step_first` does not compute."""
        return not self.bias and self.logprobs is None and self.penalties == NO_PENALTIES


def check_prompts(model: Transformer, prompts: typing.Sequence[typing.Sequence[int]]) -> None:
    """Raises ConfigError if a prompt is empty, has an id outside the vocabulary, or leaves no room in the context."""
    config, adapter = model.config, model.adapter
    ids = config.vocab_size + (adapter.prompt_tokens if adapter and adapter.kind == "prompt" else 0)
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ConfigError(f"prompt {i} has no tokens: begin it with the end-of-document token")
        if len(prompt) >= config.max_seq_len:
            raise ConfigError(
                f"prompt {i} has {len(prompt)} tokens and leaves no room in model.max_seq_len={config.max_seq_len}: shorten it"
            )
        if min(prompt) < 0 or max(prompt) >= ids:
            raise ConfigError(f"prompt {i} has an id outside the vocabulary of {ids}")


class Prefill:
    """Prompts that are being read together.

    Attributes:
      done: the number of tokens of each prompt in the staging cache.
      echo: log-probabilities of the only prompt's `ids[1:]`, chunk by chunk, if `settings.echo`.
      pooled: float32 (D,), if `settings.pools`: the sum of the last hidden states of the only prompt's `ids[:done]`.
    """

    def __init__(
        self, prompts: typing.Sequence[typing.Sequence[int]], staging: Layers, settings: Settings = Settings()
    ):
        self.prompts = [np.asarray(ids, np.int32) for ids in prompts]
        self.staging, self.settings = staging, settings
        self.done = 0
        self.echo: list[LogProbs] = []
        self.pooled = np.float32(0)

    @property
    def left(self) -> int:
        """Returns how many tokens of the longest prompt are still to be read, not counting its last token."""
        return max(0, max(map(len, self.prompts)) - 1 - self.done)

    def tokens(self, chunk: int, shift: int = 0) -> np.ndarray:
        """Returns the next chunk of each prompt, int32 (P, C), from `shift` tokens further on, padded with zeros."""
        tokens_PxC = np.zeros((self.staging[0].k_BxKxHxS.shape[0], chunk), np.int32)
        for row_C, ids in zip(tokens_PxC, self.prompts, strict=False):
            rest = ids[self.done + shift :][:chunk]
            row_C[: len(rest)] = rest
        return tokens_PxC


class Prefixes:
    """The prefix cache's index: which chunks of keys and values are kept, so that a system prompt is read once.

    It maps the hash of an adapter and all ids up to a chunk's end to its place in the cache; the chunk used least recently is
    replaced first. `hits` is the number of tokens found.
    """

    def __init__(self, places: int, chunk: int):
        self._chunk, self._places = chunk, places
        self._kept: collections.OrderedDict[bytes, int] = collections.OrderedDict()
        self.hits = 0

    def find(self, ids: np.ndarray, adapter: int = 0) -> list[int]:
        """Returns the places of the longest prefix of `ids` whose chunks are all kept."""
        keys = self._keys(ids, adapter)
        count = next((n for n, key in enumerate(keys) if key not in self._kept), len(keys))
        self._use(keys[:count])
        self.hits += count * self._chunk
        return [self._kept[key] for key in keys[:count]]

    def place(self, ids: np.ndarray, adapter: int = 0) -> int | None:
        """Returns a place to keep the last chunk of `ids`; None if the chunk is kept already, or there are no places."""
        keys = self._keys(ids, adapter)
        if keys[-1] in self._kept or not self._places:
            return None
        full = len(self._kept) == self._places
        place = self._kept.popitem(last=False)[1] if full else len(self._kept)
        self._kept[keys[-1]] = place
        self._use(keys)
        return place

    def clear(self) -> None:
        self._kept.clear()

    def _keys(self, ids: np.ndarray, adapter: int) -> list[bytes]:
        """Returns a hash for each whole chunk, of all ids up to the chunk's end."""
        so_far, keys = hashlib.sha256(b"%d" % adapter), []
        for end in range(self._chunk, len(ids) + 1, self._chunk):
            so_far.update(ids[end - self._chunk : end].tobytes())
            keys.append(so_far.digest())
        return keys

    def _use(self, keys: list[bytes]) -> None:
        """Marks chunks as used, the first chunk last, because the later chunks are useless without it."""
        for key in reversed(keys):
            if key in self._kept:
                self._kept.move_to_end(key)


class Engine:
    """Decodes up to `rows` requests together. Not thread-safe. With a mesh, make and use it under `jax.set_mesh`.

    Args:
      chunk: tokens of a prompt that are read at once.
      shortest: the ring has at least so many places, rounded up.
      prefix_bytes: the size of the prefix cache, allocated at the start; at most that of the weights; 0 for none.
      speculate: True to propose tokens to a row that lives alone (see `drafts`), on one CPU.

    Attributes:
      lengths: the lengths that the ring may have, ascending.
      burst: how many steps are best run before the host reads tokens for which somebody waits.
      state: the ring and the rows.
    """

    def __init__(
        self,
        model: Transformer,
        variables: dict,
        rows: int = 8,
        chunk: int | None = None,
        shortest: int = 128,
        prefix_bytes: int = 2**28,
        speculate: bool = False,
    ):
        leaf = jax.tree.leaves(variables)[0]
        devices = leaf.devices() if isinstance(leaf, jax.Array) else jax.devices()
        self._on_cpu = [device.platform for device in devices] == ["cpu"]  # on a single device, and it is a CPU
        self.speculates = speculate and self._on_cpu
        self.model, self.rows = model, rows
        self.chunk = chunk or (32 if self._on_cpu else 256)
        self.burst = 1 if self._on_cpu else 8
        self._shortest = -(-shortest // self.chunk) * self.chunk
        self.prefixes = Prefixes(0, self.chunk)
        self.load(variables)
        places = self._places(min(prefix_bytes, self._weight_bytes))
        self.prefixes = Prefixes(places, self.chunk)
        self._kept = ring.cache(model, places, self.chunk) if places else ()
        self.reset()

    def _places(self, most_bytes: int) -> int:
        """Returns how many chunks the prefix cache holds: as many as fit, but at most eight whole contexts for each row."""
        c = self.model.config
        of_one = 2 * c.n_layers * c.n_kv_heads * c.head_dim * self.chunk * jax.numpy.dtype(c.dtype).itemsize
        return min(most_bytes // of_one, 8 * self.rows * -(-c.max_seq_len // self.chunk))

    def reset(self, rows: int = 0, places: int = 0) -> None:
        """Restores the initial state: no row is live, and earlier requests change no result.

        `rows`: others than before, if given. `places`: of a row, prompt and new tokens, at most; 0 for the context.
        """
        self.prefixes.clear()
        self.rows = rows or self.rows
        self.lengths = self._lengths(min(places, self.model.config.max_seq_len) or self.model.config.max_seq_len)
        self._plain_B = np.ones(self.rows, bool)  # see `Settings.plain`
        self._open_BxW = np.full((self.rows, -(-self.model.config.vocab_size // 32)), 2**32 - 1, np.uint32)
        self.state = ring.empty(self.model, self.rows, self.lengths[0])

    def _lengths(self, places: int) -> list[int]:
        """Returns the ring's lengths: doublings of the shortest that are well below the last, which is `places` rounded up."""
        # Multiples of a chunk, so that a prompt's last chunk fits, and few, since each compiles a program.
        step = max(1, power_of_two(places) // 8 // self.chunk) * self.chunk
        last, lengths = -(-max(places, self._shortest) // step) * step, [self._shortest]
        while 4 * lengths[-1] <= 3 * last:
            lengths.append(2 * lengths[-1])
        return [*lengths[:-1], last]

    def load(self, variables: dict) -> None:
        """Takes other variables of the same shapes, without compiling again. Live rows continue with the new variables."""
        self.weights = None  # frees the memory first
        self.weights = lay_out(self.model, variables, every_product=self._on_cpu)
        self.prefixes.clear()
        parts = [(name, part) for of in self.weights.variables.values() for name, part in of.items()]
        layers = [part for name, part in parts if layer_of(name) is not None]
        self._weight_bytes = _bytes((layers, self.weights.head_VxD))

    def unload(self) -> None:
        """Frees the memory of weights and ring until `load` and `reset`. All compiled programs stay."""
        self.prefixes.clear()
        self.weights = self.state = None

    @property
    def slots(self) -> int:
        return self.state.layers[0].slots

    @property
    def step_bytes(self) -> int:
        """Returns how many bytes of weights and cache a step reads: every kernel, the head and every slot once; no adapters."""
        return self._weight_bytes + _bytes(self.state.layers)

    def length_for(self, tokens: int) -> int:
        """Returns the shortest ring length with at least `tokens` slots. Raises ConfigError if there is none."""
        for length in self.lengths:
            if length >= tokens:
                return length
        raise ConfigError(
            f"{tokens:,} tokens do not fit in the context of {self.model.config.max_seq_len:,}: send fewer"
        )

    def resize(self, slots: int) -> None:
        """Changes the ring's length; requests continue. The tokens of live rows, and the next to be written, must fit."""
        here, there = self.lengths.index(self.slots), self.lengths.index(slots)
        for length in self.lengths[here + 1 : there + 1] or self.lengths[there:here][::-1]:
            self.state = ring.resized(self.state, length)

    def begin(self, *prompts: typing.Sequence[int], settings: Settings = Settings()) -> Prefill:
        """Returns the Prefill to read prompts together. A single one skips chunks in the prefix cache, if no more is wanted."""
        staging = ring.cache(self.model, power_of_two(len(prompts)), self.length_for(max(map(len, prompts))))
        prefill = Prefill(prompts, staging, settings)
        skips = len(prompts) == 1 and not settings.echo and not settings.pools
        for place in self.prefixes.find(prefill.prompts[0][:-1], settings.adapter) if skips else ():
            prefill.staging = ring.paste(prefill.staging, self._kept, np.int32(place), np.int32(prefill.done))
            prefill.done += self.chunk
        return prefill

    def read(self, prefill: Prefill) -> jax.Array:
        """Starts to read one chunk of each prompt, and does not wait for the device unless the prompt is echoed or pooled.

        Returns an array that is ready once the chunk is read.
        """
        place, size = np.int32(prefill.done), min(self.chunk, prefill.left)
        tokens_PxC, next_C = prefill.tokens(self.chunk), prefill.tokens(self.chunk, 1)[0]
        more = (next_C, place, prefill.settings.echo, np.int32(prefill.settings.adapter))
        prefill.staging, logprobs, hidden_CxD = ring.read_chunk(
            self.model, self.weights, prefill.staging, tokens_PxC, *more
        )
        prefill.done += size
        if prefill.settings.pools:
            prefill.pooled += np.asarray(hidden_CxD, np.float32)[:size].sum(axis=0)
        if prefill.settings.echo:
            prefill.echo.append(jax.tree.map(lambda x: x[:size], jax.device_get(logprobs)))
        elif size == self.chunk and len(prefill.prompts) == 1:
            kept_at = self.prefixes.place(prefill.prompts[0][: prefill.done], prefill.settings.adapter)
            if kept_at is not None:
                self._kept = ring.keep(self._kept, prefill.staging, np.int32(kept_at), place)
        return logprobs.chosen

    def insert(self, prefill: Prefill, row: int, settings: Settings, prompt: int = 0) -> None:
        """Gives a row the prompt of this number of a Prefill that is read. The prompt must fit into the ring."""
        ids, s = prefill.prompts[prompt], settings
        bias_V = np.zeros(self.model.config.padded_vocab_size, np.float32)
        for token, value in s.bias.items():
            bias_V[token] = value
        seen_V = np.zeros(len(bias_V), np.int32)
        if s.penalties != NO_PENALTIES:
            seen_V[ids[ids < len(seen_V)]] = 1
        rows = Rows(
            np.float32(s.temperature),
            np.int32(min(s.top_k, len(bias_V))),
            np.float32(s.top_p),
            np.uint32(s.seed % 2**32),
            bias_V,
            np.int32(-1 if s.logprobs is None else s.logprobs),
            np.float32(s.min_p),
            np.float32(s.penalties),
            seen_V,
            np.int32(s.adapter),
        )
        entry = ring.Entry(np.int32(row), np.int32(prompt), ids[-1], np.int32(len(ids) - 1), rows)
        self.state = ring.insert(self.state, prefill.staging, entry)
        self._plain_B[row] = s.plain

    def start(
        self, live_B: np.ndarray, mask_BxW: np.ndarray | None = None, steps: int = 1, penalised: bool = False
    ) -> Drawn:
        """Starts `steps` steps of all rows (`ring.step`); returns the tokens, still on the device. No mask allows all ids.

        On one CPU, where a step takes longer the more rows it computes, an engine that speculates computes the first row alone
        while it lives alone.
        `penalised`: True if a live row has penalties, which change with every token: then `steps` must be 1.
        """
        if self.speculates and self.rows > 1 and steps == 1 and mask_BxW is None and self.alone(live_B):
            return self.start_first(())
        changed = np.bool_(penalised or mask_BxW is not None)
        mask_BxW = self._open_BxW if mask_BxW is None else mask_BxW
        self.state, drawn = ring.step(self.model, self.weights, self.state, live_B, mask_BxW, changed, steps)
        if penalised:
            self._count(live_B)
        return drawn

    def _count(self, live_B: np.ndarray) -> None:
        seen_BxV = ring.count(self.state.rows.seen_BxV, self.state.last_B, live_B)
        self.state = self.state._replace(rows=self.state.rows._replace(seen_BxV=seen_BxV))

    def start_first(self, proposed: typing.Sequence[int]) -> Drawn:
        """Starts a step of the first row alone, with proposed tokens (`ring.step_first`)."""
        proposed_N = np.asarray(proposed, np.int32)
        self.state, drawn = ring.step_first(self.model, self.weights, self.state, proposed_N)
        return drawn

    def draft(self, ids: typing.Iterable[int]) -> drafts.Draft:
        """Returns the Draft of a text, whose size suits this machine: at first use it measures how long steps take."""
        key = (self.model, in_int8(self.weights.variables), self.rows)
        if key not in _SIZES:
            _SIZES[key] = drafts.best({size: self._seconds(size) for size in drafts.SIZES})
        return drafts.Draft(ids, *_SIZES[key])

    def _seconds(self, size: int) -> float:
        """Returns how long a step of the first row takes that draws `size` tokens, without compiling."""
        state, times = ring.empty(self.model, self.rows, self.lengths[0]), []
        # With the settings that take longest: limits. One size for all settings, since each is a program for each length.
        limited = {"temperature_B": np.ones(self.rows, np.float32), "top_k_B": np.full(self.rows, 50, np.int32)}
        limited["top_p_B"] = np.full(self.rows, 0.95, np.float32)
        state = state._replace(rows=state.rows._replace(**limited))
        for _ in range(_MEASURED):
            began = time.perf_counter()
            state, drawn = ring.step_first(self.model, self.weights, state, np.zeros(size - 1, np.int32))
            jax.block_until_ready(drawn)
            times.append(time.perf_counter() - began)
        return min(times)

    def alone(self, live_B: np.ndarray) -> bool:
        """True if the first row lives alone, and is `plain`."""
        return bool(live_B[0] and not live_B[1:].any() and self._plain_B[0])

    def step(self, live_B: np.ndarray, mask_BxW: np.ndarray | None = None, steps: int = 1) -> Drawn:
        """Does the same as `start`, but waits for the drawn tokens and returns them on the host."""
        return jax.device_get(self.start(live_B, mask_BxW, steps))

    def warm(self, tell: typing.Callable[[str], None]) -> None:
        """Compiles all programs for all lengths; no row may be live. `tell` gets a line for each length."""
        idle_B = np.zeros(self.rows, bool)
        for length in self.lengths:
            tell(f"for {length:,} slots")
            self.resize(length)
            for shorter in self.lengths[: self.lengths.index(length) + 1]:
                self.insert(Prefill([[0]], ring.cache(self.model, 1, shorter)), 0, Settings())
            prefill = Prefill([[0, 0]], ring.cache(self.model, 1, length))
            self.read(prefill)
            if self._kept:
                self._kept = ring.keep(self._kept, prefill.staging, np.int32(0), np.int32(0))
                ring.paste(prefill.staging, self._kept, np.int32(0), np.int32(0))
            for steps in {1, self.burst}:
                self.step(idle_B, self._open_BxW, steps)
            if self.speculates and self.rows > 1:
                self.start_first([])
            if self.speculates and (size := self.draft(()).size):
                self.start_first([0] * size)
        self._count(idle_B)
        self.resize(self.lengths[0])


def _bytes(tree: typing.Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
