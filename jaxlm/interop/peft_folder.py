"""Folders of Hugging Face PEFT: writes an adapter into one and reads it back; opens one as the origin of a run."""

import dataclasses
import functools
import pathlib
import typing
from collections.abc import Iterator

import numpy as np
import safetensors.numpy

from jaxlm import tree
from jaxlm.config import ConfigError, ModelConfig
from jaxlm.console import Tell, told
from jaxlm.data.coder import Coder
from jaxlm.interop import hf_config, hf_folder, hf_weights, peft, peft_config
from jaxlm.interop.leaves import Content
from jaxlm.train import origin
from jaxlm.train.origin import Origin


class PeftFolder:
    """A folder that `PeftModel.from_pretrained` loads onto its base.

    Args:
      folder: where it is, or will be.
      config: the config of the model.
      dtype: "f32", "bf16" or "f16".
      adapted: the adapter.
      base: which model its base is; adapter_config.json says so.
    """

    def __init__(self, folder: pathlib.Path, config: ModelConfig, dtype: str, adapted: peft.Adapted, base: peft.Base):
        self._folder, self._config, self._dtype = folder, config, hf_folder.DTYPES[dtype]
        self._adapted, self._base = adapted, base
        leaves = tree.named_leaves(adapted.variables)
        self.count = len(leaves)
        self.bytes = sum(x.size for _, x in leaves) * self._dtype.itemsize

    def write(self, read: peft.Read, tokenizer: Coder, tell: Tell) -> None:
        """Writes the adapter, and the tokenizer that it was trained with.

        Args:
          read: leaf of the base -> its value.
          tell: is told how many tensors are made.
        """
        content, _ = peft.to_peft(self._adapted, self._config, read, self._base)
        tensors = {name: value for name, _, value in told(self.contents(read), tell)}
        safetensors.numpy.save_file(tensors, self._folder / peft_config.WEIGHTS, metadata={"format": "pt"})
        hf_folder.write_json(self._folder / peft_config.CONFIG, content)
        hf_folder.write_tokenizer(self._folder, tokenizer, self._config.max_seq_len)

    def contents(self, read: peft.Read) -> Iterator[Content]:
        """Yields the tensors that adapter_model.safetensors must hold."""
        _, tensors = peft.to_peft(self._adapted, self._config, read, self._base)
        for name, value in tensors.items():
            yield name, (), self._cast(name, value)

    def held(self, name: str) -> np.ndarray:
        """Returns what adapter_model.safetensors holds under a name."""
        return self._tensors[name]

    @functools.cached_property
    def _tensors(self) -> dict[str, np.ndarray]:
        return read_files(self._folder)[1]

    def _cast(self, name: str, value: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            cast = value.astype(self._dtype)
        if not np.isfinite(cast.astype(np.float32)).all():
            raise ConfigError(f"{name} has numbers too large for this type: export with --dtype=f32")
        return cast


def read_files(folder: pathlib.Path) -> tuple[dict[str, typing.Any], dict[str, np.ndarray]]:
    """Returns (the content of adapter_config.json, name -> tensor) of a folder.

    Raises:
      ConfigError: a file is missing or damaged, or the adapter is of a kind that is not supported.
    """
    content = peft_config.read(folder)
    try:
        return content, safetensors.numpy.load_file(folder / peft_config.WEIGHTS)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{folder}: {peft_config.WEIGHTS} can't be read ({error}): copy it again") from None


def read(folder: pathlib.Path) -> Origin | None:
    """Returns the origin in a folder of PEFT, its adapter beside its base; None if it holds none. For `train.origin.open`.

    Raises:
      ConfigError: the adapter is of a kind that is not supported, its base is not here, or the two do not fit.
    """
    if not peft_config.is_adapter(folder):
        return None
    hf_weights.check_export(folder)
    content, tensors = read_files(folder)
    home = peft_config.base_of(folder)
    checkpoint = "latest" if hf_config.is_model(home) else content.get("revision") or "latest"
    base = origin.open(home, checkpoint, readers=(hf_weights.read,))
    try:
        adapted = peft.from_peft(content, tensors, base.config.model, base.leaf)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None
    config = dataclasses.replace(base.config, adapter=adapted.adapter.settings)
    return dataclasses.replace(
        base,
        config=config,
        tokenizer=lambda: origin.prompted(base.tokenizer(), config),
        provenance={"path": str(folder.resolve())},
        state=None,
        meta=None,
        trained=lambda: adapted.variables,
        adapter=adapted.adapter,
    )
