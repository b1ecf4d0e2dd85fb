"""Reads the weights of a Hugging Face folder leaf by leaf, straight into shards, without a second copy of the model."""

import dataclasses
import functools
import hashlib
import itertools
import pathlib
from collections.abc import Callable, Mapping

import jax
import numpy as np
import safetensors

from jaxlm import config as config_lib
from jaxlm.config import ConfigError, ModelConfig, RunError, config_files
from jaxlm.data.shards.verify import file_sha256
from jaxlm.data.tokenizer import coder
from jaxlm.devices import tree
from jaxlm.devices.processes import working
from jaxlm.devices.sharding import from_host
from jaxlm.host import files
from jaxlm.interop import hf_config, leaves
from jaxlm.train.origin import Origin

MARK = "jaxlm_export.json"  # in an export: its files, and what was exported
_TYPES = ("BF16", "F16", "F32", "F64")
# Buffers of old checkpoints, which a state dict may hold besides the parameters.
_HARMLESS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def read(folder: pathlib.Path) -> Origin | None:
    """Returns the origin in a Hugging Face folder; None if the folder holds no such model. A reader for `train.origin.open`.

    Raises ConfigError if the model is of a kind that is not supported, or its weights are not there.
    """
    if not hf_config.is_model(folder):
        return None
    check_export(folder)
    return _origin(folder, hf_config.read(folder)[0])


def read_scores(folder: pathlib.Path) -> Origin | None:
    """Returns the origin in a folder of a Hugging Face reward model; None if the folder holds no Hugging Face model.

    The origin's `trained` returns the scalar head `score`. The model has no language-model head, so embeddings are tied.
    """
    if not hf_config.is_model(folder):
        return None
    check_export(folder)
    keys = hf_config.read(folder, scores=True)[0] | {"tie_embeddings": True}
    origin = _origin(folder, keys, scores=True)

    def trained() -> dict[str, dict]:
        kernel = np.asarray(origin.leaf(leaves.SCORE), np.float32)
        return {"score": tree.nested([(leaves.SCORE, kernel)])}

    return dataclasses.replace(origin, trained=trained)


def _origin(folder: pathlib.Path, keys: dict[str, object], scores: bool = False) -> Origin:
    overrides = [f"model.{key}={value}" for key, value in keys.items()]
    rows = f"train.seq_len={keys['max_seq_len']}"  # GPT-2 has no more positions
    config = config_lib.resolve(config_files.load("base", [f"workdir={folder}", rows, *overrides]))
    held = Files(folder)
    reader = functools.cache(functools.partial(held.reader, config.model, scores))  # its checks take a moment
    return Origin(
        config=config,
        tokenizer=lambda: coder.load(folder),
        provenance={"path": str(folder.resolve())},
        params=functools.partial(held.params, config.model, scores=scores),
        leaf=lambda name: reader()(name),
        digest=held.digest,
    )


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

    def params(self, config: ModelConfig, abstract: dict, shardings: dict, scores: bool = False) -> dict:
        """Returns the model's parameters with the dtypes of `abstract`, sharded as in `shardings`.

        Raises ConfigError if a tensor is missing, has another shape, or is not in the model; RunError if it can't be read.
        """
        read, done = self.reader(config, scores), itertools.count(1)
        with working(f"reading {self._folder}", len(jax.tree.leaves(abstract)), "tensors") as tell:

            def make(name: str, leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.Array:
                made = jax.block_until_ready(from_host(read(name), leaf.shape, leaf.dtype, sharding))
                tell(next(done))
                return made

            return tree.map_named(make, abstract, shardings)

    def reader(self, config: ModelConfig, scores: bool = False) -> Callable[[str], np.ndarray]:
        """Returns a function that reads a parameter by its name, with the file's dtype. Raises as `params`."""
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
