"""Restores a run's model on this machine's devices, to sample from it or to score texts; says what int8 weights cost."""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxlm import models
from jaxlm.config import Config, ConfigError, MeshConfig, RunError, config_files
from jaxlm.data.batches.document_rows import ValidationBatch, validation_rows
from jaxlm.data.shards import shards
from jaxlm.data.tokenizer import coder
from jaxlm.devices import processes, sharding
from jaxlm.eval import held_out
from jaxlm.models import adapters, quantized
from jaxlm.models.transformer import Transformer
from jaxlm.plan import settle
from jaxlm.run import ledger
from jaxlm.run.checkpoints import digest
from jaxlm.run.workdir import check_same_model
from jaxlm.step.objectives import base
from jaxlm.step.objectives.base import Batch, Variables
from jaxlm.step.step import cast
from jaxlm.train import origin

MOST_BESIDE = 8  # adapters of one model
_TOKENS = 4096  # of held-out text, about: the sources share them

Figures = dict[str, tuple[float, np.ndarray]]  # source -> (bits per byte, the likeliest token at each place)


@dataclasses.dataclass(frozen=True)
class Restored:
    """A run's model, restored from a checkpoint onto this machine's devices.

    Attributes:
      mesh: has all devices on the axis fsdp.
      variables: the parameters and, if trained beside them, an adapter or the virtual tokens of prompt tuning.
      data: the data that the run was trained on; None for a model from elsewhere.
      beside: name -> tokenizer, of the adapters that are stacked in the collection `adapters` of the variables, in order.
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
    beside: dict[str, coder.Coder]


def is_there(workdir: str) -> bool:
    return any((pathlib.Path(workdir) / name).is_file() for name in ("config.json", "adapter_config.json"))


def check_run(config: Config, word: str) -> None:
    """Raises ConfigError if `config.workdir` has no run or model. `word` names that folder on the command line."""
    if not is_there(config.workdir):
        raise ConfigError(f"{config_files.no_run(config.workdir, word)}: jaxlm train {word} makes one there")


def restore(
    config: Config, checkpoint: str, readers: Sequence[origin.Reader] = (), words: Sequence[str] = ()
) -> Restored:
    """Restores the model in `config.workdir` from a checkpoint ("latest", "best" or a step), or by one of `readers`.

    Model settings that are "auto" get the values that suit this machine. `readers` are those of `origin.open`. `words`:
    LoRA adapters of the model that are not merged into it, each NAME=RUN or NAME=FOLDER of PEFT.

    Raises:
      ConfigError: there is no such checkpoint, or an adapter is no LoRA of this model.
      RunError: the checkpoint is damaged, or a model from elsewhere has a weight that is not finite.
    """
    return opener(config, checkpoint, readers, words)()


def opener(
    config: Config, checkpoint: str, readers: Sequence[origin.Reader] = (), words: Sequence[str] = ()
) -> Callable[[], Restored]:
    """Does of `restore` what reads no weights, with most refusals; returns a function that does the rest."""
    source = origin.open(config.workdir, checkpoint, readers)
    check_same_model(pathlib.Path(config.workdir), config.model)
    return functools.partial(_restored, config, source, words, _beside(source, words, readers))


def mesh_of_all(config: Config) -> Mesh:
    """Starts JAX, and returns a mesh of all devices: the run's own may need more devices than this machine has."""
    all_devices = MeshConfig(data=1, fsdp=-1, tensor=1, context=1)
    return processes.start(config.hardware, config.distributed, all_devices, config.model.dtype)


def laid_out(config: Config) -> tuple[Mesh, Transformer, dict, dict]:
    """Returns (a mesh of all devices, the model, the shapes of its parameters, their shardings), to read weights."""
    mesh = mesh_of_all(config)
    settled = settle.to_read(config.model, jax.devices()[0].platform)
    model = models.build(settled, settled.attention)
    abstract = models.abstract_params(model)
    return mesh, model, abstract, sharding.tree_shardings(abstract, models.logical_axes(model), mesh)


def _restored(
    config: Config, source: origin.Origin, words: Sequence[str], beside: dict[str, origin.Origin]
) -> Restored:
    workdir, digest_of_base = config.workdir, source.digest() if words else ""  # reads all weights
    for word, other in zip(words, beside.values(), strict=True):
        if other.digest() != digest_of_base:
            raise ConfigError(
                f"{word} is an adapter of another base than {workdir}, or of another step of it (--checkpoint=STEP): serve it "
                "beside its own, or by itself"
            )
    mesh, model, abstract, shardings = laid_out(config)
    trained = (pathlib.Path(config.data.dir) / shards.MANIFEST).is_file()
    data = shards.open_data(config.data.dir) if trained else None
    variables = {"params": source.params(abstract, shardings)} | jax.device_put(
        source.trained(), sharding.replicated(mesh)
    )
    if beside:
        stacked = adapters.stacked([(other.adapter, other.trained()) for other in beside.values()])
        variables["adapters"] = jax.device_put(stacked, sharding.replicated(mesh))
    if source.adapter:
        model = source.adapter.attach(model)
    if data is None and (bad := digest.look(variables)[1]):  # a run never saves such weights
        name = bad[0].removeprefix("params/")
        raise RunError(f"the model of {workdir}: {name} has a number that is not finite; copy the model's files again")
    step = source.provenance.get("step")
    name = f"the model of {workdir}" if step is None else f"checkpoint {step} of {workdir}"
    if config_files.averaged(workdir) and (starts := ledger.read(pathlib.Path(workdir))["starts"]):
        name = starts[0]["ended"]["why"]  # of which steps it is an average
    tokenizers = {name: other.tokenizer() for name, other in beside.items()}
    return Restored(mesh, model, variables, source.tokenizer(), data, int(step or 0), name, tokenizers)


