"""Reads a PEFT folder's adapter_config.json, and names unsupported features in an error. Needs no JAX."""

import os
import pathlib
from collections.abc import Mapping

import safetensors

from jaxlm.config import ConfigError
from jaxlm.host import files

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# PEFT's keys that change the computation or the base -> the values that have no effect.
_PLAIN = {
    "bias": ("none",),
    "use_dora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "megatron_config": (None,),
    "target_parameters": (None, []),
    "modules_to_save": (None, []),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
# The other keys that are read, if present.
_SHAPE = {
    **dict.fromkeys(("r", "num_virtual_tokens"), files.whole(1)),
    **dict.fromkeys(("lora_alpha", "lora_dropout"), files.NUMBER),
    **dict.fromkeys(("base_model_name_or_path", "revision"), files.TEXT),
    "rank_pattern": {str: files.whole(1)},
    "alpha_pattern": {str: files.NUMBER},
}
_KERNELS = {  # how a module's name ends in Llama's relatives and in GPT-2 -> our kernels
    "q_proj": "attn/q",
    "k_proj": "attn/k",
    "v_proj": "attn/v",
    "o_proj": "attn/o",
    "gate_proj": "mlp/gate",
    "up_proj": "mlp/up",
    "down_proj": "mlp/down",
    "attn.c_attn": "attn/[qkv]",
    "attn.c_proj": "attn/o",
    "mlp.c_fc": "mlp/up",
    "mlp.c_proj": "mlp/down",
}


def is_adapter(folder: pathlib.Path) -> bool:
    return (folder / CONFIG).is_file()


def read(folder: pathlib.Path) -> dict:
    """Returns the content of adapter_config.json. Raises ConfigError if the file is damaged, or its kind not supported."""
    try:
        content = files.json_of((folder / CONFIG).read_bytes())
        check(content)
    except (OSError, *files.MANGLED) as error:
        why = error if isinstance(error, ConfigError) else f"{CONFIG} is damaged ({error!r:.200}): copy it again"
        raise ConfigError(f"{folder} can't be read: {why}") from None
    return content


def base_of(folder: pathlib.Path) -> pathlib.Path:
    """Returns the folder of the base that an adapter names. Raises ConfigError if there is no such folder on this machine."""
    name = read(folder).get("base_model_name_or_path") or ""
    for place in (pathlib.Path(os.path.expanduser(name)), folder.resolve().parent / pathlib.Path(name).name):
        if name and place.is_dir():
            return place.resolve()
    raise ConfigError(
        f"{folder} is an adapter for {name or 'a model that it does not name'}, which is no folder here: copy that model "
        f"here, and write its folder into {CONFIG} as base_model_name_or_path"
    )


def check(content: Mapping) -> None:
    """Raises ConfigError if an adapter_config.json is damaged, or needs an unsupported feature: another method, DoRA, ..."""
    kind = content.get("peft_type")
    if kind not in ("LORA", "PROMPT_TUNING"):
        raise ConfigError(f"its peft_type {kind!r} is not supported, only LORA and PROMPT_TUNING")
    needed = ("r", "lora_alpha") if kind == "LORA" else ("num_virtual_tokens",)
    if lacks := [key for key in needed if content.get(key) is None]:
        raise ConfigError(f"{CONFIG} lacks {lacks[0]}: copy it again")
    shape = {key: inner for key, inner in _SHAPE.items() if content.get(key) is not None}
    if problem := files.problem(content, shape) or files.problem(ids_of(content), {str: [files.whole(0)]}):
        raise ConfigError(f"{CONFIG} is damaged: {problem}; copy it again")
    if kind == "PROMPT_TUNING":
        if (parts := content.get("num_transformer_submodules") or 1) != 1:
            raise ConfigError(f"num_transformer_submodules={parts} is not supported, only 1")
        return
    for key, plain in _PLAIN.items():
        if (value := content.get(key, plain[0])) not in plain:
            raise ConfigError(
                f"{key}={value} is not supported: merge the adapter by PEFT (merge_and_unload), and take that model"
            )


def ids_of(content: Mapping) -> dict[str, list[int]]:
    """Returns module ("" if none is named) -> the ids whose rows an adapter replaces: "embed_tokens" -> [8187, 8188]."""
    indices = content.get("trainable_token_indices") or {}
    return {name: list(ids) for name, ids in indices.items()} if isinstance(indices, Mapping) else {"": list(indices)}


def model_folder(folder: pathlib.Path) -> pathlib.Path:
    """Returns the folder of the base if `folder` holds an adapter, else `folder`."""
    return base_of(folder) if is_adapter(folder) else folder


def settings(folder: pathlib.Path, controls: Mapping[str, int]) -> dict:
    """Returns the keys of our section `adapter` that continue to train the adapter in a folder.

    `controls` are the control tokens of the base, piece -> id. Raises ConfigError if our adapters can't have its ranks, or
    a row that it changes.
    """
    content, merge = read(folder), "merge it into its base, --config.origin_merge=True"
    if content["peft_type"] == "PROMPT_TUNING":
        return {"kind": "prompt", "prompt_tokens": content["num_virtual_tokens"], "rows": (), "without_rows": True}
    if content.get("rank_pattern") or content.get("alpha_pattern"):
        raise ConfigError(f"{folder} has several ranks or alphas (rank_pattern, alpha_pattern): {merge}")
    ids = sorted({i for of_module in ids_of(content).values() for i in of_module})
    pieces = {i: piece for piece, i in controls.items()}
    if odd := [i for i in ids if i not in pieces]:
        raise ConfigError(f"{folder} changes the row of id {odd[0]}, which is no control token: {merge}")
    try:
        with safetensors.safe_open(str(folder / WEIGHTS), framework="numpy") as file:
            modules = {name.removesuffix(".lora_A.weight") for name in file.keys() if name.endswith(".lora_A.weight")}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{folder}: {WEIGHTS} can't be read ({error}): copy it again") from None
    return {
        "kind": "lora",
        "rank": content["r"],
        "alpha": float(content["lora_alpha"]),
        "rslora": bool(content.get("use_rslora")),
        "dropout": float(content.get("lora_dropout") or 0.0),
        "targets": tuple(ours for theirs, ours in _KERNELS.items() if any(m.endswith(f".{theirs}") for m in modules)),
        "rows": tuple(pieces[i] for i in ids),
        "without_rows": not ids,
    }
