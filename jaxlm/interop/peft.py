"""Folders of Hugging Face PEFT: writes an adapter into one and reads it back; opens one as the origin of a run.

PEFT's LoRA factors are ours, as matrices (rank, in) and (out, rank). Our rows of the embedding are
*differences*; PEFT (`trainable_token_indices`) has whole rows, so the base's rows are added. Hugging Face's GPT-2 has q, k
and v in one matrix: its A stacks their A's, its B has their B's as diagonal blocks. Legend: D model, P virtual tokens.
"""

import dataclasses
import functools
import math
import pathlib
import re
import typing
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import safetensors.numpy

from jaxlm.config import AdapterConfig, ConfigError, ModelConfig
from jaxlm.data.tokenizer.coder import Coder
from jaxlm.devices import tree
from jaxlm.host.console import Tell, told
from jaxlm.interop import hf_config, hf_folder, leaves, peft_config
from jaxlm.interop.leaves import Shape, Tensor
from jaxlm.models.adapters import Adapter, Variables
from jaxlm.models.params import input_axes
from jaxlm.train import origin

_A, _B, _ROWS, _PROMPT = "lora_A.weight", "lora_B.weight", "token_adapter.trainable_tokens_delta", "prompt_embeddings"
_PREFIX = "base_model.model."
Read = Callable[[str], np.ndarray]  # leaf of the base -> its value
Base = tuple[str, str | None]  # the base's folder and checkpoint; None for a model from elsewhere
Content = dict  # of adapter_config.json


class Adapted(typing.NamedTuple):
    adapter: Adapter
    variables: Variables


class PeftFolder:
    """A folder that `PeftModel.from_pretrained` loads onto the base that adapter_config.json names."""

    def __init__(self, folder: pathlib.Path, config: ModelConfig, dtype: str, adapted: Adapted, base: Base):
        self._folder, self._config, self._dtype = folder, config, hf_folder.DTYPES[dtype]
        self._adapted, self._base = adapted, base
        sizes = [x.size for _, x in tree.named_leaves(adapted.variables)]
        self.count, self.bytes = len(sizes), sum(sizes) * self._dtype.itemsize

    def write(self, read: Read, tokenizer: Coder, tell: Tell) -> None:
        content, _ = to_peft(self._adapted, self._config, read, self._base)
        tensors = {name: value for name, _, value in told(self.contents(read), tell)}
        safetensors.numpy.save_file(tensors, self._folder / peft_config.WEIGHTS, metadata={"format": "pt"})
        hf_folder.write_json(self._folder / peft_config.CONFIG, content)
        hf_folder.write_tokenizer(self._folder, tokenizer, self._config.max_seq_len)

    def contents(self, read: Read) -> Iterator[leaves.Content]:
        for name, value in to_peft(self._adapted, self._config, read, self._base)[1].items():
            with np.errstate(over="ignore"):
                cast = value.astype(self._dtype)
            if not np.isfinite(cast.astype(np.float32)).all():
                raise ConfigError(f"{name} has numbers too large for this type: export with --dtype=f32")
            yield name, (), cast

    def held(self, name: str) -> np.ndarray:
        return self._written[name]

    @functools.cached_property
    def _written(self) -> dict[str, np.ndarray]:
        return read_files(self._folder)[1]


def read_files(folder: pathlib.Path) -> tuple[Content, dict[str, np.ndarray]]:
    """Returns (the content of adapter_config.json, name -> tensor) of a folder. Raises ConfigError if a file is damaged."""
    content = peft_config.read(folder)
    try:
        return content, safetensors.numpy.load_file(folder / peft_config.WEIGHTS)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{folder}: {peft_config.WEIGHTS} can't be read ({error}): copy it again") from None