def _beside(source: origin.Origin, words: Sequence[str], readers: Sequence[origin.Reader]) -> dict[str, origin.Origin]:
    """Opens the adapters in `words`; see `restore`."""
    if len(words) > MOST_BESIDE:
        raise ConfigError(f"{len(words)} adapters: at most {MOST_BESIDE} can be beside a model; leave some out")
    opened, home = dict[str, origin.Origin](), source.provenance["path"]
    for word in words:
        name, _, path = word.partition("=")
        if not name or not path or name in (*opened, pathlib.Path(home).resolve().name):
            raise ConfigError(
                f"{word!r} is no adapter: write NAME=RUN or NAME=FOLDER, each name once, and not the base's own"
            )
        folder, step = config_files.at_step(path)
        other = origin.open(folder, step or "latest", readers, merge=False)
        if not other.adapter:
            raise ConfigError(f"{path} is a whole model, not an adapter: serve it by itself")
        if other.adapter.settings.kind != "lora" or other.adapter.row_ids:
            raise ConfigError(
                f"{path} is not LoRA alone, without rows of the embedding: serve it by itself, or train it with "
                "--config.adapter.kind=lora --config.adapter.rows='()' --config.adapter.without_rows=True"
            )
        if other.adapter.settings.quantize != "none":
            raise ConfigError(f"{path} was trained on quantised weights (QLoRA), not on those here: serve it by itself")
        opened[name] = other
    return opened


# The weights that `sample.weights` names


def with_weights(config: Config, restored: Restored) -> Restored:
    """Returns the model with the weights that `sample.weights` names. Of int8, prints what they cost."""
    if config.sample.weights == "float":
        return restored
    texts = _texts(restored, config)
    measure = _measure(restored.model, config.loss.tile_tokens)
    with jax.set_mesh(restored.mesh), processes.working("quantising the weights, and measuring what that costs"):
        before = _figures(measure, restored.variables, texts, restored)
        restored = dataclasses.replace(restored, variables=quantized.in_int8(restored.model, restored.variables))
        after = _figures(measure, restored.variables, texts, restored)
    processes.say(cost(before, after))
    return restored


def cost(before: Figures, after: Figures) -> str:
    """Returns a line on what other weights cost; `before` and `after` are of the same texts."""
    if not before:
        return "int8 weights: no held-out text is here to say what they cost; jaxlm eval RUN --text=FILE --weights=int8 does"
    bits = (f"{source} {after[source][0]:.4g} ({after[source][0] - before[source][0]:+.4f})" for source in before)
    stay = np.concatenate([before[source][1] == after[source][1] for source in before])
    words = f"int8 weights, on {stay.size:,} tokens of held-out text: bits per byte {', '.join(bits)}"
    return f"{words}; {stay.mean():.1%} of greedy tokens stay"


def _texts(restored: Restored, config: Config) -> dict[str, ValidationBatch]:
    """Returns the beginning of each source's held-out text."""
    data, length = restored.data, config.train.seq_len
    held = {source: tokens for source, tokens in data.token_counts("val").items() if tokens > 1} if data else {}
    rows = sharding.padded_rows(restored.mesh, max(1, _TOKENS // (length * max(1, len(held)))))
    sizes = {"seq_len": length, "batch_size": rows}
    return {
        source: next(validation_rows(data, source, **sizes, targets=min(rows * length, tokens - 1)))
        for source, tokens in held.items()
    }


def _measure(model: Transformer, tile: int) -> Callable[[Variables, Batch], tuple[jax.Array, jax.Array]]:
    """Returns a function `(variables, batch) -> (summed loss in nats, the likeliest tokens [B, T])`."""
    config = model.config

    def run(variables: Variables, batch: Batch) -> tuple[jax.Array, jax.Array]:
        variables = cast(variables, jnp.dtype(config.dtype))
        hidden_BxTxD = base.hidden(model, variables, batch, None)
        logp_BxT = base.hidden_logp(model, variables, hidden_BxTxD, batch["targets"], tile)
        head_DxV = models.head_kernel(variables["params"], config, variables.get("packed"))
        if rows := models.head_rows(model, variables):
            head_DxV = head_DxV.at[:, np.asarray(rows["row_ids"])].add(rows["rows_NxD"].T.astype(head_DxV.dtype))
        head_DxV = head_DxV[:, : config.vocab_size]
        likeliest_BxT = jax.lax.map(lambda hidden_TxD: jnp.argmax(hidden_TxD @ head_DxV, axis=-1), hidden_BxTxD)
        return -jnp.sum(logp_BxT * batch["weights"]), likeliest_BxT

    return jax.jit(run)


def _figures(
    measure: Callable, variables: Variables, texts: Mapping[str, ValidationBatch], restored: Restored
) -> Figures:
    figures = {}
    for source, text in texts.items():
        nll, likeliest_BxT = jax.device_get(measure(variables, held_out.placed(text.batch, restored.mesh)))
        bits = float(nll) / math.log(2) / max(text.target_bytes, 1)
        figures[source] = (bits, likeliest_BxT[text.batch["weights"] > 0])
    return figures
