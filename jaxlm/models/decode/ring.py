"""The compiled programs of the decode engine: a batch of rows whose caches are one ring.

The ring's write index, the clock, is the same in all rows, so that one update in place serves them all. A request enters a row
with its prompt in the slots before the clock. Keys are rotated by their position in the row, never by slot, so a slot's
position is the row's newest position minus the slot's age (as in MaxText, inference/kvcache.py). Prompts are read in chunks
into a separate staging cache. A prompt's last token is left for `step`, so that `step` draws every token of a request.

Legend: B rows, P prompts read together, C tokens of a chunk, S cache slots, V padded vocabulary, W words of a
guide's mask, N steps, K key-value heads, H head dim, D model.
"""

import functools
import typing
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.config import ModelConfig
from jaxlm.devices import tree
from jaxlm.devices.sharding import constrain
from jaxlm.models import adapters, layers
from jaxlm.models.decode.sampling import NO_PENALTIES, Rows, penalised, sample_rows
from jaxlm.models.params import pack_params
from jaxlm.models.transformer import Transformer, empty_cache, head_matrix, in_int8
from jaxlm.ops.decode import row_product
from jaxlm.ops.int8 import Int8

LIKELIEST = 20  # log-probabilities besides the chosen token's, at most
NEVER = np.int32(2**30)  # a position after every query's: the slot is never seen
Layers = tuple[layers.LayerCache, ...]


class Weights(typing.NamedTuple):
    """Variables laid out for decoding.

    Attributes:
      variables: collection -> tree; the parameters are in the compute dtype, with adapters merged where possible, and those
        in the collection `packed` (see `params.pack_params`) are nowhere else.
      head_VxD: the output head, transposed: a row for each token; in int8 if the variables are.
      adapters: the collection `lora` of several adapters (`adapters.stacked`), of which each row has one; {} for none.
    """

    variables: dict
    head_VxD: jax.Array | Int8
    adapters: dict


def lay_out(model: Transformer, variables: dict, every_product: bool) -> Weights:
    """Returns a model's variables prepared for decoding. Compiles once for given shapes, so that new values cost little.

    Kernels in the collection `quantized` stay quantised, with LoRA not merged: in the compute dtype they would take four
    times the memory. `every_product`: see `params.pack_params`.
    """
    variables = dict(variables)
    stacked = variables.pop("adapters", {})
    if in_int8(variables):
        return Weights(variables, head_matrix(variables["packed"]), stacked)
    coded = "quantized" in variables
    added = {name: variables[name] for name in adapters.MERGED if name in variables and not (coded and name == "lora")}
    adapter = adapters.Adapter(model.adapter, model.row_ids) if added else None
    params, packed, head_VxD = _laid_out(variables["params"], added, adapter, model.config, every_product, coded)
    if head_VxD is None:
        head_VxD = params["embed"]["embedding"]
    rest = {name: part for name, part in variables.items() if name not in added}
    return Weights(rest | {"params": params, "packed": packed}, head_VxD, stacked)


def _of_rows(weights: Weights, adapter_B: jax.Array) -> Weights:
    """Returns the weights with a mask of each row's own adapter, if there are several."""
    if not weights.adapters:
        return weights
    lora = tree.map_named(lambda name, x: x[adapter_B] if name.endswith("mask") else x, weights.adapters)
    return weights._replace(variables=weights.variables | {"lora": lora})


@functools.partial(jax.jit, static_argnames=("adapter", "config", "every_product", "coded"))
def _laid_out(
    params: dict,
    added: adapters.Variables,
    adapter: adapters.Adapter | None,
    config: ModelConfig,
    every_product: bool,
    coded: bool,
) -> tuple[dict, dict, jax.Array | None]:
    """Returns (the parameters with the adapter merged, in the compute dtype; `packed`; the head by rows, None if tied)."""
    params = adapters.merge(params, added, adapter) if adapter else params
    params = jax.tree.map(lambda p: p.astype(config.dtype) if p.ndim > 1 else p, params)
    params, packed = (params, {}) if coded else pack_params(params, config, every_product)
    head = params.pop("head", None) if not config.tie_embeddings else None
    return params, packed, head and head["kernel"].T


