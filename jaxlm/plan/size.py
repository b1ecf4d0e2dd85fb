"""`--params=10M`: the keys that give a config's model another size, in the family's proportions."""

import dataclasses
import math
from collections.abc import Iterator

from jaxlm.config import Config, ConfigError, ModelConfig
from jaxlm.data.shards import vocabulary
from jaxlm.host.console import human
from jaxlm.plan.flops import count_params
from jaxlm.plan.ladder.rungs import SHAPE, rounded, smaller

_POWERS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_OFF = 0.05  # of the parameters that are asked for, at most
_MOST_WIDTH = 1 << 15
_DEEPER = 3  # layers: at most so many times the family's own for the width
_WIDER = 0.25  # d_ff: at most this share more or less than the family's own
_STEP, _STEPS = 1.1, 40  # sizes that are tried for the next one that fits


def overrides(config: Config, text: str) -> list[str]:
    """Returns KEY=VALUE of the keys that give the model about `text` parameters, embeddings included: "10M", "1.5B".

    Raises ConfigError if it is no number, or so few that over half of them would be embeddings.
    """
    power = _POWERS.get(text[-1:].lower(), 0)
    try:
        wanted = round(float(text[:-1] if power else text) * (power or 1))
    except (ValueError, OverflowError):  # ten; four hundred digits
        wanted = 0
    if wanted <= 0:
        raise ConfigError(f"--params={text}: a number of parameters, such as 10M or 1.5B")
    vocab_size = config.model.vocab_size or vocabulary.known(config)[0]
    if not vocab_size:
        raise ConfigError("--params counts the embedding too: give --config.model.vocab_size=N")
    sized = _sized(dataclasses.replace(config.model, vocab_size=vocab_size), wanted, text)
    return [f"model.{key}={getattr(sized, key)}" for key in SHAPE]


def _sized(model: ModelConfig, wanted: int, text: str) -> ModelConfig:
    """Returns the model nearest to the family's proportions among those of about `wanted` parameters."""
    if fitting := _nearest(model, wanted):
        return fitting
    grown = (round(wanted * _STEP**n) for n in range(1, _STEPS))
    larger = next((size for size in grown if _nearest(model, size)), 0)
    raise ConfigError(
        f"--params={text}: over half of it would be embeddings of {model.vocab_size:,} tokens, or the family's "
        f"proportions would be lost; {f'about {human(larger)} is the next size' if larger else 'ask for another size'}, or set "
        "a smaller --config.model.vocab_size"
    )


def _nearest(model: ModelConfig, wanted: int) -> ModelConfig | None:
    """Returns the model nearest to the family's proportions among those of about `wanted` parameters; None without one."""
    fitting = []
    for family in _widths(model):
        embedding = model.vocab_size * family.d_model * (1 if model.tie_embeddings else 2)
        if 2 * embedding > wanted:
            break
        layer = count_params(dataclasses.replace(family, n_layers=family.n_layers + 1)) - count_params(family)
        layers = family.n_layers + (wanted - count_params(family)) / layer
        for n in range(max(1, math.floor(layers / _DEEPER)), min(math.ceil(2 * layers), _DEEPER * family.n_layers) + 1):
            tried = _with_d_ff(dataclasses.replace(family, n_layers=n), wanted)
            if abs(count_params(tried) - wanted) <= _OFF * wanted:
                away = abs(math.log(n / family.n_layers)) + abs(math.log(tried.d_ff / family.d_ff))
                fitting.append((away, family.d_model, tried))
    return min(fitting, key=lambda each: each[:2])[2] if fitting else None


def _widths(model: ModelConfig) -> Iterator[ModelConfig]:
    """Yields the family's models by width, with whole groups of heads of the family's own size."""
    step = model.head_dim * (model.n_heads // model.n_kv_heads)
    for width in range(step, _MOST_WIDTH, step):
        heads = {"n_heads": width // model.head_dim, "n_kv_heads": width // step, "head_dim": model.head_dim}
        yield dataclasses.replace(smaller(model, width), **heads)


def _with_d_ff(model: ModelConfig, wanted: int) -> ModelConfig:
    """Returns the model with `d_ff` changed by at most `_WIDER`, so that it has about `wanted` parameters."""
    per_unit = count_params(dataclasses.replace(model, d_ff=model.d_ff + 1)) - count_params(model)
    d_ff = model.d_ff + (wanted - count_params(model)) / per_unit
    d_ff = min(max(d_ff, (1 - _WIDER) * model.d_ff), (1 + _WIDER) * model.d_ff)
    return dataclasses.replace(model, d_ff=rounded(d_ff))
