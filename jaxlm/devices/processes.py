"""Handles the processes of one program: joins them, prints from the first process only, makes all fail if one fails."""

import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
import typing
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax._src import xla_bridge
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxlm.config import ConfigError, DistributedConfig, HardwareConfig, MeshConfig, RunError
from jaxlm.devices import sharding
from jaxlm.host import console, files

T = typing.TypeVar("T")
# Share of a GPU's memory that JAX's allocator takes at the start. With JAX's own default, 0.75, runs that fit would run
# out of memory. The rest is for CUDA, cuBLAS, cuDNN and NCCL, which allocate for themselves.
MEMORY_FRACTION = 0.92
_MEMORY_KEYS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_MESSAGE_BYTES = 2000
left_behind = threading.Event()  # set: threads wait for storage that hangs, and this process must end without them
_FIRST_WORD_S, _NEXT_WORDS_S = 15.0, 60.0  # of waiting for other processes, before each message
_ABORT_LATER_S = 30  # JAX's timeout comes this long after ours
_RETRY_S = 1.0


def start(hardware: HardwareConfig, distributed: DistributedConfig, mesh: MeshConfig, dtype: str) -> Mesh:
    """Starts JAX and returns the mesh. Sets XLA's flags, the cluster if there is one, matmul precision, the compile cache.

    Every program that runs on devices calls this first, before anything touches a device. `dtype` is the model's.

    Raises ConfigError if this machine can't have the flag, cluster or mesh that the config asks for.
    """
    apply_xla_flags(hardware.xla_flags)
    join_cluster(distributed)
    if dtype == "float32" and jax.default_backend() != "cpu":
        jax.config.update("jax_default_matmul_precision", "highest")  # else float32 means TF32, or bfloat16 on TPUs
    if cache := os.path.expanduser(hardware.compile_cache):
        _turn_cache_on(cache)
    return sharding.make_mesh(mesh)


def _turn_cache_on(folder: str) -> None:
    """Caches programs that take half a second or more to compile in this folder, if it can be made."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        say(f"compiled programs are not kept: {folder} can't be made: {error.strerror} (hardware.compile_cache)")
        return
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def say(text: str) -> None:
    """Writes a line on standard error, from the first process only."""
    if jax.process_index() == 0:
        console.say(text)


def working(what: str, total: float = 0, unit: str = "") -> contextlib.AbstractContextManager[console.Tell]:
    """Shows progress on the first process; see `console.working`."""
    if jax.process_index() == 0:
        return console.working(what, total, unit)
    return contextlib.nullcontext(lambda done, note="": None)


def join_cluster(config: DistributedConfig) -> None:
    """Calls `jax.distributed.initialize` if the program runs as several processes; does nothing for a single process.

    The program runs as several processes if `distributed.coordinator` is set, if Slurm or Open MPI started several tasks, or if
    TPU_WORKER_HOSTNAMES names several hosts. With `distributed.auto` JAX looks for any cluster that it knows (GKE, GCE
    TPU pods, Kubernetes, MPI).

    A run that waits for its other processes says so after 15 seconds and each minute. If they do not come within
    `distributed.start_timeout_s`, it ends with a line and exit code 1. JAX itself would abort the process, with a C++
    stack, which no handler can prevent.
    """
    if jax.distributed.is_initialized():
        return
    if config.coordinator:
        if not 0 <= config.process_id < config.num_processes:
            given = f"{config.process_id} (num_processes={config.num_processes})"
            raise ConfigError(f"distributed.coordinator needs process_id from 0 to num_processes - 1, not {given}")
        if not config.coordinator.rpartition(":")[2].isdecimal():
            raise ConfigError(f"distributed.coordinator={config.coordinator}: give HOST:PORT of process 0")
        here = f"process {config.process_id} of {config.num_processes}"
        with _waiting(config, f"{here} waits for the others at {config.coordinator}"):
            if config.process_id:
                _reach(config)
            jax.distributed.initialize(config.coordinator, config.num_processes, config.process_id, **_timeouts(config))
    elif config.num_processes > 1:
        raise ConfigError(f"distributed.num_processes={config.num_processes} needs distributed.coordinator=HOST:PORT")
    elif config.auto or _in_cluster():
        with _waiting(config, "this process waits for the others of its cluster"):
            jax.distributed.initialize(**_timeouts(config))


def _timeouts(config: DistributedConfig) -> dict[str, int]:
    """Returns arguments of `jax.distributed.initialize`. JAX's own time-out aborts, so `_waiting`'s must come first."""
    start = math.ceil(config.start_timeout_s) + _ABORT_LATER_S
    return {"initialization_timeout": start, "heartbeat_timeout_seconds": math.ceil(config.heartbeat_s)}


@contextlib.contextmanager
def _waiting(config: DistributedConfig, words: str) -> Iterator[None]:
    """Says `words` while the `with` block takes long, and ends this process when it has taken `start_timeout_s`."""
    met = threading.Event()

    def tell() -> None:
        began, left, wait = time.monotonic(), config.start_timeout_s, _FIRST_WORD_S
        while left > 0:
            if met.wait(min(wait, left)):
                return
            passed, wait = time.monotonic() - began, _NEXT_WORDS_S
            left = config.start_timeout_s - passed
            if left > 0:
                console.say(f"{words}: {passed:.0f} s of {config.start_timeout_s:.0f}")
        advice = "start them all with the same distributed.coordinator, or raise distributed.start_timeout_s"
        console.say(f"jaxlm: {words}, in vain for {config.start_timeout_s:.0f} s: {advice}")
        os._exit(1)  # the main thread may be inside C++

    threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        met.set()


def _reach(config: DistributedConfig) -> None:
    """Waits until something listens at the coordinator's address: JAX itself would wait silently."""
    host, _, port = config.coordinator.rpartition(":")
    while True:  # `_waiting` ends the process after a time
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_RETRY_S).close()
            return
        except OSError:
            time.sleep(_RETRY_S)


