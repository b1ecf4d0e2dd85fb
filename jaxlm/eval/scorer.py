"""Scores texts with a run's model, for the stage `perplexity` of `jaxlm prepare`."""

import math
import pathlib
from collections.abc import Callable

import jax
import numpy as np

from jaxlm import config as config_lib
from jaxlm import config_files
from jaxlm.config import ConfigError
from jaxlm.data import ids as ids_lib
from jaxlm.data import rows
from jaxlm.eval import loss, model


def bits_per_byte(workdir: str) -> Callable[[str], float]:
    """Returns a function `text -> bits per byte`, which scores the first `train.seq_len` tokens with a run's latest checkpoint.

    In a config: `scorer="jaxlm.eval.scorer:bits_per_byte RUN"`. Raises ConfigError if there is no run or no checkpoint.
    """
    path = pathlib.Path(workdir).expanduser() / "config.json"
    if not path.is_file():
        raise ConfigError(f"no run in {workdir}: it has no config.json")
    config = config_lib.resolve(config_files.from_run(path))
    run = model.restore(config.workdir, "latest", config.model, config.data, config.hardware, config.distributed)
    coder, length, seq_len = run.tokenizer, run.tokenizer.token_bytes(), config.train.seq_len
    nll_of = jax.jit(loss.summed_nll(run.model, config.loss.tile_tokens))

    def score(text: str) -> float:
        ids = ids_lib.document(coder, text[: 16 * seq_len])[: seq_len + 1]
        row_1xT1 = np.full((1, seq_len + 1), run.data.eos_id, np.int32)
        row_1xT1[0, : len(ids)] = ids
        ids = ids[1:]
        weights = (np.arange(seq_len) < len(ids)).astype(np.float32)[None]
        batch = {**rows.make_batch(row_1xT1, run.data.eos_id), "weights": weights}
        with jax.set_mesh(run.mesh):
            nll = float(nll_of({"params": run.params}, batch))
        return nll / math.log(2) / max(1, int(length[ids].sum()))

    return score
