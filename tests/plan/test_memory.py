"""Memory by arithmetic: against programs compiled for an H100, and against what it must add up from."""

import dataclasses
import functools
import json
import pathlib

import jax
import pytest

from jaxlm import config, models
from jaxlm.config import MeshConfig, config_files
from jaxlm.devices import sharding
from jaxlm.models import hardware
from jaxlm.models.decode import ring
from jaxlm.plan import fit, lower, memory
from jaxlm.plan.flops import count_params

# What `python scripts/check_plan.py` measured.
GOLDEN = json.loads((pathlib.Path(__file__).parent / "h100_memory.json").read_text())["rows"]


def load(name: str, *overrides: str, platform: str = "gpu") -> config.Config:
    c = config.resolve(config_files.load(name, ["workdir=w", *overrides]))
    return dataclasses.replace(c, model=hardware.for_platform(c.model, platform))


@functools.cache
def planned(name: str, devices: int, overrides: tuple[str, ...]) -> tuple[memory.Estimator, config.Config]:
    c = load(name, *overrides)
    mesh = MeshConfig(**sharding.mesh_shape(c.mesh, devices))
    c = fit.with_changes(c, microbatch=fit.own_microbatch(c, mesh))
    return memory.Estimator(c, memory.abstract_mesh(mesh, devices)), c


def off(row: dict) -> float:
    """By how much the arithmetic differs from the compiled program, as a share of it."""
    estimator, c = planned(row["config"], row["devices"], tuple(row["overrides"]))
    return estimator(c).total / row["bytes"] - 1


@pytest.mark.engines
@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: " ".join([row["config"], *row["overrides"]]))
def test_within_a_twentieth_of_the_compiled_program(row):
    assert abs(off(row)) < 0.05


def test_every_shipped_config_was_compiled():
    """But for those of post-training, whose model is their origin's: they are compiled as variants of one."""
    own = {name for name in config_files.shipped_configs() if config_files.load(name).program == "pretrain"}
    assert {row["config"] for row in GOLDEN if not row["overrides"]} == own
    trained = {
        (c.program, c.adapter.kind, c.adapter.quantize) for c in (load(r["config"], *r["overrides"]) for r in GOLDEN)
    }
    kinds = [("sft", "none", "none"), ("sft", "lora", "none"), ("sft", "lora", "nf4"), ("dpo", "lora", "none")]
    assert trained >= {*kinds, ("sft", "prompt", "none"), ("dpo", "none", "none"), ("reward", "none", "none")}


@pytest.mark.parametrize("part", ["mlp_proj", "mlp_hidden"])
def test_a_part_that_is_forgotten_is_seen(part, monkeypatch):
    """The mutation: without one part of what a layer keeps, a figure is off by more than a tenth."""
    elements = memory.layer_elements
    monkeypatch.setattr(memory, "layer_elements", lambda *args: elements(*args) | {part: 0})
    assert any(abs(off(row)) > 0.1 for row in GOLDEN)


def test_state_and_batch_are_the_compiled_programs_arguments_to_the_byte():
    small = ("model.n_layers=1", "train.seq_len=32", "train.batch_size=8", "train.microbatch_size=4")
    c = load("quickstart", *small, "optim.name=adamw8bit", platform="cpu")
    mesh = MeshConfig(data=2, fsdp=2, tensor=2, context=1)
    found = memory.estimate(c, memory.abstract_mesh(mesh, fit.devices_of(mesh)))
    compiled = lower.parts_of(c, sharding.make_mesh(mesh)).lower().compile(compiler_options=lower.QUICK)
    analysis = compiled.memory_analysis()
    scalars = analysis.argument_size_in_bytes - found.parameters - found.optimizer - found.batch
    assert 0 <= scalars <= 64  # steps, counters


def test_what_is_frozen_and_its_adapter_are_the_compiled_programs_arguments_to_the_byte():
    small = ("model.n_layers=1", "train.seq_len=64", "train.batch_size=2", "train.microbatch_size=2")
    trained = ("program=dpo", "optim.name=adamw", "adapter.kind=lora", "adapter.quantize=nf4")
    c = load("quickstart", *small, *trained, platform="cpu")
    one = MeshConfig(1, 1, 1, 1)
    found = memory.estimate(c, memory.abstract_mesh(one, 1))
    compiled = (
        lower.parts_of(c, sharding.make_mesh(one, jax.devices()[:1])).lower().compile(compiler_options=lower.QUICK)
    )
    taken = compiled.memory_analysis().argument_size_in_bytes
    assert 0 <= taken - found.parameters - found.frozen - found.optimizer - found.batch <= 64
    bits = 8 * found.frozen / count_params(c.model)
    assert bits < 24  # the embedding is not quantised


