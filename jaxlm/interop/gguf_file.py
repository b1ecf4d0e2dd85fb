"""Writes a model as one GGUF file, with the `gguf` package and numpy alone, and reads its tensors back.

Names, metadata and layout are those of llama.cpp's convert_hf_to_gguf.py: the rows of llama's q and k are permuted (its RoPE
turns neighbours, Hugging Face's halves), GPT-2's matrices are transposed, vectors are float32.
"""

import dataclasses
import functools
import importlib
import pathlib
import re
import typing
from collections.abc import Callable

import numpy as np

from jaxlm.config import ConfigError, ModelConfig, RunError
from jaxlm.data import chat
from jaxlm.data.coder import Coder
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.interop import hf, reference, tokenizer_json
from jaxlm.interop.leaves import Tensor, contiguous, tensors
from jaxlm.models.layers import rope_of

DTYPES = ("f16", "f32", "q8_0")
_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_ROPE = "rope_freqs.weight"
_NEAR = 0.03  # relative: 127 steps up to the largest of 32 numbers, so rounding moves them by 2.2% at most
_Q8_0 = np.dtype([("scale", "<f2"), ("values", "i1", (32,))])


def package() -> typing.Any:
    """Returns the `gguf` package. Raises ConfigError, with the command that installs it, if it is missing."""
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise ConfigError('--to=gguf needs the package gguf: pip install "jaxlm[gguf]"') from None


