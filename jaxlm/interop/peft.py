"""Translates adapters to and from the files of Hugging Face PEFT, with numpy alone.

A low-rank product of ours has the same two factors there, as matrices (rank, in) and (out, rank). Rows of the embedding
are *differences* here; PEFT (`trainable_token_indices`) holds the rows themselves, so the base's are added. GPT-2's q, k
and v are one matrix there: their factors stand side by side and on a diagonal. Legend: D model, P vectors of a prompt.
"""

import dataclasses
import math
import typing
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from jaxlm import tree
from jaxlm.config import AdapterConfig, ConfigError, ModelConfig
from jaxlm.interop import leaves
from jaxlm.interop.leaves import Tensor
from jaxlm.interop.peft_config import WEIGHTS, ids_of
from jaxlm.models.adapters import Adapter, Variables
from jaxlm.models.params import input_axes

_A, _B, _ROWS, _PROMPT = "lora_A.weight", "lora_B.weight", "token_adapter.trainable_tokens_delta", "prompt_embeddings"
_PREFIX = "base_model.model."
Read = Callable[[str], np.ndarray]  # leaf of the base -> its value


@dataclasses.dataclass(frozen=True)
class Adapted:
    """An adapter and its values, on the host.

    Attributes:
      adapter: its settings, and the ids whose rows it changes.
      variables: collection -> tree of float32 arrays, as `models.adapters` has them.
    """

    adapter: Adapter
    variables: Variables


Base = tuple[str, str | None]  # the folder of a base, and which checkpoint of it; None for a model from elsewhere


def to_peft(given: Adapted, config: ModelConfig, read: Read, base: Base) -> tuple[dict[str, typing.Any], dict]:
    """Returns (the content of adapter_config.json, name -> float32 tensor) for an adapter.

    Args:
      config: the model's config.
      read: reads the base's leaves; only the embedding and an untied head are read, where the adapter has rows.
      base: what `base_model_name_or_path` and `revision` say.

    Raises:
      ConfigError: Hugging Face has no architecture for this model.
    """
    shared = {"base_model_name_or_path": base[0], "revision": base[1], "task_type": "CAUSAL_LM", "inference_mode": True}
    if "prompt" in given.variables:
        if "rows" in given.variables:
            raise ConfigError(
                "beside its prompt the run trained rows of chat tokens, for which PEFT's prompt tuning has no place: chat and "
                "serve by jaxlm, or begin with a base that was fine-tuned in its chat template"
            )
        prompt_PxD = given.variables["prompt"]["embed"]["prompt"]
        return _prompt_config(config, len(prompt_PxD)) | shared, {_PROMPT: np.ascontiguousarray(prompt_PxD)}
    tensors, ranks = {}, {}
    values = dict(tree.named_leaves(given.variables.get("lora", {})))
    for tensor in leaves.tensors(config):
        if not (factors := _factors(tensor, values)):
            continue
        module = tensor.name.removesuffix(".weight")
        tensors[f"{_PREFIX}{module}.{_A}"], tensors[f"{_PREFIX}{module}.{_B}"] = factors
        ranks[module] = len(factors[0])
    rows = _full_rows(given, config, read)
    tensors |= {f"{_PREFIX}{module}.{_ROWS}": value for module, value in rows.items()}
    return _lora_config(config, given, ranks, list(rows)) | shared, tensors


def from_peft(
    content: Mapping[str, typing.Any], tensors: Mapping[str, np.ndarray], config: ModelConfig, read: Read
) -> Adapted:
    """Returns the adapter that PEFT's files hold. Undoes `to_peft`; `settings.targets` are the kernels of our names.

    A projection whose rank or alpha differs from the others' (`rank_pattern`, `alpha_pattern`) has its scale in `lora_b`.

    Args:
      content: of adapter_config.json, as `peft_config.check` lets it pass.
      tensors: name -> value, with or without PEFT's prefix.
      config: the base's config.
      read: reads the base's leaves, as for `to_peft`.

    Raises:
      ConfigError: a tensor is missing, has no place in the model, or another shape than the model's.
    """
    left = {name.removeprefix(_PREFIX): np.asarray(value, np.float32) for name, value in tensors.items()}
    if content["peft_type"] == "PROMPT_TUNING":
        return _prompt(left, config)
    rank, alpha, rslora = content["r"], float(content["lora_alpha"]), bool(content.get("use_rslora"))
    lora: list[tuple[str, np.ndarray]] = []
    for tensor in leaves.tensors(config):
        module = tensor.name.removesuffix(".weight")
        if f"{module}.{_A}" in left and _kernels(tensor):
            a, b = _taken(left, f"{module}.{_A}"), _taken(left, f"{module}.{_B}")
            _same_shape(f"{module}.{_A}, {_B}", (a.shape[1], b.shape[0]), _in_out(tensor))
            b = b * np.float32(scaling(content, module) / _scale(alpha, rank, rslora))
            lora += _unfused(tensor, a, b)
    rows, ids = _row_differences(left, content, config, read)
    if left:
        raise ConfigError(
            f"the adapter has {next(iter(left))}, for which there is no place here: merge it by PEFT (merge_and_unload)"
        )
    targets = dict.fromkeys("/".join(name.split("/")[1:3]) for name, _ in lora)
    variables = ({"lora": tree.nested(lora)} if lora else {}) | ({"rows": rows} if rows else {})
    chosen = settings("lora", rank=rank, alpha=alpha, rslora=rslora, targets=tuple(targets), without_rows=not ids)
    return Adapted(Adapter(chosen, ids), variables)