def test_a_frozen_layer_keeps_only_what_an_adapter_reads():
    kept = {}
    for name, keys in {
        "all": ("kind=lora",),
        "attention": ("kind=lora", "targets=('attn/[qkvo]',)"),
        "prompt": ("kind=prompt",),
    }.items():
        c = load("gpuburnout_1b", "program=sft", *(f"adapter.{key}" for key in keys))
        kept[name] = memory.layer_elements(c.model, c.adapter)
    full = load("gpuburnout_1b")
    assert kept["all"] == memory.layer_elements(full.model, full.adapter)
    assert (kept["attention"]["mlp_hidden"], kept["attention"]["norms"]) == (0, 2048)
    assert (kept["prompt"]["norms"], kept["prompt"]["qkv"]) == (0, kept["all"]["qkv"])


def test_each_policy_keeps_less_and_each_way_of_splitting_helps():
    c = load("gpuburnout_1b")
    one = MeshConfig(**{field.name: 1 for field in dataclasses.fields(MeshConfig)})
    planner = fit.Planner(c)
    totals = [planner.memory(one, remat=remat).total for remat in memory.KEPT]
    assert totals == sorted(totals, reverse=True)
    assert planner.memory(one, microbatch=8).total < planner.memory(one, microbatch=16).total
    for axis in ("fsdp", "tensor", "data", "context"):
        split = planner.memory(dataclasses.replace(one, **{axis: 4}))
        assert split.activations < 0.5 * planner.memory(one).activations, axis
    assert planner.memory(dataclasses.replace(one, data=4)).parameters == planner.memory(one).parameters


def test_activations_on_the_host_are_not_on_the_device():
    names = load("gpuburnout_1b", "model.remat=names")
    one = memory.abstract_mesh(MeshConfig(1, 1, 1, 1), 1)
    offloaded = load("gpuburnout_1b", "model.remat=names", "model.offload=True")
    assert memory.estimate(offloaded, one).activations < 0.2 * memory.estimate(names, one).activations


def test_the_state_on_the_host_is_on_the_device_at_the_update_alone():
    one = memory.abstract_mesh(MeshConfig(1, 1, 1, 1), 1)
    away, here = (memory.estimate(load("local_35m", f"optim.offload={where}"), one) for where in (True, False))
    assert away.optimizer < 100
    assert away.total == pytest.approx(here.total - here.optimizer, abs=100)  # activations are the most
    small = ("train.batch_size=1", "train.seq_len=64")
    away, here = (memory.estimate(load("local_35m", f"optim.offload={where}", *small), one) for where in (True, False))
    assert away.workspace > here.optimizer > 8 * 30e6


def test_drawing_counts_weights_as_they_are_laid_out_and_caches():
    """Between two updates; the update itself has the memory for itself."""
    shape = [f"model.{key}" for key in ("n_layers=2", "d_model=128", "n_heads=4", "n_kv_heads=2", "d_ff=256")]
    shape += ["model.vocab_size=512", "model.max_seq_len=4096", "train.seq_len=128", "train.batch_size=1024"]
    given = [*shape, "origin=run", "reward.function=a:b", "policy.reference=False", "train.microbatch_size=1"]
    c = load("grpo", *given, "rollout.prompts=128", "rollout.answers=8", "rollout.max_new_tokens=8")
    one = MeshConfig(**sharding.mesh_shape(c.mesh, 1))
    found = memory.estimate(c, memory.abstract_mesh(one, 1))
    model = models.build(c.model, "blocked")
    laid_out = jax.eval_shape(
        lambda params: ring.lay_out(model, {"params": params}, every_product=False), models.abstract_params(model)
    )
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(laid_out))
    tied = laid_out.head_VxD.size * laid_out.head_VxD.dtype.itemsize if c.model.tie_embeddings else 0  # the same array
    slots = 128  # an answer has a row to itself
    cache = 2 * c.model.n_layers * 1024 * slots * c.model.n_kv_heads * c.model.head_dim * 2
    state = jax.eval_shape(lambda: ring.empty(model, 1024, slots))
    numbers = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.rows))
    assert found.rollouts == pytest.approx(weights - tied + cache + numbers, rel=0.001)
    assert found.gradients == found.activations == 0
    training = memory.estimate(
        dataclasses.replace(c, rollout=dataclasses.replace(c.rollout, rows=1)), memory.abstract_mesh(one, 1)
    )
    assert training.rollouts == 0 < training.activations


def test_a_moving_average_takes_the_weights_once_more_in_every_phase_of_a_step():
    for name, overrides in (
        ("local_35m", ()),
        ("quickstart", ("program=dpo", "optim.name=adamw", "adapter.kind=lora")),
    ):
        mesh = memory.abstract_mesh(MeshConfig(1, 4, 1, 1), 4)
        without, kept = (load(name, *overrides, f"checkpoint.average={share}") for share in (0, 0.1))
        before, after = memory.estimate(without, mesh), memory.estimate(kept, mesh)
        assert (before.average, after.average) == (0, before.parameters)
        assert after.total == before.total + after.average
        assert lower.beside(lower.parts_of(kept, mesh)) == after.average
        assert lower.beside(lower.parts_of(without, mesh)) == 0
        away = load(name, *overrides, "checkpoint.average=0.1", "optim.offload=True")
        assert memory.estimate(away, mesh).average == lower.beside(lower.parts_of(away, mesh)) == 0
