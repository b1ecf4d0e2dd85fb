"""Runs an exported model as its readers do: by the files' own names, layout and settings, in numpy.

It shares no code with what writes files nor with our models, so a mistake there shows as other numbers here. The readers are
transformers (modeling_llama.py, modeling_qwen2.py, modeling_qwen3.py, modeling_gpt2.py) and llama.cpp (src/models).
transformers reads no scaling of RoPE from a GGUF file: for these cases this is the only reader there is.
Legend: B batch, T tokens, D model, F feed-forward, N query heads, K key-value heads, G = N / K, H head dim, V vocabulary.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Container, Mapping

import numpy as np
import safetensors

Tensors = Mapping[str, np.ndarray]  # name in the file -> float32
Fields = Mapping[str, object]

_HF_LLAMA = {
    "embed": "model.embed_tokens", "layer": "model.layers.{}", "attn_norm": "input_layernorm", "q": "self_attn.q_proj",
    "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj", "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm", "mlp_norm": "post_attention_layernorm", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
    "down": "mlp.down_proj", "norm": "model.norm", "head": "lm_head",
}  # fmt: skip
_HF_GPT2 = {
    "embed": "transformer.wte", "positions": "transformer.wpe", "layer": "transformer.h.{}", "attn_norm": "ln_1",
    "qkv": "attn.c_attn", "o": "attn.c_proj", "mlp_norm": "ln_2", "up": "mlp.c_fc", "down": "mlp.c_proj",
    "norm": "transformer.ln_f", "head": "lm_head",
}  # fmt: skip
_GGUF = {
    "embed": "token_embd", "positions": "position_embd", "layer": "blk.{}", "attn_norm": "attn_norm", "qkv": "attn_qkv",
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down", "norm": "output_norm",
    "head": "output",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Model:
    """A model as a file describes it; `names` are those of its parts in the file, `layers` to `d_ff` how many there are."""

    names: Mapping[str, str]
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    d_model: int
    d_ff: int
    eps: float
    tied: bool
    gpt2: bool = False  # LayerNorm, learned positions, one matrix for q, k and v, GELU
    inputs_first: bool = False  # the matrices of layers are (in, out), as transformers' Conv1D holds them
    qk_norm: bool = False
    biased: Container[str] = ()
    frequencies: np.ndarray | None = None  # of the rotary embeddings, float32[H / 2]
    neighbours: bool = False  # RoPE turns channels 2i and 2i + 1, as llama.cpp's does for llama; else i and i + H / 2
    scores: bool = False  # a reward model: its logits are one number a token, by a head of its own

    def logits(self, tensors: Tensors, tokens_BxT: np.ndarray, prompt_PxD: np.ndarray | None = None) -> np.ndarray:
        """Returns the logits (B, T, V), of a reward model the scores (B, T, 1). Refuses a tensor that no reader looks for.

        With the vectors of a prompt in front: (B, P + T, V).
        """
        part = _Part(tensors)
        embed_VxD = part.take(f"{self.names['embed']}.weight", (-1, self.d_model))
        x_BxTxD = embed_VxD[tokens_BxT]
        if prompt_PxD is not None:
            x_BxTxD = np.concatenate([np.broadcast_to(prompt_PxD, (len(x_BxTxD), *prompt_PxD.shape)), x_BxTxD], axis=1)
        if self.gpt2:
            x_BxTxD = x_BxTxD + part.take(f"{self.names['positions']}.weight", (-1, self.d_model))[: x_BxTxD.shape[1]]
        for i in range(self.layers):
            x_BxTxD = self._layer(part.under(self.names["layer"].format(i) + "."), x_BxTxD)
        hidden_BxTxD = self._norm(part, "norm", x_BxTxD)
        if self.scores:
            head_VxD = part.take("score.weight", (1, self.d_model))
        else:
            head_VxD = embed_VxD if self.tied else part.take(f"{self.names['head']}.weight", (-1, self.d_model))
        part.end()
        return hidden_BxTxD @ head_VxD.T

    def _layer(self, part: "_Part", x_BxTxD: np.ndarray) -> np.ndarray:
        x_BxTxD = x_BxTxD + self._attention(part, self._norm(part, "attn_norm", x_BxTxD))
        y_BxTxD = self._norm(part, "mlp_norm", x_BxTxD)
        up_BxTxF = self._linear(part, "up", y_BxTxD, self.d_ff)
        hidden_BxTxF = (
            _gelu(up_BxTxF) if self.gpt2 else _silu(self._linear(part, "gate", y_BxTxD, self.d_ff)) * up_BxTxF
        )
        return x_BxTxD + self._linear(part, "down", hidden_BxTxF, self.d_model)

    def _linear(self, part: "_Part", name: str, x: np.ndarray, out: int) -> np.ndarray:
        place, shape = self.names[name], (out, x.shape[-1])
        weight = part.take(f"{place}.weight", shape[::-1] if self.inputs_first else shape)
        y = x @ (weight if self.inputs_first else weight.T)
        return y + part.take(f"{place}.bias", (out,)) if name in self.biased else y

    def _norm(self, part: "_Part", name: str, x: np.ndarray) -> np.ndarray:
        place = self.names[name]
        scale = part.take(f"{place}.weight", x.shape[-1:])
        if self.gpt2:
            x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(self.eps)) * scale
        return x + part.take(f"{place}.bias", x.shape[-1:]) if self.gpt2 else x

    def _attention(self, part: "_Part", x_BxTxD: np.ndarray) -> np.ndarray:
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.gpt2:
            joined = self._linear(part, "qkv", x_BxTxD, wide + 2 * narrow)
            q, k, v = np.split(joined, [wide, wide + narrow], -1)
        else:
            q, k, v = (self._linear(part, name, x_BxTxD, n) for name, n in (("q", wide), ("k", narrow), ("v", narrow)))
        b, t = x_BxTxD.shape[:2]
        q, k, v = (y.reshape(b, t, -1, self.head_dim) for y in (q, k, v))
        if self.qk_norm:
            q, k = self._norm(part, "q_norm", q), self._norm(part, "k_norm", k)
        if self.frequencies is not None:
            q, k = self._rotate(q), self._rotate(k)
        q_BxKxGxTxH = q.reshape(b, t, self.kv_heads, -1, self.head_dim).transpose(0, 2, 3, 1, 4)
        k_BxKx1xHxT, v_BxKx1xTxH = k.transpose(0, 2, 3, 1)[:, :, None], v.transpose(0, 2, 1, 3)[:, :, None]
        scores = q_BxKxGxTxH @ k_BxKx1xHxT / np.float32(math.sqrt(self.head_dim))
        scores = np.where(np.tri(t, dtype=bool), scores, np.float32(-np.inf))
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out_BxKxGxTxH = weights / weights.sum(-1, keepdims=True) @ v_BxKx1xTxH
        return self._linear(part, "o", out_BxKxGxTxH.transpose(0, 3, 1, 2, 4).reshape(b, t, wide), self.d_model)

    def _rotate(self, x_BxTxNxH: np.ndarray) -> np.ndarray:
        angles_Tx1xH2 = np.arange(x_BxTxNxH.shape[1], dtype=np.float32)[:, None, None] * self.frequencies
        cos, sin, half = np.cos(angles_Tx1xH2), np.sin(angles_Tx1xH2), self.head_dim // 2
        first, second = (slice(0, None, 2), slice(1, None, 2)) if self.neighbours else (slice(half), slice(half, None))
        a, b, turned = x_BxTxNxH[..., first], x_BxTxNxH[..., second], np.empty_like(x_BxTxNxH)
        turned[..., first], turned[..., second] = a * cos - b * sin, b * cos + a * sin
        return turned


class _Part:
    """The tensors of a part of a model, each to be taken once."""

    def __init__(self, tensors: Tensors, prefix: str = ""):
        self._left, self._prefix = dict(tensors) if not prefix else tensors, prefix

    def under(self, prefix: str) -> "_Part":
        return _Part(self._left, prefix)

    def take(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Returns a tensor, which must be there and of this shape; -1 stands for any size."""
        value = self._left.pop(self._prefix + name)
        assert len(value.shape) == len(shape), (self._prefix + name, value.shape, shape)
        assert all(want in (-1, have) for want, have in zip(shape, value.shape, strict=True)), self._prefix + name
        return value

    def end(self) -> None:
        """Refuses tensors that were not taken."""
        assert not self._left, f"no reader looks for {list(self._left)}"


