"""The decode engine: a row among neighbours that come and go is the row alone, which is the plain forward pass.

Engines of one model have the same rows, chunk and lengths, so that most tests share their compiled programs.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
import tiny_peft

from jaxlm import config, models
from jaxlm.models import adapters, quantized
from jaxlm.models.decode import ring
from jaxlm.models.decode.engine import Engine, Settings, check_prompts
from jaxlm.models.decode.sampling import Rows, sample_rows

RNG = np.random.default_rng(0)
SHORT, LONG = [5, 7, 11], RNG.integers(0, 101, 29).tolist()
GREEDY, WARM = Settings(temperature=0.0), Settings(temperature=0.9, top_k=20, top_p=0.9, seed=7)


@functools.cache
def built(**overrides):
    model = models.build(tiny.model_config(**({"n_layers": 1} | overrides)), "xla")
    return model, {"params": tiny.random_params(model)}


def engine(model=None, variables=None, **more) -> Engine:
    given = built() if model is None else (model, variables)
    return Engine(*given, **({"rows": 3, "chunk": 8, "shortest": 16} | more))


def enter(engine: Engine, row: int, ids: list[int], settings: Settings = GREEDY, new: int = 12, echo: bool = False):
    """Reads a prompt and puts it into a row of a ring that is long enough."""
    prefill = engine.begin(ids, settings=dataclasses.replace(settings, echo=echo))
    while prefill.left:
        engine.read(prefill)
    engine.resize(max(engine.slots, engine.length_for(len(ids) + new)))
    engine.insert(prefill, row, settings)
    return prefill


def steps(engine: Engine, row: int, count: int, live: tuple[int, ...] = (), mask_BxW=None) -> list[int]:
    """The next tokens of a row, while others live."""
    live_B = np.isin(np.arange(engine.rows), (row, *live))
    return [int(engine.step(live_B, mask_BxW).token_NxB[0, row]) for _ in range(count)]


def alone(ids: list[int], settings: Settings = GREEDY, count: int = 12, **more) -> list[int]:
    one = engine(**more)
    enter(one, 0, ids, settings, count)
    return steps(one, 0, count)


def full_logp(model, variables, ids: list[int]) -> np.ndarray:
    """Log-probabilities (T, V) of what follows each token."""
    forward = tiny.jit(lambda tokens: jax.nn.log_softmax(tiny.logits(model, variables["params"], tokens)[0]))
    return np.asarray(forward(jnp.asarray([ids])))


@pytest.mark.parametrize("overrides", [{"n_layers": 2}, {"family": "gpt2"}])
def test_decode_and_echo_are_the_full_forward(overrides):
    model, variables = built(**overrides)
    one = engine(model, variables)
    echo = enter(one, 1, LONG, Settings(temperature=0.0, logprobs=20), echo=True).echo
    drawn = [one.step(np.array([False, True, False])) for _ in range(12)]
    new = [int(d.token_NxB[0, 1]) for d in drawn]
    logp = full_logp(model, variables, LONG + new)
    after = logp[len(LONG) - 1 : -1]
    assert after.argmax(-1).tolist() == new
    chosen = [d.logprobs.chosen[0, 1] for d in drawn]
    np.testing.assert_allclose(chosen, after.max(-1), atol=1e-4)
    np.testing.assert_allclose(drawn[0].logprobs.top[0, 1], np.sort(after[0])[::-1][:20], atol=1e-4)
    assert drawn[0].logprobs.top_ids[0, 1].tolist() == np.argsort(-after[0])[:20].tolist()
    read = np.concatenate([chunk.chosen for chunk in echo])
    np.testing.assert_allclose(read, [logp[at, LONG[at + 1]] for at in range(len(LONG) - 1)], atol=1e-4)
    # Another prompt has other ones.
    assert np.abs(read - [logp[at, SHORT[at % 3]] for at in range(len(LONG) - 1)]).max() > 0.1


def test_a_row_among_neighbours_that_come_and_go_is_the_row_alone():
    expected = alone(LONG, WARM, 30)
    one, rng, got, others = engine(), np.random.default_rng(1), [], set()
    enter(one, 2, SHORT, WARM)
    steps(one, 2, 5)  # the clock is not at 0, and row 2 leaves without being wiped
    enter(one, 1, LONG, WARM, 30)
    for _ in range(30):
        if rng.random() < 0.4:
            row = int(rng.choice([0, 2]))
            if row in others:
                others.remove(row)
            else:
                others.add(row)
                enter(one, row, rng.integers(0, 101, int(rng.integers(1, 12))).tolist(), WARM)
        got += steps(one, 1, 1, tuple(others))
    assert got == expected
    assert alone(LONG, dataclasses.replace(WARM, seed=8), 30) != expected
    assert alone(LONG[:-1], WARM, 30) != expected


def test_the_ring_turns_round_many_times():
    one = engine()
    enter(one, 1, SHORT)
    steps(one, 1, 100, (0,))  # six times round with whatever is there; row 1 lives on beyond its context
    for _ in range(20):
        enter(one, 0, SHORT)
        assert one.slots == 16
        assert steps(one, 0, 7) == alone_short()[:7]


@functools.cache
def alone_short() -> list[int]:
    return alone(SHORT)


def test_the_ring_grows_and_shrinks_between_steps():
    expected = alone(SHORT, WARM, 12)
    one = engine()
    enter(one, 0, SHORT, WARM)
    got = []
    for length in (16, 64, 16, 32, 16, 64):
        one.resize(length)
        assert one.slots == length
        got += steps(one, 0, 2)
    assert got == expected
    # Slots that are lost are missed.
    one = engine()
    enter(one, 0, LONG)
    one.resize(16)
    assert steps(one, 0, 12) != alone(LONG)


def test_chunks_are_the_whole_and_a_prefix_found_is_a_prefix_read():
    expected = alone(LONG, chunk=24, shortest=32)  # of no whole number of chunks
    assert alone(LONG) == expected
    one = engine()
    enter(one, 0, LONG)
    assert one.prefixes.hits == 0
    enter(one, 1, LONG)
    assert one.prefixes.hits == 24  # whole chunks of all but the last token
    assert steps(one, 1, 12) == expected
    enter(one, 2, [*LONG[:10], *SHORT])
    assert one.prefixes.hits == 32
    assert steps(one, 2, 12) == alone([*LONG[:10], *SHORT])


def test_log_probabilities_are_those_that_are_asked_for():
    one, drawn = engine(), {}
    for asked in (None, 0, 5):
        enter(one, 0, SHORT, Settings(temperature=0.0, logprobs=asked))
        drawn[asked] = one.step(np.array([True, False, True])).logprobs
    assert (drawn[None].chosen[0, 0], np.abs(drawn[None].top).max()) == (0, 0)
    assert drawn[5].chosen[0, 0] == drawn[5].top[0, 0, 0] < 0
    # Of two programs: a last bit may differ.
    assert drawn[0].chosen[0, 0] == pytest.approx(drawn[5].chosen[0, 0], rel=1e-6)
    assert np.abs(drawn[0].top).max() == 0


def test_any_mix_of_settings_is_one_program():
    one = engine()
    enter(one, 0, SHORT)
    enter(one, 1, SHORT, WARM)
    steps(one, 0, 1, (1,))
    before = ring.step._cache_size()
    enter(one, 2, SHORT, Settings(temperature=0.5, bias={3: 5.0}, logprobs=3))
    steps(one, 0, 3, (1, 2))
    assert ring.step._cache_size() == before


def test_bias_and_mask():
    free = alone_short()[0]
    assert alone(SHORT, Settings(temperature=0.0, bias={free: -100.0}), 1) != [free]
    assert alone(SHORT, Settings(temperature=0.0, bias={33: 100.0}), 3) == [33] * 3
    one = engine()
    enter(one, 0, SHORT)
    enter(one, 1, SHORT)
    mask_BxW = np.full((3, 4), 2**32 - 1, np.uint32)
    mask_BxW[0] = [0, 0, 1 << 6, 0]
    drawn = one.step(np.array([True, True, False]), mask_BxW)
    assert drawn.token_NxB[0, :2].tolist() == [70, free]
    mask_BxW[0] = 0
    assert one.step(np.array([True, True, False]), mask_BxW).sound_NxB[0].tolist()[:2] == [False, True]


def test_bfloat16_is_near_float32():
    model, variables = built(dtype="bfloat16")
    one = engine(model, variables)
    prefill = one.begin(LONG, settings=Settings(echo=True))
    while prefill.left:
        one.read(prefill)
    logp = full_logp(*built(), LONG)
    read = np.concatenate([chunk.chosen for chunk in prefill.echo])
    gap = np.abs(read - [logp[at, LONG[at + 1]] for at in range(len(LONG) - 1)]).max()
    assert 0 < gap < 0.15


def test_adapters_are_read():
    model, variables = built()
    given = tiny_peft.adapted(variables["params"], (5, 42))
    merged = tiny_peft.merged(variables["params"], given)
    one = engine(given.adapter.attach(model), variables | given.variables)
    enter(one, 0, SHORT)
    two = engine(model, {"params": jax.tree.map(jnp.asarray, merged)})
    enter(two, 0, SHORT)
    got = steps(one, 0, 8)
    assert got == steps(two, 0, 8) != alone_short()[:8]
    # The vectors of a prompt are ids of their own.
    adapter = adapters.Adapter(tiny_peft.settings(kind="prompt", prompt_tokens=3))
    prompt = {"embed": {"prompt": variables["params"]["embed"]["embedding"][jnp.asarray([11, 4, 77])]}}
    one = engine(adapter.attach(model), variables | {"prompt": prompt})
    enter(one, 0, [101, 102, 103, *SHORT])
    assert steps(one, 0, 8) == alone([11, 4, 77, *SHORT])[:8]
    check_prompts(one.model, [[101, 102, 103]])
    with pytest.raises(config.ConfigError, match="outside the vocabulary"):
        check_prompts(model, [[101]])


@pytest.mark.parametrize("overrides", [{"n_layers": 2}, {"family": "gpt2"}])
def test_rows_of_several_adapters_are_the_merged_models(overrides):
    """Adapters of other ranks, scales and kernels share the steps with the base; nobody finds a prefix of another's."""
    model, variables = built(**overrides)
    mixed = ({"rank": 2}, {"rank": 5, "alpha": 3.0}, {"targets": (r"attn/[qv]", "mlp/up")})
    each = [tiny_peft.adapted(variables["params"], seed=seed, **own) for seed, own in enumerate(mixed)]
    wanted = Settings(temperature=0.0, logprobs=20)
    one = engine(model, variables | {"adapters": adapters.stacked(each)}, rows=4)
    for row in range(4):
        enter(one, row, LONG, dataclasses.replace(wanted, adapter=row))
    drawn = [one.step(np.ones(4, bool)) for _ in range(12)]
    assert one.prefixes.hits == 0
    for row, params in enumerate([variables["params"], *(tiny_peft.merged(variables["params"], own) for own in each)]):
        alone = engine(model, {"params": jax.tree.map(jnp.asarray, params)}, rows=4)
        enter(alone, 0, LONG, wanted)
        for step in drawn:
            expected = alone.step(np.arange(4) == 0)
            assert step.token_NxB[0, row] == expected.token_NxB[0, 0]
            np.testing.assert_allclose(step.logprobs.top[0, row], expected.logprobs.top[0, 0], atol=1e-5)
    first = np.sort(drawn[0].logprobs.top[0, :, 0])
    assert np.diff(first).min() > 1e-3  # no two are alike


