"""Translates our section `model` to the config.json of Hugging Face (Llama, Mistral, Qwen2, Qwen3, GPT-2), and back.

Reads config.json as transformers 4 and 5 write it; names in an error what our models don't support. Needs no JAX.
"""

import contextlib
import functools
import itertools
import pathlib
from collections.abc import Mapping

import ml_dtypes  # noqa: F401, names bfloat16 to numpy
import numpy as np
import safetensors

from jaxlm.config import ConfigError, ModelConfig
from jaxlm.host import files

KINDS = ("llama", "mistral", "qwen2", "qwen3", "gpt2")  # SmolLM and TinyLlama call themselves llama
_CONTINUES, _SCORES = ("ForCausalLM", "LMHeadModel"), ("ForSequenceClassification",)  # the ends of architectures
_KINDS = {_CONTINUES: "continue text (ForCausalLM)", _SCORES: "give one number (ForSequenceClassification)"}
# Our key -> theirs in Llama's relatives, and in GPT-2 ("": it has none).
_NAMES = {
    "d_model": ("hidden_size", "n_embd"),
    "d_ff": ("intermediate_size", "n_inner"),
    "n_layers": ("num_hidden_layers", "n_layer"),
    "n_heads": ("num_attention_heads", "n_head"),
    "n_kv_heads": ("num_key_value_heads", ""),
    "head_dim": ("head_dim", ""),
    "max_seq_len": ("max_position_embeddings", "n_positions"),
    "norm_eps": ("rms_norm_eps", "layer_norm_epsilon"),
    "tie_embeddings": ("tie_word_embeddings", "tie_word_embeddings"),
    "vocab_size": ("vocab_size", "vocab_size"),
}
_LLAMA = {ours: theirs for ours, (theirs, _) in _NAMES.items()}
_GPT2 = {ours: theirs for ours, (_, theirs) in _NAMES.items() if theirs}
_LINEAR = {"factor": "factor"}
_LLAMA3 = _LINEAR | {name: name for name in ("low_freq_factor", "high_freq_factor")}
_LLAMA3 |= {"original_max_len": "original_max_position_embeddings"}
_ROPE = {"default": ("none", {}), "linear": ("linear", _LINEAR), "llama3": ("llama3", _LLAMA3)}
# Our keys that hold texts, booleans, floats; all others hold integers.
_TEXTS, _SWITCHES = ("family", "rope.scaling"), ("tie_embeddings", "bias", "qkv_bias", "qk_norm")
_NUMBERS = ("norm_eps", *(f"rope.{name}" for name in ("theta", "factor", "low_freq_factor", "high_freq_factor")))
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_OTHERS = ("pytorch_model*.bin", "pytorch_model*.pt", "*.pth", "tf_model*.h5", "flax_model*.msgpack")
_TABLES = ("lm_head.weight", "embed_tokens.weight", "wte.weight")  # how the names of the head and the embedding end
_PIECE = 4096  # rows of two tables compared at a time
_GELU = ("gelu_new", "gelu_pytorch_tanh")  # the same function