def of_folder(folder: pathlib.Path) -> tuple[Model, dict[str, np.ndarray]]:
    """Returns the model in a folder of transformers, and its tensors in float32."""
    tensors: dict[str, np.ndarray] = {}
    for path in folder.glob("*.safetensors"):
        with safetensors.safe_open(path, framework="numpy") as file:
            tensors |= {name: file.get_tensor(name).astype(np.float32) for name in file.keys()}  # noqa: SIM118
    return of_hf(json.loads((folder / "config.json").read_text())), tensors


def of_file(path: pathlib.Path) -> tuple[Model, dict[str, np.ndarray]]:
    """Returns the model in a GGUF file, and its tensors in float32."""
    import gguf

    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
    tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors}
    factors = tensors.pop("rope_freqs.weight", None)
    return of_gguf(fields, tensors, factors), tensors


def of_hf(config: Fields) -> Model:
    """Returns the model that a config.json describes."""
    model = _of_hf(config)
    scores = config["architectures"][0].endswith("ForSequenceClassification")
    assert not scores or len(config["id2label"]) == 1
    return dataclasses.replace(model, scores=scores)


def _of_hf(config: Fields) -> Model:
    kind, gpt2 = config["model_type"], config["model_type"] == "gpt2"
    tied = bool(config["tie_word_embeddings"])
    if gpt2:
        n, d = config["n_head"], config["n_embd"]
        biased = ("qkv", "o", "up", "down")
        sizes = (config["n_layer"], n, n, d // n, d, config["n_inner"] or 4 * d)
        return Model(_HF_GPT2, *sizes, config["layer_norm_epsilon"], tied, gpt2=True, inputs_first=True, biased=biased)
    biased = ("q", "k", "v") if kind == "qwen2" else ("q", "k", "v", "o") if config["attention_bias"] else ()
    biased += ("gate", "up", "down") if config.get("mlp_bias") else ()
    sizes = (config[f"num_{name}"] for name in ("hidden_layers", "attention_heads", "key_value_heads"))
    rest = (config["head_dim"], config["hidden_size"], config["intermediate_size"], config["rms_norm_eps"], tied)
    rope = _hf_frequencies(config["rope_parameters"], config["head_dim"])  # transformers 5
    old = {"rope_theta": config["rope_theta"]} | (config["rope_scaling"] or {})  # transformers 4
    assert np.array_equal(rope, _hf_frequencies(old, config["head_dim"])), "rope_parameters, rope_theta"
    return Model(_HF_LLAMA, *sizes, *rest, qk_norm=kind == "qwen3", biased=biased, frequencies=rope)


def adapted(content: Fields, adapter: Tensors, name: str, value: np.ndarray) -> np.ndarray:
    """Returns a tensor of the base with what an adapter of PEFT does to it (peft/tuners: lora, trainable_tokens).

    Args:
      content: of adapter_config.json.
      adapter: the tensors of adapter_model.safetensors, float32.
      name, value: of the base's tensor.
    """
    module = name.removesuffix(".weight")
    place = f"base_model.model.{module}"
    if f"{place}.lora_A.weight" in adapter:
        a_RxI, b_OxR = adapter[f"{place}.lora_A.weight"], adapter[f"{place}.lora_B.weight"]
        rank, alpha = (_by_pattern(content, key, module) for key in ("r", "lora_alpha"))
        assert rank == len(a_RxI)
        delta_OxI = b_OxR @ a_RxI * np.float32(alpha / (math.sqrt(rank) if content["use_rslora"] else rank))
        value = value + (delta_OxI.T if content["fan_in_fan_out"] else delta_OxI)
    if f"{place}.token_adapter.trainable_tokens_delta" in adapter:
        value = value.copy()
        value[content["trainable_token_indices"][module.rpartition(".")[2]]] = adapter[
            f"{place}.token_adapter.trainable_tokens_delta"
        ]
    return value


def _by_pattern(content: Fields, key: str, module: str) -> float:
    """What holds for a module of `r` or `lora_alpha`: the entry of its pattern that ends its name, else the plain value."""
    pattern = content["rank_pattern" if key == "r" else "alpha_pattern"]
    return next((value for end, value in pattern.items() if f".{module}".endswith(f".{end}")), content[key])


def of_gguf(fields: Fields, tensors: Container[str], factors: np.ndarray | None) -> Model:
    """Returns the model that the metadata of a GGUF file describes.

    Args:
      tensors: the names of the file's tensors.
      factors: its tensor rope_freqs.weight, if it has one.
    """
    arch = str(fields["general.architecture"])

    def of(name: str) -> object:
        return fields[f"{arch}.{name}"]

    n, d, gpt2 = of("attention.head_count"), of("embedding_length"), arch == "gpt2"
    k, h = (n, d // n) if gpt2 else (of("attention.head_count_kv"), of("attention.key_length"))
    eps = of(f"attention.layer_norm_{'' if gpt2 else 'rms_'}epsilon")
    sizes = (of("block_count"), n, k, h, d, of("feed_forward_length"))
    model = Model(_GGUF, *sizes, eps, "output.weight" not in tensors)
    if gpt2:
        return dataclasses.replace(model, gpt2=True, biased=("qkv", "o", "up", "down"))
    assert of("rope.dimension_count") == of("attention.value_length") == h
    rope = _plain_frequencies(of("rope.freq_base"), h)
    if fields.get(f"{arch}.rope.scaling.type") == "linear":
        rope = rope / np.float32(of("rope.scaling.factor"))
    return dataclasses.replace(
        model,
        qk_norm=arch == "qwen3",
        biased=("q", "k", "v") if arch == "qwen2" else (),
        frequencies=rope if factors is None else rope / factors,
        neighbours=arch == "llama",
    )


def _plain_frequencies(theta: float, head_dim: int) -> np.ndarray:
    return (1 / theta ** (np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)


def _hf_frequencies(rope: Fields, head_dim: int) -> np.ndarray:
    """Returns the frequencies of modeling_rope_utils.py for `rope_parameters`."""
    plain, kind = _plain_frequencies(rope["rope_theta"], head_dim), rope.get("rope_type", "default")
    if kind == "default":
        return plain
    scaled = plain / np.float32(rope["factor"])
    if kind == "linear":
        return scaled
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)  # within the context of the original
    share = np.clip((turns - low) / (high - low), 0, 1)  # of the plain frequency
    return (share * plain + (1 - share) * scaled).astype(np.float32)


def _silu(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + 0.044715 * x**3)))
