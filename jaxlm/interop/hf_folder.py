"""A model as a folder of Hugging Face transformers: writes weights, config and tokenizer, and reads tensors back.

Weights are read leaf by leaf, straight into shards, without a second copy of the model.
"""

import functools
import hashlib
import itertools
import json
import math
import pathlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import ml_dtypes
import numpy as np
import safetensors

from jaxlm import config as config_lib
from jaxlm.config import ConfigError, ModelConfig, RunError, config_files
from jaxlm.data.chats import chat
from jaxlm.data.shards.verify import file_sha256
from jaxlm.data.tokenizer import coder, imported
from jaxlm.data.tokenizer.coder import Coder
from jaxlm.data.tokenizer.ours import Tokenizer
from jaxlm.devices import tree
from jaxlm.devices.processes import working
from jaxlm.host import files
from jaxlm.host.console import Tell, told
from jaxlm.interop import hf_config, leaves, tokenizer_json
from jaxlm.interop.leaves import Content, Tensor, read_ahead, tensors
from jaxlm.models import quantized
from jaxlm.train.origin import Origin

MARK = "jaxlm_export.json"  # in an export: its files, and what was exported
_TYPES = ("BF16", "F16", "F32", "F64")
# Buffers of old checkpoints, which a state dict may hold besides the parameters.
_HARMLESS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def read(folder: pathlib.Path, scores: bool = False) -> Origin | None:
    """Returns the origin in a Hugging Face folder; None if the folder holds no such model. A reader for `train.origin.open`.

    `scores` is True for a reward model: the origin's `trained` returns its scalar head `score`. Such a model has no
    language-model head, so embeddings are tied.

    Raises ConfigError if the model is of a kind that is not supported, or its weights are not there.
    """
    if not hf_config.is_model(folder):
        return None
    check_export(folder)
    keys = hf_config.read(folder, scores)[0] | ({"tie_embeddings": True} if scores else {})
    overrides = [f"model.{key}={value}" for key, value in keys.items()]
    rows = f"train.seq_len={keys['max_seq_len']}"  # GPT-2 has no more positions
    config = config_lib.resolve(config_files.load("base", [f"workdir={folder}", rows, *overrides]))
    held = Files(folder)
    reader = functools.cache(functools.partial(held.reader, config.model, scores))  # its checks take a moment

    def params(abstract: dict, shardings: dict) -> dict:
        leaf = reader()
        with working(f"reading {folder}", len(jax.tree.leaves(abstract)), "tensors") as tell:
            placed = told(quantized.placed(leaf, abstract, shardings), tell)
            return tree.nested((name, jax.block_until_ready(value)) for name, value in placed)

    def trained() -> dict[str, dict]:
        return {"score": tree.nested([(leaves.SCORE, np.asarray(reader()(leaves.SCORE), np.float32))])}

    return Origin(
        config=config,
        tokenizer=lambda: coder.load(folder),
        provenance={"path": str(folder.resolve())},
        params=params,
        leaf=lambda name: reader()(name),
        digest=held.digest,
        trained=trained if scores else dict,
    )


read_scores = functools.partial(read, scores=True)


def check_export(folder: pathlib.Path) -> None:
    """Raises ConfigError if a file that `jaxlm export` wrote has changed since.

    Checks nothing in other folders, nor in older exports, which have no checksums.
    """
    if not (folder / MARK).is_file():
        return
    try:
        wrote = files.json_of((folder / MARK).read_bytes()).get("sha256", {})
        bad = [n for n, value in wrote.items() if not (path := folder / n).is_file() or file_sha256(path) != value]
    except files.MANGLED:
        bad = [MARK]
    if bad:
        raise ConfigError(
            f"{folder / bad[0]} is not what jaxlm export wrote: copy it again; if you changed it, delete {folder / MARK}"
        )


def size(folder: pathlib.Path) -> int:
    return sum(path.stat().st_size for path in hf_config.weight_files(folder))


