"""Several processes, one program: joining the cluster, and failing together."""

import os
import typing

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxlm.config import ConfigError, DistributedConfig, RunError

T = typing.TypeVar("T")
_MESSAGE_BYTES = 2000


def join_cluster(config: DistributedConfig) -> None:
    """`jax.distributed.initialize`, from the config or from the cluster's environment; nothing on a single process.

    Several processes are seen by themselves under Slurm, Open MPI and where TPU_WORKER_HOSTNAMES names the hosts; with
    `distributed.auto` JAX looks for any cluster that it knows (GKE, GCE TPU pods, Kubernetes, MPI).
    """
    if jax.distributed.is_initialized():
        return
    if config.coordinator:
        if not 0 <= config.process_id < config.num_processes:
            raise ConfigError(
                f"distributed.coordinator is set: set distributed.num_processes (now {config.num_processes}), and "
                f"distributed.process_id (now {config.process_id}) to a number from 0 up to below it"
            )
        jax.distributed.initialize(config.coordinator, config.num_processes, config.process_id)
    elif config.num_processes > 1:
        raise ConfigError(
            f"distributed.num_processes={config.num_processes} needs distributed.coordinator=HOST:PORT of process 0"
        )
    elif config.auto or _in_cluster():
        jax.distributed.initialize()


def _in_cluster() -> bool:
    sizes = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
    return any(int(os.environ.get(name) or 1) > 1 for name in sizes) or "," in os.environ.get(
        "TPU_WORKER_HOSTNAMES", ""
    )


def together(
    action: typing.Callable[[], T],
    *,
    first_only: bool = False,
    errors: tuple[type[Exception], ...] = (ConfigError, RunError),
) -> T | None:
    """Runs `action` on every process (or on the first alone) and raises on all of them where it raises on one.

    Without this, what one process can't read leaves the others waiting for it until a time-out. `action` must not talk to
    other processes. The result of `action`; None where it did not run.

    Raises:
      What it raised here; elsewhere the first of `errors` that this was (or the last of them), with the message of the
      first process that failed.
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
    words = "" if error is None else f"{kind}:{error or type(error).__name__}"
    mine = np.frombuffer(words.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES), np.uint8)
    said = [bytes(row).decode("utf-8", "ignore").strip() for row in multihost_utils.process_allgather(mine)]
    if error is not None:
        raise error
    for process, words in enumerate(said):
        kind, colon, message = words.partition(":")
        if colon:
            raise errors[int(kind)](f"process {process}: {message}")
    return result
