"""The families of models by their name in a config."""

from jaxlm.config import ConfigError, ModelConfig
from jaxlm.models.gpt2 import GPT2
from jaxlm.models.llama import Llama
from jaxlm.models.transformer import Transformer

FAMILIES = {"llama": Llama, "gpt2": GPT2}


def build(model_config: ModelConfig, attention_backend: str) -> Transformer:
    """Returns the model of a config. The model holds no parameters: see `params.init_params`.

    Args:
      model_config: the section `model` of a resolved config.
      attention_backend: one of `ops.attention.BACKENDS`, as `ops.attention.resolve_backend` returns it.

    Raises:
      ConfigError: the family is unknown.
    """
    if model_config.family not in FAMILIES:
        raise ConfigError(f"config.model.family={model_config.family!r}: choose one of {', '.join(FAMILIES)}")
    return FAMILIES[model_config.family](model_config, attention_backend)
