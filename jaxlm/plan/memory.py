"""Estimates the peak memory of a train step on each device by arithmetic, for each component.

The arithmetic follows the program that XLA makes for a GPU: bfloat16, fused attention, a scheduler that minimises memory
(`scripts/check_plan.py` compiles all shipped configs for an H100, without a GPU, and compares). A CPU's program differs.

The peak is at one of three moments: the loss; the last layer's backward pass, with the activations that all layers keep and
those that this layer recomputed; the optimizer's update, with all gradients and no activations. PPO and GRPO have a fourth:
drawing answers. Frozen parameters have no gradients and no optimizer state, and no activations are kept for them.

Legend: B rows, T tokens, D model, F feed-forward, N query heads, K key-value heads, H head dim, V padded vocabulary.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxlm.config import AdapterConfig, Config, MeshConfig, ModelConfig
from jaxlm.devices import sharding, tree
from jaxlm.plan import flops, lower
from jaxlm.step import step
from jaxlm.step.objectives.base import Variables

# Remat policy -> what it keeps of `layer_elements`. The policies themselves are transformer.REMAT_POLICIES. `dots` keeps
# the output of attn/o in place of the residual, which has the same size.
KEPT = {
    "none": ("input", "norms", "qkv", "qk_norm", "attn_out", "residual", "mlp_proj", "mlp_hidden"),
    "names": ("input", "qkv", "attn_out", "residual", "mlp_proj"),
    "dots": ("input", "qkv", "residual", "mlp_proj"),
    "full": ("input",),
}
_F32 = 4


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device at the peak of a step, by component.

    `optimizer` and `average` (of the weights) leave out offloaded state. `gradients` are float32 sums of the microbatches'
    (with one microbatch, gradients in the compute type), `copies` the parameters in the compute type, `activations` those
    that all layers keep for the backward pass. `rollouts` is for drawing answers: the reference, and between two updates
    a copy of the weights and the KV caches.
    """

    parameters: int
    frozen: int
    optimizer: int
    gradients: int
    copies: int
    activations: int
    workspace: int
    batch: int
    rollouts: int = 0
    average: int = 0

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


def abstract_mesh(config: MeshConfig, devices: int) -> AbstractMesh:
    """Returns a mesh of devices that need not exist. Raises ConfigError if the axes do not multiply to `devices`."""
    sizes = sharding.mesh_shape(config, devices)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def estimate(config: Config, mesh: Mesh | AbstractMesh) -> Memory:
    """Returns the memory of a step on each device of a mesh. Dtype and attention must not be auto."""
    return Estimator(config, mesh)(config)


class _Share:
    """One device's share of variables, in numbers and bytes; `width`: bytes of the compute type.

    `narrow_bytes`: of dtypes below float32; `drawing_bytes`: in the compute type.
    """

    def __init__(self, variables: Variables, shardings: Variables, width: int):
        rows = lower.placements(tree.merge(variables), tree.merge(shardings))
        layers = [row for row in rows if tree.layer_of(row.name) is not None]
        self.numbers, self.layer_numbers = (sum(row.elements for row in some) for some in (rows, layers))
        self.bytes, self.layer_bytes = (sum(row.bytes for row in some) for some in (rows, layers))
        self.narrow_bytes = sum(row.bytes for row in rows if row.leaf.dtype.itemsize < _F32)
        self.drawing_bytes = sum(min(row.bytes, row.elements * width) for row in rows)


