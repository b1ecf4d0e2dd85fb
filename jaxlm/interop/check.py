"""Compares what was written with the run: its settings, every tensor to the bit, and what each layer gives.

To the bit: the files hold what the same code makes of the run's leaves now. That finds damage, not a mistake of this code. So
each layer is run twice on one input: by our model, with the run's weights as the format rounds them, and by
`interop.reference`, which knows nothing of how the files were made. Only a wrong layout, name or setting parts the two.
"""

import dataclasses
import typing
from collections.abc import Callable, Iterator

import jax
import numpy as np

from jaxlm import models, tree
from jaxlm.config import ModelConfig, RunError
from jaxlm.interop import hf, peft, reference
from jaxlm.interop.ahead import Ahead
from jaxlm.interop.leaves import SCORE, Tensor, tensors
from jaxlm.interop.peft import Adapted
from jaxlm.models import layerwise, quantized
from jaxlm.models.adapters import Adapter
from jaxlm.objectives import base

POSITIONS = 64
# How far what a layer adds may be from what ours adds, relative to its size; float32 alone makes 1e-6 of it.
_APART = 1e-3
_LAST = "the final norm and the head"
_PLAIN = {"dtype": "float32", "attention": "xla", "remat": "none", "fp8": False, "offload": False, "dropout": 0.0}

Named = dict[str, np.ndarray]


class Written(typing.Protocol):
    """What an exported model must be able to tell.

    Attributes:
      scores: True for a reward model.
    """

    scores: bool

    def config(self) -> ModelConfig:
        """Returns the model's config, as the files say it. Raises KeyError if they lack a setting."""

    def reference(self) -> reference.Model:
        """Returns the model that the files describe. Raises KeyError if they lack a setting."""

    def name_of(self, tensor: Tensor) -> str:
        """Returns what a tensor is called in the files."""

    def made(self, tensor: Tensor, values: list[np.ndarray]) -> np.ndarray:
        """Returns what the files must hold of a tensor, for the values of its leaves in the run."""

    def held(self, name: str) -> np.ndarray:
        """Returns what the files hold under a name."""

    def plain(self, name: str, held: np.ndarray) -> np.ndarray:
        """Returns what they hold in float32, in the files' own layout."""

    def kept(self, tensor: Tensor, values: list[np.ndarray], plain: np.ndarray) -> list[np.ndarray]:
        """Returns leaves of the run in float32, as the format rounds them; `plain` is what the files hold of them."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What was found equal.

    Attributes:
      leaves: how many leaves are the run's, to the bit, as far as the format keeps them.
      positions: at how many positions layers and logits were compared.
      moved: how far rounding moved the logits from the run's own: the root mean square, relative to theirs. Of an adapter that
        was trained beside quantised kernels also how far the base in full precision moves them.
    """

    leaves: int
    positions: int
    moved: float


