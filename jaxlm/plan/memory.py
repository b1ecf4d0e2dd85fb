"""Memory of a train step on each device, by component, by arithmetic: what XLA's GPU compiler holds at its peak.

The arithmetic follows the program that a GPU runs: bfloat16, fused attention, a scheduler that minimises memory. It was
read off the buffers of programs compiled for an H100 (`scripts/check_plan.py` compiles all shipped configs so, without
a GPU, and compares). XLA's program for a CPU is another one: float32, and with many query blocks' scores held at once.

What a layer keeps for the backward pass follows from its remat policy; the rest of it is recomputed, one layer at a time.
So the peak is at the start of the last layer's backward pass, in the loss, or in the optimizer's update.

Legend: B rows, T tokens, D model, F feed-forward, N query heads, K key-value heads, H head dim, V padded vocabulary.
"""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from jaxlm import sharding, tree
from jaxlm.config import Config, MeshConfig, ModelConfig
from jaxlm.objectives import lm
from jaxlm.step import parts, step

# What each remat policy keeps of `layer_elements`; transformer.REMAT_POLICIES are the policies themselves. `dots` keeps the
# output of the attention's last product, of the residual's size, in place of the residual.
KEPT = {
    "none": ("input", "norms", "qkv", "attn_out", "residual", "mlp_proj", "mlp_hidden"),
    "names": ("input", "qkv", "attn_out", "residual", "mlp_proj"),
    "dots": ("input", "qkv", "residual", "mlp_proj"),
    "full": ("input",),
}
_F32 = 4


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device at the peak of a step, by component.

    Attributes:
      parameters: float32.
      optimizer: its state, as it lives between steps.
      gradients: all of them; float32 sums over microbatches, or the compute type where there is one microbatch.
      copies: parameters in the compute type.
      activations: what all layers keep for the backward pass.
      workspace: what that moment needs beside them.
      batch: the rows of a whole step.
    """

    parameters: int
    optimizer: int
    gradients: int
    copies: int
    activations: int
    workspace: int
    batch: int

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(dataclasses.astuple(self))


def abstract_mesh(config: MeshConfig, devices: int) -> AbstractMesh:
    """A mesh of devices that need not exist. Raises ConfigError."""
    sizes = sharding.mesh_shape(config, devices)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def estimate(config: Config, mesh: typing.Any) -> Memory:
    """The memory of a config's train step on each device of a mesh (`abstract_mesh`, or a real one).

    Args:
      config: with `model.dtype` and `model.attention` set, and a microbatch that the mesh divides.
      mesh: whose axes split parameters, optimizer state and batch by the rules of `jaxlm.sharding`.
    """
    return Estimator(config, mesh)(config)


class _Share(typing.NamedTuple):
    """A parameter as one device has it: how many numbers, of how many bytes in the compute type, and is it a layer's."""

    numbers: int
    width: int
    in_layer: bool