def test_beside_adapters_a_row_may_live_alone_and_the_base_may_be_int8():
    model, variables = built()
    each = [tiny_peft.adapted(variables["params"], seed=seed, rank=2 + seed) for seed in range(2)]
    beside = {"adapters": adapters.stacked(each)}
    second = Settings(temperature=0.0, adapter=2)
    merged = jax.tree.map(jnp.asarray, tiny_peft.merged(variables["params"], each[1]))
    expected = {}
    for name, given in {"merged": {"params": merged}, "int8": in_int8(model, variables)}.items():
        one = engine(model, given)
        enter(one, 0, LONG, Settings(temperature=0.0))
        expected[name] = steps(one, 0, 8)
    one = engine(model, variables | beside, speculate=True)
    enter(one, 0, LONG, second)
    assert one.alone(np.array([True, False, False]))
    assert steps(one, 0, 8) == expected["merged"]
    one = engine(model, in_int8(model, variables) | beside)
    for row, settings in ((0, Settings(temperature=0.0)), (1, second)):
        enter(one, row, LONG, settings)
    of_rows = np.concatenate([one.step(np.array([True, True, False])).token_NxB for _ in range(8)]).T
    assert of_rows[0].tolist() == expected["int8"] != of_rows[1].tolist()


def in_int8(model, variables):
    """A copy in int8, since the tree that is given is emptied."""
    return quantized.in_int8(model, jax.tree.map(lambda x: x, variables))


