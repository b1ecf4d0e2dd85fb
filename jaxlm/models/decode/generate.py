"""Text generation: one prefill of the prompts, then a loop on the device that decodes one token per row and step (`ring`).

Prompts are padded on the left, so that all rows write the same cache slot. Legend: B batch, P prompt slots, S cache slots, V
padded vocabulary, M maximum of new tokens, D model.
"""

import functools
import typing
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.config import ConfigError, SampleConfig
from jaxlm.devices.sharding import constrain
from jaxlm.models import layers
from jaxlm.models.decode import ring
from jaxlm.models.decode.engine import check_prompts, on_one_cpu, power_of_two
from jaxlm.models.decode.ring import Weights, lay_out
from jaxlm.models.decode.sampling import Sampler, sample
from jaxlm.models.transformer import Transformer, empty_cache
from jaxlm.ops.decode import first_argmax

Ids = Sequence[int]
Prompts = Sequence[Ids]


def generate(
    model: Transformer, variables: dict, prompts: Prompts, settings: SampleConfig, stop_ids: Ids = (), seed: int = 0
) -> list[list[int]]:
    """Continues each prompt. Returns each prompt's new ids, including the stop id if one ended the row.

    A row depends on its own prompt, the seed and its place in the list, not on the other prompts. Lengths are rounded up
    to a few sizes, so most calls reuse a compiled program.

    Args:
      settings: A row ends after `max_new_tokens` ids, at a stop id, or when prompt and new ids fill `max_seq_len`.
        `temperature` 0 takes the likeliest token. `top_k` samples among the k likeliest tokens; 0 means all. `top_p`
        samples among the likeliest tokens that together have this probability (arXiv:1904.09751); 1 means all. Other
        keys are not read.

    Raises:
      ConfigError: a prompt is empty, has an id outside the vocabulary or leaves no room in the context, or a setting is
        out of range.
    """
    return Generator(model, variables)(prompts, settings, stop_ids, seed)