def several(config: DistributedConfig) -> bool:
    """True if the program would run as several processes; asks no other process."""
    return bool(config.coordinator or config.auto or _in_cluster())


def _in_cluster() -> bool:
    """True if the environment says that this is one of several processes."""
    sizes = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
    several_hosts = "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")
    return several_hosts or any(int(os.environ.get(name) or 1) > 1 for name in sizes)


def together(
    action: Callable[[], T], *, first_only: bool = False, errors: tuple[type[Exception], ...] = (ConfigError, RunError)
) -> T | None:
    """Calls `action` on every process, and returns its result; None where it was not called. If a process raises, all do.

    Without this, a process that can't read a file would leave the others waiting for it until a time-out. `action` must
    not communicate with other processes. A process without an error raises the class and message of the first that failed.

    Args:
      first_only: True to run it only on the first process.
      errors: the classes of errors that the other processes may raise; for an error of another class they raise the last.
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
    kind = next((i for i, e in enumerate(errors) if isinstance(error, e)), len(errors) - 1)
    words = "" if error is None else f"{kind}{'!' * files.of_system(error)}:{error or type(error).__name__}"
    mine = np.frombuffer(words.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES), np.uint8)
    messages = [bytes(row).decode("utf-8", "ignore").strip() for row in multihost_utils.process_allgather(mine)]
    if error is not None:
        raise error
    for process, words in enumerate(messages):
        kind, colon, message = words.partition(":")
        if colon:
            cause = OSError(message) if kind.endswith("!") else None
            raise errors[int(kind.rstrip("!"))](f"process {process}: {message}") from cause
    return result


def from_first(make: Callable[[], T]) -> T:
    """Calls `make` on the first process only, and returns its result, a JSON value, on all processes.

    For decisions that depend on files: on a network file system two processes may see different files. Raises as `together`.
    """
    value = together(make, first_only=True)
    if jax.process_count() == 1:
        return value
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int64(text.size)))
    text = text if jax.process_index() == 0 else np.zeros(size, np.uint8)
    return json.loads(bytes(multihost_utils.broadcast_one_to_all(text)))


def apply_xla_flags(wanted: tuple[str, ...]) -> None:
    """Writes `hardware.xla_flags` in front of the flags in XLA_FLAGS, which win, and sets the memory fraction.

    XLA reads its flags once, when the first backend starts, and ends the process if it does not know a flag. Each of
    `wanted` is NAME=VALUE, with or without leading dashes; VALUE may be empty.

    Raises ConfigError if XLA does not know a flag or can't read its value, or this process has started its devices.
    """
    if not any(os.environ.get(key) for key in _MEMORY_KEYS):
        os.environ[_MEMORY_KEYS[0]] = str(MEMORY_FRACTION)
    theirs = os.environ.get("XLA_FLAGS", "").split()
    new = [flag for flag in map(_flag, wanted) if flag not in theirs]
    if not new:
        return
    if xla_bridge.backends_are_initialized():
        raise ConfigError(f"config.hardware.xla_flags={' '.join(wanted)} comes too late: JAX has started its devices")
    flags = " ".join(new + theirs)
    _check_flags(flags)
    os.environ["XLA_FLAGS"] = flags


def _flag(text: str) -> str:
    name, equals, value = text.strip().lstrip("-").partition("=")
    if not name.startswith("xla_") or not equals or " " in text.strip():
        raise ConfigError(f"hardware.xla_flags: {text!r} is not xla_NAME=VALUE, such as xla_gpu_autotune_level=4")
    return f"--{name}={value}"


def _check_flags(flags: str) -> None:
    """Tries the flags in a child process, since XLA ends a process on a bad flag. Raises ConfigError."""
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "import jax; jax.jit(lambda: 0)()"]
    tried = subprocess.run(command, env=env, capture_output=True, text=True)
    if tried.returncode:
        lines = [line for line in tried.stderr.splitlines() if "flag" in line.lower()] or tried.stderr.splitlines()
        reason = lines[0].split("] ")[-1].strip() if lines else f"exit code {tried.returncode}"
        raise ConfigError(f"config.hardware.xla_flags: XLA does not take {flags}: {reason}")
