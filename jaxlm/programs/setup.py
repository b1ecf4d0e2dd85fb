"""What every program that touches a device does first: processes, compile cache, mesh, data, model."""

import dataclasses
import os
import pathlib
import sys
import typing

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxlm import config_files, models, sharding
from jaxlm.config import Config, ConfigError, DistributedConfig
from jaxlm.data import build
from jaxlm.data.shards import DataDir, open_data
from jaxlm.ops import attention

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


def data(config: Config, make: bool = True) -> tuple[DataDir, dict[str, float]]:
    """The data of a config, made first where its sources have paths and `data.dir` holds none, and its mixture.

    With `make=False` it is only opened, whatever the sources say.

    Raises:
      ConfigError: no data, data of another recipe, or a tokenizer of another size than `model.vocab_size`.
    """
    d = config.data
    if make and jax.process_index() == 0 and any(source.path for source in d.sources.values()):
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
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("data is made")
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
