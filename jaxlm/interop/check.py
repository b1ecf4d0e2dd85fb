"""Compares what was written with the run: its settings, every leaf to the bit, and the logits of a few positions.

The logits are made a layer at a time, by the run's own float32 weights and by the files' weights under the files' settings.
A leaf that was laid out wrongly by the table of names, and is read back by the same table, shows there.
"""

import dataclasses
import typing
from collections.abc import Callable, Iterator

import jax
import numpy as np

from jaxlm import models
from jaxlm.config import ModelConfig, RunError
from jaxlm.interop.ahead import Ahead
from jaxlm.interop.leaves import Tensor, tensors
from jaxlm.models import layerwise

POSITIONS = 64
_MOVED = 0.25  # how far rounding may move a layer's output, relative to its size; a wrong layout moves it by about 1
_LAST = "the final norm and the logits"

Leaves = dict[str, np.ndarray]


class Written(typing.Protocol):
    """What an exported model must be able to tell."""

    exact: bool  # True if nothing is rounded

    def config(self) -> ModelConfig:
        """Returns the model's config, as the files say it."""

    def leaves(self, tensor: Tensor, values: list[np.ndarray]) -> list[np.ndarray] | None:
        """Returns the leaves that the files hold; None if they are not, to the bit, what the format keeps of `values`."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What was found equal.

    Attributes:
      leaves: how many leaves are the run's, to the bit, as far as the format keeps them.
      positions: at how many positions the logits were compared.
      moved: how far rounding moved them from the run's own: the root mean square, relative to theirs; 0 in float32.
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
      RunError: they differ; the message names the setting, the leaf or the layer.
    """
    said = written.config()
    if different := _differing(dataclasses.asdict(config), dataclasses.asdict(said)):
        raise RunError(f"what was written has another setting: {different}; export again")
    plain = {"dtype": "float32", "attention": "xla", "remat": "none", "fp8": False, "offload": False, "dropout": 0.0}
    ours, theirs = (_Forward(dataclasses.replace(c, **plain)) for c in (config, said))
    count, parts, moved = 0, list(_parts(config)), 0.0
    order = [leaf for _, group in parts for tensor in group for leaf in tensor.leaves]
    with Ahead(read, order) as ahead:
        for name, group in parts:
            own: Leaves = {}
            found: Leaves = {}
            for tensor in group:
                values = [ahead(leaf) for leaf in tensor.leaves]
                own |= dict(zip(tensor.leaves, map(tensor.cut, values), strict=True))
                found |= _equal(tensor, values, written)
                count += 1
                tick(count)
            moved = _moved(ours.feed(name, own), theirs.feed(name, found))
            if not moved <= (0.0 if written.exact else _MOVED):
                raise RunError(f"what was written is far from the run's: after {name} numbers are off by {moved:.1%}")
    return Verdict(sum(len(tensor.leaves) for tensor in tensors(config)), ours.tokens.shape[1], moved)


def _equal(tensor: Tensor, values: list[np.ndarray], written: Written) -> Leaves:
    """Returns the leaves that the files hold of a tensor, in float32. Raises RunError if they are not what `values` become."""
    found = written.leaves(tensor, values)
    if found is None:
        raise RunError(
            f"what was written is not the run's: {tensor.name} ({', '.join(tensor.leaves)}) differs; export again"
        )
    return {
        leaf: tensor.cut(value).astype(np.float32, copy=False) for leaf, value in zip(tensor.leaves, found, strict=True)
    }


def _differing(ours: dict, theirs: dict, prefix: str = "model.") -> str:
    """Returns the first key whose value differs, with both values; "" if none does. Files may hold numbers in float32."""
    for key, own in ours.items():
        found = theirs[key]
        if isinstance(own, dict):
            if inner := _differing(own, found, f"{prefix}{key}."):
                return inner
        elif own != found and not (isinstance(own, float) and np.float32(own) == np.float32(found)):
            return f"{prefix}{key} is {found} instead of {own}"
    return ""


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


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """True if two contiguous arrays are of one type and hold the same bytes."""
    kind = f"u{a.dtype.itemsize}"
    same = a.shape == b.shape and a.dtype == b.dtype
    return same and np.array_equal(a.view(kind), b.view(kind))


def _moved(own: np.ndarray, found: np.ndarray) -> float:
    """Returns the root mean square of the difference, relative to that of `own`; infinite if a number is not finite."""
    size, gap = np.sqrt(np.mean(np.square(own))), np.sqrt(np.mean(np.square(own - found)))
    if not (np.isfinite(size) and np.isfinite(gap)):
        return float("inf")
    return float(gap / size) if gap else 0.0