def read(folder: pathlib.Path) -> origin.Origin | None:
    """Returns the origin in a folder of PEFT, base and adapter; None if it has no adapter. A reader for `train.origin.open`.

    Raises ConfigError if the adapter's kind is not supported, its base is not on this machine, or the two do not fit.
    """
    if not peft_config.is_adapter(folder):
        return None
    hf_folder.check_export(folder)
    content, tensors = read_files(folder)
    home = peft_config.base_of(folder)
    checkpoint = "latest" if hf_config.is_model(home) else content.get("revision") or "latest"
    base = origin.open(home, checkpoint, readers=(hf_folder.read,))
    try:
        adapter, variables = from_peft(content, tensors, base.config.model, base.leaf)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None
    config = dataclasses.replace(base.config, adapter=adapter.settings)
    return dataclasses.replace(
        base,
        config=config,
        tokenizer=lambda: origin.prompted(base.tokenizer(), config),
        provenance={"path": str(folder.resolve())},
        state=None,
        meta=None,
        trained=lambda: variables,
        adapter=adapter,
    )


READERS = (read, hf_folder.read)  # of weights from elsewhere, for `train.origin.open`


def to_peft(adapted: Adapted, config: ModelConfig, read: Read, base: Base) -> tuple[Content, dict[str, np.ndarray]]:
    """Returns (the content of adapter_config.json, name -> float32 tensor) for an adapter.

    `read` reads leaves of the base: only the embedding and an untied head, if the adapter has rows. `base` is written as
    `base_model_name_or_path` and `revision`. Raises ConfigError if Hugging Face has no architecture for this model.
    """
    adapter, variables = adapted
    shared = {"base_model_name_or_path": base[0], "revision": base[1], "task_type": "CAUSAL_LM", "inference_mode": True}
    rows = variables.get("rows", {})
    if "prompt" in variables:
        if rows:
            raise ConfigError(
                "PEFT's prompt tuning can't hold the rows of chat tokens that the run trained besides its prompt: chat and "
                "serve by jaxlm, or begin with a base that was fine-tuned in its chat template"
            )
        prompt_PxD = variables["prompt"]["embed"]["prompt"]
        return _prompt_config(config, len(prompt_PxD)) | shared, {_PROMPT: np.ascontiguousarray(prompt_PxD)}
    tensors, ranks, tables = {}, {}, []
    factors_of = dict(tree.named_leaves(variables.get("lora", {})))
    for tensor in leaves.tensors(config):
        if factors := _joined(tensor, factors_of):
            module = _module(tensor)
            tensors[f"{_PREFIX}{module}.{_A}"], tensors[f"{_PREFIX}{module}.{_B}"] = factors
            ranks[module] = len(factors[0])
    for tensor in _tables(config):
        if (table := _table(tensor)) in rows:
            whole = _base_rows(read, tensor, adapter.row_ids) + np.asarray(rows[table]["rows"], np.float32)
            tensors[f"{_PREFIX}{_module(tensor)}.{_ROWS}"] = np.ascontiguousarray(whole)
            tables.append(_module(tensor))
    return _lora_config(config, adapter, ranks, tables) | shared, tensors


def from_peft(content: Mapping, tensors: Mapping[str, np.ndarray], config: ModelConfig, read: Read) -> Adapted:
    """Returns the adapter in PEFT's files, the inverse of `to_peft`; `settings.targets` are kernels by our names.

    If a projection has its own rank or alpha (`rank_pattern`, `alpha_pattern`), `lora_b` is scaled to make up for it.

    Args:
      content: of adapter_config.json, after `peft_config.check`.
      tensors: name -> value, with or without PEFT's prefix.

    Raises ConfigError if a tensor is missing, is not in the model, or has another shape than the model's.
    """
    left = {name.removeprefix(_PREFIX): np.asarray(value, np.float32) for name, value in tensors.items()}
    if content["peft_type"] == "PROMPT_TUNING":
        prompt_PxD = _taken(left, _PROMPT)
        _same_shape(_PROMPT, prompt_PxD.shape[1:], (config.d_model,))
        adapter = Adapter(settings("prompt", prompt_tokens=len(prompt_PxD)))
        return Adapted(adapter, {"prompt": {"embed": {"prompt": prompt_PxD}}})
    rslora = bool(content.get("use_rslora"))
    chosen = settings("lora", rank=content["r"], alpha=float(content["lora_alpha"]), rslora=rslora)
    lora: list[tuple[str, np.ndarray]] = []
    for tensor in leaves.tensors(config):
        module = _module(tensor)
        if f"{module}.{_A}" in left and _kernels(tensor):
            a, b = _taken(left, f"{module}.{_A}"), _taken(left, f"{module}.{_B}")
            shape = tensor.shape[::-1] if tensor.transposed else tensor.shape
            _same_shape(f"{module}.{_A}, {_B}", (a.shape[1], b.shape[0]), shape)
            lora += _split(tensor, a, b * np.float32(_scale(content, module) / chosen.scale))
    rows, ids = _row_differences(left, content, config, read)
    if left:
        raise ConfigError(
            f"the adapter's {next(iter(left))} can't be loaded: merge the adapter into its base with PEFT (merge_and_unload)"
        )
    targets = dict.fromkeys("/".join(name.split("/")[1:3]) for name, _ in lora)
    variables = ({"lora": tree.nested(lora)} if lora else {}) | ({"rows": rows} if rows else {})
    return Adapted(Adapter(dataclasses.replace(chosen, targets=tuple(targets), without_rows=not ids), ids), variables)


