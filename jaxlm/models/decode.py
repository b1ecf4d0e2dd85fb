"""The decode engine: requests enter and leave the rows of one batch between two steps (the programs: `ring`).

Legend: B rows, C tokens of a chunk, V padded vocabulary, W words of a guide's mask.
"""

import functools
import typing

import jax
import numpy as np

from jaxlm.config import ConfigError
from jaxlm.models import ring
from jaxlm.models.layout import lay_out
from jaxlm.models.prefixes import Prefixes
from jaxlm.models.ring import Drawn, Layers, LogProbs
from jaxlm.models.sampling import Rows
from jaxlm.models.transformer import Transformer


class Settings(typing.NamedTuple):
    """How one row draws (see `sampling.Rows`)."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    bias: typing.Mapping[int, float] = {}
    logprobs: bool = False


def check_prompts(model: Transformer, prompts: typing.Sequence[typing.Sequence[int]]) -> None:
    """Raises ConfigError if a prompt can't be continued: it is empty, has an id outside the vocabulary, or leaves no room.

    Raises:
      ConfigError: names the first such prompt.
    """
    config, adapter = model.config, model.adapter
    ids = config.vocab_size + (adapter.prompt_tokens if adapter and adapter.kind == "prompt" else 0)
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ConfigError(f"prompt {i} has no tokens: begin it with the end-of-document token")
        if len(prompt) >= config.max_seq_len:
            raise ConfigError(
                f"prompt {i} has {len(prompt)} tokens and leaves no room in the context of "
                f"model.max_seq_len={config.max_seq_len}: shorten it"
            )
        if min(prompt) < 0 or max(prompt) >= ids:
            raise ConfigError(f"prompt {i} has an id outside the vocabulary of {ids}")


def on_one_cpu(variables: dict) -> bool:
    """True if the variables lie on one device, a CPU."""
    leaf = jax.tree.leaves(variables)[0]
    devices = leaf.devices() if isinstance(leaf, jax.Array) else jax.devices()
    return len(devices) == 1 and next(iter(devices)).platform == "cpu"


class Prefill:
    """A prompt that is being read. `echo` holds the log-probabilities of `ids[1:]`, chunk by chunk, if they were asked for."""

    def __init__(self, ids: typing.Sequence[int], staging: Layers, echo: bool):
        self.ids, self.staging, self.wants_echo = np.asarray(ids, np.int32), staging, echo
        self.done = 0  # tokens that the staging cache holds
        self.echo: list[LogProbs] = []

    @property
    def left(self) -> int:
        """Returns how many tokens are still to be read: all but the last one are."""
        return max(0, len(self.ids) - 1 - self.done)


class Engine:
    """Decodes up to `rows` requests together. Not for several threads. Under a mesh, made and used under `jax.set_mesh`.

    Attributes:
      lengths: the lengths that the ring may have, ascending.
      chunk: tokens of a prompt that are read at once.
      burst: how many steps are best taken between two looks at their tokens.
      state: the ring and the rows.
    """

    def __init__(
        self,
        model: Transformer,
        variables: dict,
        rows: int = 8,
        chunk: int | None = None,
        shortest: int = 256,
        prefix_bytes: int = 2**28,
    ):
        on_cpu = on_one_cpu(variables)
        self.model, self.rows = model, rows
        self.weights = lay_out(model, variables, every_product=on_cpu)
        self.chunk = chunk or (32 if on_cpu else 256)
        self.burst = 1 if on_cpu else 8
        self.lengths = [-(-shortest // self.chunk) * self.chunk]  # else the last chunk of a prompt has no room
        while self.lengths[-1] < model.config.max_seq_len:
            self.lengths.append(2 * self.lengths[-1])
        self.prefixes = Prefixes(prefix_bytes, self.chunk)
        self.state = ring.empty(model, rows, self.lengths[0])
        self._open_BxW = np.full((rows, -(-model.config.vocab_size // 32)), 2**32 - 1, np.uint32)

    @property
    def slots(self) -> int:
        """Returns the length of the ring."""
        return self.state.layers[0].slots

    @property
    def step_bytes(self) -> int:
        """Returns how many bytes of weights and cache a step reads: all kernels and the head once, each slot once."""
        read = {name: part for name, part in self.weights.variables["params"].items() if name.startswith("layers_")}
        rest = {name: part for name, part in self.weights.variables.items() if name != "params"}
        leaves = jax.tree.leaves((read, rest, self.weights.head_VxD, self.state.layers))
        return sum(leaf.nbytes for leaf in leaves)

    def length_for(self, tokens: int) -> int:
        """Returns the shortest length that holds so many tokens in a row. Raises ConfigError if none does."""
        for length in self.lengths:
            if length >= tokens:
                return length
        raise ConfigError(
            f"{tokens:,} tokens do not fit in the context of {self.model.config.max_seq_len:,}: send fewer"
        )

    def resize(self, slots: int) -> None:
        """Changes the ring's length; requests go on. All rows that live must fit."""
        while self.slots != slots:
            place = self.lengths.index(self.slots)
            self.state = ring.resized(self.state, self.lengths[place + (1 if slots > self.slots else -1)])

    def begin(self, ids: typing.Sequence[int], echo: bool = False) -> Prefill:
        """Returns a prompt to read; what the cache of prefixes holds of it is there already, unless it is to be echoed."""
        prefill = Prefill(ids, ring.staging(self.model, self.length_for(len(ids))), echo)
        for chunk in () if echo else self.prefixes.find(prefill.ids[:-1]):
            prefill.staging = ring.paste(prefill.staging, chunk, prefill.done)
            prefill.done += self.chunk
        return prefill

    def read(self, prefill: Prefill) -> None:
        """Reads one chunk of a prompt, and waits for it, so that no other prompt waits for several."""
        size = min(self.chunk, prefill.left)
        tokens_2xC = np.zeros((2, self.chunk), np.int32)
        for number, ids in enumerate((prefill.ids, prefill.ids[1:])):
            tokens_2xC[number, :size] = ids[prefill.done :][:size]
        prefill.staging, logprobs = ring.read_chunk(
            self.model, self.weights, prefill.staging, *tokens_2xC, np.int32(prefill.done), prefill.wants_echo
        )
        if size == self.chunk and not prefill.wants_echo:
            chunk = functools.partial(ring.cut, prefill.staging, np.int32(prefill.done), self.chunk)
            self.prefixes.keep(prefill.ids[: prefill.done + size], chunk)
        prefill.done += size
        logprobs = jax.device_get(logprobs)
        if prefill.wants_echo:
            prefill.echo.append(jax.tree.map(lambda x: x[:size], logprobs))

    def insert(self, row: int, prefill: Prefill, settings: Settings) -> None:
        """Puts a prompt that was read into a row. The ring must be as long as the request may become."""
        bias_V = np.zeros(self.model.config.padded_vocab_size, np.float32)
        for token, value in settings.bias.items():
            bias_V[token] = value
        one = Rows(
            np.float32(settings.temperature),
            np.int32(min(settings.top_k, len(bias_V))),
            np.float32(settings.top_p),
            np.uint32(settings.seed % 2**32),
            bias_V,
            np.bool_(settings.logprobs),
        )
        position = np.int32(len(prefill.ids) - 1)
        self.state = ring.insert(self.state, prefill.staging, np.int32(row), prefill.ids[-1], position, one)

    def step(self, live_B: np.ndarray, mask_BxW: np.ndarray | None = None, steps: int = 1) -> Drawn:
        """Returns the next tokens of each row, on the host (see `ring.step`; no mask allows all)."""
        guided = np.bool_(mask_BxW is not None)
        mask_BxW = self._open_BxW if mask_BxW is None else mask_BxW
        self.state, drawn = ring.step(self.model, self.weights, self.state, live_B, mask_BxW, guided, steps)
        return jax.device_get(drawn)

    def warm(self, tell: typing.Callable[[str], None]) -> None:
        """Compiles all programs for all lengths, while no row lives. `tell` gets a line for each length."""
        idle_B = np.zeros(self.rows, bool)
        for length in self.lengths:
            tell(f"compiling for {length:,} slots")
            self.resize(length)
            for shorter in self.lengths[: self.lengths.index(length) + 1]:
                self.insert(0, Prefill([0], ring.staging(self.model, shorter), False), Settings())
            prefill = Prefill([0, 0], ring.staging(self.model, length), False)
            self.read(prefill)
            ring.paste(prefill.staging, ring.cut(prefill.staging, np.int32(0), self.chunk), 0)
            for steps in {1, self.burst}:
                self.step(idle_B, steps=steps)
        self.resize(self.lengths[0])
