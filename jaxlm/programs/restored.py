"""A trained model back from its run's folder: to sample from, or to judge texts with."""

import dataclasses
import math
import pathlib
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxlm import config as config_lib
from jaxlm import config_files, models, processes, sharding
from jaxlm.config import Config, ConfigError, MeshConfig, RunError
from jaxlm.data import rows, shards
from jaxlm.models import hardware
from jaxlm.objectives import lm
from jaxlm.ops import xent
from jaxlm.train.checkpoint import Checkpointer, CorruptCheckpointError
from jaxlm.train.workdir import check_same_model


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint on the devices of this machine."""

    config: Config
    mesh: Mesh
    model: typing.Any
    params: typing.Any
    data: shards.DataDir
    step: int


def restore(config: Config, checkpoint: str) -> Restored:
    """The model of `config.workdir` at a checkpoint ("latest", "best" or a step).

    Raises ConfigError when there is none, RunError when it is damaged.
    """
    # A mesh of its own: the one that trained may need more devices than there are here.
    config = dataclasses.replace(config, mesh=MeshConfig(data=1, fsdp=-1, tensor=1, context=1))
    workdir = pathlib.Path(config.workdir)
    check_same_model(workdir, config.model)
    mesh = processes.start(config.hardware, config.distributed, config.mesh, config.model.dtype)
    settled = hardware.for_platform(config.model, jax.devices()[0].platform)
    # Nothing is differentiated here; and a run's `auto` was settled for its training alone.
    config = dataclasses.replace(config, model=dataclasses.replace(settled, remat="none", offload=False))
    checkpointer = Checkpointer(workdir / "checkpoints", read_only=True)
    step = checkpointer.find(checkpoint)
    data = shards.open_data(config.data.dir)
    model = models.build(config.model, config.model.attention)
    abstract = models.abstract_params(model)
    where = sharding.tree_shardings(abstract, models.logical_axes(model), mesh)
    try:
        params = checkpointer.restore_params(step, abstract, where)
    except CorruptCheckpointError as error:
        others = [str(other) for other in checkpointer.steps() if other != step]
        hint = f"; try --checkpoint={others[-1]}" if others else ""
        raise RunError(f"{error}{hint}") from error
    finally:
        checkpointer.close()
    return Restored(config, mesh, model, params, data, step)


def bits_per_byte(workdir: str) -> Callable[[str], float]:
    """A function from text to bits per byte under a run's latest checkpoint, at most one context of it looked at.

    For the stage `perplexity`: `scorer="jaxlm.programs.restored:bits_per_byte RUN"`. Raises ConfigError.
    """
    path = pathlib.Path(workdir).expanduser() / "config.json"
    if not path.is_file():
        raise ConfigError(f"no run in {workdir}: it has no config.json")
    run = restore(config_lib.resolve(config_files.from_run(path)), "latest")
    coder, length, seq_len = run.data.tokenizer(), run.data.token_bytes(), run.config.train.seq_len

    @jax.jit
    def summed_nll(params: typing.Any, batch: dict[str, jax.Array]) -> jax.Array:
        hidden_1xTxD = lm.hidden(run.model, params, batch, key=None, train=False)
        nll_T = xent.token_nll(
            hidden_1xTxD[0],
            models.head_kernel(params, run.config.model),
            batch["targets"][0],
            vocab_size=run.config.model.vocab_size,
            tile=run.config.loss.tile_tokens,
        )
        return jnp.sum(nll_T * batch["weights"][0])

    def score(text: str) -> float:
        ids = coder.encode(text[: 16 * seq_len])[:seq_len]
        row_1xT1 = np.full((1, seq_len + 1), run.data.eos_id, np.int32)
        row_1xT1[0, 1 : 1 + len(ids)] = ids  # EOS opens a document
        weights = (np.arange(seq_len) < len(ids)).astype(np.float32)[None]
        batch = {**rows.make_batch(row_1xT1, run.data.eos_id), "weights": weights}
        with jax.set_mesh(run.mesh):
            nll = float(summed_nll(run.params, batch))
        return nll / math.log(2) / max(1, int(length[ids].sum()))

    return score