class Generator:
    """Does what `generate` does for many calls with the same variables, which are prepared for decoding only once.

    Holds the parameters and a second copy of their kernels, packed for decoding in the compute dtype, both with the adapter
    added. Quantised kernels have no copy, and their adapter stays separate. If the parameters are sharded over a mesh, make
    and call the generator under `jax.set_mesh`.
    """

    def __init__(self, model: Transformer, variables: dict):
        self.model = model
        self.on_cpu = on_one_cpu(variables)
        self.weights = lay_out(model, variables, every_product=self.on_cpu)

    def __call__(self, prompts: Prompts, settings: SampleConfig, stop_ids: Ids = (), seed: int = 0) -> list[list[int]]:
        if len(prompts) == 0 or settings.max_new_tokens == 0:
            _check(self.model, prompts, settings)
            return [[] for _ in prompts]
        out_BxM, counts_B = _run(self.model, self.weights, *self._inputs(prompts, settings, stop_ids, seed))
        out_BxM, counts_B = jax.device_get((out_BxM, counts_B))
        return [out_BxM[row, : counts_B[row]].tolist() for row in range(len(prompts))]

    def stream(
        self, prompts: Prompts, settings: SampleConfig, stop_ids: Ids = (), seed: int = 0
    ) -> Iterator[list[list[int]]]:
        """Returns an iterator over each row's new ids, as they come. By then all is compiled and the prompts are read.

        The device waits for the host at each yield: after each token on a CPU, after eight tokens on an accelerator.
        """
        if len(prompts) == 0 or settings.max_new_tokens == 0:
            _check(self.model, prompts, settings)
            return iter(())
        request, static = self._inputs(prompts, settings, stop_ids, seed)
        static = static._replace(parts=1)  # one cache length, since each further one pauses to compile
        state = _begin(self.model, self.weights, request, static)
        advance = functools.partial(_advance, self.model, self.weights, request, static=static)
        for _ in range(2):  # decodes nothing, but compiles; twice, since the first may change the state's sharding
            state = advance(state, 0)

        def chunks(state: _State) -> Iterator[list[list[int]]]:
            seen = np.zeros(len(prompts), int)
            while True:
                out_BxM, counts_B, done_B = jax.device_get((state.out_BxM, state.counts_B, state.done_B))
                yield [out_BxM[row, seen[row] : counts_B[row]].tolist() for row in range(len(prompts))]
                if done_B.all():
                    return
                seen, state = counts_B, advance(state, 1 if self.on_cpu else 8)

        return chunks(jax.block_until_ready(state))

    def _inputs(
        self, prompts: Prompts, settings: SampleConfig, stop_ids: Ids, seed: int
    ) -> tuple["_Request", "_Static"]:
        """Returns the programs' arguments besides model and weights. Raises ConfigError as `generate` does."""
        config, s = self.model.config, settings
        _check(self.model, prompts, s)
        static = _Static(
            room=-(-s.max_new_tokens // 32) * 32,
            parts=min(4, max(1, s.max_new_tokens // 64)) if self.on_cpu else 1,
            greedy=s.temperature == 0,
            top_k=min(s.top_k, config.vocab_size),
            nucleus=s.top_p < 1,
        )
        return _request(prompts, s, config.max_seq_len, stop_ids, seed), static


def _check(model: Transformer, prompts: Prompts, s: SampleConfig) -> None:
    check_prompts(model, prompts)
    if s.max_new_tokens < 0 or not s.temperature >= 0 or s.top_k < 0 or not 0 < s.top_p <= 1:
        raise ConfigError(
            f"max_new_tokens={s.max_new_tokens}, temperature={s.temperature} and top_k={s.top_k} must be at least 0, "
            f"top_p={s.top_p} above 0 and at most 1"
        )


class _Request(typing.NamedTuple):
    """The prompts and limits of a call as arrays. B and P are rounded up, so that few programs serve all calls."""

    tokens_BxP: np.ndarray
    lengths_B: np.ndarray
    room_B: np.ndarray  # new tokens of each row, at most
    stops: np.ndarray  # ids that end a row, padded with -1
    sampler: Sampler
    key: jax.Array

    def positions(self) -> jax.Array:
        """Returns the position of each prompt token, (B, P): 0 at a prompt's first token, negative in the padding before it."""
        width = self.tokens_BxP.shape[1]
        return jnp.arange(width) - (width - self.lengths_B)[:, None]


class _Static(typing.NamedTuple):
    """Static arguments of the compiled program, besides the shapes: another value compiles another program.

    Attributes:
      room: columns for new tokens, M.
      parts: the cache grows to its full length in this many steps. Attention reads all slots, filled or not, so a short
        cache saves time; but each length is another loop to compile.
      nucleus: True if top-p is on.
    """

    room: int
    parts: int
    greedy: bool
    top_k: int
    nucleus: bool


def _request(prompts: Prompts, s: SampleConfig, max_seq_len: int, stop_ids: Ids, seed: int) -> _Request:
    rows, width = power_of_two(len(prompts)), _bucket(max(len(prompt) for prompt in prompts))
    tokens_BxP = np.zeros((rows, width), np.int32)
    lengths_B = np.ones(rows, np.int32)  # padding rows hold one token and are done at once
    room_B = np.zeros(rows, np.int32)
    for row, prompt in enumerate(prompts):
        tokens_BxP[row, width - len(prompt) :] = prompt
        lengths_B[row] = len(prompt)
        room_B[row] = min(s.max_new_tokens, max_seq_len - len(prompt))
    stops = np.full(max(8, power_of_two(len(stop_ids))), -1, np.int32)
    stops[: len(stop_ids)] = list(stop_ids)
    sampler = Sampler(np.float32(s.temperature), np.float32(s.top_p))
    return _Request(tokens_BxP, lengths_B, room_B, stops, sampler, jax.random.key(seed))


def _bucket(n: int) -> int:
    """Returns n rounded up to a multiple of a quarter of the next power of two, or of 16 if that is more."""
    step = max(16, power_of_two(n) // 4)
    return -(-n // step) * step


class _State(typing.NamedTuple):
    """The carry of the decoding loop."""

    step: jax.Array  # new tokens so far, the same in all rows
    last_B: jax.Array  # the newest token of each row
    done_B: jax.Array
    counts_B: jax.Array  # new tokens of each row
    out_BxM: jax.Array
    cache: tuple[layers.LayerCache, ...]


class _Loop(typing.NamedTuple):
    """One call under jit: the model and settings (static), the weights and request (traced)."""

    model: Transformer
    weights: Weights
    request: _Request
    static: _Static

    @property
    def width(self) -> int:
        return self.request.tokens_BxP.shape[1]

    def first(self) -> _State:
        """Returns the state with the first token of each row; the cache holds the prompts alone."""
        rows, positions_BxP = len(self.request.lengths_B), self.request.positions()
        hidden_BxPxD, cache = self.model.apply(
            self.weights.variables,
            self.request.tokens_BxP,
            jnp.maximum(positions_BxP, 0),
            (positions_BxP >= 0).astype(jnp.int32),
            cache=empty_cache(self.model.config, rows, self.width),
        )
        zeros_B, out_BxM = jnp.zeros(rows, jnp.int32), jnp.zeros((rows, self.static.room), jnp.int32)
        state = _State(jnp.int32(0), zeros_B, self.request.room_B <= 0, zeros_B, out_BxM, cache.layers)
        return self._record(state, hidden_BxPxD[:, -1])

    def grown(self, state: _State, tokens: int) -> _State:
        return state._replace(cache=tuple(layer.grown(self.width + tokens) for layer in state.cache))

    def until(self, state: _State, last: jax.Array | int) -> _State:
        return jax.lax.while_loop(lambda state: ~state.done_B.all() & (state.step < last), self._next, state)

    def _next(self, state: _State) -> _State:
        slot, position_B = self.width + state.step - 1, self.request.lengths_B + state.step - 1
        hidden_BxD, cache = ring.read(self.model, self.weights, state.cache, slot, state.last_B, position_B)
        return self._record(state._replace(cache=cache), hidden_BxD)

    def _record(self, state: _State, hidden_BxD: jax.Array) -> _State:
        """Returns the state with one more token per row, chosen from the hidden states of the rows' newest tokens."""
        token_B = self._choose(hidden_BxD, state.step)
        out_BxM = jax.lax.dynamic_update_slice(state.out_BxM, token_B[:, None], (0, state.step))
        counts_B = state.counts_B + ~state.done_B
        stopped_B = (token_B[:, None] == self.request.stops).any(axis=1) | (counts_B >= self.request.room_B)
        return _State(state.step + 1, token_B, state.done_B | stopped_B, counts_B, out_BxM, state.cache)

    def _choose(self, hidden_BxD: jax.Array, step: jax.Array) -> jax.Array:
        logits_BxV = ring.logits_of(self.model, self.weights, hidden_BxD)
        if self.static.greedy:
            return first_argmax(logits_BxV)
        keys_B = jax.vmap(functools.partial(jax.random.fold_in, self.request.key))(jnp.arange(len(hidden_BxD)))
        step_keys_B = jax.vmap(lambda key: jax.random.fold_in(key, step))(keys_B)
        sampler, static = self.request.sampler, self.static
        return sample(logits_BxV, step_keys_B, sampler, top_k=static.top_k, nucleus=static.nucleus)


@functools.partial(jax.jit, static_argnames=("model", "static"))
def _run(model: Transformer, weights: Weights, request: _Request, static: _Static) -> tuple[jax.Array, jax.Array]:
    """Returns (new tokens (B, M), how many of them are valid (B,)); requests of the same rounded sizes share a program."""
    loop = _Loop(model, weights, request, static)
    state = loop.first()
    for part in range(1, static.parts + 1):
        last = static.room * part // static.parts
        state = loop.until(loop.grown(state, last), last)
    # Replicated on every device, so that each process of a cluster can read the arrays.
    return constrain(state.out_BxM, None, None), constrain(state.counts_B, None)


@functools.partial(jax.jit, static_argnames=("model", "static"))
def _begin(model: Transformer, weights: Weights, request: _Request, static: _Static) -> _State:
    loop = _Loop(model, weights, request, static)
    return _whole(loop.grown(loop.first(), static.room))


@functools.partial(jax.jit, static_argnames=("model", "static"), donate_argnames="state")
def _advance(
    model: Transformer, weights: Weights, request: _Request, state: _State, tokens: jax.Array | int, static: _Static
) -> _State:
    return _whole(_Loop(model, weights, request, static).until(state, state.step + tokens))


def _whole(state: _State) -> _State:
    done_B, counts_B = constrain(state.done_B, None), constrain(state.counts_B, None)
    return state._replace(done_B=done_B, counts_B=counts_B, out_BxM=constrain(state.out_BxM, None, None))