def settings(kind: str, **changed: typing.Any) -> AdapterConfig:
    """Returns a section `adapter` of this kind: neutral values, replaced by those in `changed`."""
    plain = {"rank": 1, "alpha": 1.0, "rslora": False, "dropout": 0.0, "targets": (), "rows": (), "without_rows": True}
    plain |= {"quantize": "none", "prompt_tokens": 1, "prompt_text": ""}
    return AdapterConfig(kind=kind, **(plain | changed))


def _scale(content: Mapping, module: str) -> float:
    rank = _of_pattern(content.get("rank_pattern"), module, content["r"])
    alpha = _of_pattern(content.get("alpha_pattern"), module, content["lora_alpha"])
    return alpha / (math.sqrt(rank) if content.get("use_rslora") else rank)


def _of_pattern(pattern: Mapping[str, float] | None, module: str, default: float) -> float:
    """Returns the value of the first pattern that matches the end of the module's name, as PEFT does; else `default`."""
    matching = (value for key, value in (pattern or {}).items() if re.match(rf"(.*\.)?({key})$", module))
    return next(matching, default)


def _module(tensor: Tensor) -> str:
    return tensor.name.removesuffix(".weight")


def _tables(config: ModelConfig) -> list[Tensor]:
    return [tensor for tensor in leaves.tensors(config) if tensor.vocab_size]


def _table(tensor: Tensor) -> str:
    return tensor.leaves[0].split("/")[0]


def _kernels(tensor: Tensor) -> list[tuple[str, Shape, Shape, slice]]:
    """Returns (path, input axes, output axes, its rows of B) of each kernel that a layer's tensor holds; [] for others."""
    kernels, at = [], 0
    for leaf, shape in zip(tensor.leaves, tensor.shapes, strict=True):
        if tree.layer_of(leaf) is None or not leaf.endswith("/kernel"):
            return []
        inputs, outputs = shape[: input_axes(leaf)], shape[input_axes(leaf) :]
        kernels.append((leaf.removesuffix("/kernel"), inputs, outputs, slice(at, at + math.prod(outputs))))
        at += math.prod(outputs)
    return kernels


