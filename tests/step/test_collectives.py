"""What devices send each other in the compiled step: weights once a use, gradients once, and of long rows only keys and values.

XLA's CPU compiler adds gradients up by all-reduce and lets each device keep its slice; on GPUs and TPUs it makes a
reduce-scatter of the two.
"""

import dataclasses
import functools
import math
import pathlib

import jax
import pytest
import tiny_models as tiny

from jaxlm import config, models
from jaxlm.config import config_files
from jaxlm.devices import sharding, tree
from jaxlm.models import layers
from jaxlm.ops import products
from jaxlm.plan import lower
from jaxlm.plan.lower import Collective
from jaxlm.step import step
from jaxlm.step.objectives import lm

B, T, D, K, H = 8, 24, 32, 2, 8


def make_config(**model) -> config.Config:
    keys = ["data.path=x", f"train.batch_size={B}", f"train.seq_len={T}", "loss.tile_tokens=8"]
    c = config.resolve(config_files.load("base", keys))
    model = tiny.model_config(n_layers=1, attention="blocked", **model)
    return dataclasses.replace(c, model=model, optim=dataclasses.replace(c.optim, warmup_steps=2))


def compile_step(c: config.Config, options: dict | None = None, **sizes: int) -> list[Collective]:
    axes = {"data": 1, "fsdp": 1, "tensor": 1, "context": 1} | sizes
    mesh = sharding.make_mesh(config.MeshConfig(**axes), jax.devices()[: math.prod(axes.values())])
    lowered = lower.parts_of(c, mesh).lower()
    return lower.collectives(lowered.compile(compiler_options=tiny.FAST_COMPILE | (options or {})).as_text())


def matrix_bytes(c: config.Config) -> dict[str, int]:
    """Bytes of each parameter that is a matrix, in float32."""
    abstract = models.abstract_params(models.build(c.model, "xla"))
    return {name: 4 * leaf.size for name, leaf in tree.named_leaves(abstract) if leaf.ndim > 1}


def size(shape: str) -> int:
    return math.prod(int(n) for n in shape.partition("[")[2].rstrip("]").split(",") if n)


def large(found: list[Collective], kind: str, dtype: str = "f32") -> int:
    """Bytes of all arrays with two dimensions or more that operations of a kind give."""
    return sum(4 * size(s) for c in found if c.kind == kind for s in c.shapes if "," in s and s.startswith(dtype))


def fsdp_moves_what_it_must(found: list[Collective], c: config.Config) -> None:
    """With remat=full: each matrix of a layer gathered for forward and for backward, the head once, gradients once."""
    matrices = matrix_bytes(c)
    head = matrices.pop("embed/embedding")
    assert large(found, "all-gather") == head + 2 * sum(matrices.values())
    assert large(found, "all-reduce") == head + sum(matrices.values())
    assert max(x.bytes for x in found if x.kind == "all-gather") < sum(matrices.values()) + head
    # The two ends of the lookup of embeddings, where devices trade columns for rows.
    assert [x.kind for x in found if "embed/embed" in x.name] == ["all-gather", "all-to-all", "all-to-all"]
    assert not any(x.in_loop for x in found)
    # The optimizer: scalars for norms, and nothing else.
    update = [x for x in found if "jvp" not in x.name]
    assert update
    assert {shape for x in update for shape in x.shapes} == {"f32[]"}


@functools.cache
def under_fsdp() -> list[Collective]:
    return compile_step(make_config(remat="full"), fsdp=8)


def test_fsdp_gathers_each_weight_once_a_use_and_adds_each_gradient_up_once():
    fsdp_moves_what_it_must(under_fsdp(), make_config(remat="full"))


def test_muon_trades_parts_of_gradients_for_whole_matrices_and_back_and_sends_nothing_else():
    """Each device gets its share of the stacked matrices: 1 of 8, filled up with zeros where there are fewer."""
    c = make_config(remat="full")
    c = dataclasses.replace(c, optim=dataclasses.replace(c.optim, name="muon"))
    update = [x for x in compile_step(c, fsdp=8) if "optimizer" in x.name]
    assert {x.kind for x in update} == {"all-to-all"}
    heads = 4 * H
    stacks = {(D, heads): 2, (D, K * H): 2, (D, c.model.d_ff): 3}  # q and o; k and v; gate, up and down
    assert all(n <= 8 for n in stacks.values())
    assert sum(x.bytes for x in update) == 4 * 2 * sum(rows * columns for rows, columns in stacks)


def test_the_loss_that_flattens_rows_of_all_devices_is_noticed(monkeypatch):
    """The mutation: tiles of rows that are split over devices, so that each turn adds up the head's gradient."""

    def flat(function, hidden_BxTxD, head_DxV, *tokens_BxT, summed):
        assert summed
        return function(hidden_BxTxD.reshape(-1, D), head_DxV, *(x.reshape(-1) for x in tokens_BxT))

    monkeypatch.setattr(lm.spmd, "over_tokens", flat)
    found = compile_step(make_config(remat="full"), fsdp=8)
    assert any(x.in_loop and x.bytes >= matrix_bytes(make_config())["embed/embedding"] for x in found)
    with pytest.raises(AssertionError):
        fsdp_moves_what_it_must(found, make_config(remat="full"))


def partitioned(folder: pathlib.Path, c: config.Config, **sizes: int) -> list[Collective]:
    """The collectives before XLA's CPU compiler makes them float32, as it does with all bfloat16."""
    compile_step(c, {"xla_dump_to": str(folder), "xla_dump_hlo_pass_re": "spmd-partitioning"}, **sizes)
    (path,) = folder.glob("*jit_train_step*.after_spmd-partitioning.*")
    return lower.collectives(path.read_text())


