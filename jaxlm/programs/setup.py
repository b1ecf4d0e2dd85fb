"""What every program that touches a device does first: processes, compile cache, mesh, data, model."""

import contextlib
import dataclasses
import os
import pathlib
import re
import typing

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxlm import config_files, processes, sharding, xla_flags
from jaxlm.config import Config, ConfigError
from jaxlm.corpus import documents
from jaxlm.corpus.sources import SourceStats
from jaxlm.data import build
from jaxlm.data.rows import weights_of
from jaxlm.data.shards import MANIFEST, DataDir, open_data
from jaxlm.ops import attention
from jaxlm.plan import tune
from jaxlm.programs import console

# Keys of the model that change how it is computed, not which function it is: free to differ on resuming.
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


def start(config: Config) -> Mesh:
    """Sets XLA's flags, joins the cluster if there is one, turns the compile cache on; returns the mesh over all devices."""
    xla_flags.apply(config.hardware.xla_flags)
    processes.join_cluster(config.distributed)
    if config.model.dtype == "float32" and jax.default_backend() != "cpu":
        jax.config.update("jax_default_matmul_precision", "highest")  # else float32 means TF32, or bfloat16 on TPUs
    if cache := os.path.expanduser(config.hardware.compile_cache):
        try:
            os.makedirs(cache, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"config.hardware.compile_cache={cache} can't be made: {error.strerror}; name another folder, or "
                '"" for no cache'
            ) from error
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return sharding.make_mesh(config.mesh)


def for_platform(config: Config, platform: str) -> Config:
    """Fills what depends on the hardware: `model.attention` and `model.dtype` when they are auto. Raises ConfigError."""
    dtype, asked = config.model.dtype, config.model.attention
    if dtype == "auto":
        dtype = "float32" if platform == "cpu" else "bfloat16"
    try:
        backend = attention.resolve_backend(asked, platform)
    except ValueError as error:
        raise ConfigError(f"config.model.attention: {error}") from error
    capability = _cuda_capability(platform)
    if backend.startswith("cudnn") and (dtype == "float32" or config.model.head_dim % 8 or config.model.head_dim > 128):
        if asked != "auto":
            raise ConfigError(
                f"model.attention={asked} needs model.dtype=bfloat16 and a head_dim that is a multiple of 8, at most 128"
            )
        backend = "xla"
    if backend in ("cudnn_packed", "tokamax") and capability and capability < (9, 0):
        raise ConfigError(
            f"model.attention={asked} needs Hopper or newer (compute capability 9.0), this GPU has "
            f"{capability[0]}.{capability[1]}: use cudnn"
        )
    if config.model.fp8:
        _check_fp8(platform, dtype, capability)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, attention=backend, dtype=dtype))


def backends(config: Config, platform: str) -> list[str]:
    """The attention backends that this platform runs for this model."""
    found = []
    for name in attention.BACKENDS:
        with contextlib.suppress(ConfigError):
            model = dataclasses.replace(config.model, attention=name)
            found.append(for_platform(dataclasses.replace(config, model=model), platform).model.attention)
    return found


def fit(config: Config, mesh: Mesh) -> Config:
    """Settles `model.remat=auto` and `train.microbatch_size=-1` for the devices at hand, the same on all processes."""
    if not tune.undecided(config):
        return config  # then nothing is asked of the machine, which may not know (memory, off Linux), nor of the others
    limit = min(multihost_utils.process_allgather(tune.memory_limit(config.tune.memory_gb)).ravel().tolist())
    return tune.resolve(config, mesh, limit, say)


def _cuda_capability(platform: str) -> tuple[int, int] | None:
    """Of the GPU at hand, as (9, 0) on Hopper; None elsewhere."""
    if platform not in ("gpu", "cuda") or jax.default_backend() != "gpu":
        return None
    name = getattr(jax.devices()[0], "compute_capability", "")
    return tuple(int(part) for part in name.split("."))[:2] if re.fullmatch(r"\d+\.\d+", name) else None


def _check_fp8(platform: str, dtype: str, capability: tuple[int, int] | None) -> None:
    if platform == "cpu":
        return  # slow, and the same numbers: for tests
    if platform not in ("gpu", "cuda") or (capability and capability < (8, 9)):
        have = f"a GPU of compute capability {capability[0]}.{capability[1]}" if capability else f"a {platform}"
        raise ConfigError(
            f"model.fp8 needs an NVIDIA GPU of Ada, Hopper or newer (8.9), here is {have}: set it to False"
        )
    if dtype == "float32":
        raise ConfigError("model.fp8 is for model.dtype=bfloat16: float32 asks for full precision")