class State(typing.NamedTuple):
    """The carry of the steps. `last_B` is each row's newest token, which the next step reads; `position_B` its position."""

    layers: Layers
    clock: jax.Array  # the slot that the next step writes
    last_B: jax.Array
    position_B: jax.Array
    drawn_B: jax.Array  # new tokens so far
    rows: Rows


class LogProbs(typing.NamedTuple):
    """Log-probabilities, before all that a request asks for, of the chosen token and of the likeliest tokens (last axis)."""

    chosen: jax.Array
    top_ids: jax.Array
    top: jax.Array


class Drawn(typing.NamedTuple):
    """The new tokens of N steps; `sound` is False where the highest logit, with bias and mask, was not finite."""

    token_NxB: jax.Array
    sound_NxB: jax.Array
    logprobs: LogProbs | None  # zeros unless a row asks for them


def read(
    model: Transformer, weights: Weights, ring: Layers, clock: jax.Array, new_BxT: jax.Array, position_B: jax.Array
) -> tuple[jax.Array, Layers]:
    """Returns the hidden states (B, T, D) of each row's newest tokens, and the ring with them written from the clock on.

    `position_B` is the first one's. A row attends to as many of the newest slots as it has tokens; other slots may hold any
    finite values.
    """
    # No mask is stored: a row's position says which slots it attends to, so freeing or filling a row changes no mask.
    # A row that is done may run on with the others; its position must stay inside a table of learned positions.
    slots, place_T = ring[0].slots, jnp.arange(new_BxT.shape[1])
    position_BxT = jnp.minimum(position_B[:, None] + place_T, model.config.max_seq_len - 1)
    slot_T, newest_Bx1 = (clock + place_T) % slots, position_BxT[:, -1:]
    age_S = (slot_T[-1] - jnp.arange(slots)) % slots
    seen_BxS = jnp.where(age_S <= newest_Bx1, newest_Bx1 - age_S, NEVER)
    cache = layers.Cache(ring, slot_T, seen_BxS)
    hidden_BxTxD, cache = model.apply(weights.variables, new_BxT, position_BxT, cache=cache)
    return hidden_BxTxD, cache.layers


def logits_of(model: Transformer, weights: Weights, hidden_BxD: jax.Array) -> jax.Array:
    """Returns the logits (B, V) in float32, -inf in the padding of the vocabulary."""
    logits_BxV = row_product(hidden_BxD, weights.head_VxD, preferred_element_type=jnp.float32)
    return jnp.where(jnp.arange(logits_BxV.shape[1]) < model.config.vocab_size, logits_BxV, -jnp.inf)


def _log_probs(logits_BxV: jax.Array, chosen_B: jax.Array, likeliest: jax.Array) -> LogProbs:
    """Returns log-probabilities: zeros if `likeliest` < 0, of the chosen tokens if 0, of the likeliest (slow) too if > 0."""

    def chosen() -> tuple[jax.Array, jax.Array]:
        total_B = jax.nn.logsumexp(logits_BxV, axis=-1)
        chosen_Bx1 = jnp.take_along_axis(logits_BxV, chosen_B[:, None], axis=-1, mode="clip")
        return chosen_Bx1[:, 0] - total_B, total_B

    def top() -> tuple[jax.Array, jax.Array]:
        top, ids = jax.lax.top_k(logits_BxV, min(LIKELIEST, logits_BxV.shape[1]))
        return ids.astype(jnp.int32), top - total_B[:, None]

    # A branch of the same program, not another program: a request for log-probabilities compiles nothing.
    chosen_B, total_B = _if(likeliest >= 0, chosen)
    return LogProbs(chosen_B, *_if(likeliest > 0, top))