def test_weights_travel_in_the_compute_type(tmp_path, monkeypatch, compiled_anew):
    """And the mutation: gathered first, cast then."""
    c = make_config(dtype="bfloat16")
    found = partitioned(tmp_path / "a", c, fsdp=8)
    assert large(found, "all-gather") == 0
    assert 2 * large(found, "all-gather", "bf16") == 2 * sum(matrix_bytes(c).values())
    cast = step.cast

    def late(params, dtype):
        return cast(jax.tree.map(lambda p: sharding.constrain(p, *(None,) * p.ndim), params), dtype)

    monkeypatch.setattr(step, "cast", late)
    assert large(partitioned(tmp_path / "b", c, fsdp=8), "all-gather") > 0


def tensor_moves_activations_alone(found: list[Collective]) -> None:
    """Sums of hidden states: forward of embedding, attention and MLP, backward of attention and MLP; no weights."""
    assert not [x for x in found if x.kind != "all-reduce"]
    moved = [(x, size(shape)) for x in found if not x.in_loop for shape in x.shapes if size(shape) > D]
    assert {elements for _, elements in moved} == {B * T * D}
    assert ["transpose(jvp" in x.name for x, _ in moved] == [False] * 3 + [True] * 2
    # The loss: statistics of the logits and the hidden states' gradient of each tile.
    assert max(x.bytes for x in found if x.in_loop) == 4 * 8 * D


def test_tensor_sends_two_sums_of_hidden_states_a_layer_and_no_weights():
    tensor_moves_activations_alone(compile_step(make_config(), tensor=2))


def test_products_apart_are_noticed():
    """The mutation: q, k, v and gate, up each add up their own gradient of the same hidden states."""
    with pytest.raises(AssertionError):
        tensor_moves_activations_alone(compile_step(make_config(fuse_projections=False), tensor=2))


def context_moves_keys_and_values_alone(found: list[Collective]) -> None:
    key = f"f32[{B},{T},{K},{H}]"
    gathered = [shape for x in found if x.kind == "all-gather" for shape in x.shapes]
    assert sorted(gathered) == [key, key, f"s32[{B},{T}]"]
    scattered = [shape for x in found if x.kind == "reduce-scatter" for shape in x.shapes]
    assert scattered == [f"f32[{B},{T // 2},{K},{H}]"] * 2
    # Else gradients of weights and sums of the loss, once each.
    rest = [x for x in found if x.kind not in ("all-gather", "reduce-scatter")]
    assert {x.kind for x in rest} == {"all-reduce"}
    assert not any(x.in_loop for x in rest)
    matrices = matrix_bytes(make_config())
    # The table's gradient twice: as the head, and as the embedding.
    assert large(rest, "all-reduce") == sum(matrices.values()) + matrices["embed/embedding"]


def test_context_gathers_keys_and_values_alone():
    context_moves_keys_and_values_alone(compile_step(make_config(), context=2))


@pytest.mark.parametrize("module", [products, layers])
def test_hidden_states_gathered_for_a_flat_product_or_loss_are_noticed(monkeypatch, module):
    """The mutations: products of flat rows, and the loss of flat rows, though their tokens are split."""
    if module is products:
        monkeypatch.setattr(products, "axis_size", lambda axis: 1)
    else:
        monkeypatch.setattr(lm.spmd, "_token_axes", lambda mesh, shape: (jax.sharding.PartitionSpec(None, None), ()))
    with pytest.raises(AssertionError):
        context_moves_keys_and_values_alone(compile_step(make_config(), context=2))


HLO = """HloModule jit_f, is_scheduled=true, num_partitions=8

%body.1 (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %ar = f32[8]{0} all-reduce(%p), replica_groups=[4,2]<=[8], to_apply=%add, metadata={op_name="loop"}
}

ENTRY %main (a: bf16[4,64]) -> f32[8] {
  %ag = bf16[32,64]{1,0} all-gather(%a), replica_groups=mesh['x'=8,'y'=1] {'x'}, dimensions={0}, metadata={op_name="one"}
  %rs = (f32[2]{0}, bf16[3]{0}) reduce-scatter(%b), replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
  %ags = (f32[4]{0}, f32[8]{0}) all-gather-start(%c), replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b':(2)2}
  %alone = f32[8]{0} all-reduce(%c), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
  %all = pred[16]{0} all-reduce(%c), replica_groups={}, to_apply=%add
  %w = f32[8]{0} while(%t), condition=%cond.1, body=%body.1
}
"""


def test_reading_the_text():
    assert lower.collectives(HLO) == [
        Collective("all-reduce", 32, 2, ("f32[8]",), True, "loop"),
        Collective("all-gather", 32 * 64 * 2, 8, ("bf16[32,64]",), False, "one"),
        Collective("reduce-scatter", 4 * 14, 4, ("f32[2]", "bf16[3]"), False, ""),
        Collective("all-gather", 32, 2, ("f32[8]",), False, ""),
        Collective("all-reduce", 16, 8, ("pred[16]",), False, ""),
    ]
    with pytest.raises(ValueError, match="unknown groups of devices"):
        lower.collectives(HLO.replace("replica_groups={},", "replica_groups=new,"))


def test_loops_of_known_length_are_counted():
    loop = "condition=%cond.1, body=%body.1"
    known = loop + ', backend_config={"known_trip_count":{"n":"16"},"x":1}'
    assert [c.turns for c in lower.collectives(HLO)] == [1, 1, 1, 1, 1]
    assert [c.turns for c in lower.collectives(HLO.replace(loop, known))] == [16, 1, 1, 1, 1]