def architecture(config: ModelConfig) -> str:
    """Returns GGUF's name of a model's architecture. Raises ConfigError if it has none, or if readers would ignore a part."""
    name = str(hf.hf_config(config)["model_type"])
    if name == "llama" and config.bias:
        raise ConfigError("GGUF's readers ignore the biases of a llama model (model.bias=True): export with --to=hf")
    return name


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the tensors of a model are named and stored.

    Attributes:
      config: the model's config.
      dtype: "f32", "f16" or "q8_0", of matrices.
    """

    config: ModelConfig
    dtype: str

    @functools.cached_property
    def _table(self) -> typing.Any:
        gguf = package()
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        return gguf.get_tensor_name_map(kinds[architecture(self.config)], self.config.n_layers)

    def name_of(self, tensor: Tensor) -> str:
        """Returns GGUF's name of a tensor."""
        found = self._table.get_name(tensor.name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ConfigError(f"GGUF has no place for {tensor.name}: export with --to=hf")
        return found

    def kind(self, tensor: Tensor) -> typing.Any:
        """Returns GGUF's type of a tensor. Vectors and positions are f32; rows that are no multiple of 32 can't be q8_0."""
        types = package().GGMLQuantizationType
        if len(tensor.shape) == 1 or tensor.leaves[0].startswith("pos_embed"):
            return types.F32
        if self.dtype == "q8_0" and self.shape(tensor)[-1] % 32:
            return types.F16
        return types[self.dtype.upper()]

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Returns the shape in which GGUF holds a tensor, outermost first."""
        return tensor.shape[::-1] if tensor.name.endswith(_TRANSPOSED) else tensor.shape

    def held(self, tensor: Tensor) -> tuple[tuple[int, ...], np.dtype]:
        """Returns the shape and the type of what the file holds of a tensor: numbers, or bytes of blocks."""
        kind, shape = self.kind(tensor), self.shape(tensor)
        block, size = package().GGML_QUANT_SIZES[kind]
        if block > 1:
            return (*shape[:-1], shape[-1] // block * size), np.dtype(np.uint8)
        return shape, np.dtype({"F32": np.float32, "F16": np.float16}[kind.name])

    def encode(self, tensor: Tensor, value: np.ndarray) -> np.ndarray:
        """Returns what the file holds of a tensor (float32): numbers, or the bytes of blocks.

        Raises ConfigError if a number is too large for float16.
        """
        value = value.T if tensor.name.endswith(_TRANSPOSED) else value
        if heads := self._heads(tensor):
            value = value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        with np.errstate(over="ignore"):
            coded = package().quants.quantize(contiguous(value), self.kind(tensor))
        if coded.dtype == np.float16 and not np.isfinite(coded).all():
            raise ConfigError(f"{tensor.name} has numbers beyond 65,504, too large for f16: export with --dtype=f32")
        return coded

    def undo(self, tensor: Tensor, value: np.ndarray) -> np.ndarray:
        """Returns a tensor (float32) for what the file holds of it, in float32 and in the file's layout."""
        if heads := self._heads(tensor):
            value = value.reshape(heads, -1, 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        return value.T if tensor.name.endswith(_TRANSPOSED) else value

    def _heads(self, tensor: Tensor) -> int:
        """Returns the number of heads by which a tensor's rows are permuted; 0 if they are not."""
        if architecture(self.config) != "llama":
            return 0
        heads = {"q_proj.weight": self.config.n_heads, "k_proj.weight": self.config.n_kv_heads}
        return next((n for end, n in heads.items() if tensor.name.endswith(end)), 0)


class GgufFile:
    """A GGUF file. It is what `interop.check` calls Written. The arguments are as of `hf_folder.HfFolder`.

    Attributes:
      name: of the model, for readers.
    """

    scores = False  # GGUF has no place for a reward model's head

    def __init__(self, path: pathlib.Path, config: ModelConfig, dtype: str, name: str):
        self._path, self._config, self.name = path, config, name
        self._layout = Layout(config, dtype)
        self.bytes = sum(int(np.prod(shape)) * kind.itemsize for shape, kind in map(self._layout.held, tensors(config)))

    def write(self, read: Callable[[str], np.ndarray], tokenizer: Coder, tick: Callable[[int], None]) -> None:
        """Writes the file; see `HfFolder.write`."""
        layout, writer = self._layout, package().GGUFWriter(self._path, architecture(self._config))
        factors = _rope_factors(self._config)
        try:
            _add_model(writer, layout, self.name)
            _add_tokenizer(writer, _ours(tokenizer))
            for tensor in tensors(self._config):
                shape, item = layout.held(tensor)
                nbytes = int(np.prod(shape)) * item.itemsize
                writer.add_tensor_info(layout.name_of(tensor), shape, item, nbytes, layout.kind(tensor))
            if factors is not None:
                writer.add_tensor_info(_ROPE, factors.shape, factors.dtype, factors.nbytes)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for number, tensor in enumerate(tensors(self._config), 1):
                writer.write_tensor_data(self.made(tensor, [read(leaf) for leaf in tensor.leaves]))
                tick(number)
            if factors is not None:
                writer.write_tensor_data(factors)
        finally:
            writer.close()

    def config(self) -> ModelConfig:
        """Returns the model's config with what the file says of it. Raises KeyError if it lacks a setting."""
        (fields, stored), c = self._header, self._config
        arch = str(fields["general.architecture"])
        names = {
            "n_layers": "block_count",
            "d_model": "embedding_length",
            "d_ff": "feed_forward_length",
            "n_heads": "attention.head_count",
            "max_seq_len": "context_length",
            "norm_eps": f"attention.layer_norm_{'' if arch == 'gpt2' else 'rms_'}epsilon",
        }
        if arch != "gpt2":
            names |= {"n_kv_heads": "attention.head_count_kv", "head_dim": "attention.key_length"}
            names |= {"vocab_size": "vocab_size"}
        said = {ours: fields[f"{arch}.{theirs}"] for ours, theirs in names.items()}
        said["tie_embeddings"] = "output.weight" not in stored
        if arch == "gpt2":
            heads = said["n_heads"]
            said |= {"n_kv_heads": heads, "head_dim": said["d_model"] // heads, "family": arch}
            return dataclasses.replace(c, **said, vocab_size=stored["token_embd.weight"].shape[0])
        said |= {"family": "llama", "qk_norm": arch == "qwen3", "qkv_bias": arch == "qwen2"}
        rope = {"theta": fields[f"{arch}.rope.freq_base"], "scaling": "llama3" if _ROPE in stored else "none"}
        if f"{arch}.rope.scaling.type" in fields:
            rope |= {"scaling": fields[f"{arch}.rope.scaling.type"], "factor": fields[f"{arch}.rope.scaling.factor"]}
        return dataclasses.replace(c, **said, rope=dataclasses.replace(c.rope, **rope))

    def reference(self) -> reference.Model:
        """Returns the model that the file describes. Raises KeyError if it lacks a setting, RunError for wrong rope_freqs."""
        fields, stored = self._header
        factors = self.held(_ROPE) if _ROPE in stored else None
        if factors is not None and not np.array_equal(factors, _rope_factors(self._config)):
            raise RunError(f"what was written is not the run's: {_ROPE} differs; export again")
        return reference.of_gguf(fields, stored, factors)

    def name_of(self, tensor: Tensor) -> str:
        """Returns GGUF's name of a tensor."""
        return self._layout.name_of(tensor)

    def made(self, tensor: Tensor, values: list[np.ndarray]) -> np.ndarray:
        """Returns what the file must hold of a tensor for the values of its leaves: numbers, or the bytes of blocks."""
        return self._layout.encode(tensor, tensor.from_leaves(values))

    def held(self, name: str) -> np.ndarray:
        """Returns what the file holds under a name: numbers, or the bytes of blocks. Raises RunError if it was cut short."""
        stored = self._header[1][name]
        block, size = package().GGML_QUANT_SIZES[stored.kind]
        shape, item = stored.shape, np.dtype({"F32": np.float32, "F16": np.float16}.get(stored.kind.name, np.uint8))
        if block > 1:
            shape = (*shape[:-1], shape[-1] // block * size)
        # Read, not mapped: the pages of a mapped file count as memory.
        value = np.fromfile(self._path, item, int(np.prod(shape)), offset=stored.offset)
        if value.size != np.prod(shape):
            raise RunError(f"{self._path} ends in the middle of {name}: it was cut short; export again")
        return value.reshape(shape)

    def plain(self, name: str, held: np.ndarray) -> np.ndarray:
        """Returns in float32 what the file holds under a name, in its own layout."""
        stored = self._header[1][name]
        if stored.kind.name != "Q8_0":
            return held.astype(np.float32, copy=False)
        blocks = held.view(_Q8_0)
        value = blocks["values"].astype(np.float32)
        value *= blocks["scale"][..., None]
        return value.reshape(stored.shape)

    def kept(self, tensor: Tensor, values: list[np.ndarray], plain: np.ndarray) -> list[np.ndarray]:
        """Returns leaves of the run in float32, as the file rounds them.

        Blocks of q8_0 lie as the file's rows do, so `plain` is laid out as ours are, and must then be near the run's.
        """
        kind = self._layout.kind(tensor).name
        if kind != "Q8_0":
            item = {"F32": np.float32, "F16": np.float16}[kind]
            return [value.astype(item, copy=False).astype(np.float32, copy=False) for value in values]
        found = tensor.to_leaves(self._layout.undo(tensor, plain))
        for leaf, value, near in zip(tensor.leaves, map(tensor.cut, values), map(tensor.cut, found), strict=True):
            gap = np.linalg.norm((value - near).ravel())
            if not gap <= _NEAR * np.linalg.norm(value.ravel()):
                raise RunError(f"what was written is not the run's: q8_0 puts other numbers for {leaf}; report this")
        return found

    @functools.cached_property
    def _header(self) -> tuple[dict[str, typing.Any], dict[str, "_Stored"]]:
        """The metadata but for the tokenizer's, and the tensors, both by their names."""
        reader = package().GGUFReader(self._path)
        fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
        shapes = {tensor.name: tuple(map(int, reversed(tensor.shape))) for tensor in reader.tensors}
        return fields, {t.name: _Stored(shapes[t.name], t.tensor_type, int(t.data_offset)) for t in reader.tensors}


class _Stored(typing.NamedTuple):
    """A tensor by the file's own header: its shape, outermost first, its GGUF type, where it begins in bytes."""

    shape: tuple[int, ...]
    kind: typing.Any
    offset: int


def _ours(tokenizer: Coder) -> Tokenizer:
    if not isinstance(tokenizer, Tokenizer):
        raise ConfigError(
            "GGUF is written for tokenizers that jaxlm made; of an imported one, export with --to=hf and convert that folder "
            "with llama.cpp's convert_hf_to_gguf.py"
        )
    return tokenizer


def _rope_factors(config: ModelConfig) -> np.ndarray | None:
    """Returns by what each rotary frequency is divided (llama 3's scaling); None without it."""
    if config.family == "gpt2" or config.rope.scaling != "llama3":
        return None
    plain = dataclasses.replace(config, rope=dataclasses.replace(config.rope, scaling="none"))
    return (rope_of(plain) / rope_of(config)).astype(np.float32)


def _add_model(writer: typing.Any, layout: Layout, name: str) -> None:
    gguf, c = package(), layout.config
    kinds = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0"}
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType[kinds[layout.dtype]])
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
    held = tokenizer_json.pieces(tokenizer)
    writer.add_tokenizer_model("llama" if held.is_bpe else "t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(held.texts)
    writer.add_token_scores(held.scores)
    writer.add_token_types(held.types)
    writer.add_add_space_prefix(held.dummy_prefix)
    writer.add_remove_extra_whitespaces(held.strips)
    if held.charsmap:
        writer.add_precompiled_charsmap(held.charsmap)
    # What a text is opened by is called BOS there; of ours it is EOS, once.
    writer.add_bos_token_id(tokenizer.opening[0])
    writer.add_eos_token_id(tokenizer.eos_id)
    writer.add_unk_token_id(held.types.index(tokenizer_json.UNKNOWN))
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    if chat.speaks(tokenizer):
        writer.add_eot_token_id(chat.end_id(tokenizer))
        # The tag that marks answers is of transformers. llama-cpp-python compiles templates as it loads, and may not know it.
        writer.add_chat_template(re.sub(r"{% (end)?generation %}", "", chat.TEMPLATE))
