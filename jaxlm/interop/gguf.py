"""Writes a model as one GGUF file, with the `gguf` package and numpy alone, and reads its tensors back.

Names, metadata and layout are those of llama.cpp's convert_hf_to_gguf.py: the rows of llama's q and k are permuted (its RoPE
rotates adjacent pairs), GPT-2's matrices are transposed, vectors are float32.
"""

import dataclasses
import functools
import math
import pathlib
import re
import typing
from collections.abc import Callable, Iterator

import numpy as np

from jaxlm.config import ConfigError, ModelConfig, optional
from jaxlm.data.chats import chat
from jaxlm.data.tokenizer.coder import Coder
from jaxlm.data.tokenizer.ours import Tokenizer
from jaxlm.host.console import Tell, told
from jaxlm.interop import hf_config, k_quants, tokenizer_json
from jaxlm.interop.leaves import Content, Tensor, by_leaf, contiguous, read_ahead, tensors
from jaxlm.models.layers import rope_of

DTYPES = ("f16", "f32", "q8_0", "q6_k", "q5_k_m", "q4_k_m")
_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_ROPE = "rope_freqs.weight"
# What Ollama needs: a Go template, since it takes a GGUF file's own only where it knows it.
_TEXT = 'TEMPLATE """{{ .Prompt }}"""\n'
_CHAT = '''TEMPLATE """{{ range .Messages }}<|im_start|><|{{ .Role }}|>
{{ .Content }}<|im_end|>
{{ end }}<|im_start|><|assistant|>
"""
PARAMETER stop "<|im_end|>"
'''


def package() -> typing.Any:
    """Returns the `gguf` package. Raises ConfigError, with the command that installs it, if it is missing."""
    return optional("gguf", "--to=gguf needs the package gguf", "gguf")


def file_name(name: str, dtype: str) -> str:
    return f"{name}-{dtype}.gguf"


def architecture(config: ModelConfig) -> str:
    """Returns GGUF's name of a model's architecture. Raises ConfigError if GGUF has none, or its readers ignore a part."""
    name = str(hf_config.content(config)["model_type"])
    if name == "llama" and config.bias:
        raise ConfigError("GGUF's readers ignore the biases of a llama model (model.bias=True): export with --to=hf")
    return name


def check(config: ModelConfig, tokenizer: Coder) -> None:
    """Raises ConfigError if GGUF can't hold the model or its tokenizer, or the package `gguf` is missing."""
    package()
    architecture(config)
    if not isinstance(tokenizer, Tokenizer):
        raise ConfigError(
            "--to=gguf works only with tokenizers that jaxlm made: export this model with --to=hf, and convert that folder "
            "with llama.cpp's convert_hf_to_gguf.py"
        )


