"""The train step: accumulation is exact, sharding changes nothing, bad steps are skipped, the state's memory is reused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_models as tiny
from tiny_steps import BATCHES, B, assert_close, changed, make_mesh, one_layer

from jaxlm import config, models
from jaxlm.config import MeshConfig
from jaxlm.devices import sharding
from jaxlm.ops import attention as ops_attention
from jaxlm.plan.memory import abstract_mesh
from jaxlm.step import optim, parts, state, step
from jaxlm.step.objectives import lm


class Setup:
    """A config's parts on a mesh (its sizes by axis), or bare."""

    def __init__(self, c: config.Config, sizes: dict[str, int] | None = None, objective=lm.make):
        self.mesh = None if sizes is None else make_mesh(**sizes)
        self.parts = parts.make(c, self.mesh or make_mesh(), objective)
        self.step = self.parts.step()

    def state(self):
        return state.init({"params": tiny.random_params(self.parts.model)}, self.parts.tx)

    def run(self, batches):
        if self.mesh is None:
            now, fn = self.state(), jax.jit(self.step)
            history = []
            for batch in batches:
                now, metrics = fn({}, now, batch)
                history.append(metrics)
            return now, history
        now, history = jax.device_put(self.state(), self.parts.shardings), []
        with jax.set_mesh(self.mesh):
            fn = self.parts.jit()
            for batch in batches:
                now, metrics = fn({}, now, sharding.to_global(jax.tree.map(np.asarray, batch), self.mesh, B))
                history.append(metrics)
        return now, history


@functools.cache
def full_batch():
    """State and metrics after two steps on one device without accumulation: what all others must equal."""
    return Setup(one_layer(train__microbatch_size=B)).run(BATCHES)


def test_accumulated_gradients_equal_the_full_batch_with_unequal_token_counts():
    expected, expected_metrics = full_batch()
    got, got_metrics = Setup(one_layer(train__microbatch_size=1)).run(BATCHES)
    assert_close(got.params, expected.params)
    assert_close(got_metrics, expected_metrics, rtol=1e-4)


def test_the_accumulation_test_can_fail():
    """The usual mistake, a mean of microbatch means, gives another gradient on these batches."""

    def mean_of_means(model, c):
        objective = lm.make(model, c)

        def wrong(variables, batch, key):
            sums = objective.sums(variables, batch, key)
            return sums._replace(loss=sums.loss / sums.weight, weight=jnp.ones(()))

        return dataclasses.replace(objective, sums=wrong)

    expected, _ = full_batch()
    got, _ = Setup(one_layer(train__microbatch_size=2), objective=mean_of_means).run(BATCHES)
    with pytest.raises(AssertionError):
        assert_close(got.params, expected.params)


PAIRS = [  # every two axes (4 ways on 2 key-value heads, too), rows of a microbatch, backend
    ({"data": 2, "tensor": 4}, B, "xla"),
    ({"data": 2, "fsdp": 2, "context": 2}, 4, "xla"),
    ({"fsdp": 2, "tensor": 2, "context": 2}, 4, "blocked"),
]


@pytest.mark.parametrize(("mesh", "rows", "attention"), PAIRS)
def test_sharded_equals_one_device(mesh, rows, attention):
    expected, expected_metrics = full_batch()
    c = one_layer(train__microbatch_size=rows, model__attention=attention)
    got, got_metrics = Setup(c, mesh).run(BATCHES)
    assert_close(got.params, expected.params, rtol=1e-4)
    assert_close(got_metrics, expected_metrics, rtol=1e-4)


def test_the_comparison_of_meshes_can_fail(monkeypatch):
    """The mutation: each device takes its first token for the first of the row, so queries miss the keys before it."""
    monkeypatch.setattr(ops_attention, "_offset", lambda tokens: jnp.int32(0))
    expected, _ = full_batch()
    got, _ = Setup(one_layer(train__microbatch_size=B, model__attention="blocked"), {"context": 2}).run(BATCHES)
    with pytest.raises(AssertionError):
        assert_close(got.params, expected.params, rtol=1e-4)


def test_the_state_is_sharded_and_its_memory_given_to_the_next():
    setup = Setup(one_layer(), {"fsdp": 8})
    now = jax.device_put(setup.state(), setup.parts.shardings)
    mu = now.opt_state[0].mu["layers_0"]["mlp"]["up"]["kernel"]
    assert mu.addressable_shards[0].data.size == mu.size // 8
    with jax.set_mesh(setup.mesh):
        batch = sharding.to_global(jax.tree.map(np.asarray, BATCHES[0]), setup.mesh, B)
        fn = setup.parts.jit()
        aliased = fn.lower({}, now, batch).compile().memory_analysis().alias_size_in_bytes
        size = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(now))
        assert aliased == size  # every byte of it
        fn({}, now, batch)
    assert mu.is_deleted()


