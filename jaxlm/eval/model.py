"""Restores a run's model on this machine's devices, to sample from it or to score texts."""

import dataclasses
import pathlib
import typing
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from jaxlm import models
from jaxlm.config import Config, ConfigError, MeshConfig, RunError, config_files
from jaxlm.data.shards import shards
from jaxlm.data.tokenizer import coder
from jaxlm.devices import processes, sharding
from jaxlm.models import adapters
from jaxlm.models.transformer import Transformer
from jaxlm.plan import settle
from jaxlm.run import ledger
from jaxlm.run.checkpoints import digest
from jaxlm.run.workdir import check_same_model
from jaxlm.step.objectives.base import Variables
from jaxlm.train import origin

MOST_BESIDE = 8  # adapters of one model


@dataclasses.dataclass(frozen=True)
class Restored:
    """A run's model, restored from a checkpoint onto this machine's devices.

    Attributes:
      mesh: has all devices on the axis fsdp.
      variables: the parameters and, if trained beside them, an adapter or the virtual tokens of prompt tuning.
      data: the data that the run was trained on; None for a model from elsewhere.
      step: the training step at which the checkpoint was saved; 0 for a model from elsewhere.
      name: the model in a message: "checkpoint 100 of RUN", "the average of RUN: last 2, of the steps 90, 100", "the model of
        FOLDER".
    """

    mesh: Mesh
    model: Transformer
    variables: Variables
    tokenizer: coder.Coder
    data: shards.DataDir | None
    step: int
    name: str


class Beside(typing.NamedTuple):
    """An adapter that is served beside its base."""

    name: str
    tokenizer: coder.Coder
    adapter: adapters.Adapter
    variables: Variables


def beside(base: str, checkpoint: str, words: Sequence[str], readers: Sequence[origin.Reader]) -> list[Beside]:
    """Opens the LoRA adapters in `words`, each NAME=RUN or NAME=FOLDER of PEFT. Raises ConfigError.

    `base`, `checkpoint`: the model for which they must have been trained.
    """
    if len(words) > MOST_BESIDE:
        raise ConfigError(f"{len(words)} adapters: at most {MOST_BESIDE} can be beside a model; leave some out")
    own, opened = origin.open(base, checkpoint, readers).digest() if words else "", dict[str, Beside]()
    for word in words:
        name, _, path = word.partition("=")
        if not name or not path or name in opened:
            raise ConfigError(f"{word!r} is no adapter: write NAME=RUN or NAME=FOLDER, each name once")
        folder, step = config_files.at_step(path)
        source = origin.open(folder, step or "latest", readers, merge=False)
        if not source.adapter or source.adapter.settings.kind != "lora" or source.adapter.row_ids:
            raise ConfigError(f"{path} is not LoRA alone, without rows of the embedding: serve it by itself")
        if source.digest() != own:
            raise ConfigError(
                f"{path} is an adapter of another base than {base}: serve it beside its own, or by itself"
            )
        opened[name] = Beside(name, source.tokenizer(), source.adapter, source.trained())
    return [*opened.values()]


def with_adapters(restored: Restored, others: Sequence[Beside]) -> Variables:
    """Returns the variables of a model with stacked adapters beside it, if there are any."""
    if not others:
        return restored.variables
    stacked = adapters.stacked([(other.adapter, other.variables) for other in others])
    return restored.variables | {"adapters": jax.device_put(stacked, sharding.replicated(restored.mesh))}


def is_there(workdir: str) -> bool:
    return any((pathlib.Path(workdir) / name).is_file() for name in ("config.json", "adapter_config.json"))


def check_run(config: Config, word: str) -> None:
    """Raises ConfigError if `config.workdir` has no run or model. `word` names that folder on the command line."""
    if not is_there(config.workdir):
        raise ConfigError(f"no run in {config.workdir}: jaxlm train {word} makes one there")


def restore(config: Config, checkpoint: str, readers: Sequence[origin.Reader] = ()) -> Restored:
    """Restores the model in `config.workdir` from a checkpoint ("latest", "best" or a step), or by one of `readers`.

    Model settings that are "auto" get the values that suit this machine. `readers` are those of `origin.open`.

    Raises:
      ConfigError: there is no such checkpoint.
      RunError: the checkpoint is damaged, or a model from elsewhere has a weight that is not finite.
    """
    workdir = config.workdir
    source = origin.open(workdir, checkpoint, readers)
    check_same_model(pathlib.Path(workdir), config.model)
    # A new mesh, since the run's own may need more devices than this machine has.
    all_devices = MeshConfig(data=1, fsdp=-1, tensor=1, context=1)
    mesh = processes.start(config.hardware, config.distributed, all_devices, config.model.dtype)
    settled = settle.to_read(config.model, jax.devices()[0].platform)
    trained = (pathlib.Path(config.data.dir) / shards.MANIFEST).is_file()
    data = shards.open_data(config.data.dir) if trained else None
    model = models.build(settled, settled.attention)
    abstract = models.abstract_params(model)
    params = source.params(abstract, sharding.tree_shardings(abstract, models.logical_axes(model), mesh))
    variables = {"params": params} | jax.device_put(source.trained(), sharding.replicated(mesh))
    if source.adapter:
        model = source.adapter.attach(model)
    if data is None and (bad := digest.look(variables)[1]):  # a run never saves such weights
        name = bad[0].removeprefix("params/")
        raise RunError(f"the model of {workdir}: {name} has a number that is not finite; copy the model's files again")
    step = source.provenance.get("step")
    name = f"the model of {workdir}" if step is None else f"checkpoint {step} of {workdir}"
    if config_files.averaged(workdir) and (starts := ledger.read(pathlib.Path(workdir))["starts"]):
        name = starts[0]["ended"]["why"]  # of which steps it is an average
    return Restored(mesh, model, variables, source.tokenizer(), data, int(step or 0), name)