def _if(true: jax.Array, of: typing.Callable[[], typing.Any]) -> typing.Any:
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(of))
    return jax.lax.cond(true, of, lambda: zeros)


def _changed(scores_BxV: jax.Array, mask_BxW: jax.Array, rows: Rows) -> jax.Array:
    """Returns the scores after penalties, with -inf where a mask's bit is 0."""
    scores_BxV = penalised(scores_BxV, rows)
    ids_V = jnp.arange(scores_BxV.shape[1])
    words_BxV = jnp.take(mask_BxW, ids_V // 32, axis=1, mode="fill", fill_value=0)
    return jnp.where((words_BxV >> (ids_V % 32).astype(jnp.uint32)) & 1 > 0, scores_BxV, -jnp.inf)


def _placed(ring: Iterable[layers.LayerCache]) -> Layers:
    """Returns the cache with a fixed sharding, the one for which the next program was compiled."""
    return jax.tree.map(lambda x: constrain(x, "batch", "kv_heads", None, None), tuple(ring))


def _of_both(change: typing.Callable[..., jax.Array], *caches: layers.LayerCache) -> layers.LayerCache:
    """Returns a layer's cache, with `change(*arrays, axis of the slots)` applied to the keys and to the values of `caches`."""
    keys, values = zip(*caches, strict=True)
    return layers.LayerCache(change(*keys, 3), change(*values, 2))


def _settled(state: State) -> State:
    rest = jax.tree.map(lambda x: constrain(x, *(None,) * x.ndim), state._replace(layers=()))
    return rest._replace(layers=_placed(state.layers))


@functools.partial(jax.jit, static_argnames=("model", "rows", "slots"))
def empty(model: Transformer, rows: int, slots: int) -> State:
    """Returns a state without requests."""
    zeros_B, zeros = jnp.zeros(rows, jnp.int32), jnp.zeros(rows)
    bias_BxV = jnp.zeros((rows, model.config.padded_vocab_size))
    settings = Rows(
        *(zeros, zeros_B, zeros + 1, zeros_B.astype(jnp.uint32), bias_BxV, zeros_B - 1),
        *(zeros, zeros[:, None] + jnp.asarray(NO_PENALTIES), bias_BxV.astype(jnp.int32), zeros_B),
    )
    ring = empty_cache(model.config, rows, slots)
    return _settled(State(ring, jnp.int32(0), zeros_B, zeros_B, zeros_B, settings))


@functools.partial(jax.jit, static_argnames=("model", "steps"), donate_argnames="state")
def step(
    model: Transformer,
    weights: Weights,
    state: State,
    live_B: jax.Array,
    mask_BxW: jax.Array,
    changed: jax.Array,
    steps: int,
) -> tuple[State, Drawn]:
    """Returns the state and the new tokens after `steps` steps. Tokens of rows that are not live are meaningless.

    Args:
      live_B: True in rows that have a request.
      mask_BxW: uint32, bits of the ids that each row may draw; ignored, as penalties are, unless `changed`.
    """
    rows = state.rows._replace(temperature_B=jnp.where(live_B, state.rows.temperature_B, 0))
    likeliest = jnp.where(live_B, rows.likeliest_B, -1).max()
    weights = _of_rows(weights, rows.adapter_B)

    def one(state: State, _: None) -> tuple[State, Drawn]:
        position_B = jnp.where(live_B, state.position_B, 0)
        hidden_Bx1xD, ring = read(model, weights, state.layers, state.clock, state.last_B[:, None], position_B)
        logits_BxV = logits_of(model, weights, hidden_Bx1xD[:, 0])
        scores_BxV = logits_BxV + rows.bias_BxV
        change = functools.partial(_changed, rows=rows)
        scores_BxV = jax.lax.cond(changed, change, lambda scores_BxV, _: scores_BxV, scores_BxV, mask_BxW)
        token_B = sample_rows(scores_BxV, rows, state.drawn_B)
        logprobs = _log_probs(logits_BxV, token_B, likeliest)
        slots = state.layers[0].slots
        state = State(ring, (state.clock + 1) % slots, token_B, state.position_B + 1, state.drawn_B + 1, state.rows)
        return state, Drawn(token_B, jnp.isfinite(scores_BxV.max(axis=-1)), logprobs)

    # Several steps in one program: on a GPU, the launch of a small model's step takes the host longer than the step runs.
    state, drawn = jax.lax.scan(one, state, length=steps)
    return _settled(state), jax.tree.map(lambda x: constrain(x, *(None,) * x.ndim), drawn)


@functools.partial(jax.jit, static_argnames=("model",), donate_argnames="state")
def step_first(model: Transformer, weights: Weights, state: State, proposed_N: jax.Array) -> tuple[State, Drawn]:
    """Does what `step` does, but of the first row alone, whose settings are without bias, mask and log-probabilities.

    It draws N + 1 tokens at once, each as if the proposed tokens before it were the text. They are the row's tokens up to the
    first that differs from its proposal, and that one; the state goes on after it. So each is drawn from the distribution that
    it has without proposals, by the same random number: a proposed token is right with its own probability.
    """
    count, slots = len(proposed_N) + 1, state.layers[0].slots
    weights = _of_rows(weights, state.rows.adapter_B[:1])
    new_T = jnp.concatenate([state.last_B[:1], proposed_N])
    hidden_1xTxD, ring = read(model, weights, state.layers, state.clock, new_T[None], state.position_B[:1])
    logits_TxV = logits_of(model, weights, hidden_1xTxD[0])
    rows = jax.tree.map(lambda x: jnp.repeat(x[:1], count, axis=0), state.rows)
    token_T = sample_rows(logits_TxV, rows, state.drawn_B[0] + jnp.arange(count))
    right = jnp.cumprod(token_T[:-1] == proposed_N).sum()
    state = state._replace(
        layers=ring,
        clock=(state.clock + right + 1) % slots,
        last_B=state.last_B.at[0].set(token_T[right]),
        position_B=state.position_B + right + 1,
        drawn_B=state.drawn_B + right + 1,
    )
    return state, Drawn(token_T[:, None], jnp.isfinite(logits_TxV.max(axis=-1))[:, None], None)


@functools.partial(jax.jit, donate_argnames="seen_BxV")
def count(seen_BxV: jax.Array, last_B: jax.Array, live_B: jax.Array) -> jax.Array:
    """Returns `Rows.seen_BxV` after the newest token of each live row was counted for penalties."""
    return constrain(seen_BxV.at[jnp.arange(len(live_B)), last_B].add(2 * live_B.astype(jnp.int32)), None, None)


@functools.partial(jax.jit, static_argnames=("model",), donate_argnames="staging")
def read_chunk(
    model: Transformer,
    weights: Weights,
    staging: Layers,
    tokens_PxC: jax.Array,
    next_C: jax.Array,
    begin: jax.Array,
    echo: jax.Array,
    adapter: jax.Array,
) -> tuple[Layers, LogProbs, jax.Array]:
    """Returns the staging cache with one more chunk of each prompt in the slots from `begin` on, and of the first prompt:

    log-probabilities of `next_C` after its tokens if `echo`, else zeros; its last hidden states (C, D). A chunk may be padded
    with any tokens, since no query of its prompt attends to them.
    """
    (prompts, size), slots = tokens_PxC.shape, staging[0].slots
    weights = _of_rows(weights, jnp.broadcast_to(adapter, prompts))
    position_C = jnp.minimum(begin + jnp.arange(size), model.config.max_seq_len - 1)
    hidden_PxCxD, cache = model.apply(
        weights.variables,
        tokens_PxC,
        jnp.broadcast_to(position_C, (prompts, size)),
        cache=layers.Cache(staging, begin, jnp.broadcast_to(jnp.arange(slots), (prompts, slots))),
    )
    logprobs = _if(echo, lambda: _log_probs(logits_of(model, weights, hidden_PxCxD[0]), next_C, jnp.int32(LIKELIEST)))
    return _placed(cache.layers), logprobs, hidden_PxCxD[0]


@functools.partial(jax.jit, donate_argnames="kept")
def keep(kept: Layers, staging: Layers, place: jax.Array, begin: jax.Array) -> Layers:
    """Returns the prefix cache, where a row is a chunk, with row `place` set to the staged prompt's chunk at slot `begin`."""
    size = kept[0].slots

    def put(to: jax.Array, new: jax.Array, axis: int) -> jax.Array:
        return _put(to, _cut(new, begin, size, axis), place, 0)

    return _placed(_of_both(put, *pair) for pair in zip(kept, staging, strict=True))


@functools.partial(jax.jit, donate_argnames="staging")
def paste(staging: Layers, kept: Layers, place: jax.Array, begin: jax.Array) -> Layers:
    """Returns the staging cache with the prefix cache's chunk at `place` copied to the slots from `begin` on."""

    def put(to: jax.Array, chunks: jax.Array, axis: int) -> jax.Array:
        return _put(to, _cut(chunks, place, 1), begin, axis)

    return _placed(_of_both(put, *pair) for pair in zip(staging, kept, strict=True))


_put, _cut = jax.lax.dynamic_update_slice_in_dim, jax.lax.dynamic_slice_in_dim


class Entry(typing.NamedTuple):
    """A request that enters a row.

    Attributes:
      prompt: the index of its prompt among those read together.
      last, position: the prompt's last token, and its position.
      settings: of this row alone, without the axis B.
    """

    row: jax.typing.ArrayLike
    prompt: jax.typing.ArrayLike
    last: jax.typing.ArrayLike
    position: jax.typing.ArrayLike
    settings: Rows


@functools.partial(jax.jit, donate_argnames="state")
def insert(state: State, staging: Layers, entry: Entry) -> State:
    """Returns the state with a prompt in a row, which loses its earlier content.

    `staging` holds each prompt's keys and values from slot 0 on, except those of the last token.
    """
    slots = state.layers[0].slots

    def turned(to: jax.Array, new: jax.Array, axis: int) -> jax.Array:
        # Shift the prompt so that its last token, which the next step reads, will be at the clock.
        shifted = jnp.roll(_cut(new, entry.prompt, 1), state.clock - entry.position, axis)
        return _put(to, shifted, entry.row, 0)

    def put(all_B: jax.Array, value: jax.typing.ArrayLike) -> jax.Array:
        return all_B.at[entry.row].set(value)

    # The staging cache may be longer than the ring, if a longer prompt was read with this one.
    grown = [layers.LayerCache(k[..., :slots], v[:, :, :slots]).grown(slots) for k, v in staging]
    return _settled(
        State(
            tuple(_of_both(turned, *pair) for pair in zip(state.layers, grown, strict=True)),
            state.clock,
            put(state.last_B, entry.last),
            put(state.position_B, entry.position),
            put(state.drawn_B, 0),
            jax.tree.map(put, state.rows, entry.settings),
        )
    )


@functools.partial(jax.jit, static_argnames=("slots",))
def resized(state: State, slots: int) -> State:
    """Returns the state with a ring of another length, which keeps the newest slots."""
    old = state.layers[0].slots
    least = max(0, old - slots)  # how many of the oldest slots a shorter ring loses

    def moved(x: jax.Array, axis: int) -> jax.Array:
        return jax.lax.slice_in_dim(jnp.roll(x, -state.clock, axis), least, None, axis=axis)

    ring = tuple(_of_both(moved, layer).grown(slots) for layer in state.layers)
    return _settled(state._replace(layers=ring, clock=jnp.int32(min(old, slots) % slots)))


@functools.partial(jax.jit, static_argnames=("model", "rows", "slots"))
def cache(model: Transformer, rows: int, slots: int) -> Layers:
    """Returns an empty cache for staged prompts or for kept chunks, one in each row."""
    return _placed(empty_cache(model.config, rows, slots))
