"""Maps jaxlm's leaves to Hugging Face's tensors (Llama, Qwen2, Qwen3, GPT-2), and back.

RoPE is half-split in both, so nothing is permuted. Legend: V vocabulary, Vp vocabulary padded to a multiple of 128.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures

import numpy as np

from jaxlm.config import ConfigError, ModelConfig
from jaxlm.devices.tree import layer_name
from jaxlm.models.params import input_axes

Shape = tuple[int, ...]
Content = tuple[str, tuple[str, ...], np.ndarray]  # a tensor's name in files, its leaves in the run, its value
SCORE = "score_head/kernel"  # the leaf of a reward model's head, as objectives.base.init_head names it
_ROWS = 32  # rows transposed at a time, few enough for the CPU's cache


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a Hugging Face model, and which of our leaves it holds.

    Attributes:
      name: the tensor's name in a state dict.
      leaves: the names of our leaves, in the tensor's order; GPT-2's `c_attn` holds q, k and v side by side.
      transposed: True if the tensor is (out, in), as in torch's Linear, and the leaf (in, out).
      vocab_size: V, to which the leaf's padded axis is cut; 0 if no axis is padded.
    """

    name: str
    leaves: tuple[str, ...]
    shapes: tuple[Shape, ...]
    transposed: bool = False
    vocab_size: int = 0

    @property
    def shape(self) -> Shape:
        flat = [self._cut_shape(_flat(leaf, shape)) for leaf, shape in zip(self.leaves, self.shapes, strict=True)]
        joined = (*flat[0][:-1], sum(shape[-1] for shape in flat))
        return joined[::-1] if self.transposed else joined

    def from_leaves(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the tensor, with the leaves' dtype; contiguous, since `safetensors.numpy` silently scrambles other arrays."""
        parts = []
        for leaf, shape, value in zip(self.leaves, self.shapes, values, strict=True):
            if value.shape != shape:
                raise ConfigError(f"{leaf} has shape {value.shape}, the config says {shape}")
            flat = value.reshape(_flat(leaf, shape))
            parts.append(flat[tuple(slice(size) for size in self._cut_shape(flat.shape))])
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
        return contiguous(joined.T if self.transposed else joined)

    def to_leaf(self, value: np.ndarray, place: int) -> np.ndarray:
        """Returns leaf number `place`, contiguous, with the tensor's dtype and zeros in the padding."""
        flats = [_flat(leaf, shape) for leaf, shape in zip(self.leaves, self.shapes, strict=True)]
        cuts = [self._cut_shape(flat) for flat in flats]
        start = sum(cut[-1] for cut in cuts[:place])
        part = (value.T if self.transposed else value)[..., start : start + cuts[place][-1]]
        if cuts[place] != flats[place]:
            part = np.pad(part, [(0, size - have) for size, have in zip(flats[place], cuts[place], strict=True)])
        return contiguous(part).reshape(self.shapes[place])

    def _cut_shape(self, flat: Shape) -> Shape:
        """Returns the shape without the vocabulary's padding, which is in an embedding's rows or the head's columns."""
        if not self.vocab_size:
            return flat
        return (flat[0], self.vocab_size) if self.leaves[0].startswith("head/") else (self.vocab_size, *flat[1:])


def tensors(config: ModelConfig, scores: bool = False) -> Iterator[Tensor]:
    """Yields every tensor of the Hugging Face model for a config: embedding, layers in order, final norm, head.

    There is no `lm_head` if embeddings are tied. `scores` is True for a reward model (`ForSequenceClassification`), whose head
    is the scalar head `score`. Raises ConfigError if Hugging Face has no such architecture.
    """
    yield from _gpt2(config) if config.family == "gpt2" else _llama(config)
    if scores:
        yield Tensor("score.weight", (SCORE,), ((config.d_model,),), transposed=True)
    elif not config.tie_embeddings:
        shape = (config.d_model, config.padded_vocab_size)
        yield Tensor("lm_head.weight", ("head/kernel",), (shape,), transposed=True, vocab_size=config.vocab_size)


def read_ahead(
    read: Callable[[str], np.ndarray], wanted: Sequence[Tensor]
) -> Iterator[tuple[Tensor, list[np.ndarray]]]:
    """Yields each tensor with the values of its leaves; meanwhile a thread reads the next tensor's."""

    def values(tensor: Tensor) -> list[np.ndarray]:
        return [read(leaf) for leaf in tensor.leaves]

    with futures.ThreadPoolExecutor(1) as pool:
        upcoming = pool.submit(values, wanted[0])
        for tensor, after in zip(wanted, (*wanted[1:], None), strict=True):
            current = upcoming.result()
            if after:
                upcoming = pool.submit(values, after)
            yield tensor, current


def parameters(config: ModelConfig, scores: bool = False) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors(config, scores))


