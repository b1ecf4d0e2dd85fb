"""Folders of Hugging Face PEFT: writes an adapter into one and reads it back; opens one as the origin of a run."""

import json
import pathlib
import typing
from collections.abc import Callable

import numpy as np
import safetensors.numpy

from jaxlm import tree
from jaxlm.config import ConfigError, ModelConfig, RunError
from jaxlm.data.coder import Coder
from jaxlm.interop import hf_folder, peft


class PeftFolder:
    """A folder that `PeftModel.from_pretrained` loads onto its base.

    Args:
      folder: where it is, or will be.
      config: the config of the model.
      dtype: "f32", "bf16" or "f16".
      adapted: the adapter.
      base: where its base is; adapter_config.json says so.
    """

    def __init__(self, folder: pathlib.Path, config: ModelConfig, dtype: str, adapted: peft.Adapted, base: str):
        self._folder, self._config, self._dtype = folder, config, hf_folder.TYPES[hf_folder.DTYPES[dtype]]
        self._adapted, self._base = adapted, base
        self._written: dict[str, np.ndarray] = {}
        self.bytes = sum(x.size for _, x in tree.named_leaves(adapted.variables)) * self._dtype.itemsize

    def write(self, read: peft.Read, tokenizer: Coder, tick: Callable[[int], None]) -> None:
        """Writes the adapter, and the tokenizer that it was trained with.

        Args:
          read: leaf of the base -> its value.
          tick: is told how many tensors were written so far.
        """
        content, tensors = peft.to_peft(self._adapted, self._config, read, self._base)
        self._written = {name: self._cast(name, value) for name, value in tensors.items()}
        safetensors.numpy.save_file(self._written, self._folder / peft.WEIGHTS, metadata={"format": "pt"})
        hf_folder.write_json(self._folder / peft.CONFIG, content)
        hf_folder.write_tokenizer(self._folder, tokenizer, self._config.max_seq_len)
        tick(len(tensors))

    def held(self) -> tuple[dict[str, typing.Any], dict[str, np.ndarray]]:
        """Returns (the content of adapter_config.json, name -> tensor, float32), read back from the disk.

        Raises RunError if a tensor is not what was written.
        """
        content, tensors = read_files(self._folder)
        for name, value in self._written.items():
            if name not in tensors or tensors[name].tobytes() != value.tobytes():
                raise RunError(f"what was written is not the run's: {name} differs; export again")
        return content, {name: value.astype(np.float32) for name, value in tensors.items()}

    def _cast(self, name: str, value: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            cast = value.astype(self._dtype)
        if not np.isfinite(cast.astype(np.float32)).all():
            raise ConfigError(f"{name} has numbers too large for this type: export with --dtype=f32")
        return cast


def is_adapter(folder: pathlib.Path) -> bool:
    """True if a folder holds an adapter of PEFT."""
    return (folder / peft.CONFIG).is_file()


def read_files(folder: pathlib.Path) -> tuple[dict[str, typing.Any], dict[str, np.ndarray]]:
    """Returns (the content of adapter_config.json, name -> tensor) of a folder.

    Raises:
      ConfigError: a file is missing or damaged, or the adapter is of a kind that is not supported.
    """
    try:
        content = json.loads((folder / peft.CONFIG).read_text(encoding="utf-8"))
        tensors = safetensors.numpy.load_file(folder / peft.WEIGHTS)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{folder} holds no whole adapter of PEFT ({error}): copy it again") from None
    try:
        peft.check(content)
    except ConfigError as error:
        raise ConfigError(f"{folder} can't be read: {error}") from None
    return content, tensors