def with_optimizer(name: str, **changes) -> config.Config:
    """A config whose model is wide enough for blocks of eight bits."""
    size = {"d_model": 64, "n_heads": 2, "n_kv_heads": 1, "head_dim": 64, "d_ff": 128}
    c = one_layer(**{f"model__{key}": value for key, value in size.items()})
    return changed(c, optim__name=name, **changes)


def test_sharded_equals_one_device_with_muon():
    c = with_optimizer("muon")
    (expected, _), (got, _) = Setup(c).run(BATCHES), Setup(c, {"fsdp": 4, "tensor": 2}).run(BATCHES)
    assert_close(got.params, expected.params, rtol=1e-4)


def test_in_eight_bits_state_on_the_host_or_on_other_devices_changes_nothing():
    """Gradients that are summed in another order may round a code in ten thousand the other way."""
    c = with_optimizer("adamw8bit")
    (one, _), (many, metrics), (there, other) = (
        Setup(c).run(BATCHES),
        Setup(c, {"fsdp": 4, "tensor": 2}).run(BATCHES),
        Setup(with_optimizer("adamw8bit", optim__offload=True), {"fsdp": 4, "tensor": 2}).run(BATCHES),
    )
    jax.tree.map(np.testing.assert_array_equal, jax.device_get((many, metrics)), jax.device_get((there, other)))
    assert {x.sharding.memory_kind for x in jax.tree.leaves(there.opt_state) if x.ndim} == {"pinned_host"}
    assert {x.sharding.memory_kind for x in jax.tree.leaves((many, there.params))} == {"device"}
    gaps = jax.tree.map(lambda a, b: np.ravel(np.abs(np.asarray(a) - np.asarray(b))), one.params, many.params)
    gaps = np.concatenate(jax.tree.leaves(gaps))
    assert np.mean(gaps > 2e-6) < 1e-3
    assert gaps.max() < c.optim.lr / 8


def lowered(c: config.Config, platform: str) -> str:
    """The text of a step as it would be compiled for a platform that is not there."""
    setup = Setup(c, {"fsdp": 8})
    batch = jax.eval_shape(lambda: BATCHES[0])
    with jax.set_mesh(setup.mesh):
        traced = setup.parts.jit().trace({}, setup.parts.abstract, batch)
        return traced.lower(lowering_platforms=(platform,)).as_text()


def test_on_a_gpu_what_is_offloaded_goes_to_the_host_and_back():
    c = one_layer()
    arrays = len([x for x in jax.tree.leaves(Setup(c).state().opt_state) if x.ndim])
    plain = lowered(c, "cuda")
    state_away = lowered(changed(c, optim__offload=True), "cuda")
    activations_away = lowered(changed(c, model__remat="names", model__offload=True), "cuda")

    def count(text, place):
        return text.count(f'_xla_buffer_placement = "{place}"')

    assert count(plain, "pinned_host") == 0
    assert count(state_away, "device") >= arrays
    assert count(state_away, "pinned_host") >= arrays
    saved = 7 * c.model.n_layers  # q, k, v, attention's output, residual, gate, up
    assert count(activations_away, "pinned_host") >= saved
    assert count(activations_away, "device") >= saved


def test_offloaded_activations_change_nothing():
    away = one_layer(train__microbatch_size=B, model__remat="names", model__offload=True)
    assert_close(Setup(away).run(BATCHES)[0].params, full_batch()[0].params)


def test_the_update_holds_no_second_copy_of_parameters_or_moments():
    """Temporary memory is the gradients and little more; a state chosen after the update would be there twice."""
    size = {"d_model": 256, "n_heads": 4, "n_kv_heads": 4, "d_ff": 1024}
    c = dataclasses.replace(one_layer(), model=tiny.model_config(n_layers=1, attention="xla", **size))

    def temporary(tx=None) -> float:
        made = Setup(c, {"data": 8}).parts
        compiled = dataclasses.replace(made, tx=tx or made.tx).lower().compile()
        params = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(made.abstract.params))
        return compiled.memory_analysis().temp_size_in_bytes / params

    frugal = temporary()
    assert frugal < 2.1
    inner = optim.make(c.optim, models.abstract_params(models.build(c.model, "xla")))

    def chosen_after(grads, old, params, ok, **extra):
        updates, new = inner.update(grads, old, params, ok=True, **extra)
        return updates, jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)

    assert temporary(optax.GradientTransformationExtraArgs(inner.init, chosen_after)) > frugal + 0.7


def test_an_abstract_mesh_gives_the_program_of_a_real_one():
    def program(mesh) -> str:
        return parts.make(one_layer(), mesh, lm.make).lower().as_text()

    real = program(make_mesh(data=2, fsdp=2, tensor=2))
    assert program(abstract_mesh(MeshConfig(data=2, fsdp=2, tensor=2, context=1), 8)) == real
    assert program(abstract_mesh(MeshConfig(data=8, fsdp=1, tensor=1, context=1), 8)) != real