def _joined(tensor: Tensor, factors: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns PEFT's (A (r, in), B (out, r)) of a tensor from our `factors`; None if these do not change the tensor."""
    rows, columns, kernels = [], [], _kernels(tensor)
    for path, _, _, place in kernels:
        if f"{path}/lora_a" in factors:
            a, b = (np.asarray(factors[f"{path}/{name}"], np.float32) for name in ("lora_a", "lora_b"))
            rank = a.shape[-1]
            rows.append(a.reshape(-1, rank).T)
            columns.append(np.zeros((kernels[-1][-1].stop, rank), np.float32))
            columns[-1][place] = b.reshape(rank, -1).T
    return (np.ascontiguousarray(np.concatenate(rows)), np.concatenate(columns, axis=1)) if rows else None


def _split(tensor: Tensor, a: np.ndarray, b: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, value) of our factors for a tensor's A and B. Of a joined tensor, zero columns of a B are left out."""
    for path, inputs, outputs, place in _kernels(tensor):
        part = b[place]
        used = np.ones(len(a), bool) if len(tensor.leaves) == 1 else np.any(part, axis=0)
        if used.any():
            yield f"{path}/lora_a", np.ascontiguousarray(a[used].T).reshape(*inputs, -1)
            yield f"{path}/lora_b", np.ascontiguousarray(part[:, used].T).reshape(-1, *outputs)


def _base_rows(read: Read, table: Tensor, ids: tuple[int, ...]) -> np.ndarray:
    value = np.asarray(read(table.leaves[0]))
    return np.asarray(value[:, list(ids)].T if table.transposed else value[list(ids)], np.float32)


def _row_differences(
    left: dict[str, np.ndarray], content: Mapping, config: ModelConfig, read: Read
) -> tuple[dict[str, dict], tuple[int, ...]]:
    """Removes the rows from `left`; returns (our collection `rows`, their ids), zeros for a table that PEFT does not change."""
    ids_of_module, whole = peft_config.ids_of(content), {}
    for tensor in _tables(config):
        module = _module(tensor)
        if f"{module}.{_ROWS}" in left:
            names = (module, module.rpartition(".")[2], "")
            own = next((ids_of_module[name] for name in names if name in ids_of_module), [])
            whole[module] = own, _taken(left, f"{module}.{_ROWS}")
    ids = tuple(sorted({i for own, _ in whole.values() for i in own}))
    if ids and not 0 <= ids[0] <= ids[-1] < config.vocab_size:
        raise ConfigError(
            f"the adapter has a row of id {ids[-1]:,}, its base {config.vocab_size:,} ids: merge them by PEFT "
            "(merge_and_unload)"
        )
    rows = {}
    for tensor in _tables(config) if ids else ():
        change = np.zeros((len(ids), config.d_model), np.float32)
        if _module(tensor) in whole:
            own, value = whole[_module(tensor)]
            _same_shape(f"{_module(tensor)}.{_ROWS}", value.shape, (len(own), config.d_model))
            change[[ids.index(i) for i in own]] = value - _base_rows(read, tensor, tuple(own))
        rows[_table(tensor)] = {"rows": change}
    return rows, ids


def _lora_config(config: ModelConfig, adapter: Adapter, ranks: dict[str, int], tables: list[str]) -> Content:
    chosen, gpt2 = adapter.settings, config.family == "gpt2"
    # The end of a name that identifies a projection, "q_proj", in GPT-2 "attn.c_proj" -> the modules.
    modules_of: dict[str, list[str]] = {}
    for module in ranks:
        modules_of.setdefault(".".join(module.split(".")[-2 if gpt2 else -1 :]), []).append(module)
    every_layer = all(len(modules) == config.n_layers for modules in modules_of.values())
    apart = {end: ranks[modules[0]] for end, modules in modules_of.items() if ranks[modules[0]] != chosen.rank}
    power = 0.5 if chosen.rslora else 1.0
    ids = {name.rpartition(".")[2]: list(adapter.row_ids) for name in tables}
    return {
        "peft_type": "LORA",
        "r": chosen.rank,
        "lora_alpha": chosen.alpha,
        "use_rslora": chosen.rslora,
        "lora_dropout": chosen.dropout,
        "bias": "none",
        "fan_in_fan_out": gpt2,
        "target_modules": list(modules_of if every_layer else ranks),
        "rank_pattern": apart,
        "alpha_pattern": {end: chosen.alpha * (rank / chosen.rank) ** power for end, rank in apart.items()},
        "modules_to_save": None,
        **({"trainable_token_indices": ids} if ids else {}),
    }


def _prompt_config(config: ModelConfig, tokens: int) -> Content:
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
        raise ConfigError(f"the adapter has no tensor {name}: copy {peft_config.WEIGHTS} again")
    return left.pop(name)


def _same_shape(what: str, theirs: tuple[int, ...], base: tuple[int, ...]) -> None:
    if tuple(theirs) != tuple(base):
        raise ConfigError(
            f"the adapter's {what} are for {tuple(theirs)}, its base has {tuple(base)}: they do not belong together"
        )
