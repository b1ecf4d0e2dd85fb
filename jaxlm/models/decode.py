"""The decode engine: requests enter and leave the rows of one batch between two steps of a compiled program.

The cache is a ring whose write index, the clock, is the same in all rows, so that one update in place serves them all. A
request enters a row with its prompt in the slots before the clock. Keys are rotated by their position in the row, never
by slot, so a slot's position is the row's newest position less the slot's age. Ideas: MaxText, inference/kvcache.py.

A prompt is read in chunks into a staging cache of its own, all but its last token, which the next step reads: so each
token of a request is drawn by the step. Legend: B rows, C tokens of a chunk, S cache slots, P slots of a staging cache,
V padded vocabulary, W words of a guide's mask, N steps, K key-value heads, H head dim.
"""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.config import ConfigError
from jaxlm.models import layers
from jaxlm.models.layout import Weights, lay_out
from jaxlm.models.prefixes import Prefixes
from jaxlm.models.sampling import Rows, sample_rows
from jaxlm.models.transformer import Transformer, empty_cache
from jaxlm.ops.decode import row_product
from jaxlm.sharding import constrain

LIKELIEST = 20  # the most log-probabilities beside the chosen token's
NEVER = np.int32(2**30)  # a position after every query's: the slot is never seen
Layers = tuple[layers.LayerCache, ...]


class State(typing.NamedTuple):
    """What the steps carry. `position_B` is that of `last_B`, the newest token, which the next step reads."""

    layers: Layers
    clock: jax.Array  # the slot that the next step writes
    last_B: jax.Array
    position_B: jax.Array
    drawn_B: jax.Array  # new tokens so far
    rows: Rows


class LogProbs(typing.NamedTuple):
    """Log-probabilities of the model's own distribution: of the chosen token, and of the likeliest (last axis)."""

    chosen: jax.Array
    top_ids: jax.Array
    top: jax.Array


class Drawn(typing.NamedTuple):
    """The new tokens of N steps; `sound` is False where no finite logit was left to choose."""

    token_NxB: jax.Array
    sound_NxB: jax.Array
    logprobs: LogProbs  # zeros unless a row asks


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


def read(
    model: Transformer, weights: Weights, ring: Layers, clock: jax.Array, last_B: jax.Array, position_B: jax.Array
) -> tuple[jax.Array, Layers]:
    """Returns the hidden states (B, D) of each row's newest token, and the ring with it at the clock.

    A row sees the slots that are no older than its position; other slots may hold anything finite.
    """
    # A row that is done may run on with the others; its position must stay inside a table of learned positions.
    position_Bx1 = jnp.minimum(position_B, model.config.max_seq_len - 1)[:, None]
    age_S = (clock - jnp.arange(ring[0].slots)) % ring[0].slots
    seen_BxS = jnp.where(age_S <= position_Bx1, position_Bx1 - age_S, NEVER)
    hidden_Bx1xD, cache = model.apply(
        weights.variables | {"packed": weights.packed},
        last_B[:, None],
        position_Bx1,
        cache=layers.Cache(ring, clock, seen_BxS),
    )
    return hidden_Bx1xD[:, 0], cache.layers


def logits_of(model: Transformer, weights: Weights, hidden_BxD: jax.Array) -> jax.Array:
    """Returns the logits (B, V) in float32, -inf in the padding of the vocabulary."""
    logits_BxV = row_product(hidden_BxD, weights.head_VxD, preferred_element_type=jnp.float32)
    return jnp.where(jnp.arange(logits_BxV.shape[1]) < model.config.vocab_size, logits_BxV, -jnp.inf)


def _log_probs(logits_BxV: jax.Array, chosen_B: jax.Array) -> LogProbs:
    total_Bx1 = jax.nn.logsumexp(logits_BxV, axis=-1, keepdims=True)
    top, ids = jax.lax.top_k(logits_BxV, min(LIKELIEST, logits_BxV.shape[1]))
    chosen_Bx1 = jnp.take_along_axis(logits_BxV, chosen_B[:, None], axis=-1, mode="clip")
    return LogProbs((chosen_Bx1 - total_Bx1)[:, 0], ids.astype(jnp.int32), top - total_Bx1)