def check(
    read: Callable[[str], np.ndarray], written: Written, config: ModelConfig, tick: Callable[[int], None]
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
    try:
        said, theirs = written.config(), written.reference()
    except KeyError as error:
        raise RunError(f"what was written lacks the setting {error.args[0]}; export again") from None
    if different := _differing(dataclasses.asdict(config), dataclasses.asdict(said)):
        raise RunError(f"what was written has another setting: {different}; export again")
    ours = _Ours(config)
    count, parts = 0, list(_parts(config, written.scores))
    order = [leaf for _, group in parts for tensor in group for leaf in tensor.leaves]
    x = y = np.float32(0)  # by the run's own weights, and by the files'
    with Ahead(read, order) as ahead:
        for name, group in parts:
            own: Named = {}
            kept: Named = {}
            found: Named = {}
            for tensor in group:
                values = [ahead(leaf) for leaf in tensor.leaves]
                plain = found[written.name_of(tensor)] = _equal(tensor, values, written)
                own |= _cut(tensor, values)
                kept |= _cut(tensor, written.kept(tensor, values, plain))
                count += 1
                tick(count)
            x, wanted = ours.run(name, own, x), ours.run(name, kept, y)
            given, y = y, _run(theirs, name, found, ours.tokens, y)
            _near(name, given, np.asarray(wanted), y)
    leaves = sum(len(tensor.leaves) for tensor in tensors(config, written.scores))
    return Verdict(leaves, ours.tokens.shape[1], _moved(np.asarray(x), y))


def check_adapter(
    given: Adapted,
    content: typing.Mapping[str, typing.Any],
    held: Named,
    read: Callable[[str], np.ndarray],
    config: ModelConfig,
    tick: Callable[[int], None],
) -> Verdict:
    """Compares an adapter in PEFT's files, on its base, with the run's model. No more than one layer is in memory.

    Args:
      given: the run's adapter.
      content, held: what adapter_config.json holds, and name -> tensor of the other file, float32.
      read: leaf -> its value in the base.
      config: the config of the model.
      tick: is told how many tensors of the base were compared so far.

    Raises:
      RunError: they differ; the message names the layer.
    """
    kept = peft.from_peft(content, held, config, read)
    theirs, prompt_PxD = reference.of_hf(hf.hf_config(config)), held.get("prompt_embeddings")
    ours = _Ours(config, given.adapter)
    tokens = ours.tokens[:, ours.tokens[0] < config.vocab_size]
    count, parts, kind = 0, list(_parts(config, scores=False)), given.adapter.settings.quantize
    order = [leaf for _, group in parts for tensor in group for leaf in tensor.leaves]
    x = y = np.float32(0)  # by the run, and by the files on the base in full precision
    with Ahead(read, order) as ahead:
        for name, group in parts:
            own: Named = {}
            beside: Named = {}  # as the run had them: in codes, and decoded
            found: Named = {}
            for tensor in group:
                values = [np.asarray(ahead(leaf), np.float32) for leaf in tensor.leaves]
                own |= _cut(tensor, values)
                decoded = [quantized.rounded(*leaf, kind) for leaf in zip(tensor.leaves, values, strict=True)]
                beside |= _cut(tensor, decoded)
                found[tensor.name] = reference.adapted(content, held, tensor.name, tensor.from_leaves(values))
                count += 1
                tick(count)
            x, wanted = ours.run(name, beside, x, given.variables), ours.run(name, own, y, kept.variables)
            before, y = y, _run(theirs, name, found, tokens, y, prompt_PxD)
            _near(name, before, np.asarray(wanted), y)
    return Verdict(len(held), ours.tokens.shape[1], _moved(np.asarray(x), y))


def _near(name: str, given: np.ndarray, wanted: np.ndarray, found: np.ndarray) -> None:
    """Raises RunError if what a part gives for its input `given` is not what ours does, but for rounding."""
    given = given if tree.layer_of(name) is not None else np.float32(0)  # a layer adds to its input
    gap = _gap(wanted - given, found - given)
    if not gap <= _APART:
        raise RunError(
            f"what was written is not the run's model: {name} is off by {gap:.1%}, and not by rounding; "
            "export with another --to, and report this"
        )


def _cut(tensor: Tensor, values: list[np.ndarray]) -> Named:
    return dict(zip(tensor.leaves, map(tensor.cut, values), strict=True))


def _equal(tensor: Tensor, values: list[np.ndarray], written: Written) -> np.ndarray:
    """Returns what the files hold of a tensor, in float32. Raises RunError if it is not what `values` become."""
    name = written.name_of(tensor)
    held = written.held(name)
    if not _same_bits(written.made(tensor, values), held):
        raise RunError(f"what was written is not the run's: {', '.join(tensor.leaves)} ({name}) differs; export again")
    return written.plain(name, held)


def _run(
    model: reference.Model,
    part: str,
    found: Named,
    tokens_BxT: np.ndarray,
    x_BxTxD: np.ndarray,
    prompt_PxD: np.ndarray | None = None,
) -> np.ndarray:
    """Returns the output of a part for its input, by the files' tensors."""
    if part == "embed":
        return model.embed(found, tokens_BxT, prompt_PxD)
    layer = tree.layer_of(part)
    return model.logits(found, x_BxTxD) if layer is None else model.layer(found, layer, x_BxTxD)


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


def _parts(config: ModelConfig, scores: bool) -> Iterator[tuple[str, list[Tensor]]]:
    """Yields (part, its tensors) in the order in which a model uses them; the tied embedding comes twice."""
    groups: dict[str, list[Tensor]] = {}
    places = {"pos_embed": "embed"} | dict.fromkeys(("final_norm", "head", "score_head"), _LAST)
    for tensor in tensors(config, scores):
        top = tensor.leaves[0].split("/")[0]
        groups.setdefault(places.get(top, top), []).append(tensor)
    last = groups.pop(_LAST)
    if config.tie_embeddings and not scores:
        last.append(groups["embed"][0])
    yield from groups.items()
    yield _LAST, last


class _Ours:
    """Our model, in parts. `tokens` begin with the virtual ids of a prompt, if the adapter has one."""

    def __init__(self, config: ModelConfig, adapter: Adapter | None = None):
        model = models.build(dataclasses.replace(config, **_PLAIN), "xla")
        self.model = adapter.attach(model) if adapter else model
        self.layer = layerwise.layer(self.model)
        front = adapter.settings.prompt_tokens if adapter and adapter.settings.kind == "prompt" else 0
        count = min(POSITIONS, config.max_seq_len - front)
        self.tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, count))
        self.tokens = np.concatenate([config.vocab_size + np.arange(front)[None], self.tokens], axis=1)
        rows = self.model.row_ids[:count]
        self.tokens[0, front : front + len(rows)] = rows

    def run(
        self, part: str, leaves: Named, x_BxTxD: np.ndarray | jax.Array, beside: layerwise.Beside = layerwise.NOTHING
    ) -> jax.Array:
        """Returns the output of a part for its input, by these leaves and an adapter's variables. It is not waited for."""
        params = tree.nested(leaves.items())
        if part == "embed":
            return layerwise.embed(self.model, params, self.tokens, beside)
        if part == _LAST and SCORE in leaves:
            hidden_BxTxD = layerwise.final(self.model, params, x_BxTxD)
            return base.scalar({"score": params}, "score", hidden_BxTxD)[..., None]
        if part == _LAST:
            return layerwise.logits(self.model, params, x_BxTxD, beside)
        return self.layer(params[part], x_BxTxD, beside.get("lora", {}).get(part))


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    kind = f"u{a.dtype.itemsize}"
    same = a.shape == b.shape and a.dtype == b.dtype
    return same and np.array_equal(np.ascontiguousarray(a).view(kind), np.ascontiguousarray(b).view(kind))


def _gap(own: np.ndarray, found: np.ndarray) -> float:
    """Returns the mean over positions of the difference's size, relative to that of `own`; infinite if one is not finite.

    By position, since a few of them may be so large that nothing else counts (arXiv:2402.17762).
    """
    size, gap = (np.sqrt(np.square(x).sum(-1)) for x in (own, own - found))
    share = np.mean(gap / np.maximum(size, np.finfo(np.float32).tiny))
    return float(share) if np.isfinite(share) else float("inf")


def _moved(own: np.ndarray, found: np.ndarray) -> float:
    """Returns the root mean square of the difference, relative to that of `own`; infinite if a number is not finite."""
    size, gap = np.sqrt(np.mean(np.square(own))), np.sqrt(np.mean(np.square(own - found)))
    if not (np.isfinite(size) and np.isfinite(gap)):
        return float("inf")
    return float(gap / size) if gap else 0.0
