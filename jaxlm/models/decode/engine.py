"""The decode engine: requests enter and leave the rows of one batch between two steps (the programs: `ring`).

Legend: B rows, P prompts that are read together, C tokens of a chunk, E rows that are entered, W words of a guide's mask.
"""

import collections
import hashlib
import typing

import jax
import numpy as np

from jaxlm.config import ConfigError
from jaxlm.models.decode import ring
from jaxlm.models.decode.ring import Drawn, Layers, LogProbs, lay_out
from jaxlm.models.decode.sampling import Rows
from jaxlm.models.transformer import Transformer


class Settings(typing.NamedTuple):
    """How one row draws (see `sampling.Rows`). `logprobs`: 0 of the drawn tokens, n of the n likeliest too; None for none."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    bias: typing.Mapping[int, float] = {}
    logprobs: int | None = None


class Entry(typing.NamedTuple):
    """What enters a row: which of the prompts that were read together."""

    row: int
    settings: Settings
    prompt: int = 0


def check_prompts(model: Transformer, prompts: typing.Sequence[typing.Sequence[int]]) -> None:
    """Raises ConfigError if a prompt can't be continued: it is empty, has an id outside the vocabulary, or leaves no room."""
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


def on_one_cpu(variables: dict) -> bool:
    """True if the variables lie on one device, a CPU."""
    leaf = jax.tree.leaves(variables)[0]
    devices = leaf.devices() if isinstance(leaf, jax.Array) else jax.devices()
    return len(devices) == 1 and next(iter(devices)).platform == "cpu"


class Prefill:
    """Prompts that are being read together.

    Attributes:
      done: how many tokens of each the staging cache holds, from the first on.
      echo: the log-probabilities of the only prompt's `ids[1:]`, chunk by chunk, if they were asked for.
    """

    def __init__(self, prompts: typing.Sequence[typing.Sequence[int]], staging: Layers, wants_echo: bool = False):
        self.prompts = [np.asarray(ids, np.int32) for ids in prompts]
        self.staging, self.wants_echo = staging, wants_echo
        self.done = 0
        self.echo: list[LogProbs] = []

    @property
    def left(self) -> int:
        """Returns how many tokens of the longest are still to be read: all but the last one are."""
        return max(0, max(map(len, self.prompts)) - 1 - self.done)

    def tokens(self, chunk: int, shift: int = 0) -> np.ndarray:
        """Returns the next chunk of each prompt, int32 (P, C), so many tokens further on, with zeros behind its end."""
        tokens_PxC = np.zeros((self.staging[0].k_BxKxHxS.shape[0], chunk), np.int32)
        for row_C, ids in zip(tokens_PxC, self.prompts, strict=False):
            rest = ids[self.done + shift :][:chunk]
            row_C[: len(rest)] = rest
        return tokens_PxC


class Prefixes:
    """Knows which chunks of keys and values are kept of how prompts begin, so that a system prompt is read once.

    Gives each chunk a place, by all the ids up to its end; of more chunks than places the longest unused go first.
    `hits` is how many tokens were found.
    """

    def __init__(self, places: int, chunk: int):
        self._chunk, self._free = chunk, list(range(places))[::-1]
        self._kept: collections.OrderedDict[bytes, int] = collections.OrderedDict()
        self.hits = 0

    def find(self, ids: np.ndarray) -> list[int]:
        """Returns the places of the chunks with which `ids` begin, as many in a row as are kept."""
        keys = self._keys(ids)
        count = next((n for n, key in enumerate(keys) if key not in self._kept), len(keys))
        self._use(keys[:count])
        self.hits += count * self._chunk
        return [self._kept[key] for key in keys[:count]]

    def place(self, ids: np.ndarray) -> int | None:
        """Returns where to keep the last chunk of `ids`; None if it is kept already, or nothing is."""
        keys = self._keys(ids)
        if keys[-1] in self._kept or not (self._free or self._kept):
            return None
        place = self._free.pop() if self._free else self._kept.popitem(last=False)[1]
        self._kept[keys[-1]] = place
        self._use(keys)
        return place

    def clear(self) -> None:
        self._free += self._kept.values()
        self._kept.clear()

    def _keys(self, ids: np.ndarray) -> list[bytes]:
        """A hash for each whole chunk, of all ids up to its end."""
        so_far, keys = hashlib.sha256(), []
        for end in range(self._chunk, len(ids) + 1, self._chunk):
            so_far.update(ids[end - self._chunk : end].tobytes())
            keys.append(so_far.digest())
        return keys

    def _use(self, keys: list[bytes]) -> None:
        """Marks chunks as used, the first one last: without it the others would be of no use."""
        for key in reversed(keys):
            if key in self._kept:
                self._kept.move_to_end(key)