class Estimator:
    """Does what `estimate` does, for configs that differ only in remat and microbatch: it lays out the parameters once."""

    def __init__(self, config: Config, mesh: Mesh | AbstractMesh):
        made, dtype = lower.parts_of(config, mesh), jnp.dtype(config.model.dtype)
        compute = jax.eval_shape(lambda params: step.cast(params, dtype), made.abstract.params)
        self._ways, self._axes, self._width = sharding.batch_ways(mesh), mesh.shape, dtype.itemsize
        self._fsdp, self._tensor = (mesh.shape.get(axis, 1) for axis in ("fsdp", "tensor"))
        self._trained = _Share(compute, made.shardings.params, self._width)
        self._frozen = _Share(made.frozen, made.frozen_shardings, self._width)
        self._all_trained = "params" in made.abstract.params
        self._optimizer, self._visiting = device_bytes(made.abstract.opt_state, made.shardings.opt_state)
        placed = jax.tree.map(lambda leaf: leaf.sharding, made.batch())
        self._batch, _ = device_bytes(made.batch(), placed)

    def __call__(self, config: Config) -> Memory:
        m, t, trained, frozen = config.model, config.train, self._trained, self._frozen
        tokens = t.seq_len // self._axes.get("context", 1)
        rows = t.microbatch_size // self._ways
        in_float32 = trained.numbers * _F32
        draws = flops.draws(config)
        # A policy's reference is a second model only if all parameters are trained.
        reference = trained.bytes if draws and config.policy.reference and self._all_trained else 0
        steady = {"parameters": in_float32, "frozen": frozen.bytes, "optimizer": self._optimizer}
        steady |= {"batch": self._batch, "rollouts": reference}
        steady["average"] = in_float32 * lower.averages(config)
        sums = in_float32 if t.microbatch_size < t.batch_size else 0
        layer = _Layer(config, rows, tokens, self._axes)
        # XLA keeps two more copies for a scan over the layers: their parameters stacked, and their gradients stacked.
        stacks, frozen_stacks = (trained.layer_bytes, frozen.layer_bytes) if m.scan_layers else (0, 0)
        held = {"gradients": sums, "activations": m.n_layers * layer.kept + layer.shared}
        # XLA keeps a cast of each trained parameter.
        copies = trained.narrow_bytes + (self._head_copy(m) if self._all_trained else 0) + stacks + frozen_stacks
        joined = self._joined(m)
        # Joined frozen kernels are not kept for the backward pass, which joins them again.
        waiting = joined if self._all_trained else 0
        nothing = {"copies": 0, "activations": 0}
        # The last layer's backward pass, the loss, the update (which makes float32 updates of all parameters), drawing.
        moments = [
            Memory(**steady, **held, copies=copies + joined, workspace=layer.backward + self._head(m) + stacks),
            Memory(**steady, **held, copies=copies + waiting, workspace=self._loss(config, rows * tokens)),
            Memory(**steady, **nothing, gradients=sums or trained.bytes, workspace=in_float32 + self._visiting),
        ]
        if draws:
            steady["rollouts"] += self._drawing(config)
            moments.append(Memory(**steady, **nothing, gradients=0, workspace=0))
        return max(moments, key=lambda memory: memory.total)

    def _drawing(self, config: Config) -> int:
        """The bytes for drawing a policy's answers: its weights, KV caches, each row's bias and counts of all ids."""
        m, r, t = config.model, config.rollout, config.train
        answers = r.prompts * r.answers
        weights = (self._trained if self._all_trained else self._frozen).drawing_bytes
        slots = 1 << (t.seq_len * t.batch_size // answers - 1).bit_length()
        rows = r.rows or answers
        cache = 2 * m.n_layers * rows * slots * m.n_kv_heads * m.head_dim * self._width
        return weights + cache // (self._ways * self._tensor) + 2 * rows * m.padded_vocab_size * _F32

    def _joined(self, m: ModelConfig) -> int:
        """The bytes of weights gathered and joined for matrix products: of one layer, or of all without remat and scan."""
        joined = _side_by_side(m, self._tensor) if m.fuse_projections else 0
        # The joined weights are gathered already: they are not counted again.
        whole = (self._trained.layer_numbers + self._frozen.layer_numbers) * self._fsdp
        gathered = whole // m.n_layers - joined if self._fsdp > 1 else 0
        times = m.n_layers if m.remat == "none" and not m.scan_layers and self._all_trained else 1
        return (joined + gathered) * self._width * times

    def _head(self, m: ModelConfig) -> int:
        """The bytes of the head's gradient, float32, which the loss sums over its tiles; 0 if the head is frozen."""
        return m.padded_vocab_size * m.d_model * _F32 // self._tensor if self._all_trained else 0

    def _head_copy(self, m: ModelConfig) -> int:
        """The bytes of a tied head in the compute type; 0 if there is no copy of it."""
        copied = m.tie_embeddings and self._width != _F32
        return m.padded_vocab_size * m.d_model * self._width // self._tensor if copied else 0

    def _loss(self, config: Config, tokens: int) -> int:
        """The bytes of one tile's logits (without tiles, of all logits), of the hidden states, and of the gradients of both."""
        m, width = config.model, self._width
        tile = min(config.loss.tile_tokens or tokens, tokens)
        of_gradient, head = width, self._head(m)
        if not self._all_trained:
            of_gradient, head = (width, self._head_copy(m)) if tile < tokens else (_F32, 0)
        # Without tiles the policy's logits wait for the backward pass while the reference computes its own.
        others = _F32 if tile == tokens and flops.reference(config) == "each step" else 0
        logits = tile * m.padded_vocab_size // self._tensor * (_F32 + of_gradient + others)
        return logits + 2 * tokens * m.d_model * width + head


def _side_by_side(m: ModelConfig, tensor: int) -> int:
    """Returns the elements of q|k|v and gate|up of a layer, on each device of an axis `tensor` of this size."""
    # Each tensor device joins its own columns, if the axis divides them: see models.layers.project.
    qkv = (m.n_heads + 2 * m.n_kv_heads) * m.head_dim if m.n_kv_heads % tensor == 0 else 0
    gate_up = 2 * m.d_ff if m.family == "llama" and m.d_ff % tensor == 0 else 0
    return m.d_model * (qkv + gate_up) // tensor


def layer_elements(m: ModelConfig, adapter: AdapterConfig, tensor: int = 1) -> dict[str, int]:
    """Returns name -> elements per token on each tensor device, for each array that a layer's backward pass needs."""
    heads = (m.n_heads + 2 * m.n_kv_heads) * m.head_dim
    llama = m.family == "llama"
    trained = flops.kernels(m) if adapter.kind == "none" else flops.targets(m, adapter)
    groups = {"attn/q", "attn/k", "attn/v"}, {"mlp/gate", "mlp/up"}
    hidden = 1 if "mlp/down" in trained else 0
    return {
        "input": m.d_model,
        "norms": sum(not group.isdisjoint(trained) for group in groups) * m.d_model,
        "qkv": heads // tensor,
        "qk_norm": (m.n_heads + m.n_kv_heads) * m.head_dim // tensor if m.qk_norm else 0,
        "attn_out": m.n_heads * m.head_dim // tensor,
        "residual": m.d_model,
        "mlp_proj": (2 if llama else 1) * m.d_ff // tensor,
        "mlp_hidden": (hidden if llama else 1 + hidden) * m.d_ff // tensor,  # GELU keeps its factor of the input too
    }


class _Layer:
    """A layer's activation bytes on a device: `kept` for the backward pass, `backward`: added by it, `shared` by all layers."""

    def __init__(self, config: Config, rows: int, tokens: int, axes: typing.Mapping[str, int]):
        m, tensor = config.model, axes.get("tensor", 1)
        width = jnp.dtype(m.dtype).itemsize
        elements = layer_elements(m, config.adapter, tensor)
        offloaded = m.offload and m.remat != "none"  # to the host's memory: all but the layer's input
        kept = sum(elements[name] for name in KEPT["full" if offloaded else m.remat])
        small = m.n_heads // tensor * _F32 + (2 * m.d_model if m.dropout else 0)  # normalisers; dropout's masks
        tokens_in_all = rows * tokens
        self.kept = tokens_in_all * (kept * width + (small if m.remat == "none" else 0))
        # cuDNN takes the mask as a bias [T, T] for all heads, of which XLA keeps two, with and without the causal part. The
        # backend xla holds the scores of all heads of a layer.
        square = rows * tokens * tokens * axes.get("context", 1)
        self.shared = 2 * square * width if m.attention == "cudnn" else 0
        scores = 0 if m.attention != "xla" else square * m.n_heads // tensor * (_F32 + width)
        if m.attention == "xla" and m.remat in ("none", "dots"):
            self.kept += scores
        recomputed = sum(elements.values()) - kept
        # A LoRA on the down projection has its own term of the gradient of the MLP's hidden activations.
        term = m.d_ff // tensor if "mlp/down" in flops.targets(m, config.adapter) else 0
        self.backward = tokens_in_all * (recomputed + elements["mlp_proj"] + term + m.d_model) * width + scores


def device_bytes(abstract: typing.Any, shardings: typing.Any) -> tuple[int, int]:
    """Returns a tree's bytes on each device: (of leaves that stay there, of leaves that are loaded from the host for use)."""
    rows = lower.placements(abstract, shardings)
    away = sum(row.bytes for row in rows if row.sharding.memory_kind == "pinned_host")
    return sum(row.bytes for row in rows) - away, away
