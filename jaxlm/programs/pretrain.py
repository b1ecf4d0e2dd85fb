"""Pretraining: text -> tokens -> next-token prediction. Run it again to resume; raise `train.steps` to continue."""

import argparse
import dataclasses
import pathlib

import jax

from jaxlm import processes, sharding
from jaxlm.config import Config, DataConfig
from jaxlm.data import loader, shards
from jaxlm.data.open import make_data, open_mixture
from jaxlm.eval import loss as eval_loss
from jaxlm.eval import samples
from jaxlm.models import hardware
from jaxlm.plan import tune
from jaxlm.processes import say, together
from jaxlm.train import checkpoint, ledger, loop, metrics, pretraining, profile, start, workdir


def run(config: Config, args: argparse.Namespace) -> int:
    """Trains to `train.steps`; returns the exit code."""
    del args
    mesh = processes.start(config.hardware, config.distributed, config.mesh, config.model.dtype)
    platform = jax.devices()[0].platform
    asked, config = config, dataclasses.replace(config, model=hardware.for_platform(config.model, platform))
    folder = together(lambda: workdir.check(config, mesh))
    held = together(lambda: ledger.lock(folder), first_only=True)
    together(lambda: make_data(config, say), first_only=True)
    data, mixture = together(lambda: open_mixture(config.data, config.prepare, config.model.vocab_size))
    config = tune.fit(config, mesh, say)
    parts = pretraining.make(config, mesh)
    sample = together(lambda: samples.make(config, parts.model, data, folder))
    order = {"seed": config.seed, "seq_len": config.train.seq_len, "batch_size": config.train.batch_size}
    fingerprint = loader.data_fingerprint(data, mixture, **order)
    checkpointer = checkpoint.Checkpointer(folder / "checkpoints", config.checkpoint)
    if checkpointer.steps():
        now, meta = checkpointer.restore_latest(parts.abstract, parts.shardings)
        loader.check_fingerprint(meta["fingerprint"], fingerprint)
    else:
        now, meta = parts.create(), {"interrupted": False}
    first = int(now.step)
    if first >= config.train.steps:
        say(f"complete: {folder} is at step {first} of {config.train.steps}; raise config.train.steps to continue")
        checkpointer.close()
        return loop.DONE
    profile.check(config.profile, first + 1)

    rows = sharding.local_rows(mesh, config.train.batch_size)
    kept = {"row_indices": rows, "start_step": first, **speed(config.data)}
    batches = together(lambda: loader.TrainLoader(data, mixture, **order, **kept))
    writer = together(lambda: begin(folder, asked, config, data, mesh, first), first_only=True)
    start.announce(config.model, config.train, now.params, mesh, first)
    hooks = loop.Hooks(
        evaluate=eval_loss.make(config, parts.model, data, mixture, mesh),
        sample=sample,
        meta={"config": dataclasses.asdict(config), "fingerprint": fingerprint},
        interrupted=meta["interrupted"],
    )
    wall_s = writer.last.get("wall_s", 0.0) if writer else 0.0
    meter = metrics.make_meter(config.model, config.train, config.hardware, wall_s)
    try:
        code = loop.run(config, mesh, now, parts.jit(), batches, checkpointer, meter, writer, hooks)
    finally:
        batches.close()
        if writer:
            writer.close()
        checkpointer.close()  # a save in flight is finished, also when the loop failed
        if held:
            held.close()
    done = {loop.DONE: "done", loop.STOPPED: "stopped", loop.PREEMPTED: "interrupted, the state is saved"}[code]
    say(f"{done}: {folder}" + ("; the same command goes on" if code == loop.PREEMPTED else ""))
    return code


def begin(
    folder: pathlib.Path, asked: Config, config: Config, data: shards.DataDir, mesh: jax.sharding.Mesh, first: int
) -> metrics.Writer:
    """Records this start and opens the metrics, on the first process."""
    choices = {"attention": config.model.attention, "dtype": config.model.dtype, "mesh": dict(mesh.shape)}
    choices |= {"remat": config.model.remat, "microbatch_size": config.train.microbatch_size}
    # The config as asked for, so that `sample` finds its own best attention on another machine.
    ledger.record_start(folder, asked, step=first, manifest_sha256=data.sha256, choices=choices)
    return metrics.Writer(folder, config.log, dataclasses.asdict(config))


def speed(d: DataConfig) -> dict[str, float]:
    """What makes the loader fast or patient, and no batch different."""
    threads = {"num_threads": d.num_threads, "num_workers": d.num_workers, "prefetch": d.prefetch}
    return threads | {"stall_seconds": d.timeout_s}
