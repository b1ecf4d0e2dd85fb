"""Writes a model as a folder of Hugging Face transformers: weights, config, tokenizer. Reads its tensors back."""

import functools
import itertools
import json
import math
import pathlib
import struct
import typing
from collections.abc import Callable, Iterator, Sequence

import ml_dtypes
import numpy as np

from jaxlm.config import ConfigError, ModelConfig
from jaxlm.data.chats import chat
from jaxlm.data.tokenizer import imported
from jaxlm.data.tokenizer.coder import Coder
from jaxlm.data.tokenizer.ours import Tokenizer
from jaxlm.host.console import Tell, told
from jaxlm.interop import hf_config, hf_weights, tokenizer_json
from jaxlm.interop.leaves import Content, Tensor, read_ahead, tensors

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16), "f32": np.dtype(np.float32)}
_SHARD_BYTES = 5_000_000_000  # the size of transformers' shards
_ALIGN = 8  # the first tensor of a file begins at a multiple of this many bytes


def tokenizer_class(config: ModelConfig, tokenizer: Coder) -> str:
    """Returns the class of transformers that loads the tokenizer unchanged.

    AutoTokenizer of transformers 5 assumes Qwen's own tokenizer for every qwen2 model, whatever the folder says.
    """
    other = isinstance(tokenizer, Tokenizer) and hf_config.content(config)["model_type"] == "qwen2"
    return "PreTrainedTokenizerFast" if other else "AutoTokenizer"


class HfFolder:
    """A folder that `AutoModelForCausalLM` and `AutoTokenizer` load.

    Args:
      dtype: "bf16", "f16" or "f32".
      scores: True for a reward model, which `AutoModelForSequenceClassification` loads.
      shard_bytes: the most bytes of weights in a file; a larger tensor gets a file of its own.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        config: ModelConfig,
        dtype: str,
        scores: bool = False,
        shard_bytes: int = _SHARD_BYTES,
    ):
        self._folder, self._config, self._dtype = folder, config, dtype
        self._scores, self._shard_bytes, self._tensors = scores, shard_bytes, list(tensors(config, scores))
        self.count, self.bytes = len(self._tensors), sum(map(self._nbytes, self._tensors))

    def write(self, read: Callable[[str], np.ndarray], tokenizer: Coder, tell: Tell) -> None:
        """Writes config, tokenizer and weights, one tensor at a time; `tell` gets the number of tensors written so far."""
        write_json(self._folder / "config.json", self._config_json(tokenizer))
        write_tokenizer(self._folder, tokenizer, self._config.max_seq_len)
        files, contents = self._files(), told(self.contents(read), tell)
        for path, inside in files.items():
            with open(path, "wb") as file:
                file.write(self._header(inside))
                for _, _, value in itertools.islice(contents, len(inside)):
                    file.write(value.reshape(-1).view(np.uint8).data)
        if len(files) > 1:
            place = {tensor.name: path.name for path, inside in files.items() for tensor in inside}
            write_json(self._folder / hf_config.INDEX, {"metadata": {"total_size": self.bytes}, "weight_map": place})

    def contents(self, read: Callable[[str], np.ndarray]) -> Iterator[Content]:
        """Yields the tensors that the files must hold, in the type of the files."""
        for tensor, values in read_ahead(read, self._tensors):
            cast = [self._cast(leaf, value) for leaf, value in zip(tensor.leaves, values, strict=True)]
            yield tensor.name, tensor.leaves, tensor.from_leaves(cast)

    def held(self, name: str) -> np.ndarray:
        return self._written.tensor(name)

    @functools.cached_property
    def _written(self) -> hf_weights.Files:
        return hf_weights.Files(self._folder)

    def _cast(self, leaf: str, value: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            cast = value.astype(DTYPES[self._dtype])
        if self._dtype == "f16" and not np.isfinite(cast).all():
            raise ConfigError(f"{leaf} has numbers beyond 65,504, too large for f16: export with --dtype=bf16")
        return cast

    def _nbytes(self, tensor: Tensor) -> int:
        return math.prod(tensor.shape) * DTYPES[self._dtype].itemsize

    def _files(self) -> dict[pathlib.Path, list[Tensor]]:
        groups, full = [[]], 0
        for tensor in self._tensors:
            if groups[-1] and full + self._nbytes(tensor) > self._shard_bytes:
                groups, full = [*groups, []], 0
            groups[-1].append(tensor)
            full += self._nbytes(tensor)
        if len(groups) == 1:
            return {self._folder / hf_config.SINGLE: groups[0]}
        names = (f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1))
        return dict(zip((self._folder / name for name in names), groups, strict=True))

    # A safetensors file is 8 bytes with the length of a JSON header, the header, and the tensors one after the other. The
    # library's `save_file` needs all tensors in memory at once.
    def _header(self, inside: Sequence[Tensor]) -> bytes:
        ends = list(itertools.accumulate(map(self._nbytes, inside), initial=0))
        table: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        for tensor, offsets in zip(inside, itertools.pairwise(ends), strict=True):
            table[tensor.name] = {"dtype": self._dtype.upper(), "shape": tensor.shape, "data_offsets": offsets}
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGN)
        return struct.pack("<Q", len(text)) + text

    def _config_json(self, tokenizer: Coder) -> dict[str, typing.Any]:
        opening, config, dtype = tokenizer.opening, hf_config.content(self._config), DTYPES[self._dtype].name
        if self._scores:
            config |= hf_config.scoring(config) | {"pad_token_id": _pad_id(tokenizer)}
        return config | {
            "bos_token_id": opening[0] if opening else None,
            "eos_token_id": tokenizer.eos_id,
            "dtype": dtype,
            "torch_dtype": dtype,  # transformers 4
            "use_cache": True,
        }


def write_tokenizer(folder: pathlib.Path, tokenizer: Coder, max_length: int) -> None:
    """Writes a tokenizer as transformers reads it, and generation_config.json with the ids that end an answer.

    Our own tokenizer becomes tokenizer.json. An imported tokenizer is written unchanged, but without BPE dropout, which would
    give a text different ids each time.
    """
    write_json(folder / "generation_config.json", generation(tokenizer))
    if isinstance(tokenizer, Tokenizer):
        write_json(folder / "tokenizer.json", tokenizer_json.tokenizer_json(tokenizer))
        write_json(folder / "tokenizer_config.json", tokenizer_json.tokenizer_config(tokenizer, max_length))
        (folder / "tokenizer.model").write_bytes(tokenizer.model_bytes)
        return
    for name, content in tokenizer.files.items():
        if name != imported.IDS:
            (folder / name).write_bytes(content)
    spec = imported.settings_of(tokenizer.files, imported.JSON)
    if spec.get("model", {}).get("dropout"):
        spec["model"]["dropout"] = None
        write_json(folder / imported.JSON, spec)


def write_json(path: pathlib.Path, content: dict[str, typing.Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _pad_id(tokenizer: Coder) -> int | None:
    """Returns the padding id, which a reward model skips to find a text's last token; None if there is none."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.id_of(tokenizer_json.pad_token(tokenizer))
    name = chat.settings(tokenizer).get("pad_token")
    return tokenizer.id_of(name) if name else None


def generation(tokenizer: Coder) -> dict[str, typing.Any]:
    ends, opening = chat.ends(tokenizer), tokenizer.opening
    return {"bos_token_id": opening[0] if opening else None, "eos_token_id": list(ends) if len(ends) > 1 else ends[0]}
