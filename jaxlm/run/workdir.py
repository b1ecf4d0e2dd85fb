"""Creates the run's folder, and raises ConfigError if the run can't work or does not belong in that folder."""

import dataclasses
import pathlib
from collections.abc import Collection, Mapping

import jax
from jax.sharding import Mesh
from ml_collections import config_dict

from jaxlm.config import Config, ConfigError, ModelConfig, OptimConfig, config_files
from jaxlm.data.batches.order import check_fingerprint
from jaxlm.data.shards.manifest import MANIFEST
from jaxlm.devices import sharding
from jaxlm.host import files
from jaxlm.host.console import say
from jaxlm.run import metrics
from jaxlm.run.checkpoints import keep, store

TOKENIZER = config_files.TOKENIZER
# Keys of the model that a resumed run may change: the parameters and their meaning stay the same.
_FREE_KEYS = ("attention", "dtype", "dropout", "fp8", "fuse_projections", "init_std", "offload", "remat", "scan_layers")
# Keys of the optimizer that decide which arrays its state has.
_OPTIM_STATE_KEYS = ("name", "mu_dtype", "full_precision")


def check(config: Config, mesh: Mesh) -> pathlib.Path:
    """Does all checks that need no data, and returns the run's folder. Raises ConfigError if a check fails."""
    folder = workdir(config.workdir)
    size = config.train.microbatch_size if config.train.microbatch_size > 0 else config.train.batch_size
    sharding.check_batch(mesh, "train.microbatch_size", size)
    sharding.check_context(mesh, config.train.seq_len, config.model)
    sharding.check_tensor(mesh, config.model)
    check_offload(config.optim, config.model, mesh.local_devices[0])
    check_same_model(folder, config.model)
    check_same_optimizer(folder, config.optim)
    metrics.check(config.log)
    return folder


def workdir(path: str) -> pathlib.Path:
    """Returns the run's folder. Creates it if it is missing. Raises ConfigError if `path` is empty or can't be created."""
    if not path:
        raise ConfigError("no folder for this run: give --config.workdir=DIR")
    folder = pathlib.Path(path)
    files.make_folder(folder, f"config.workdir={path}", "; name another folder")
    return folder


def has_checkpoints(folder: pathlib.Path) -> bool:
    return files.has_steps(folder / "checkpoints")


def saved_config(folder: pathlib.Path) -> config_dict.ConfigDict | None:
    path = folder / "config.json"
    return config_files.from_run(path) if path.is_file() else None


def check_same_batches(folder: pathlib.Path, fingerprint: Mapping[str, str], as_before: str = "") -> None:
    """Raises ConfigError if the newest checkpoint was trained on other batches. `as_before`: advice for an older run."""
    checkpoints = folder / "checkpoints"
    if keep.begun(checkpoints):
        # In a thread, so that a signal ends the run while the read hangs.
        metas = files.within(None, lambda: store.read_metas(checkpoints, keep.steps(checkpoints)[-1:]))
        for meta in metas.values():
            try:
                check_fingerprint(meta.get("fingerprint", {}), fingerprint)
            except ConfigError as error:
                saved = files.json_of((folder / "config.json").read_bytes())
                newer = not as_before or "ignore" in saved.get("examples", {})  # it read as this version
                raise ConfigError(f"{error}" if newer else f"{error}. When it began, {as_before}") from None


def check_data_seed(config: Config) -> None:
    """Raises ConfigError if the run's data is gone, and `data.seed` changed: other documents would be held out."""
    folder, gone = pathlib.Path(config.workdir), not (pathlib.Path(config.data.dir) / MANIFEST).is_file()
    saved = saved_config(folder) if gone and has_checkpoints(folder) else None
    if saved and (seed := max(saved.data.seed, 0)) != max(config.data.seed, 0):
        raise ConfigError(
            f"the data of {config.workdir} was made with data.seed={seed}, and is not in {config.data.dir}: give "
            f"--config.data.seed={seed}, to make the same data again"
        )


def check_offload(optim: OptimConfig, model: ModelConfig, device: jax.Device) -> None:
    """Raises ConfigError if the config offloads to the host's memory and the device can't read that memory."""
    section = "optim" if optim.offload else "model" if model.offload else ""
    if section and "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
        raise ConfigError(f"{section}.offload: JAX has no pinned_host memory for {device.device_kind}; set it to False")


def check_same_model(folder: pathlib.Path, model: ModelConfig) -> None:
    free = _FREE_KEYS + (("max_seq_len",) if model.family == "llama" else ())
    if not model.vocab_size:
        free += ("vocab_size",)  # it is the data's, and the checkpoint's fingerprint covers the data
    keys = [field.name for field in dataclasses.fields(model) if field.name not in free]
    _check_same(folder, "a model", "model", model, keys)


def check_same_optimizer(folder: pathlib.Path, optim: OptimConfig) -> None:
    _check_same(folder, "an optimizer", "optim", optim, _OPTIM_STATE_KEYS)


def _check_same(
    folder: pathlib.Path, what: str, name: str, section: ModelConfig | OptimConfig, keys: Collection[str]
) -> None:
    """Raises ConfigError if a key of `section` differs from the folder's saved config, if the folder has checkpoints."""
    saved, checkpoints = folder / "config.json", folder / "checkpoints"
    if not saved.is_file() or not checkpoints.is_dir() or not any(checkpoints.iterdir()):
        return
    try:
        old = config_files.from_run(saved)[name].to_dict()
    except ConfigError as error:
        say(f"{error}; this start writes it anew")
        return
    new = dataclasses.asdict(section)
    for key in keys:
        if old[key] != new[key]:
            raise ConfigError(
                f"{folder} holds {what} with {key}={old[key]}, now {name}.{key}={new[key]}: set it back, or give another "
                "config.workdir"
            )