def contiguous(value: np.ndarray) -> np.ndarray:
    """Returns `np.ascontiguousarray(value)`, for a transposed matrix in a third to a half of NumPy's time."""
    source = value.T
    if value.ndim != 2 or value.flags.c_contiguous or not source.flags.c_contiguous:
        return np.ascontiguousarray(value)
    made = np.empty(value.shape, value.dtype)
    for start in range(0, len(source), _ROWS):
        made[:, start : start + _ROWS] = source[start : start + _ROWS].T
    return made


def by_leaf(config: ModelConfig, scores: bool = False) -> dict[str, tuple[Tensor, int]]:
    return {leaf: (tensor, i) for tensor in tensors(config, scores) for i, leaf in enumerate(tensor.leaves)}


def _flat(leaf: str, shape: Shape) -> Shape:
    """Returns a kernel's shape as (in, out), an embedding's as it is, any other leaf's as one axis."""
    if leaf.endswith("/kernel"):
        inputs = input_axes(leaf)
        return math.prod(shape[:inputs]), math.prod(shape[inputs:])
    return shape if leaf.endswith("/embedding") else (math.prod(shape),)


def _table(name: str, leaf: str, rows: int, config: ModelConfig, vocab_size: int = 0) -> Tensor:
    return Tensor(name, (leaf,), ((rows, config.d_model),), vocab_size=vocab_size)


def _norm(name: str, path: str, size: int, bias: bool = False) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (f"{path}/scale",), ((size,),))
    if bias:
        yield Tensor(f"{name}.bias", (f"{path}/bias",), ((size,),))


def _linear(name: str, paths: Sequence[str], shape: Shape, bias: bool, transposed: bool) -> Iterator[Tensor]:
    """Yields a weight, which holds our kernels side by side, and its bias if it has one. `shape`: of each kernel."""
    yield Tensor(f"{name}.weight", tuple(f"{path}/kernel" for path in paths), (shape,) * len(paths), transposed)
    if bias:
        outputs = shape[input_axes(f"{paths[0]}/kernel") :]
        yield Tensor(f"{name}.bias", tuple(f"{path}/bias" for path in paths), (outputs,) * len(paths))


def _llama(config: ModelConfig) -> Iterator[Tensor]:
    c = config
    d, n, k, h, f = c.d_model, c.n_heads, c.n_kv_heads, c.head_dim, c.d_ff
    attention = {"q": (d, n, h), "k": (d, k, h), "v": (d, k, h), "o": (n, h, d)}
    mlp = {"gate": (d, f), "up": (d, f), "down": (f, d)}
    yield _table("model.embed_tokens.weight", "embed/embedding", c.padded_vocab_size, c, c.vocab_size)
    for i in range(c.n_layers):
        ours, theirs = layer_name(i), f"model.layers.{i}"
        yield from _norm(f"{theirs}.input_layernorm", f"{ours}/attn_norm", d)
        yield from _norm(f"{theirs}.post_attention_layernorm", f"{ours}/mlp_norm", d)
        for x in "qk" if c.qk_norm else "":
            yield from _norm(f"{theirs}.self_attn.{x}_norm", f"{ours}/attn/{x}_norm", h)
        for x, shape in attention.items():
            bias = c.bias or (c.qkv_bias and x != "o")
            yield from _linear(f"{theirs}.self_attn.{x}_proj", [f"{ours}/attn/{x}"], shape, bias, transposed=True)
        for x, shape in mlp.items():
            yield from _linear(f"{theirs}.mlp.{x}_proj", [f"{ours}/mlp/{x}"], shape, c.bias, transposed=True)
    yield from _norm("model.norm", "final_norm", d)


def _gpt2(config: ModelConfig) -> Iterator[Tensor]:
    """Yields GPT-2's tensors. The weights of its Conv1D are (in, out), as our kernels are."""
    c = config
    d, n, h = c.d_model, c.n_heads, c.head_dim
    if n * h != d:
        raise ConfigError(f"GPT-2 of Hugging Face needs n_heads * head_dim = d_model, here {n} * {h} and {d}")
    norm = functools.partial(_norm, size=d, bias=True)
    linear = functools.partial(_linear, bias=True, transposed=False)
    yield _table("transformer.wte.weight", "embed/embedding", c.padded_vocab_size, c, c.vocab_size)
    yield _table("transformer.wpe.weight", "pos_embed/embedding", c.max_seq_len, c)
    for i in range(c.n_layers):
        ours, theirs = layer_name(i), f"transformer.h.{i}"
        yield from norm(f"{theirs}.ln_1", f"{ours}/attn_norm")
        yield from linear(f"{theirs}.attn.c_attn", [f"{ours}/attn/{x}" for x in "qkv"], (d, n, h))
        yield from linear(f"{theirs}.attn.c_proj", [f"{ours}/attn/o"], (n, h, d))
        yield from norm(f"{theirs}.ln_2", f"{ours}/mlp_norm")
        yield from linear(f"{theirs}.mlp.c_fc", [f"{ours}/mlp/up"], (d, c.d_ff))
        yield from linear(f"{theirs}.mlp.c_proj", [f"{ours}/mlp/down"], (c.d_ff, d))
    yield from norm("transformer.ln_f", "final_norm")
