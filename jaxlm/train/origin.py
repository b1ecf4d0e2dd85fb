"""Opens weights to start from: the checkpoint of a run, or a folder whose format a reader knows.

Nothing is read before `params` or `state` is called. They read leaf by leaf, straight into the shards.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from jaxlm import config as config_lib
from jaxlm import config_files
from jaxlm.config import Config, ConfigError, RunError
from jaxlm.data import coder, shards
from jaxlm.data.rows import check_fingerprint
from jaxlm.objectives.base import Variables
from jaxlm.step.parts import Parts
from jaxlm.step.state import TrainState
from jaxlm.train import workdir
from jaxlm.train.checkpoints import leaf as leaves
from jaxlm.train.checkpoints.damage import CorruptCheckpointError
from jaxlm.train.checkpoints.store import Checkpointer
from jaxlm.train.scores import Scores


@dataclasses.dataclass(frozen=True)
class Origin:
    """Weights to start from.

    Attributes:
      config: the config of the model.
      tokenizer: a function that reads the model's tokenizer.
      provenance: what identifies the weights in the ledger: `path`, and `step` for a run's checkpoint.
      params: (shapes, shardings) -> the model's parameters. Raises RunError if they are damaged.
      leaf: name -> one parameter, on the host, in the type that is stored. Raises RunError if it is damaged.
      state: (shapes, shardings) -> the train state; None if there is none, as in a folder of weights.
      meta: () -> what a run's checkpoint says of its config and data; None in a folder of weights.
    """

    config: Config
    tokenizer: Callable[[], coder.Coder]
    provenance: dict[str, str | int]
    params: Callable[[dict, dict], dict]
    leaf: Callable[[str], np.ndarray]
    state: Callable[[TrainState, TrainState], TrainState] | None = None
    meta: Callable[[], dict] | None = None

    def branch(self, parts: Parts, fingerprint: dict) -> tuple[TrainState, Variables, dict]:
        """Returns (state, frozen variables, meta) for a run that goes on from this state.

        Its model, optimizer and order of batches must be the same. `meta` names the batches that were passed over.

        Args:
          parts: the parts of that run.
          fingerprint: the fingerprint of its data.

        Raises:
          ConfigError: there is no state here, or the model, optimizer or data differ.
          RunError: the checkpoint is damaged.
        """
        c = parts.config
        if self.state is None or self.meta is None:
            raise ConfigError(f"{c.origin} holds weights and no state to branch from: set origin_state=False")
        workdir.check_same_model(pathlib.Path(c.origin), c.model)
        workdir.check_same_optimizer(pathlib.Path(c.origin), c.optim)
        meta = self.meta()
        check_fingerprint(meta["fingerprint"], fingerprint)
        state = self.state(parts.abstract, parts.shardings)
        return state, parts.load_frozen(self), {"passed_over": meta.get("passed_over", [])}


Reader = Callable[[pathlib.Path], Origin | None]  # None: the folder is of another format


def open(path: str | pathlib.Path, checkpoint: str | int = "latest", readers: Sequence[Reader] = ()) -> Origin:
    """Opens the weights in a folder: a jaxlm run, or a format that one of the readers knows.

    Args:
      checkpoint: which checkpoint of a run: "latest", "best" or a step. Other folders have the latest alone.

    Raises:
      ConfigError: there is no such folder, checkpoint or format.
    """
    folder = pathlib.Path(path).expanduser()
    if (folder / "checkpoints").is_dir() and (folder / "config.json").is_file():
        return _run(folder, checkpoint)
    for read in readers:
        if origin := read(folder):
            if checkpoint != "latest":
                raise ConfigError(
                    f"{path} is no run but a model, which has no checkpoint {checkpoint}: ask for none, or for latest"
                )
            return origin
    if not folder.is_dir():
        raise ConfigError(f"no folder {path}")
    absent = "config.json" if not (folder / "config.json").is_file() else "checkpoints: train first"
    raise ConfigError(f"no run to begin from in {path}: it has no {absent}")


def _run(folder: pathlib.Path, checkpoint: str | int) -> Origin:
    config = config_lib.resolve(config_files.from_run(folder / "config.json"))
    scores = Scores(config.checkpoint).read(folder)
    store = Checkpointer(folder / "checkpoints", scores=scores, read_only=True)
    step = store.find(checkpoint)

    def params(abstract: dict, shardings: dict) -> dict:
        try:
            return store.restore_params(step, abstract, shardings)
        except CorruptCheckpointError as error:
            others = [str(other) for other in store.steps() if other != step]
            hint = f"; try --checkpoint={others[-1]}" if others else ""
            raise RunError(f"{error}{hint}") from error

    return Origin(
        config=config,
        tokenizer=lambda: _tokenizer(folder, config.data.dir),
        provenance={"path": str(folder.resolve()), "step": step},
        params=params,
        state=lambda abstract, shardings: store.restore(step, abstract, shardings),
        meta=lambda: store.meta(step),
        leaf=leaves.reader(folder / "checkpoints" / str(step)),
    )


def _tokenizer(folder: pathlib.Path, data_dir: str) -> coder.Coder:
    """The tokenizer of a run: its data's, or the one that was imported with it."""
    kept = folder / workdir.TOKENIZER
    if kept.is_dir() and not (pathlib.Path(data_dir) / shards.MANIFEST).is_file():
        return coder.load(kept)
    return shards.open_data(data_dir).tokenizer()
