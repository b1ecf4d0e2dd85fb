"""Makes the run's folder, and raises ConfigError if the run can't work or does not belong in that folder."""

import dataclasses
import pathlib
from collections.abc import Collection

import jax
from jax.sharding import Mesh

from jaxlm import config_files, sharding
from jaxlm.config import BY_RULE, Config, ConfigError, ModelConfig, OptimConfig
from jaxlm.console import say
from jaxlm.plan import accelerators
from jaxlm.train import loggers

TOKENIZER = config_files.TOKENIZER
# Keys of the model that a resumed run may change: they do not change which parameters there are or what they mean.
_FREE_MODEL_KEYS = (
    "attention",
    "dtype",
    "dropout",
    "fp8",
    "fuse_projections",
    "init_std",
    "offload",
    "remat",
    "scan_layers",
)
# Keys of the optimizer that decide which arrays its state has.
_OPTIM_STATE_KEYS = ("name", "mu_dtype", "full_precision")


def check(config: Config, mesh: Mesh) -> pathlib.Path:
    """Makes all checks that need no data, and returns the run's folder. Raises ConfigError if a check fails."""
    folder = workdir(config.workdir)
    size = config.train.microbatch_size if config.train.microbatch_size > 0 else config.train.batch_size
    sharding.check_batch(mesh, **{"train.microbatch_size": size, "eval.batch_size": config.eval.batch_size})
    sharding.check_context(mesh, config.train.seq_len, config.model)
    sharding.check_tensor(mesh, config.model)
    check_offload(config.optim, config.model, mesh.local_devices[0])
    check_price(config, mesh.devices.flat[0].device_kind, mesh.size)
    check_same_model(folder, config.model)
    check_same_optimizer(folder, config.optim)
    loggers.check(config.log)
    return folder


def workdir(path: str) -> pathlib.Path:
    """Returns the run's folder. Makes it if it is missing. Raises ConfigError if the path is empty or can't be made."""
    if not path:
        raise ConfigError("no folder for this run: give --config.workdir=DIR")
    folder = pathlib.Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"config.workdir={path} can't be made: {error.strerror or error}; name another folder"
        ) from error
    return folder


def has_checkpoints(folder: pathlib.Path) -> bool:
    """True if the run has begun: its folder holds a checkpoint."""
    return any(path.name.isdecimal() for path in (folder / "checkpoints").glob("[0-9]*"))


def rates_so_far(folder: pathlib.Path, config: Config) -> dict[str, float] | None:
    """Returns the rates and `b2` of the run in the folder, or of the run that this one branches from; None for a new run."""
    home = folder if has_checkpoints(folder) else pathlib.Path(config.origin).expanduser()
    saved = home / "config.json"
    if not (home == folder or config.origin_state) or not saved.is_file():
        return None
    optim = config_files.from_run(saved).optim
    return {key: getattr(optim, key) for key in BY_RULE}


def check_offload(optim: OptimConfig, model: ModelConfig, device: jax.Device) -> None:
    """Raises ConfigError if the config offloads to the host's memory and the device can't read that memory."""
    asked = [name for name, section in (("optim", optim), ("model", model)) if section.offload]
    if asked and "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
        raise ConfigError(
            f"{asked[0]}.offload: JAX has no pinned_host memory for {device.device_kind}; set it to False"
        )


def check_price(config: Config, device_kind: str, devices: int) -> None:
    """Raises ConfigError if a budget counts dollars and `hardware.usd_per_hour` is 0: it would never be spent.

    The line has the prices of the accelerators that the device may be, times their number, as flags to type.
    """
    budgets = {f"phases.plan.{name}.usd": phase.usd for name, phase in config.phases.plan.items()}
    budgets |= {f"stop.{key}": getattr(config.stop, key) for key in ("usd", "usd_per_centinat")}
    budgets["checkpoint.max_unprotected_usd"] = config.checkpoint.max_unprotected_usd
    limited = [f"config.{key}={usd:g}" for key, usd in budgets.items() if usd]
    if config.hardware.usd_per_hour or not limited:
        return
    flag, times = "--config.hardware.usd_per_hour=", f"{devices} x " * (devices > 1)
    cards = accelerators.load(config.plan.prices).of_device(device_kind)
    flags = [f"{flag}{devices * card.usd:g} ({times}{card.name})" for card in cards]
    raise ConfigError(
        f"{limited[0]} limits dollars, and without a price it would never be spent: give "
        f"{' or '.join(flags or [f'{flag}PRICE ({times}{device_kind})'])}, or what an hour of this machine costs you"
    )


def check_same_model(folder: pathlib.Path, model: ModelConfig) -> None:
    """Raises ConfigError if `model` differs from the model of the folder's checkpoints."""
    free = _FREE_MODEL_KEYS + (("max_seq_len",) if model.family == "llama" else ())
    keys = [field.name for field in dataclasses.fields(model) if field.name not in free]
    _check_same(folder, "model", model, keys)


def check_same_optimizer(folder: pathlib.Path, optim: OptimConfig) -> None:
    """Raises ConfigError if the arrays of this optimizer's state differ from those in the folder's checkpoints."""
    _check_same(folder, "optim", optim, _OPTIM_STATE_KEYS)


def _check_same(folder: pathlib.Path, name: str, section: ModelConfig | OptimConfig, keys: Collection[str]) -> None:
    """Compares these keys of a section with the config that the folder's checkpoints were made with, if there are any."""
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
        if key == "vocab_size" and not new[key]:
            continue  # the data's, which the checkpoint's fingerprint is compared with
        if old[key] != new[key]:
            what = "a model" if name == "model" else "an optimizer"
            raise ConfigError(
                f"{folder} holds {what} with {key}={old[key]}, now {name}.{key}={new[key]}: set it back, or give another "
                "config.workdir"
            )
