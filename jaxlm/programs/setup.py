"""What every program that touches a device does first: processes, compile cache, mesh, data, model."""

import dataclasses
import os
import pathlib
import sys
import typing

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxlm import config_files, models, sharding
from jaxlm.config import Config, ConfigError, DistributedConfig, RunError
from jaxlm.data import build
from jaxlm.data.shards import DataDir, open_data
from jaxlm.ops import attention

T = typing.TypeVar("T")
_MESSAGE_BYTES = 2000

# Keys of the model that change how it is computed, not which function it is: free to differ on resuming.
_FREE_MODEL_KEYS = ("attention", "dtype", "dropout", "fuse_projections", "init_std", "remat", "scan_layers")


def start(config: Config) -> Mesh:
    """Joins the cluster if there is one, turns the compile cache on, and returns the mesh over all devices."""
    join_cluster(config.distributed)
    if config.hardware.compile_cache:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(config.hardware.compile_cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return sharding.make_mesh(config.mesh)


def join_cluster(config: DistributedConfig) -> None:
    """`jax.distributed.initialize`, from the config or from the cluster's environment; nothing on a single process.

    Several processes are seen by themselves under Slurm, Open MPI and where TPU_WORKER_HOSTNAMES names the hosts; with
    `distributed.auto` JAX looks for any cluster that it knows (GKE, GCE TPU pods, Kubernetes, MPI).
    """
    if jax.distributed.is_initialized():
        return
    if config.coordinator:
        if config.num_processes < 1 or not 0 <= config.process_id < config.num_processes:
            raise ConfigError(
                f"distributed.coordinator is set: distributed.process_id={config.process_id} must be in 0.."
                f"distributed.num_processes-1={config.num_processes - 1}"
            )
        jax.distributed.initialize(config.coordinator, config.num_processes, config.process_id)
    elif config.auto or _in_cluster():
        jax.distributed.initialize()


def _in_cluster() -> bool:
    sizes = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
    return any(int(os.environ.get(name) or 1) > 1 for name in sizes) or "," in os.environ.get(
        "TPU_WORKER_HOSTNAMES", ""
    )


def together(action: typing.Callable[[], T], *, first_only: bool = False) -> T | None:
    """Runs `action` on every process (or on the first alone) and raises on all of them where it raises on one.

    Without this, bad input that one process sees leaves the others waiting for it until a time-out. `action` must not
    talk to other processes.

    Raises:
      What it raised here; elsewhere ConfigError, or RunError if it was not bad input, with the message of the first
      process that failed.
    """
    result, error = None, None
    try:
        if not first_only or jax.process_index() == 0:
            result = action()
    except Exception as raised:
        if jax.process_count() == 1:
            raise
        error = raised
    if jax.process_count() == 1:
        return result
    bad_input = isinstance(error, ConfigError)
    words = "" if error is None else f"{'bad' if bad_input else 'failed'}:{error or type(error).__name__}"
    mine = np.frombuffer(words.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES), np.uint8)
    said = [bytes(row).decode("utf-8", "ignore").strip() for row in multihost_utils.process_allgather(mine)]
    if error is not None:
        raise error
    for process, (kind, _, message) in enumerate(words.partition(":") for words in said):
        if kind:
            raise (ConfigError if kind == "bad" else RunError)(f"process {process}: {message}")
    return result


def for_platform(config: Config, platform: str) -> Config:
    """Fills what depends on the hardware: `model.attention` and `model.dtype` when they are auto. Raises ConfigError."""
    dtype, asked = config.model.dtype, config.model.attention
    if dtype == "auto":
        dtype = "float32" if platform == "cpu" else "bfloat16"
    try:
        backend = attention.resolve_backend(asked, platform)
    except ValueError as error:
        raise ConfigError(f"config.model.attention: {error}") from error
    if backend == "cudnn" and (dtype == "float32" or config.model.head_dim % 8):
        if asked != "auto":
            raise ConfigError("model.attention=cudnn needs model.dtype=bfloat16 and a head_dim that is a multiple of 8")
        backend = "xla"
    return dataclasses.replace(config, model=dataclasses.replace(config.model, attention=backend, dtype=dtype))


def build_model(config: Config) -> typing.Any:
    """The model of a config that `for_platform` has been through."""
    return models.build(config.model, config.model.attention)


def check_same_model(workdir: pathlib.Path, config: Config) -> None:
    """Refuses another model than the one whose checkpoints this folder holds. Raises ConfigError."""
    saved, checkpoints = workdir / "config.json", workdir / "checkpoints"
    if not saved.is_file() or not checkpoints.is_dir() or not any(checkpoints.iterdir()):
        return
    old, new = config_files.from_run(saved).model.to_dict(), dataclasses.asdict(config.model)
    free = _FREE_MODEL_KEYS + (("max_seq_len",) if config.model.family == "llama" else ())
    for key in new:
        if key not in free and old[key] != new[key]:
            raise ConfigError(
                f"{workdir} holds a model with {key}={old[key]}, now model.{key}={new[key]}: set it back, or give another "
                "config.workdir"
            )


def make_data(config: Config) -> None:
    """Makes `data.dir` from sources that have paths; where it is there already, checks that it was made from them.

    Raises:
      ConfigError: no such source, or data of another recipe.
    """
    d = config.data
    if not any(source.path for source in d.sources.values()):
        return
    sources = [build.Source(name, s.path, s.weight, d.text_key) for name, s in d.sources.items()]
    settings = build.BuildSettings(
        vocab_size=config.model.vocab_size,
        chat_tokens=d.chat_tokens,
        seed=config.seed,
        val_fraction=d.val_fraction,
        block_tokens=d.block_tokens,
        max_source_bytes=d.max_bytes or None,
        tfds_dir=d.tfds_dir or None,
    )
    build.build_data(d.dir, sources, settings, log=say)


def data(config: Config) -> tuple[DataDir, dict[str, float]]:
    """The data in `data.dir`, and the mixture.

    Raises:
      ConfigError: no data, or a tokenizer of another size than `model.vocab_size`.
    """
    d = config.data
    opened = open_data(d.dir)
    if opened.vocab_size != config.model.vocab_size:
        raise ConfigError(
            f"the tokenizer in {d.dir} has {opened.vocab_size} tokens: set "
            f"--config.model.vocab_size={opened.vocab_size}, or another config.data.dir"
        )
    return opened, {name: s.weight for name, s in d.sources.items()} or opened.mixture


def say(text: str) -> None:
    """A line for the person on standard error, from the first process only."""
    if jax.process_index() == 0:
        print(text, file=sys.stderr, flush=True)


def workdir(config: Config) -> pathlib.Path:
    """The run's folder, made if need be. Raises ConfigError."""
    if not config.workdir:
        raise ConfigError("no folder for this run: give --config.workdir=DIR")
    path = pathlib.Path(config.workdir)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"config.workdir={config.workdir} can't be made: {error.strerror or error}") from error
    return path