def _no_log_probs(logits_BxV: jax.Array, chosen_B: jax.Array) -> LogProbs:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(_log_probs, logits_BxV, chosen_B))


def _placed(ring: Layers) -> Layers:
    """The cache with its sharding fixed, so that each program gives the next one what it was compiled for."""
    return tuple(
        layers.LayerCache(
            constrain(layer.k_BxKxHxS, "batch", "kv_heads", None, None),
            constrain(layer.v_BxKxSxH, "batch", "kv_heads", None, None),
        )
        for layer in ring
    )


def _settled(state: State) -> State:
    rest = jax.tree.map(lambda x: constrain(x, *(None,) * x.ndim), state._replace(layers=()))
    return rest._replace(layers=_placed(state.layers))


@functools.partial(jax.jit, static_argnames=("model", "rows", "slots"))
def empty(model: Transformer, rows: int, slots: int) -> State:
    """Returns a state without requests."""
    zeros_B, zeros = jnp.zeros(rows, jnp.int32), jnp.zeros(rows)
    bias_BxV = jnp.zeros((rows, model.config.padded_vocab_size))
    settings = Rows(zeros, zeros_B, zeros + 1, zeros_B.astype(jnp.uint32), bias_BxV, zeros_B > 0)
    ring = empty_cache(model.config, rows, slots).layers
    return _settled(State(ring, jnp.int32(0), zeros_B, zeros_B, zeros_B, settings))