def content(config: ModelConfig) -> dict[str, object]:
    """Returns the content of Hugging Face's config.json for a model, without the ids of special tokens.

    It has the rotary settings twice, for transformers 5 (`rope_parameters`) and 4 (`rope_theta`, `rope_scaling`): each
    version silently uses theta 10000 if its own keys are missing.

    Raises ConfigError if Hugging Face has no architecture for this model.
    """
    c, table = config, _GPT2 if config.family == "gpt2" else _LLAMA
    shared = {theirs: getattr(c, ours) for ours, theirs in table.items()} | {"initializer_range": c.init_std}
    if c.family == "gpt2":
        if c.qk_norm or c.n_heads * c.head_dim != c.d_model:
            raise ConfigError("Hugging Face GPT-2 has no QK-norm and needs model.n_heads * head_dim = d_model")
        dropout = {"embd_pdrop": c.dropout, "resid_pdrop": c.dropout, "attn_pdrop": 0.0}
        head = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new"}
        return head | shared | dropout
    if c.qk_norm and (c.bias or c.qkv_bias):
        raise ConfigError("export with QK-norm needs model.bias=False and model.qkv_bias=False, as Hugging Face has it")
    kind = "qwen3" if c.qk_norm else "qwen2" if c.qkv_bias and not c.bias else "llama"
    rope_type, needed = next((name, keys) for name, (ours, keys) in _ROPE.items() if ours == c.rope.scaling)
    rope = {"rope_type": rope_type} | {theirs: getattr(c.rope, ours) for ours, theirs in needed.items()}
    head = {"architectures": [f"{kind.capitalize()}ForCausalLM"], "model_type": kind, "hidden_act": "silu"}
    head |= {"attention_bias": c.bias, "attention_dropout": 0.0} | ({"mlp_bias": c.bias} if kind == "llama" else {})
    rotary = {"rope_theta": c.rope.theta, "rope_scaling": rope if needed else None}
    return head | shared | rotary | {"rope_parameters": rope | {"rope_theta": c.rope.theta}}


def scoring(language_model: Mapping[str, object]) -> dict[str, object]:
    """Returns the keys in which a reward model's config.json differs from a language model's, except the padding id."""
    family = language_model["architectures"][0].removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    label = "LABEL_0"
    return {"architectures": [f"{family}ForSequenceClassification"], "id2label": {"0": label}, "label2id": {label: 0}}


def is_model(folder: pathlib.Path) -> bool:
    config = files.json_there(folder / "config.json")
    return bool({"architectures", "model_type"} & config.keys()) and "train" not in config


def weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files with a model's weights: model.safetensors if it exists, as transformers does, else the index's files.

    Raises ConfigError if there are no weights, or a file of the index is missing.
    """
    index = folder / INDEX
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if index.is_file():
        try:
            names = sorted(set(files.json_of(index.read_bytes())["weight_map"].values()))
            places = [folder / name for name in names]
        except files.MANGLED:
            raise ConfigError(f"{index} is damaged: copy it again") from None
        if missing := [path.name for path in places if not path.is_file()]:
            raise ConfigError(f"{folder} lacks {missing[0]}, which {INDEX} names: copy it again")
        return places
    other = next((path.name for pattern in _OTHERS for path in folder.glob(pattern)), "")
    if other:
        place = repr(str(folder))
        convert = f"import transformers as t; t.AutoModelForCausalLM.from_pretrained({place}).save_pretrained({place})"
        raise ConfigError(
            f'{folder} has {other} and no safetensors: convert it where PyTorch is installed: python -c "{convert}"'
        )
    raise ConfigError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}")


def _has_own_head(folder: pathlib.Path) -> bool:
    """True if the weights hold a head that differs from the embedding: then transformers 5 does not tie the two."""
    with contextlib.suppress(ConfigError, OSError, safetensors.SafetensorError):
        return _tables_differ(
            tuple((str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in weight_files(folder))
        )
    return False  # damaged files: reading the weights raises


@functools.lru_cache(maxsize=16)  # a large table takes seconds
def _tables_differ(stamps: tuple[tuple[str, int, int], ...]) -> bool:
    """True if files hold a head and an embedding that differ. `stamps`: (path, time, size), so that the cache sees changes."""
    opened = [safetensors.safe_open(path, framework="numpy") for path, _, _ in stamps]
    tables = [file.get_slice(name) for file in opened for name in file.keys() if name.endswith(_TABLES)]  # noqa: SIM118
    shapes = [table.get_shape() for table in tables]
    bounds = [*range(0, shapes[0][0], _PIECE), shapes[0][0]] if len(tables) == 2 else []
    pieces = ([np.asarray(t[at:end], np.float32) for t in tables] for at, end in itertools.pairwise(bounds))
    return shapes[1:] != shapes[:-1] or not all(np.array_equal(*pair) for pair in pieces)


def read(folder: pathlib.Path, scores: bool = False) -> tuple[dict[str, object], list[str], list[str]]:
    """Returns (key of our section `model` -> value, messages, remarks) for a model's folder; a key may be `rope.theta`.

    A remark is a message on a contradiction in the folder: it says which side is used, as in transformers. `scores` is True for
    a reward model. Raises ConfigError if config.json is damaged, or needs a feature that our models do not support.
    """
    saved = files.json_there(folder / "config.json")
    if not saved:
        raise ConfigError(f"{folder}/config.json is missing or damaged: copy it again")
    try:
        keys, lines, notes = _read(saved, _SCORES if scores else _CONTINUES)
        for key, value in keys.items():
            kind = str if key in _TEXTS else bool if key in _SWITCHES else float if key in _NUMBERS else int
            if type(value) is not kind or (kind in (int, float) and not 0 <= value < 2**31):
                raise TypeError(f"{key}={value!r:.60}")
    except _Unsupported as error:
        raise ConfigError(f"{folder} can't be imported: {error}") from None
    except KeyError as error:
        raise ConfigError(f"{folder}/config.json lacks {error.args[0]}: copy it again") from None
    except files.MANGLED as error:
        raise ConfigError(f"{folder}/config.json is damaged ({error}): copy it again") from None
    if keys["tie_embeddings"] and not scores and _has_own_head(folder):
        keys["tie_embeddings"] = False
        notes.append("lm_head.weight differs from the embedding: the head is used (untied), as transformers 5 does")
    if (folder / SINGLE).is_file() and (folder / INDEX).is_file():
        notes.append(f"{folder} has {SINGLE} and {INDEX}: the first is read, as transformers does")
    if dropout := (files.json_there(folder / "tokenizer.json").get("model") or {}).get("dropout"):
        notes.append(
            f"tokenizer.json has a BPE dropout of {dropout}: it is off, so that a text always has the same ids"
        )
    return keys, lines, notes


class _Unsupported(Exception):
    """A feature of a model that our models do not support."""


def _read(saved: dict, ends: tuple[str, ...]) -> tuple[dict[str, object], list[str], list[str]]:
    kind = saved.get("model_type", "")
    if kind not in KINDS:
        raise _Unsupported(f"model_type {kind!r} is not supported, only {', '.join(KINDS)}")
    other = [name for name in saved.get("architectures") or () if not name.endswith(ends)]
    if other:
        raise _Unsupported(f"the architecture {other[0]} is not supported, only models that {_KINDS[ends]}")
    if saved.get("quantization_config"):
        raise _Unsupported("its weights are quantised (quantization_config): use the model that is not quantised")
    return (_gpt2(saved), [], []) if kind == "gpt2" else _llama(saved, kind)


def _gpt2(saved: dict) -> dict[str, object]:
    activation = saved.get("activation_function", "gelu_new")
    if activation not in _GELU:
        raise _Unsupported(f"activation_function={activation} is not supported, only {' and '.join(_GELU)}")
    plain = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    for key, wanted in plain.items():
        if saved.get(key, wanted) != wanted:
            raise _Unsupported(f"{key}={saved[key]} is not supported")
    left_out = {"n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
    keys = _named(_GPT2, left_out | saved)
    keys |= {"n_kv_heads": keys["n_heads"], "head_dim": keys["d_model"] // keys["n_heads"]}
    return keys | {"d_ff": keys["d_ff"] or 4 * keys["d_model"], "bias": False, "qkv_bias": False, "qk_norm": False}


def _named(table: dict[str, str], saved: dict) -> dict[str, object]:
    keys = {ours: saved[theirs] for ours, theirs in table.items()}
    keys["family"] = "gpt2" if table is _GPT2 else "llama"
    return keys | {"norm_eps": float(keys["norm_eps"]), "tie_embeddings": bool(keys["tie_embeddings"])}


def _llama(saved: dict, kind: str) -> tuple[dict[str, object], list[str], list[str]]:
    activation = saved.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise _Unsupported(f"hidden_act={activation} is not supported, only silu")
    heads = {"mistral": 8, "qwen2": 32, "qwen3": 32}.get(kind)
    left_out = {"num_key_value_heads": heads, "head_dim": 0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    keys, window, lines = _named(_LLAMA, left_out | saved), _window(saved, kind), []
    if window and window < keys["max_seq_len"]:
        lines = [f"sliding window of {window:,} tokens: attention is full within it, so the context is {window:,}"]
        keys["max_seq_len"] = window
    keys["n_kv_heads"] = keys["n_kv_heads"] or keys["n_heads"]
    keys["head_dim"] = keys["head_dim"] or (128 if kind == "qwen3" else keys["d_model"] // keys["n_heads"])
    keys |= {"bias": _bias(saved, kind), "qkv_bias": kind == "qwen2", "qk_norm": kind == "qwen3"}
    rope, notes = _rope(saved)
    return keys | {f"rope.{key}": value for key, value in rope.items()}, lines, notes


def _bias(saved: dict, kind: str) -> bool:
    attention, mlp = bool(saved.get("attention_bias")), bool(saved.get("mlp_bias")) and kind == "llama"
    if kind in ("llama", "qwen3") and (attention != mlp or (attention and kind == "qwen3")):
        raise _Unsupported(f"attention_bias={attention} with mlp_bias={mlp} in a {kind} is not supported")
    return attention and kind == "llama"


def _window(saved: dict, kind: str) -> int:
    """Returns the size in tokens of the layers' sliding window; 0 if no layer has one."""
    if kind == "mistral":
        return saved.get("sliding_window", 4096) or 0
    if kind == "llama":
        return 0
    layers = saved.get("layer_types")
    slides = (
        "sliding_attention" in layers if layers else saved.get("max_window_layers", 28) < saved["num_hidden_layers"]
    )
    return (saved.get("sliding_window", 4096) or 0) if saved.get("use_sliding_window") and slides else 0


