"""Compares what was written with the run, leaf by leaf and then by the logits of a few positions, a layer at a time."""

import dataclasses
import typing
from collections.abc import Callable, Iterator

import jax
import numpy as np

from jaxlm import models
from jaxlm.config import ModelConfig, RunError
from jaxlm.interop.leaves import Tensor, tensors
from jaxlm.models import layerwise

POSITIONS = 64
_MOVED = 0.1  # how far rounding may move a layer's output, relative to its size; a wrong layout moves it by about 1
_LAST = "the final norm and the logits"

Leaves = dict[str, np.ndarray]


class Written(typing.Protocol):
    """What an exported model must be able to tell."""

    exact: bool  # True if nothing is rounded

    def config(self) -> ModelConfig:
        """Returns the model's config, as the files say it."""

    def leaves(self, tensor: Tensor) -> list[np.ndarray]:
        """Returns the leaves that a tensor holds, read from the files."""

    def kept(self, tensor: Tensor, values: list[np.ndarray]) -> list[np.ndarray]:
        """Returns what the format keeps of these leaves of the run, in the type that `leaves` has."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What was found equal.

    Attributes:
      leaves: how many leaves are the run's, to the bit, as far as the format keeps them.
      positions: how many positions' logits are equal.
      moved: how far rounding moved the logits from the run's own: the root mean square, relative to theirs.
    """

    leaves: int
    positions: int
    moved: float


def check(
    read: Callable[[str], np.ndarray],
    written: Written,
    config: ModelConfig,
    tick: Callable[[int], None],
) -> Verdict:
    """Compares the written model with the run's. No more than one layer of each is in memory.

    Args:
      read: leaf -> its value in the run's checkpoint.
      written: the exported model.
      config: the run's config of the model.
      tick: is told how many tensors were compared so far.

    Raises:
      RunError: they differ; the message names the leaf or the layer.
    """
    plain = {"dtype": "float32", "attention": "xla", "remat": "none", "fp8": False, "offload": False, "dropout": 0.0}
    own_config, said = (dataclasses.replace(c, **plain) for c in (config, written.config()))
    forwards = (_Forward(own_config), _Forward(own_config), _Forward(said))
    count = 0
    for name, group in _parts(config):
        sides: tuple[Leaves, Leaves, Leaves] = {}, {}, {}
        for tensor in group:
            own = [read(leaf) for leaf in tensor.leaves]
            kept, found = written.kept(tensor, own), written.leaves(tensor)
            for leaf, *values in zip(tensor.leaves, own, kept, found, strict=True):
                values = [tensor.cut(value) for value in values]
                if not _same_bits(values[1], values[2]):
                    raise RunError(f"what was written is not the run's: {leaf} ({tensor.name}) differs; export again")
                for side, value in zip(sides, values, strict=True):
                    side[leaf] = value.astype(np.float32)
            count += 1
            tick(count)
        own, kept, found = (forward.feed(name, side) for forward, side in zip(forwards, sides, strict=True))
        if not np.array_equal(kept, found):
            raise RunError(f"what was written computes another model: {name} gives other numbers; its settings differ")
        moved = _moved(own, found)
        if not moved <= (0.0 if written.exact else _MOVED):
            raise RunError(f"what was written is far from the run's: after {name} numbers are off by {moved:.1%}")
    return Verdict(sum(len(tensor.leaves) for tensor in tensors(config)), forwards[0].tokens.shape[1], moved)


def _parts(config: ModelConfig) -> Iterator[tuple[str, list[Tensor]]]:
    """Yields (part, its tensors) in the order in which a model uses them; the tied embedding comes twice."""
    groups: dict[str, list[Tensor]] = {}
    for tensor in tensors(config):
        top = tensor.leaves[0].split("/")[0]
        groups.setdefault(
            {"pos_embed": "embed", "final_norm": "the logits", "head": "the logits"}.get(top, top), []
        ).append(tensor)
    last = groups.pop("the logits")
    if config.tie_embeddings:
        last.append(groups["embed"][0])
    yield from groups.items()
    yield _LAST, last


class _Forward:
    """One model's way through the parts, on its own activations."""

    def __init__(self, config: ModelConfig):
        self.model = models.build(config, "xla")
        self.layer = layerwise.layer(self.model)
        count = min(POSITIONS, config.max_seq_len)
        self.tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, count))
        self._x: jax.Array | None = None

    def feed(self, part: str, leaves: Leaves) -> np.ndarray:
        """Runs a part on the output of the one before, and returns its output."""
        tree: dict = {}
        for leaf, value in leaves.items():
            *parents, last = leaf.split("/")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = value
        if part == "embed":
            self._x = layerwise.embed(self.model, tree, self.tokens)
        elif part == _LAST:
            self._x = layerwise.logits(self.model, tree, self._x)
        else:
            self._x = self.layer(tree[part], self._x)
        return np.asarray(self._x)


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    kind = f"u{a.dtype.itemsize}"
    same = a.shape == b.shape and a.dtype == b.dtype
    return same and np.array_equal(np.ascontiguousarray(a).view(kind), np.ascontiguousarray(b).view(kind))


def _moved(own: np.ndarray, found: np.ndarray) -> float:
    """Returns the root mean square of the difference, relative to that of `own`; infinite if a number is not finite."""
    size, gap = np.sqrt(np.mean(np.square(own))), np.sqrt(np.mean(np.square(own - found)))
    if not (np.isfinite(size) and np.isfinite(gap)):
        return float("inf")
    return float(gap / size) if gap else 0.0