def scaling(content: Mapping[str, typing.Any], module: str) -> float:
    """Returns the number by which PEFT multiplies a module's low-rank product."""
    rank = _of_pattern(content.get("rank_pattern"), module, content["r"])
    alpha = _of_pattern(content.get("alpha_pattern"), module, content["lora_alpha"])
    return _scale(alpha, rank, bool(content.get("use_rslora")))


def _scale(alpha: float, rank: int, rslora: bool) -> float:
    return alpha / (math.sqrt(rank) if rslora else rank)


def _of_pattern(pattern: Mapping[str, float] | None, module: str, default: float) -> float:
    """The value of the first pattern that the end of the module's name matches, as PEFT looks it up."""
    import re

    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def _kernels(tensor: Tensor) -> list[str]:
    return [
        leaf.removesuffix("/kernel")
        for leaf in tensor.leaves
        if tree.layer_of(leaf) is not None and leaf.endswith("/kernel")
    ]


def _in_out(tensor: Tensor) -> tuple[int, int]:
    return tensor.shape[::-1] if tensor.transposed else tensor.shape


def _factors(tensor: Tensor, values: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns (A (r, in), B (out, r)) of a tensor, of `values` by our names; None if they leave it alone."""
    kernels = _kernels(tensor)
    if not any(f"{path}/lora_a" in values for path in kernels):
        return None
    rows, columns, at = [], [], 0
    inside, outside = _in_out(tensor)
    for path, shape in zip(kernels, tensor.shapes, strict=True):
        width = math.prod(shape[input_axes(f"{path}/kernel") :])
        if f"{path}/lora_a" in values:
            a, b = (np.asarray(values[f"{path}/{name}"], np.float32) for name in ("lora_a", "lora_b"))
            rank = a.shape[-1]
            rows.append(a.reshape(inside, rank).T)
            block = np.zeros((outside, rank), np.float32)
            block[at : at + width] = b.reshape(rank, width).T
            columns.append(block)
        at += width
    return np.ascontiguousarray(np.concatenate(rows)), np.concatenate(columns, axis=1)


def _unfused(tensor: Tensor, a: np.ndarray, b: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, value) of our factors for the matrices of a tensor. Columns of a part of B that are 0 are left out."""
    at = 0
    for path, shape in zip(_kernels(tensor), tensor.shapes, strict=True):
        inputs = input_axes(f"{path}/kernel")
        width = math.prod(shape[inputs:])
        part = b[at : at + width]
        at += width
        used = np.ones(len(a), bool) if len(tensor.leaves) == 1 else np.any(part, axis=0)
        if used.any():
            rank = int(used.sum())
            yield f"{path}/lora_a", np.ascontiguousarray(a[used].T).reshape(*shape[:inputs], rank)
            yield f"{path}/lora_b", np.ascontiguousarray(part[:, used].T).reshape(rank, *shape[inputs:])


def _tables(config: ModelConfig) -> dict[str, tuple[str, str]]:
    """Returns module of PEFT -> (the leaf of the base, our place in `rows`) of the embedding and an untied head."""
    found = {}
    for tensor in leaves.tensors(config):
        if tensor.vocab_size:
            found[tensor.name.removesuffix(".weight")] = (tensor.leaves[0], tensor.leaves[0].split("/")[0])
    return found


def _base_rows(read: Read, leaf: str, ids: tuple[int, ...]) -> np.ndarray:
    """Returns the base's rows (n, D) of some ids; the head holds them as columns."""
    value = np.asarray(read(leaf))
    return np.asarray(value[:, list(ids)].T if leaf == "head/kernel" else value[list(ids)], np.float32)


def _full_rows(given: Adapted, config: ModelConfig, read: Read) -> dict[str, np.ndarray]:
    rows = given.variables.get("rows", {})
    return {
        module: np.ascontiguousarray(
            _base_rows(read, leaf, given.adapter.row_ids) + np.asarray(rows[place]["rows"], np.float32)
        )
        for module, (leaf, place) in _tables(config).items()
        if place in rows
    }


def _row_differences(
    left: dict[str, np.ndarray], content: Mapping[str, typing.Any], config: ModelConfig, read: Read
) -> tuple[dict[str, dict], tuple[int, ...]]:
    """Takes the rows out of `left`; returns (our collection `rows`, their ids). A table that PEFT leaves alone has zeros."""
    said = ids_of(content)
    found: dict[str, tuple[list[int], np.ndarray]] = {}
    for module in _tables(config):
        if f"{module}.{_ROWS}" in left:
            short = module.rpartition(".")[2]
            ids = next((said[name] for name in (module, short, "") if name in said), [])
            found[module] = (ids, _taken(left, f"{module}.{_ROWS}"))
    ids = tuple(sorted({i for of_table, _ in found.values() for i in of_table}))
    if ids and not 0 <= ids[0] <= ids[-1] < config.vocab_size:
        raise ConfigError(
            f"the adapter has a row of id {ids[-1]:,}, its base {config.vocab_size:,} ids: merge them by PEFT "
            "(resize_token_embeddings, merge_and_unload) and begin with that model"
        )
    rows = {}
    for module, (leaf, place) in _tables(config).items() if ids else ():
        rows[place] = {"rows": np.zeros((len(ids), config.d_model), np.float32)}
        if module in found:
            own, value = found[module]
            _same_shape(f"{module}.{_ROWS}", value.shape, (len(own), config.d_model))
            rows[place]["rows"][[ids.index(i) for i in own]] = value - _base_rows(read, leaf, tuple(own))
    return rows, ids


def _prompt(left: dict[str, np.ndarray], config: ModelConfig) -> Adapted:
    prompt_PxD = _taken(left, _PROMPT)
    _same_shape(_PROMPT, prompt_PxD.shape[1:], (config.d_model,))
    return Adapted(
        Adapter(settings("prompt", prompt_tokens=len(prompt_PxD))), {"prompt": {"embed": {"prompt": prompt_PxD}}}
    )


def settings(kind: str, **changed: typing.Any) -> AdapterConfig:
    """Returns the section `adapter` of a config, with what is given changed in one that does nothing."""
    plain = AdapterConfig(
        kind=kind,
        rank=1,
        alpha=1.0,
        rslora=False,
        dropout=0.0,
        targets=(),
        rows=(),
        without_rows=True,
        quantize="none",
        prompt_tokens=1,
        prompt_text="",
    )
    return dataclasses.replace(plain, **changed)


def _lora_config(
    config: ModelConfig, given: Adapted, ranks: dict[str, int], tables: list[str]
) -> dict[str, typing.Any]:
    chosen, shorts = given.adapter.settings, {module: _short(module, config) for module in ranks}
    every = {short: [f for f, s in shorts.items() if s == short] for short in shorts.values()}
    whole = all(len(modules) == config.n_layers for modules in every.values())
    apart = {short: ranks[modules[0]] for short, modules in every.items() if ranks[modules[0]] != chosen.rank}
    power = 0.5 if chosen.rslora else 1.0
    ids = {name.rpartition(".")[2]: list(given.adapter.row_ids) for name in tables}
    return {
        "peft_type": "LORA",
        "r": chosen.rank,
        "lora_alpha": chosen.alpha,
        "use_rslora": chosen.rslora,
        "lora_dropout": chosen.dropout,
        "bias": "none",
        "fan_in_fan_out": config.family == "gpt2",
        "target_modules": list(every) if whole else list(shorts),
        "rank_pattern": apart,
        "alpha_pattern": {short: chosen.alpha * (rank / chosen.rank) ** power for short, rank in apart.items()},
        "modules_to_save": None,
        **({"trainable_token_indices": ids} if ids else {}),
    }


def _short(module: str, config: ModelConfig) -> str:
    """Returns the end of a module's name that tells projections apart: "q_proj"; of GPT-2 "attn.c_proj"."""
    return ".".join(module.split(".")[-2 if config.family == "gpt2" else -1 :])


def _prompt_config(config: ModelConfig, tokens: int) -> dict[str, typing.Any]:
    return {
        "peft_type": "PROMPT_TUNING",
        "num_virtual_tokens": tokens,
        "token_dim": config.d_model,
        "num_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_transformer_submodules": 1,
        "prompt_tuning_init": "RANDOM",
    }


def _taken(left: dict[str, np.ndarray], name: str) -> np.ndarray:
    if name not in left:
        raise ConfigError(f"the adapter has no tensor {name}: copy {WEIGHTS} again")
    return left.pop(name)


def _same_shape(what: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if tuple(found) != tuple(wanted):
        raise ConfigError(
            f"the adapter's {what} are for {tuple(found)}, its base has {tuple(wanted)}: they do not belong together"
        )