def _rope(saved: dict) -> tuple[dict[str, object], list[str]]:
    """Returns (the keys of `model.rope`, a remark if config.json contradicts itself), read as transformers 5 does."""
    # `rope_scaling`, unless empty, replaces all of `rope_parameters`; `rope_theta` is used if the section has none.
    sections = {name: saved[name] for name in ("rope_scaling", "rope_parameters") if saved.get(name)}
    for name, value in sections.items():
        if not isinstance(value, dict):
            raise TypeError(f"{name}={value!r:.60}")
        sections[name] = {"rope_type": value.get("type", "default")} | value
    outer = {key: saved[key] for key in ("rope_theta", "partial_rotary_factor") if saved.get(key) is not None}
    rope = {"rope_theta": 10000.0} | outer | next(iter(sections.values()), {"rope_type": "default"})
    kind = rope["rope_type"]
    if kind not in _ROPE:
        raise _Unsupported(f"rope_type={kind} is not supported, only {', '.join(_ROPE)}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise _Unsupported("partial_rotary_factor is not supported: RoPE must rotate the whole head")
    scaling, needed = _ROPE[kind]
    numbers = {ours: rope[theirs] for ours, theirs in needed.items()}
    floats = {ours: float(value) for ours, value in numbers.items() if ours != "original_max_len"}
    keys = {"theta": float(rope["rope_theta"]), "scaling": scaling} | numbers | floats
    parts = (*sections.values(), outer)
    unread = [f"{key}={value}" for part in parts for key, value in part.items() if rope.get(key, value) != value]
    line = f"its rotary settings disagree: {', '.join(unread)} is ignored, {keys} is used, as in transformers"
    return keys, [line] if unread else []