def check_offload(config: Config, device: jax.Device) -> None:
    """Refuses what is to wait in the host's memory where the device can't reach it. Raises ConfigError."""
    asked = [key for key in ("optim", "model") if getattr(config, key).offload]
    if asked and "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
        raise ConfigError(
            f"{asked[0]}.offload: JAX has no pinned_host memory for {device.device_kind}; set it to False"
        )


def check_same_model(workdir: pathlib.Path, config: Config) -> None:
    """Refuses another model than the one whose checkpoints this folder holds. Raises ConfigError."""
    free = _FREE_MODEL_KEYS + (("max_seq_len",) if config.model.family == "llama" else ())
    keys = [field.name for field in dataclasses.fields(config.model)]
    _check_same(workdir, config, "model", [key for key in keys if key not in free])


def check_same_optimizer(workdir: pathlib.Path, config: Config) -> None:
    """Refuses an optimizer whose state is not the one that this folder's checkpoints hold. Raises ConfigError."""
    _check_same(workdir, config, "optim", ["name", "mu_dtype", "full_precision"])


def _check_same(workdir: pathlib.Path, config: Config, section: str, keys: typing.Sequence[str]) -> None:
    saved, checkpoints = workdir / "config.json", workdir / "checkpoints"
    if not saved.is_file() or not checkpoints.is_dir() or not any(checkpoints.iterdir()):
        return
    old = config_files.from_run(saved)[section].to_dict()
    new = dataclasses.asdict(getattr(config, section))
    for key in keys:
        if old[key] != new[key]:
            what = "a model" if section == "model" else "an optimizer"
            raise ConfigError(
                f"{workdir} holds {what} with {key}={old[key]}, now {section}.{key}={new[key]}: set it back, or give another "
                "config.workdir"
            )


def make_data(config: Config) -> None:
    """Makes `data.dir` from `data.sources` that have paths, else from what `jaxlm prepare` made of `prepare.sources`
    (which it does first where need be); where it is there already, checks that it was made from them.

    Raises:
      ConfigError: a source that is not there, or data of another recipe.
    """
    d = config.data
    if any(source.path for source in d.sources.values()):
        sources = [build.Source(name, s.path, s.weight, d.text_key) for name, s in d.sources.items()]
        read, extra = None, {}
    elif found := _prepared(config):
        sources, read, extra = found
    else:
        return
    settings = build.BuildSettings(
        vocab_size=config.model.vocab_size,
        chat_tokens=d.chat_tokens,
        seed=config.seed,
        val_fraction=d.val_fraction,
        block_tokens=d.block_tokens,
        max_source_bytes=d.max_bytes or None,
        tfds_dir=d.tfds_dir or None,
        tokenizer_path=d.tokenizer or None,
        tokenizer_model=d.tokenizer_model,
    )
    build.build_data(d.dir, sources, settings, read=read, recipe_extra=extra, log=say)


def _prepared(config: Config) -> tuple[list[build.Source], build.Reader, dict[str, str]] | None:
    """What `jaxlm prepare` made or now makes, how it is read, and what identifies it; None where neither is the case."""
    from jaxlm.corpus import prepare  # here, because its libraries take a second to import

    root = pathlib.Path(config.data.dir)
    fresh = not (root / prepare.MANIFEST).is_file()
    if config.prepare.sources:
        done = prepare.prepare(config, say)
    elif fresh or (root / MANIFEST).is_file():
        return None
    else:
        done = prepare.open_prepared(root)
    if fresh:
        say(
            f"prepared documents: {root / 'documents'}; jaxlm prepare with the same config and data.dir writes their report"
        )
    names = [name for name, source in done.manifest["sources"].items() if source["kept"]["documents"]]
    if not names:
        raise ConfigError(f"prepare kept no document of any source: {root / 'removed'} says which stage took them")

    def verified(name: str) -> typing.Iterator[pathlib.Path]:
        for entry in done.manifest["sources"][name]["files"]:
            documents.verify(root / entry["file"], entry["sha256"])
            yield root / entry["file"]

    def read(source: build.Source, stats: SourceStats) -> typing.Iterator[tuple[str, str]]:
        texts = documents.read_texts(verified(source.name))
        for doc_id, text in documents.within(texts, config.data.max_bytes):
            stats.documents += 1
            stats.bytes += len(text.encode())
            yield doc_id, text

    weights = weights_of(config.prepare.sources or config.data.sources, names)
    sources = [build.Source(name, f"documents/{name}", weights[name]) for name in names]
    return sources, read, {"prepared": done.sha256}


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
    if d.sources:
        return opened, {name: source.weight for name, source in d.sources.items()}
    prepared = {name: source.weight for name, source in config.prepare.sources.items() if name in opened.sources}
    return opened, prepared or opened.mixture


def say(text: str) -> None:
    """A line for the person on standard error, from the first process only."""
    if jax.process_index() == 0:
        console.say(text)


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