@functools.partial(jax.jit, static_argnames=("model", "steps"), donate_argnames="state")
def step(
    model: Transformer,
    weights: Weights,
    state: State,
    live_B: jax.Array,
    mask_BxW: jax.Array | None,
    steps: int,
) -> tuple[State, Drawn]:
    """Returns the state and the new tokens after so many steps. Rows that are not live read nothing and draw anything.

    Args:
      live_B: True in rows that have a request.
      mask_BxW: uint32, the bits of the ids that each row may draw, for one step; None for all.
    """
    rows = state.rows._replace(
        temperature_B=jnp.where(live_B, state.rows.temperature_B, 0), logprobs_B=state.rows.logprobs_B & live_B
    )

    def one(state: State, _: None) -> tuple[State, Drawn]:
        position_B = jnp.where(live_B, state.position_B, 0)
        hidden_BxD, ring = read(model, weights, state.layers, state.clock, state.last_B, position_B)
        logits_BxV = logits_of(model, weights, hidden_BxD)
        scores_BxV = logits_BxV + rows.bias_BxV
        if mask_BxW is not None:
            ids_V = jnp.arange(scores_BxV.shape[1])
            words_BxV = jnp.take(mask_BxW, ids_V // 32, axis=1, mode="fill", fill_value=0)
            scores_BxV = jnp.where((words_BxV >> (ids_V % 32).astype(jnp.uint32)) & 1 > 0, scores_BxV, -jnp.inf)
        token_B = sample_rows(scores_BxV, rows, state.drawn_B)
        logprobs = jax.lax.cond(rows.logprobs_B.any(), _log_probs, _no_log_probs, logits_BxV, token_B)
        slots = state.layers[0].slots
        state = State(ring, (state.clock + 1) % slots, token_B, state.position_B + 1, state.drawn_B + 1, state.rows)
        return state, Drawn(token_B, jnp.isfinite(scores_BxV.max(axis=-1)), logprobs)

    state, drawn = jax.lax.scan(one, state, length=steps)
    return _settled(state), jax.tree.map(lambda x: constrain(x, *(None,) * x.ndim), drawn)


@functools.partial(jax.jit, static_argnames=("model", "echo"), donate_argnames="staging")
def read_chunk(
    model: Transformer,
    weights: Weights,
    staging: Layers,
    tokens_C: jax.Array,
    next_C: jax.Array,
    begin: jax.Array,
    echo: bool,
) -> tuple[Layers, LogProbs | None]:
    """Returns the staging cache with one more chunk of a prompt in the slots from `begin` on.

    With `echo` also the log-probabilities of the tokens that follow each: `next_C`. The last chunk is filled up with
    any tokens, which no query of the prompt sees.
    """
    slots = staging[0].slots
    position_1xC = jnp.minimum(begin + jnp.arange(len(tokens_C)), model.config.max_seq_len - 1)[None]
    hidden_1xCxD, cache = model.apply(
        weights.variables,
        tokens_C[None],
        position_1xC,
        cache=layers.Cache(staging, begin, jnp.arange(slots)[None]),
    )
    logprobs = _log_probs(logits_of(model, weights, hidden_1xCxD[0]), next_C) if echo else None
    return _placed(cache.layers), logprobs


@functools.partial(jax.jit, static_argnames=("size",))
def cut(staging: Layers, begin: jax.Array, size: int) -> Layers:
    """Returns the slots of one chunk, copied."""
    return tuple(
        layers.LayerCache(
            jax.lax.dynamic_slice_in_dim(layer.k_BxKxHxS, begin, size, 3),
            jax.lax.dynamic_slice_in_dim(layer.v_BxKxSxH, begin, size, 2),
        )
        for layer in staging
    )


@functools.partial(jax.jit, donate_argnames="staging")
def paste(staging: Layers, chunk: Layers, begin: jax.Array) -> Layers:
    """Returns the staging cache with a chunk that `cut` gave."""
    return tuple(
        layers.LayerCache(
            jax.lax.dynamic_update_slice_in_dim(layer.k_BxKxHxS, piece.k_BxKxHxS, begin, 3),
            jax.lax.dynamic_update_slice_in_dim(layer.v_BxKxSxH, piece.v_BxKxSxH, begin, 2),
        )
        for layer, piece in zip(staging, chunk, strict=True)
    )


@functools.partial(jax.jit, donate_argnames="state")
def insert(
    state: State, staging: Layers, row: jax.Array, last: jax.Array, position: jax.Array, settings: Rows
) -> State:
    """Returns the state with a prompt in a row, whose earlier content is gone.

    Args:
      staging: the keys and values of all but the prompt's last token, from slot 0 on.
      last, position: the prompt's last token, and its position.
      settings: those of the row, without the axis B.
    """
    slots = state.layers[0].slots
    shift = state.clock - position

    def put(ring: layers.LayerCache, new: layers.LayerCache) -> layers.LayerCache:
        new = new.grown(slots)
        return layers.LayerCache(
            jax.lax.dynamic_update_slice_in_dim(ring.k_BxKxHxS, jnp.roll(new.k_BxKxHxS, shift, 3), row, 0),
            jax.lax.dynamic_update_slice_in_dim(ring.v_BxKxSxH, jnp.roll(new.v_BxKxSxH, shift, 2), row, 0),
        )

    return _settled(
        State(
            tuple(put(*pair) for pair in zip(state.layers, staging, strict=True)),
            state.clock,
            state.last_B.at[row].set(last),
            state.position_B.at[row].set(position),
            state.drawn_B.at[row].set(0),
            jax.tree.map(lambda all_B, one: all_B.at[row].set(one), state.rows, settings),
        )
    )


@functools.partial(jax.jit, static_argnames=("slots",))
def resized(state: State, slots: int) -> State:
    """Returns the state with a ring of another length, which keeps the newest slots."""
    old = state.layers[0].slots
    least = max(0, old - slots)  # the oldest slots, which a shorter ring loses

    def moved(layer: layers.LayerCache) -> layers.LayerCache:
        k_BxKxHxS = jnp.roll(layer.k_BxKxHxS, -state.clock, 3)[..., least:]
        v_BxKxSxH = jnp.roll(layer.v_BxKxSxH, -state.clock, 2)[:, :, least:]
        return layers.LayerCache(k_BxKxHxS, v_BxKxSxH).grown(slots)

    return _settled(
        state._replace(layers=tuple(moved(layer) for layer in state.layers), clock=jnp.int32(min(old, slots) % slots))
    )


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
        self.lengths = [max(shortest, self.chunk)]
        while self.lengths[-1] < model.config.max_seq_len:
            self.lengths.append(2 * self.lengths[-1])
        self.prefixes = Prefixes(prefix_bytes, self.chunk)
        self.state = empty(model, rows, self.lengths[0])

    @property
    def slots(self) -> int:
        """Returns the length of the ring."""
        return self.state.layers[0].slots

    def length_for(self, tokens: int) -> int:
        """Returns the shortest length that holds so many tokens in a row."""
        return next(length for length in self.lengths if length >= tokens)

    def resize(self, slots: int) -> None:
        """Changes the ring's length; requests go on. All rows that live must fit."""
        while self.slots != slots:
            place = self.lengths.index(self.slots)
            self.state = resized(self.state, self.lengths[place + (1 if slots > self.slots else -1)])

    def begin(self, ids: typing.Sequence[int], echo: bool = False) -> Prefill:
        """Returns a prompt to read; what the cache of prefixes holds of it is there already, unless it is to be echoed."""
        prefill = Prefill(ids, _staging(self.model, self.length_for(len(ids))), echo)
        for chunk in () if echo else self.prefixes.find(prefill.ids[:-1]):
            prefill.staging = paste(prefill.staging, chunk, prefill.done)
            prefill.done += self.chunk
        return prefill

    def read(self, prefill: Prefill) -> None:
        """Reads one chunk of a prompt."""
        size = min(self.chunk, prefill.left)
        tokens_2xC = np.zeros((2, self.chunk), np.int32)
        for number, ids in enumerate((prefill.ids, prefill.ids[1:])):
            tokens_2xC[number, :size] = ids[prefill.done :][:size]
        prefill.staging, logprobs = read_chunk(
            self.model, self.weights, prefill.staging, *tokens_2xC, np.int32(prefill.done), prefill.wants_echo
        )
        if size == self.chunk and not prefill.wants_echo:
            chunk = functools.partial(cut, prefill.staging, np.int32(prefill.done), self.chunk)
            self.prefixes.keep(prefill.ids[: prefill.done + size], chunk)
        prefill.done += size
        if logprobs is not None:
            prefill.echo.append(jax.tree.map(lambda x: x[:size], jax.device_get(logprobs)))

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
        self.state = insert(self.state, prefill.staging, np.int32(row), prefill.ids[-1], position, one)

    def step(self, live_B: np.ndarray, mask_BxW: np.ndarray | None = None, steps: int = 1) -> Drawn:
        """Returns the next tokens of each row, on the host."""
        self.state, drawn = step(self.model, self.weights, self.state, live_B, mask_BxW, steps)
        return jax.device_get(drawn)

    def warm(self, tell: typing.Callable[[str], None]) -> None:
        """Compiles all programs for all lengths, while no row lives. `tell` gets a line for each length."""
        idle_B = np.zeros(self.rows, bool)
        open_BxW = np.full((self.rows, -(-self.model.config.vocab_size // 32)), 2**32 - 1, np.uint32)
        for length in self.lengths:
            tell(f"compiling for {length:,} slots")
            self.resize(length)
            for shorter in self.lengths[: self.lengths.index(length) + 1]:
                self.insert(0, Prefill([0], _staging(self.model, shorter), False), Settings())
            for echo in (False, True):
                prefill = Prefill([0, 0], _staging(self.model, length), echo)
                self.read(prefill)
            paste(prefill.staging, cut(prefill.staging, np.int32(0), self.chunk), 0)
            for mask, steps in {(False, 1), (True, 1), (False, self.burst)}:
                self.step(idle_B, open_BxW if mask else None, steps)
        self.resize(self.lengths[0])


@functools.partial(jax.jit, static_argnames=("model", "slots"))
def _staging(model: Transformer, slots: int) -> Layers:
    return _placed(empty_cache(model.config, 1, slots).layers)
