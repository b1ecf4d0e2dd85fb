"""Continues prompts that are known beforehand, each by the same settings."""

from collections.abc import Sequence

import numpy as np

from jaxlm.config import ConfigError, SampleConfig
from jaxlm.models.decode import schedule
from jaxlm.models.decode.engine import Engine
from jaxlm.models.decode.schedule import Ask
from jaxlm.models.transformer import Transformer

Ids = Sequence[int]


def generate(
    model: Transformer,
    variables: dict,
    prompts: Sequence[Ids],
    settings: SampleConfig,
    stop_ids: Ids = (),
    seed: int = 0,
) -> list[list[int]]:
    """Continues each prompt. Returns each prompt's new ids, including the stop id if one ended the row.

    A row depends on its own prompt, the seed and its place in the list; on the other prompts only by rounding. If the
    parameters are sharded over a mesh, call it under `jax.set_mesh`.

    Args:
      settings: A row ends after `max_new_tokens` ids, at a stop id, or when prompt and new ids fill `max_seq_len`.
        `temperature` 0 takes the likeliest token. `top_k` samples among the k likeliest tokens; 0 means all. `top_p`
        samples among the likeliest tokens that together have this probability (arXiv:1904.09751); 1 means all. Other
        keys are not read.

    Raises:
      ConfigError: a prompt is empty, has an id outside the vocabulary or leaves no room in the context, or a setting is
        out of range.
      RunError: the logits are not finite.
    """
    engine = Engine(model, variables, prefix_bytes=0)
    drawn = schedule.tokens_of(engine, asks(prompts, settings, stop_ids, seed))
    return [[token.id for token in tokens] for tokens in drawn]


def asks(prompts: Sequence[Ids], settings: SampleConfig, stop_ids: Ids = (), seed: int = 0) -> list[Ask]:
    """Returns the requests of `generate`. Raises ConfigError if a setting is out of range."""
    s = settings
    if s.max_new_tokens < 0 or not s.temperature >= 0 or s.top_k < 0 or not 0 < s.top_p <= 1:
        raise ConfigError(
            f"max_new_tokens={s.max_new_tokens}, temperature={s.temperature} and top_k={s.top_k} must be at least 0, "
            f"top_p={s.top_p} above 0 and at most 1"
        )
    seeds = np.random.SeedSequence(seed % 2**64).generate_state(len(prompts)).tolist()
    own = {"temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p, "stop_ids": tuple(stop_ids)}
    return [
        Ask(tuple(map(int, ids)), s.max_new_tokens, seed=of_row, keeps_stop=True, **own)
        for ids, of_row in zip(prompts, seeds, strict=True)
    ]