def test_a_step_that_is_not_finite_changes_only_the_counters():
    setup = Setup(one_layer(train__microbatch_size=B))
    fn = jax.jit(setup.step)
    first, _ = fn({}, setup.state(), BATCHES[0])
    bad = BATCHES[1] | {"weights": BATCHES[1]["weights"].at[0, 0].set(jnp.nan)}
    second, metrics = fn({}, first, bad)
    third, _ = fn({}, second, bad)
    fourth, _ = fn({}, third, BATCHES[1])
    jax.tree.map(np.testing.assert_array_equal, (second.params, second.opt_state), (first.params, first.opt_state))
    assert np.isnan(metrics["loss"])
    counts = [(int(s.step), int(s.skipped), int(s.skipped_in_a_row)) for s in (first, second, third, fourth)]
    assert counts == [(1, 0, 0), (2, 1, 1), (3, 2, 2), (4, 2, 0)]
    with pytest.raises(AssertionError):
        jax.tree.map(np.testing.assert_array_equal, fourth.params, third.params)


def test_clipping_bounds_the_gradient_and_reports_the_norm_before():
    (a, ma), (b, mb) = (Setup(one_layer(optim__clip_norm=norm)).run(BATCHES[:1]) for norm in (1e-3, 0.0))
    np.testing.assert_allclose(ma[0]["grad_norm"], mb[0]["grad_norm"], rtol=1e-6)
    norm = float(mb[0]["grad_norm"])
    scaled = jax.tree.map(lambda m: m * (1e-3 / norm), b.opt_state[0].mu)
    assert_close(a.opt_state[0].mu, scaled, rtol=1e-4)
    groups = [v for k, v in mb[0].items() if k.startswith("grad_norm/")]
    np.testing.assert_allclose(np.sqrt(np.sum(np.square(groups))), norm, rtol=1e-5)


def test_bf16_compute_keeps_fp32_state_and_is_near_fp32():
    (a, ma), (_, mb) = Setup(one_layer(model__dtype="bfloat16")).run(BATCHES), full_batch()
    assert {x.dtype for x in jax.tree.leaves((a.params, a.opt_state[0].mu))} == {jnp.dtype("float32")}
    np.testing.assert_allclose(ma[1]["loss"], mb[1]["loss"], rtol=2e-2)


def test_bf16_gradients_are_near_fp32_also_of_rows_that_many_tokens_share(monkeypatch):
    """A table cast before it is looked up has its gradient summed in bfloat16, where a frequent token loses most of it."""
    c = one_layer(model__tie_embeddings=True)
    tokens = jnp.zeros((2, 1024), jnp.int32).at[:, ::2].set(jnp.arange(512) % 50)
    batch = {"tokens": tokens, "targets": jnp.roll(tokens, -1, 1), "segment_ids": jnp.ones_like(tokens)}
    batch |= {"positions": jnp.tile(jnp.arange(1024), (2, 1)), "weights": jnp.ones(tokens.shape, jnp.float32)}
    params = jax.jit(lambda: models.init_params(models.build(c.model, "blocked"), jax.random.key(0)))()

    def gradients(dtype):
        typed = changed(c, model__dtype=dtype)
        objective = lm.make(models.build(typed.model, "blocked"), typed)
        cast = step.cast({"params": params}, jnp.dtype(dtype))
        return jax.jit(lambda p, b: step._gradients(objective, {}, p, b, None, 1)[1])(cast, batch)

    def worst(got, expected):
        def error(a, b):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            return np.linalg.norm(a - b) / np.linalg.norm(b)

        return max(jax.tree.leaves(jax.tree.map(error, got, expected)))

    exact = gradients("float32")
    assert worst(gradients("bfloat16"), exact) < 0.02
    monkeypatch.setattr(step, "cast", lambda params, dtype: jax.tree.map(lambda p: p.astype(dtype), params))
    assert worst(gradients("bfloat16"), exact) > 0.04


def test_dropout_follows_from_the_step():
    setup = Setup(one_layer(model__dropout=0.3))
    (_, first), (_, again) = setup.run(BATCHES), setup.run(BATCHES)
    assert_close(first, again, rtol=0)
    _, other = setup.run([BATCHES[0], BATCHES[0]])
    assert float(other[0]["loss"]) == float(first[0]["loss"])
    no_lr = jax.jit(setup.step)({}, setup.state(), BATCHES[0])[1]["loss"]
    later = jax.jit(setup.step)({}, dataclasses.replace(setup.state(), step=jnp.int32(5)), BATCHES[0])[1]["loss"]
    assert float(no_lr) != float(later)


def test_codes_of_quantised_kernels_are_not_cast():
    kept = {"codes": jnp.ones((2, 2), jnp.uint8), "scales": jnp.ones((2, 2))}
    found = step.cast({"params": {"kernel": jnp.ones((2, 2))}, "quantized": {"q": kept}}, jnp.dtype("bfloat16"))
    assert found["params"]["kernel"].dtype == jnp.bfloat16
    assert found["quantized"]["q"] == kept
