"""Generation against the plain forward pass, and what each setting promises."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
import tiny_peft

from jaxlm import config, models
from jaxlm.devices import sharding, tree
from jaxlm.models import adapters, layers
from jaxlm.models.decode import generate as generate_module
from jaxlm.models.decode import ring
from jaxlm.models.decode.sampling import nucleus_threshold

PROMPTS = [[5, 7, 11], [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20], [42]]
LONGEST = max(map(len, PROMPTS))
VARIANTS = [
    {"n_layers": 2, "scan_layers": True, "fuse_projections": False, "tie_embeddings": False, "qk_norm": True},
    {"n_layers": 2, "family": "gpt2", "tie_embeddings": False},
]


def built(seed: int = 0, **overrides):
    model = models.build(tiny.model_config(**({"n_layers": 1} | overrides)), "blocked")
    return model, tiny.random_params(model, seed)


def generate(model, params, prompts, *, stop_ids=(), seed=0, **settings) -> list[list[int]]:
    """`generate` with settings by name, greedy but for those."""
    return generate_module.generate(
        model, {"params": params}, prompts, tiny.sample_config(**settings), stop_ids=stop_ids, seed=seed
    )


def assert_greedy_by_full_forward(model, params, got: list[list[int]]) -> None:
    """What generate must give: each token from a forward pass over all that came before (padded to one length)."""
    forward = tiny.jit(lambda ids: tiny.logits(dataclasses.replace(model, backend="xla"), params, ids)[0])
    for prompt, new in zip(PROMPTS, got, strict=True):
        ids = [*prompt, *new, *[0] * (LONGEST - len(prompt))]
        assert forward(jnp.asarray([ids])).argmax(-1)[len(prompt) - 1 :][: len(new)].tolist() == new


@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_decode_is_full_forward(variant):
    model, params = built(**variant)
    expected = generate(model, params, PROMPTS, max_new_tokens=8)
    assert [len(new) for new in expected] == [8, 8, 8]
    assert_greedy_by_full_forward(model, params, expected)
    # Mixed lengths change nothing: a prompt alone gives the same.
    assert generate(model, params, PROMPTS[2:], max_new_tokens=8) == expected[2:]
    # The comparison can fail: other weights in one layer give other tokens.
    _, other = built(seed=9, **variant)
    wrong = params | {"layers_1": other["layers_1"]}
    assert generate(model, wrong, PROMPTS, max_new_tokens=8) != expected


def test_a_cache_that_grows_loses_nothing(monkeypatch):
    model, params = built(max_seq_len=256)
    got = generate(model, params, PROMPTS, max_new_tokens=200)  # long enough for three lengths of the cache
    assert [len(new) for new in got] == [200, 200, 200]
    assert_greedy_by_full_forward(model, params, got)
    grown = layers.LayerCache.grown
    monkeypatch.setattr(
        layers.LayerCache, "grown", lambda self, slots: jax.tree.map(jnp.zeros_like, grown(self, slots))
    )
    jax.clear_caches()  # programs traced with the other function, before and after
    assert generate(model, params, PROMPTS, max_new_tokens=200) != got
    jax.clear_caches()


def test_stop_ids_end_a_row_and_the_loop():
    model, params = built()
    free = generate(model, params, PROMPTS, max_new_tokens=10)
    stop = free[1][4]
    stopped = generate(model, params, PROMPTS, max_new_tokens=10, stop_ids=(stop, 100))
    for row, whole in zip(stopped, free, strict=True):
        ends = [i for i, token in enumerate(whole) if token in (stop, 100)]
        assert row == (whole[: ends[0] + 1] if ends else whole)
    assert len(stopped[1]) < 10


def test_rows_depend_on_seed_and_place_only():
    model, params = built()
    settings = {"max_new_tokens": 12, "temperature": 1.0, "top_k": 50, "top_p": 0.95}
    first = generate(model, params, PROMPTS, seed=3, **settings)
    assert generate(model, params, PROMPTS, seed=3, **settings) == first
    assert generate(model, params, PROMPTS, seed=4, **settings) != first
    companions = generate(model, params, [PROMPTS[0], [1, 2], PROMPTS[2]], seed=3, **settings)
    assert [companions[0], companions[2]] == [first[0], first[2]]
    same = generate(model, params, [PROMPTS[0]] * 3, seed=3, **settings)
    assert same[0] != same[1]


def test_limits_of_sampling_are_greedy():
    model, params = built()
    greedy = generate(model, params, PROMPTS, max_new_tokens=6)
    for settings in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}):
        assert generate(model, params, PROMPTS, max_new_tokens=6, **({"temperature": 1.0} | settings)) == greedy


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
def test_nucleus_threshold_is_that_of_a_sort(top_p):
    probs = np.random.default_rng(0).dirichlet(np.full(300, 0.1), 5).astype(np.float32)
    threshold = np.asarray(jax.jit(nucleus_threshold)(probs, top_p))
    for row, t in zip(probs, threshold[:, 0], strict=True):
        ordered = np.sort(row)[::-1]
        kept = int(np.searchsorted(np.cumsum(ordered, dtype=np.float64), top_p)) + 1
        assert abs(int((row >= t).sum()) - kept) <= (top_p == 0.999)  # sums of float32 may part at the last token


def test_padded_vocabulary_is_never_drawn():
    model, params = built(vocab_size=3, tie_embeddings=False)
    # Padding columns that would win, were they not masked: the largest multiples of the others, both ways.
    head_DxV = params["head"]["kernel"]
    head_DxV = head_DxV.at[:, 3:9].set(9 * jnp.tile(head_DxV[:, :3], 2) * jnp.repeat(jnp.array([1, -1]), 3))
    params = params | {"head": {"kernel": head_DxV}}
    hidden_BxTxD = tiny.hidden(model, {"params": params}, {"tokens": jnp.array([[1], [2]])})
    assert (jnp.argmax(hidden_BxTxD @ head_DxV, axis=-1) >= 3).all()
    for settings in ({}, {"temperature": 5.0, "top_k": 50}, {"temperature": 5.0, "top_p": 0.99}):
        out = generate(model, params, [[1], [2, 0]], max_new_tokens=20, **settings)
        assert max(max(row) for row in out) < 3


def test_rows_end_where_the_context_is_full():
    for overrides in ({}, {"family": "gpt2"}):
        model, params = built(max_seq_len=32, **overrides)
        out = generate(model, params, [[1] * 30, [1, 2]], max_new_tokens=20)
        assert [len(row) for row in out] == [2, 20]
        assert out[1] == generate(model, params, [[1], [1, 2]], max_new_tokens=20)[1]


def test_new_lengths_seldom_compile():
    model, params = built(vocab_size=97)  # as no other test
    before = ring.step._cache_size()
    for length, new in ((3, 9), (16, 32), (7, 20), (11, 1), (5, 2), (9, 3)):
        generate(model, params, [[1] * length] * 3, max_new_tokens=new)
    generate(model, params, [[1]] * 4, max_new_tokens=5, stop_ids=(1, 2, 3), seed=5)
    assert ring.step._cache_size() == before + 2  # bursts of 8 steps and of 1


def test_sharded_parameters_generate_the_same():
    model, params = built(vocab_size=250)
    expected = generate(model, params, PROMPTS, max_new_tokens=6)
    mesh = sharding.make_mesh(config.MeshConfig(data=2, fsdp=2, tensor=2, context=1))
    split = jax.device_put(
        params, sharding.tree_shardings(models.abstract_params(model), models.logical_axes(model), mesh)
    )
    assert generate(model, split, PROMPTS, max_new_tokens=6) == expected
    with jax.set_mesh(mesh):
        assert generate(model, split, PROMPTS, max_new_tokens=6) == expected


@pytest.mark.parametrize("overrides", [{}, {"family": "gpt2", "tie_embeddings": False}])
def test_an_adapter_is_decoded_as_it_is_trained(overrides):
    """Low-rank products and rows, which decoding has in the kernels; the vectors of a prompt, which are ids of their own."""
    model, params = built(**overrides)
    given = tiny_peft.adapted(params, (5, 42))
    merged = tree.map_named(lambda _, leaf: jnp.asarray(leaf), tiny_peft.merged(params, given))
    expected = generate(model, merged, PROMPTS, max_new_tokens=8)
    settings, adapted = tiny.sample_config(max_new_tokens=8), given.adapter.attach(model)
    assert generate_module.generate(adapted, {"params": params, **given.variables}, PROMPTS, settings) == expected
    assert generate(model, params, PROMPTS, max_new_tokens=8) != expected


def test_a_prompt_of_vectors_is_read_in_front():
    model, params = built()
    adapter = adapters.Adapter(tiny_peft.settings(kind="prompt", prompt_tokens=3))
    vocab, rows = model.config.vocab_size, [11, 4, 77]
    prompt = {"embed": {"prompt": params["embed"]["embedding"][jnp.asarray(rows)]}}
    settings, asked = tiny.sample_config(max_new_tokens=8), [[vocab, vocab + 1, vocab + 2, *ids] for ids in PROMPTS]
    got = generate_module.generate(adapter.attach(model), {"params": params, "prompt": prompt}, asked, settings)
    assert got == generate(model, params, [[*rows, *ids] for ids in PROMPTS], max_new_tokens=8)
    with pytest.raises(config.ConfigError, match="outside the vocabulary"):
        generate(model, params, asked, max_new_tokens=8)
    with pytest.raises(config.ConfigError, match="outside the vocabulary"):
        generate_module.generate(adapter.attach(model), {"params": params, "prompt": prompt}, [[vocab + 3]], settings)


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([[1], [2] * 64], {}, "prompt 1 has 64 tokens"),
        ([[]], {}, "prompt 0 has no tokens"),
        ([[101]], {}, "outside the vocabulary of 101"),
        ([[1]], {"top_p": 0.0}, "top_p"),
        ([[1]], {"temperature": -1.0}, "temperature"),
    ],
)
def test_bad_input_is_one_clear_line(prompts, settings, message):
    with pytest.raises(config.ConfigError, match=message):
        generate(*built(), prompts, max_new_tokens=4, **settings)


def test_nothing_is_asked_for():
    assert generate(*built(), [], max_new_tokens=4) == []
    assert generate(*built(), [[1]], max_new_tokens=0) == [[]]