class Estimator:
    """`estimate` for configs that differ in remat and microbatch only: the state is laid out once."""

    def __init__(self, config: Config, mesh: typing.Any):
        made = parts.make(config, mesh, lm.make)
        abstract, where = made.abstract, made.shardings
        compute = jax.eval_shape(lambda p: step.cast(p, jnp.dtype(config.model.dtype)), tree.merge(abstract.params))
        placed = zip(tree.named_leaves(compute), jax.tree.leaves(tree.merge(where.params)), strict=True)
        self._mesh = mesh
        self._shares = [
            _Share(math.prod(at.shard_shape(leaf.shape)), leaf.dtype.itemsize, tree.layer_of(name) is not None)
            for (name, leaf), at in placed
        ]
        self._optimizer, self._visiting = _device_bytes(abstract.opt_state, where.opt_state)

    def __call__(self, config: Config) -> Memory:
        """The memory with this config's remat policy and microbatch."""
        m, t = config.model, config.train
        tokens = t.seq_len // self._mesh.shape.get("context", 1)
        rows = t.microbatch_size // sharding.batch_ways(self._mesh)
        accumulates = t.microbatch_size < t.batch_size
        numbers = sum(share.numbers for share in self._shares)
        steady = {
            "parameters": numbers * _F32,
            "optimizer": self._optimizer,
            "batch": 5 * 4 * t.batch_size // sharding.batch_ways(self._mesh) * tokens,
        }
        sums = numbers * _F32 if accumulates else 0
        gradients = sums or sum(share.numbers * share.width for share in self._shares)
        layer = _Layer(m, rows, tokens, self._mesh.shape)
        # A scan goes over the layers' parameters stacked, a copy, and stacks their gradients before they are taken apart.
        stacks = sum(s.numbers * s.width for s in self._shares if s.in_layer) if m.scan_layers else 0
        held = {
            "gradients": sums,
            "copies": self._copies(m) + stacks,
            "activations": m.n_layers * layer.kept + layer.shared,
        }
        moments = [
            Memory(**steady, **held, workspace=layer.backward + self._head(m) + stacks),
            Memory(**steady, **held, workspace=self._loss(config, rows * tokens) + self._head(m)),
            Memory(**steady, gradients=gradients, copies=0, activations=0, workspace=numbers * _F32 + self._visiting),
        ]
        return max(moments, key=lambda memory: memory.total)

    def _copies(self, m: ModelConfig) -> int:
        """Parameters in the compute type; of one layer or (unrolled, without remat) of all, q|k|v and gate|up side by side,
        and the weights that fsdp gathers.
        """
        width = jnp.dtype(m.dtype).itemsize
        cast = sum(share.numbers * share.width for share in self._shares if share.width < _F32)
        tensor = self._mesh.shape.get("tensor", 1)
        head = m.padded_vocab_size * m.d_model * width // tensor if m.tie_embeddings and width < _F32 else 0
        # Each of the tensor devices joins its own columns, where there are as many for each: see models.layers.project.
        qkv = (m.n_heads + 2 * m.n_kv_heads) * m.head_dim if m.n_kv_heads % tensor == 0 else 0
        gate_up = 2 * m.d_ff if m.family == "llama" and m.d_ff % tensor == 0 else 0
        joined = m.d_model * (qkv + gate_up) // tensor if m.fuse_projections else 0
        # What fsdp splits is gathered to be used; of what is joined that copy is the one above.
        whole = sum(share.numbers for share in self._shares if share.in_layer) * self._mesh.shape.get("fsdp", 1)
        gathered = whole // m.n_layers - joined if self._mesh.shape.get("fsdp", 1) > 1 else 0
        layers = m.n_layers if m.remat == "none" and not m.scan_layers else 1
        return cast + head + (joined + gathered) * width * layers

    def _head(self, m: ModelConfig) -> int:
        """The float32 gradient of the output head, which the loss adds up over its tiles."""
        return m.padded_vocab_size * m.d_model * _F32 // self._mesh.shape.get("tensor", 1)

    def _loss(self, config: Config, tokens: int) -> int:
        """Logits of one tile (all of them without tiles), float32 and their gradient, hidden states and theirs."""
        m, width = config.model, jnp.dtype(config.model.dtype).itemsize
        tile = min(config.loss.tile_tokens or tokens, tokens)
        logits = tile * m.padded_vocab_size // self._mesh.shape.get("tensor", 1) * (_F32 + width)
        return logits + 2 * tokens * m.d_model * width


def layer_elements(m: ModelConfig, tensor: int = 1) -> dict[str, int]:
    """What the backward pass of a layer needs of its forward pass: numbers a token, on each of `tensor` devices."""
    heads = (m.n_heads + 2 * m.n_kv_heads) * m.head_dim
    llama = m.family == "llama"
    return {
        "input": m.d_model,
        "norms": 2 * m.d_model,
        "qkv": heads // tensor,
        "attn_out": m.n_heads * m.head_dim // tensor,
        "residual": m.d_model,
        "mlp_proj": (2 if llama else 1) * m.d_ff // tensor,
        "mlp_hidden": (1 if llama else 2) * m.d_ff // tensor,  # GELU keeps its factor of the input too
    }


class _Layer:
    """Bytes of one layer's activations on a device, for `rows` rows of `tokens` tokens.

    Attributes:
      kept: from the forward pass to the backward pass.
      shared: kept once for all layers.
      backward: beside that, at the start of the last layer's backward pass: what is recomputed, and the gradients of the MLP's
        hidden activations, where those themselves are no longer needed.
    """

    def __init__(self, m: ModelConfig, rows: int, tokens: int, axes: typing.Mapping[str, int]):
        width, tensor = jnp.dtype(m.dtype).itemsize, axes.get("tensor", 1)
        parts = layer_elements(m, tensor)
        offloaded = m.offload and m.remat != "none"  # to the host's memory: all but the layer's input
        kept = sum(parts[name] for name in KEPT["full" if offloaded else m.remat])
        small = m.n_heads // tensor * _F32 + (2 * m.d_model if m.dropout else 0)  # normalisers; dropout's masks
        here = rows * tokens
        self.kept = here * (kept * width + (small if m.remat == "none" else 0))
        # cuDNN takes the segments as a bias, causal and not; XLA's attention all scores of a layer.
        square = rows * tokens * tokens * axes.get("context", 1)
        self.shared = 2 * square * width if m.attention == "cudnn" else 0
        scores = 0 if m.attention != "xla" else square * m.n_heads // tensor * (_F32 + width)
        if m.attention == "xla" and m.remat in ("none", "dots"):
            self.kept += scores
        again = sum(parts.values()) - kept
        self.backward = here * (again + parts["mlp_proj"] + m.d_model) * width + scores


def _device_bytes(abstract: typing.Any, where: typing.Any) -> tuple[int, int]:
    """Bytes of a tree on each device: what lives there, and what comes from host memory to be used."""
    sizes = {True: 0, False: 0}
    for leaf, at in zip(jax.tree.leaves(abstract), jax.tree.leaves(where), strict=True):
        sizes[at.memory_kind == "pinned_host"] += math.prod(at.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return sizes[False], sizes[True]
