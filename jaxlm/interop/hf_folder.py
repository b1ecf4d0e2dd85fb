"""Writes a model as a folder of Hugging Face transformers: weights, config, tokenizer. Reads its tensors back."""

import json
import math
import pathlib
import typing
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np

from jaxlm.config import ConfigError, ModelConfig
from jaxlm.console import Tell, told
from jaxlm.data import chat, imported
from jaxlm.data.coder import Coder
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.interop import hf, hf_weights, shards, tokenizer_json
from jaxlm.interop.leaves import Content, read_ahead, tensors

DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
_SHARD_BYTES = 5_000_000_000  # as transformers cuts them
TYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}


def tokenizer_class(config: ModelConfig, tokenizer: Coder) -> str:
    """Returns the class of transformers that loads the tokenizer as it is.

    AutoTokenizer of transformers 5 takes every qwen2 model for one with Qwen's own tokenizer, whatever the folder says.
    """
    other = isinstance(tokenizer, Tokenizer) and hf.hf_config(config)["model_type"] == "qwen2"
    return "PreTrainedTokenizerFast" if other else "AutoTokenizer"


class HfFolder:
    """A folder that `AutoModelForCausalLM` and `AutoTokenizer` load.

    Args:
      folder: where it is, or will be.
      config: the model's config.
      dtype: "bf16", "f16" or "f32".
      scores: True for a reward model, which `AutoModelForSequenceClassification` loads.
      shard_bytes: the most bytes of weights in a file.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        config: ModelConfig,
        dtype: str,
        scores: bool = False,
        shard_bytes: int = _SHARD_BYTES,
    ):
        self._folder, self._config, self._dtype, self.scores = folder, config, DTYPES[dtype], scores
        self._shard_bytes, self._files, self._tensors = shard_bytes, None, list(tensors(config, scores))
        self.count = len(self._tensors)
        self.bytes = sum(math.prod(t.shape) for t in self._tensors) * TYPES[self._dtype].itemsize

    def write(self, read: Callable[[str], np.ndarray], tokenizer: Coder, tell: Tell) -> None:
        """Writes weights, config and tokenizer, one tensor at a time.

        Args:
          read: leaf -> its value.
          tell: is told how many tensors were written so far.
        """
        write_json(self._folder / "config.json", self._config_json(tokenizer))
        write_json(self._folder / "generation_config.json", generation(tokenizer))
        write_tokenizer(self._folder, tokenizer, self._config.max_seq_len)
        shapes = {tensor.name: tensor.shape for tensor in self._tensors}
        plan = shards.plan(shapes, TYPES[self._dtype].itemsize, self._shard_bytes)
        values = ((name, value) for name, _, value in self.contents(read))
        shards.write(self._folder, plan, self._dtype, told(values, tell))

    def contents(self, read: Callable[[str], np.ndarray]) -> Iterator[Content]:
        """Yields the tensors that the files must hold, in the type of the files."""
        for tensor, values in read_ahead(read, self._tensors):
            cast = [self._cast(leaf, value) for leaf, value in zip(tensor.leaves, values, strict=True)]
            yield tensor.name, tensor.leaves, tensor.from_leaves(cast)

    def held(self, name: str) -> np.ndarray:
        """Returns a tensor of the files."""
        if self._files is None:
            self._files = hf_weights.Files(self._folder)
        return self._files.tensor(name)

    def _cast(self, leaf: str, value: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            cast = value.astype(TYPES[self._dtype])
        if self._dtype == "float16" and not np.isfinite(cast).all():
            raise ConfigError(f"{leaf} has numbers beyond 65,504, too large for f16: export with --dtype=bf16")
        return cast

    def _config_json(self, tokenizer: Coder) -> dict[str, typing.Any]:
        opening, config = tokenizer.opening, hf.hf_config(self._config)
        if self.scores:
            config |= hf.scoring(config) | {"pad_token_id": _pad_id(tokenizer)}
        return config | {
            "bos_token_id": opening[0] if opening else None,
            "eos_token_id": tokenizer.eos_id,
            "dtype": self._dtype,
            "torch_dtype": self._dtype,  # transformers 4
            "use_cache": True,
        }


def write_tokenizer(folder: pathlib.Path, tokenizer: Coder, max_length: int) -> None:
    """Writes a tokenizer as transformers reads it: ours as tokenizer.json, that of another model as it came.

    But for BPE dropout, by which a text would have other ids each time.
    """
    if not isinstance(tokenizer, Tokenizer):
        for name, content in tokenizer.files.items():
            if name != imported.IDS:
                (folder / name).write_bytes(content)
        spec = imported.settings_of(tokenizer.files, imported.JSON)
        if spec.get("model", {}).get("dropout"):
            spec["model"]["dropout"] = None
            write_json(folder / imported.JSON, spec)
        return
    write_json(folder / "tokenizer.json", tokenizer_json.tokenizer_json(tokenizer))
    write_json(folder / "tokenizer_config.json", tokenizer_json.tokenizer_config(tokenizer, max_length))
    (folder / "tokenizer.model").write_bytes(tokenizer.model_bytes)


def write_json(path: pathlib.Path, content: dict[str, typing.Any]) -> None:
    """Writes a JSON file as transformers does."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _pad_id(tokenizer: Coder) -> int | None:
    """Returns the id of padding, which a reward model looks past for a text's last token; None if there is none."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.id_of(tokenizer_json.pad_token(tokenizer))
    named = chat.settings(tokenizer).get("pad_token")
    return tokenizer.id_of(named) if named else None


def generation(tokenizer: Coder) -> dict[str, typing.Any]:
    """Returns the content of generation_config.json, which names all that ends an answer or a text."""
    ends, opening = chat.ends(tokenizer), tokenizer.opening
    return {"bos_token_id": opening[0] if opening else None, "eos_token_id": list(ends) if len(ends) > 1 else ends[0]}