class Engine:
    """Decodes up to `rows` requests together. Not for several threads. Under a mesh, made and used under `jax.set_mesh`.

    Args:
      chunk: tokens of a prompt that are read at once.
      shortest: the shortest length of the ring, about.
      prefix_bytes: the most memory, taken at once, that keeps how prompts began; 0 for none.
      burst: see below.

    Attributes:
      lengths: the lengths that the ring may have, ascending.
      burst: how many steps are best taken between two looks at their tokens.
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
        burst: int | None = None,
    ):
        self._on_cpu = on_one_cpu(variables)
        self.model, self.rows = model, rows
        self.chunk = chunk or (32 if self._on_cpu else 256)
        self.burst = burst or (1 if self._on_cpu else 8)
        self.lengths = [-(-shortest // self.chunk) * self.chunk]  # else the last chunk of a prompt has no room
        while self.lengths[-1] < model.config.max_seq_len:
            self.lengths.append(2 * self.lengths[-1])
        places = self._places(prefix_bytes)
        self.prefixes = Prefixes(places, self.chunk)
        self._kept = ring.cache(model, places, self.chunk) if places else ()
        self._open_BxW = np.full((rows, -(-model.config.vocab_size // 32)), 2**32 - 1, np.uint32)
        self.load(variables)
        self.reset()

    def _places(self, most_bytes: int) -> int:
        """How many chunks are kept: as many as may be, but no more than eight whole contexts for each row."""
        c = self.model.config
        of_one = 2 * c.n_layers * c.n_kv_heads * c.head_dim * self.chunk * jax.numpy.dtype(c.dtype).itemsize
        return min(most_bytes // of_one, 8 * self.rows * -(-c.max_seq_len // self.chunk))

    def reset(self) -> None:
        """Makes it as it was when new: no row lives, and nothing that comes depends on what was."""
        self.prefixes.clear()
        self.state = ring.empty(self.model, self.rows, self.lengths[0])

    def load(self, variables: dict) -> None:
        """Takes other variables of the same shapes; nothing is compiled again. Rows that live go on with them."""
        self.weights = None  # so that its memory is free
        self.weights = lay_out(self.model, variables, every_product=self._on_cpu)
        self.prefixes.clear()
        layers = {name: part for name, part in self.weights.variables["params"].items() if name.startswith("layers_")}
        rest = {name: part for name, part in self.weights.variables.items() if name != "params"}
        self._weight_bytes = _bytes((layers, rest, self.weights.head_VxD))

    def unload(self) -> None:
        """Lets the memory of weights and ring go, until `load` and `reset`. All programs stay."""
        self.prefixes.clear()
        self.weights = self.state = None

    @property
    def slots(self) -> int:
        return self.state.layers[0].slots

    @property
    def step_bytes(self) -> int:
        """Returns how many bytes of weights and cache a step reads: all kernels and the head once, each slot once."""
        return self._weight_bytes + _bytes(self.state.layers)

    def length_for(self, tokens: int) -> int:
        """Returns the shortest length that holds so many tokens in a row. Raises ConfigError if none does."""
        for length in self.lengths:
            if length >= tokens:
                return length
        raise ConfigError(
            f"{tokens:,} tokens do not fit in the context of {self.model.config.max_seq_len:,}: send fewer"
        )

    def resize(self, slots: int) -> None:
        """Changes the ring's length; requests go on. What rows that live hold, and what they write next, must fit."""
        while self.slots != slots:
            place = self.lengths.index(self.slots)
            self.state = ring.resized(self.state, self.lengths[place + (1 if slots > self.slots else -1)])

    def begin(self, *prompts: typing.Sequence[int], echo: bool = False) -> Prefill:
        """Returns prompts to read together; what is kept of how a prompt alone begins is there, unless it is to be echoed."""
        staging = ring.cache(self.model, power_of_two(len(prompts)), self.length_for(max(map(len, prompts))))
        prefill = Prefill(prompts, staging, echo)
        for place in self.prefixes.find(prefill.prompts[0][:-1]) if len(prompts) == 1 and not echo else ():
            prefill.staging = ring.paste(prefill.staging, self._kept, np.int32(place), np.int32(prefill.done))
            prefill.done += self.chunk
        return prefill

    def read(self, prefill: Prefill) -> jax.Array | None:
        """Starts to read one chunk of each prompt, and does not wait, unless it is to be echoed.

        Returns what can be waited for, if it is one prompt.
        """
        place, tokens_PxC = np.int32(prefill.done), prefill.tokens(self.chunk)
        if len(tokens_PxC) > 1:
            prefill.staging = ring.read_chunks(self.model, self.weights, prefill.staging, tokens_PxC, place)
            prefill.done += self.chunk
            return None
        size, next_C = min(self.chunk, prefill.left), prefill.tokens(self.chunk, 1)[0]
        prefill.staging, logprobs = ring.read_chunk(
            self.model, self.weights, prefill.staging, tokens_PxC[0], next_C, place, prefill.wants_echo
        )
        prefill.done += size
        if prefill.wants_echo:
            prefill.echo.append(jax.tree.map(lambda x: x[:size], jax.device_get(logprobs)))
        elif size == self.chunk:
            kept_at = self.prefixes.place(prefill.prompts[0][: prefill.done])
            if kept_at is not None:
                self._kept = ring.keep(self._kept, prefill.staging, np.int32(kept_at), place)
        return logprobs.chosen

    def insert(self, prefill: Prefill, entries: typing.Sequence[Entry]) -> None:
        """Puts prompts that were read into rows, one prompt into as many as there are. The ring must hold each of them."""
        entries = [*entries, *[entries[-1]] * (power_of_two(len(entries)) - len(entries))]
        bias_ExV = np.zeros((len(entries), self.model.config.padded_vocab_size), np.float32)
        for bias_V, entry in zip(bias_ExV, entries, strict=True):
            for token, value in entry.settings.bias.items():
                bias_V[token] = value
        every, prompts = [entry.settings for entry in entries], [prefill.prompts[entry.prompt] for entry in entries]
        settings = Rows(
            np.float32([one.temperature for one in every]),
            np.int32([min(one.top_k, bias_ExV.shape[1]) for one in every]),
            np.float32([one.top_p for one in every]),
            np.uint32([one.seed % 2**32 for one in every]),
            bias_ExV,
            np.int32([-1 if one.logprobs is None else one.logprobs for one in every]),
        )
        rows_E, prompts_E = np.int32([(entry.row, entry.prompt) for entry in entries]).T
        last_E, position_E = np.int32([(ids[-1], len(ids) - 1) for ids in prompts]).T
        self.state = ring.insert(
            self.state, prefill.staging, ring.Entries(rows_E, prompts_E, last_E, position_E, settings)
        )

    def start(self, live_B: np.ndarray, mask_BxW: np.ndarray | None = None, steps: int = 1) -> Drawn:
        """Starts steps of all rows, as `ring.step`; no mask allows all. What they draw stays on the device."""
        guided = np.bool_(mask_BxW is not None)
        mask_BxW = self._open_BxW if mask_BxW is None else mask_BxW
        self.state, drawn = ring.step(self.model, self.weights, self.state, live_B, mask_BxW, guided, steps)
        return drawn

    def step(self, live_B: np.ndarray, mask_BxW: np.ndarray | None = None, steps: int = 1) -> Drawn:
        """As `start`, but returns the next tokens of each row, on the host."""
        return jax.device_get(self.start(live_B, mask_BxW, steps))

    def warm(self, tell: typing.Callable[[str], None]) -> None:
        """Compiles all programs for all lengths, while no row lives. `tell` gets a line for each length."""
        idle_B = np.zeros(self.rows, bool)
        for length in self.lengths:
            tell(f"compiling for {length:,} slots")
            self.resize(length)
            for shorter in self.lengths[: self.lengths.index(length) + 1]:
                self.insert(Prefill([[0]], ring.cache(self.model, 1, shorter)), [Entry(0, Settings())])
            prefill = Prefill([[0, 0]], ring.cache(self.model, 1, length))
            self.read(prefill)
            if self._kept:
                self._kept = ring.keep(self._kept, prefill.staging, np.int32(0), np.int32(0))
                ring.paste(prefill.staging, self._kept, np.int32(0), np.int32(0))
            for steps in {1, self.burst}:
                self.step(idle_B, steps=steps)
        self.resize(self.lengths[0])


def _bytes(tree: typing.Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