class GgufFile:
    """A GGUF file: how a model's tensors are named and stored in it.

    Attributes:
      dtype: of the matrices, one of DTYPES.
    """

    def __init__(self, folder: pathlib.Path, config: ModelConfig, dtype: str, name: str):
        self._path, self._config, self.dtype, self._name = folder / file_name(name, dtype), config, dtype, name
        self._tensors, self._factors = list(tensors(config)), _rope_factors(config)
        self.count = len(self._tensors) + (self._factors is not None)
        self.bytes = sum(math.prod(self._byte_shape(tensor)) for tensor in self._tensors)

    @property
    def coarse(self) -> dict[str, int]:
        """Returns the matrices that a K-quant can't hold, name -> their columns, which 256 does not divide."""
        columns = {self._name_of(tensor): _shape(tensor)[-1] for tensor in self._tensors if self._kind(tensor) != "F32"}
        return {name: n for name, n in columns.items() if "_k" in self.dtype and n % k_quants.BLOCK}

    def write(self, read: Callable[[str], np.ndarray], tokenizer: Coder, tell: Tell) -> None:
        writer = package().GGUFWriter(self._path, architecture(self._config))
        try:
            kind = "ALL_F32" if self.dtype == "f32" else f"MOSTLY_{self.dtype.upper()}"
            writer.add_file_type(package().LlamaFileType[kind])
            _add_model(writer, self._config, self._name)
            _add_tokenizer(writer, tokenizer)
            for tensor in self._tensors:
                shape = self._byte_shape(tensor)
                writer.add_tensor_info(self._name_of(tensor), shape, np.uint8, math.prod(shape), self._type(tensor))
            if self._factors is not None:
                writer.add_tensor_info(_ROPE, self._factors.shape, self._factors.dtype, self._factors.nbytes)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for _, _, value in told(self.contents(read), tell):
                writer.write_tensor_data(value)
        finally:
            writer.close()
        modelfile = self._path.with_name("Modelfile")
        if not modelfile.exists():
            chats = chat.speaks(tokenizer)
            modelfile.write_text(f"FROM ./{self._path.name}\n{_CHAT if chats else _TEXT}", encoding="utf-8")

    def contents(self, read: Callable[[str], np.ndarray]) -> Iterator[Content]:
        """Yields the tensors that the file must hold: as numbers, or as the bytes of blocks.

        Raises ConfigError if a number is too large for float16, which holds the scales of blocks too.
        """
        for tensor, values in read_ahead(read, self._tensors):
            yield self._name_of(tensor), tensor.leaves, self._encode(tensor, tensor.from_leaves(values))
        if self._factors is not None:
            yield _ROPE, (), self._factors

    def held(self, name: str) -> np.ndarray:
        shape, item, offset = self._stored[name]
        # Read, not mapped: the pages of a mapped file count as memory.
        return np.fromfile(self._path, item, math.prod(shape), offset=offset).reshape(shape)

    def leaf(self, name: str) -> np.ndarray:
        """Returns a leaf of the run as the file holds it, float32."""
        tensor, place = by_leaf(self._config)[name]
        value = package().quants.dequantize(self.held(self._name_of(tensor)), self._type(tensor))
        if heads := self._heads(tensor):
            value = value.reshape(heads, -1, 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        return tensor.to_leaf(value.T if tensor.name.endswith(_TRANSPOSED) else value, place)

    @functools.cached_property
    def _stored(self) -> dict[str, tuple[tuple[int, ...], np.dtype, int]]:
        """Returns tensor name -> (shape, dtype, offset in bytes), from the file's own header."""
        stored = package().GGUFReader(self._path).tensors
        return {tensor.name: (tensor.data.shape, tensor.data.dtype, int(tensor.data_offset)) for tensor in stored}

    @functools.cached_property
    def _names(self) -> typing.Any:
        gguf = package()
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        return gguf.get_tensor_name_map(kinds[architecture(self._config)], self._config.n_layers)

    def _name_of(self, tensor: Tensor) -> str:
        name = self._names.get_name(tensor.name, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ConfigError(f"GGUF has no place for {tensor.name}: export with --to=hf")
        return name

    def _kind(self, tensor: Tensor) -> str:
        """Returns GGUF's type of a tensor: F32 for vectors and positions; Q8_0, else F16, for rows that blocks can't hold."""
        columns = _shape(tensor)[-1]
        if len(tensor.shape) == 1 or tensor.leaves[0].startswith("pos_embed"):
            return "F32"
        if not self.dtype.startswith("q"):
            return self.dtype.upper()
        if self.dtype == "q8_0" or columns % k_quants.BLOCK:
            return "F16" if columns % 32 else "Q8_0"
        return k_quants.kind(self._name_of(tensor), self.dtype, self._config.n_layers, self._config.tie_embeddings)

    def _type(self, tensor: Tensor) -> typing.Any:
        return package().GGMLQuantizationType[self._kind(tensor)]

    def _byte_shape(self, tensor: Tensor) -> tuple[int, ...]:
        return package().quants.quant_shape_to_byte_shape(_shape(tensor), self._type(tensor))

    def _encode(self, tensor: Tensor, value: np.ndarray) -> np.ndarray:
        value, kind = value.T if tensor.name.endswith(_TRANSPOSED) else value, self._kind(tensor)
        if heads := self._heads(tensor):
            value = value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        if kind != "F32" and not np.abs(value).max() <= np.finfo(np.float16).max:
            raise ConfigError(
                f"{tensor.name} has numbers beyond 65,504, too large for {self.dtype}: export with --dtype=f32"
            )
        if kind.endswith("_K"):
            return k_quants.quantize(value, kind)
        return package().quants.quantize(contiguous(value), self._type(tensor))

    def _heads(self, tensor: Tensor) -> int:
        """Returns the number of heads whose rows are permuted in a tensor; 0 if none are."""
        if architecture(self._config) != "llama":
            return 0
        heads = {"q_proj.weight": self._config.n_heads, "k_proj.weight": self._config.n_kv_heads}
        return next((n for end, n in heads.items() if tensor.name.endswith(end)), 0)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tensor.shape[::-1] if tensor.name.endswith(_TRANSPOSED) else tensor.shape


def _rope_factors(config: ModelConfig) -> np.ndarray | None:
    """Returns the factor that divides each rotary frequency in llama 3's scaling; None without this scaling."""
    if config.family == "gpt2" or config.rope.scaling != "llama3":
        return None
    plain = dataclasses.replace(config, rope=dataclasses.replace(config.rope, scaling="none"))
    return (rope_of(plain) / rope_of(config)).astype(np.float32)


def _add_model(writer: typing.Any, c: ModelConfig, name: str) -> None:
    gguf = package()
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(c.max_seq_len)
    writer.add_embedding_length(c.d_model)
    writer.add_block_count(c.n_layers)
    writer.add_feed_forward_length(c.d_ff)
    writer.add_head_count(c.n_heads)
    if c.family == "gpt2":
        writer.add_layer_norm_eps(c.norm_eps)
        return
    writer.add_head_count_kv(c.n_kv_heads)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_vocab_size(c.vocab_size)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rope.theta)
    if c.rope.scaling == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(c.rope.factor)


def _add_tokenizer(writer: typing.Any, tokenizer: Tokenizer) -> None:
    pieces = tokenizer_json.pieces(tokenizer)
    writer.add_tokenizer_model("llama" if pieces.is_bpe else "t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces.texts)
    writer.add_token_scores(pieces.scores)
    writer.add_token_types(pieces.types)
    writer.add_add_space_prefix(pieces.dummy_prefix)
    writer.add_remove_extra_whitespaces(pieces.strips)
    if pieces.charsmap:
        writer.add_precompiled_charsmap(pieces.charsmap)
    # GGUF calls the token that opens a text BOS; our tokenizers open a text with one EOS.
    writer.add_bos_token_id(tokenizer.opening[0])
    writer.add_eos_token_id(tokenizer.eos_id)
    writer.add_unk_token_id(pieces.types.index(tokenizer_json.UNKNOWN))
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    if chat.speaks(tokenizer):
        writer.add_eot_token_id(tokenizer.find(chat.END))
        # Only transformers knows the tag that marks answers; llama-cpp-python may fail on the tag when it loads the model.
        writer.add_chat_template(re.sub(r"{% (end)?generation %}", "", chat.TEMPLATE))
