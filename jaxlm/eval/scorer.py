"""Scores texts with a run's model, for the stage `perplexity` of `jaxlm prepare`."""

import math
from collections.abc import Callable

from jaxlm import config as config_lib
from jaxlm import config_files, files
from jaxlm.config import ConfigError
from jaxlm.data import ids as ids_lib
from jaxlm.eval import likelihood, model


def bits_per_byte(workdir: str) -> Callable[[str], float]:
    """Returns a function `text -> bits per byte`, which scores the first `train.seq_len` tokens with a run's latest checkpoint.

    In a config: `scorer="jaxlm.eval.scorer:bits_per_byte RUN"`. Raises ConfigError if there is no run or no checkpoint.
    """
    path = files.expanded(workdir) / "config.json"
    if not path.is_file():
        raise ConfigError(f"no run in {workdir}: it has no config.json")
    config = config_lib.resolve(config_files.from_run(path))
    run = model.restore(config, "latest")
    scorer = likelihood.of_restored(run, config)
    length, seq_len = run.tokenizer.token_bytes(), config.train.seq_len

    def score(text: str) -> float:
        ids = ids_lib.document(scorer.tokenizer, text[: 16 * seq_len])[: seq_len + 1]
        opened = max(1, len(scorer.tokenizer.opening))
        context, scored = ids[:opened], ids[opened:]
        (found,) = scorer.score([(context, scored)])
        return -found.logp / math.log(2) / max(1, int(length[scored].sum()))

    return score