def test_a_quantised_base_is_read():
    model, variables = built()
    frozen = tiny.jit(lambda params: quantized.freeze(params, "nf4", "float32"))(variables["params"])
    thawed = tiny.jit(lambda frozen: tiny.thaw(frozen, model))(frozen)
    got = {}
    for name, given in {"codes": frozen, "decoded": {"params": thawed}}.items():
        one = engine(model, given)
        enter(one, 0, SHORT)
        got[name] = steps(one, 0, 8)
    assert got["codes"] == got["decoded"] != alone_short()[:8]


def test_rows_draw_by_their_own_settings():
    logits = jnp.log(jnp.asarray([0.4, 0.3, 0.15, 0.1, 0.05]))
    count = 3000

    def shares(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
        def rows(value, dtype):  # every second row is greedy
            return jnp.full(2 * count, value, dtype)

        settings = Rows(
            jnp.tile(jnp.asarray([temperature, 0.0], jnp.float32), count),
            rows(top_k, jnp.int32),
            rows(top_p, jnp.float32),
            jnp.arange(2 * count, dtype=jnp.uint32),
            jnp.zeros((2 * count, 6)),
            rows(-1, jnp.int32),
            rows(min_p, jnp.float32),
            jnp.zeros((2 * count, 3)),
            jnp.zeros((2 * count, 6), jnp.int32),
            rows(0, jnp.int32),
        )
        logits_BxV = jnp.broadcast_to(jnp.append(logits, -jnp.inf), (2 * count, 6))
        ids = np.asarray(draw(logits_BxV, settings, rows(0, jnp.int32)))
        assert (ids[1::2] == 0).all()
        return np.bincount(ids[::2], minlength=6) / count

    def near(got, expected):
        np.testing.assert_allclose(got, np.array(expected) / np.sum(expected), atol=0.03)

    draw = tiny.jit(sample_rows)
    near(shares(), [0.4, 0.3, 0.15, 0.1, 0.05, 0])
    near(shares(temperature=0.5), [0.16, 0.09, 0.0225, 0.01, 0.0025, 0])
    near(shares(top_k=2), [0.4, 0.3, 0, 0, 0, 0])
    near(shares(top_p=0.75), [0.4, 0.3, 0.15, 0, 0, 0])
    near(shares(top_k=2, top_p=0.5), [1, 0, 0, 0, 0, 0])
    near(shares(min_p=0.3), [0.4, 0.3, 0.15, 0, 0, 0])  # of the likeliest: at least .12
    near(shares(min_p=0.3, top_p=0.8), [0.4, 0.3, 0, 0, 0, 0])  # of what min-p leaves, 0.82 by two


def test_of_a_large_vocabulary_only_what_is_allowed_is_drawn():
    count, allowed = 1000, {7: 0.2, 9_000: 0.5, 19_999: 0.3}
    logits_V = np.full(20_001, -np.inf, np.float32)
    logits_V[list(allowed)] = np.log([*allowed.values()])
    fill = {"temperature_B": 1.0, "top_k_B": 0, "top_p_B": 1.0, "likeliest_B": -1, "min_p_B": 0.0, "adapter_B": 0}
    rows = {name: np.full(count, value) for name, value in fill.items()} | {"seed_B": np.arange(count, dtype=np.uint32)}
    rows = Rows(bias_BxV=0, penalties_Bx3=0, seen_BxV=0, **rows)
    ids, drawn = np.unique(
        tiny.jit(sample_rows)(np.tile(logits_V, (count, 1)), rows, np.zeros(count, np.int32)), return_counts=True
    )
    assert [*ids] == [*allowed]
    np.testing.assert_allclose(drawn / count, [*allowed.values()], atol=0.06)


def test_a_row_that_lives_alone_is_computed_alone():
    """On a CPU a step of eight rows takes longer than one of one; every setting that it lacks brings back all rows."""
    one = engine(speculate=True)
    enter(one, 0, SHORT, WARM)
    enter(one, 1, SHORT, WARM)
    newest = one.state.last_B[1]
    got = steps(one, 0, 6)
    assert one.state.last_B[1] == newest  # the second row was not computed
    assert got + steps(one, 0, 2, (1,)) == alone(SHORT, WARM, 8)
    assert one.state.last_B[1] != newest
    before = ring.step._cache_size()
    for more in ({"bias": {33: 100.0}}, {"logprobs": 0}):
        enter(one, 0, SHORT, dataclasses.replace(GREEDY, **more))
        assert (one.step(np.array([True, False, False])).logprobs.chosen[0, 0] < 0) == ("logprobs" in more)
    assert ring.step._cache_size() == before