class Files:
    """The safetensors files of a folder: a single file, or those of an index.

    Raises:
      ConfigError: there are no files, one is missing, or a tensor has a type that is not a float.
      RunError: a file is damaged.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._file_of: dict[str, pathlib.Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in hf_config.weight_files(folder):
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118
                    part = file.get_slice(name)
                    self._file_of[name], self.shapes[name] = path, tuple(part.get_shape())
                    if part.get_dtype() not in _TYPES and not name.endswith(_HARMLESS):
                        raise ConfigError(f"{path}: {name} is of type {part.get_dtype()}, not {', '.join(_TYPES)}")

    def reader(self, config: ModelConfig, scores: bool = False) -> Callable[[str], np.ndarray]:
        """Returns a function that reads a parameter by its name, with the file's dtype; RunError if it can't.

        Raises ConfigError if a tensor is missing, has another shape, or is not in the model.
        """
        theirs = self._names(config)
        check_tensors({ours: self.shapes[name] for ours, name in theirs.items()}, config, scores)
        of_leaf = leaves.by_leaf(config, scores)
        joined = functools.lru_cache(1)(self.tensor)  # GPT-2's q, k and v are one tensor

        def read(leaf: str) -> np.ndarray:
            tensor, place = of_leaf[leaf]
            return tensor.to_leaf(joined(theirs[tensor.name]), place)

        return read

    def digest(self) -> str:
        """Returns a hash of all tensors, which does not depend on how they are split into files."""
        hasher = hashlib.sha256()
        with working(f"looking at {self._folder}", len(self.shapes), "tensors") as tell:
            for number, name in enumerate(sorted(self.shapes), 1):
                tensor = self.tensor(name)
                hasher.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
                hasher.update(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
                tell(number)
        return hasher.hexdigest()

    # A tensor is mapped into memory only while its leaves are made: the pages of a whole mapped file would count as memory.
    def tensor(self, name: str) -> np.ndarray:
        """Returns one tensor, with the file's dtype. Raises RunError if it can't be read."""
        path = self._file_of[name]
        with _opened(path) as file:
            try:
                return file.get_tensor(name)
            except Exception as error:
                raise _unreadable(path, error) from error

    def _names(self, config: ModelConfig) -> dict[str, str]:
        """Returns name in `interop.leaves` -> name in the files. The hub's GPT-2 has names without "transformer."."""
        wanted = [tensor.name for tensor in leaves.tensors(config)]
        prefix = wanted[0].partition(".")[0] + "."
        if any(name.startswith(prefix) for name in self.shapes):
            return {name: name for name in self.shapes}
        return {name if name in ("lm_head.weight", "score.weight") else prefix + name: name for name in self.shapes}


def check_tensors(shapes: Mapping[str, tuple[int, ...]], config: ModelConfig, scores: bool = False) -> None:
    """Raises ConfigError if these tensor names and shapes are not the model's; `scores` is True for a reward model."""
    wanted = {tensor.name: tensor.shape for tensor in leaves.tensors(config, scores)}
    for name, shape in wanted.items():
        if name not in shapes:
            raise ConfigError(f"Hugging Face checkpoint: tensor {name} is missing")
        if shapes[name] != shape:
            raise ConfigError(f"Hugging Face checkpoint: {name} has shape {shapes[name]}, the config says {shape}")
    # Some programs save tied models with a copy of the embedding.
    tied = ("lm_head.weight",) if config.tie_embeddings else ()
    left = [n for n in shapes if n not in wanted and not n.endswith(_HARMLESS) and n not in tied]
    if left:
        raise ConfigError(f"Hugging Face checkpoint: {len(left)} tensors fit nowhere, first {left[0]}")


def _opened(path: pathlib.Path) -> safetensors.safe_open:
    try:
        return safetensors.safe_open(str(path), framework="numpy")
    except Exception as error:
        raise _unreadable(path, error) from error


def _unreadable(path: pathlib.Path, error: Exception) -> RunError:
    return RunError(f"{path} can't be read ({config_files.first_line(error) or type(error).__name__}): copy it again")


DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16), "f32": np.dtype(np.float32)}
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
    """

    shard_bytes = 5_000_000_000  # of weights in a file, as in transformers; a larger tensor has a file of its own

    def __init__(self, folder: pathlib.Path, config: ModelConfig, dtype: str, scores: bool = False):
        self._folder, self._config, self._dtype = folder, config, dtype
        self._scores, self._tensors = scores, list(tensors(config, scores))
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
    def _written(self) -> Files:
        return Files(self._folder)

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
            if groups[-1] and full + self._nbytes(tensor) > self.shard_bytes:
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

    def _config_json(self, tokenizer: Coder) -> dict:
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


def write_json(path: pathlib.Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _pad_id(tokenizer: Coder) -> int | None:
    """Returns the padding id, which a reward model skips to find a text's last token; None if there is none."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.id_of(tokenizer_json.pad_token(tokenizer))
    name = chat.settings(tokenizer).get("pad_token")
    return tokenizer.id_of(name) if name else None


def generation(tokenizer: Coder) -> dict:
    ends, opening = chat.ends(tokenizer), tokenizer.opening
    return {"bos_token_id": opening[0] if opening else None, "eos_token_id": list(ends) if len(ends) > 1 else ends[0]}
