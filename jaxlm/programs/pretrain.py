"""Pretraining: text -> tokens -> next-token prediction. Run it again to resume; raise `train.steps` to continue."""

import argparse
import dataclasses
import pathlib
import typing

import jax
from clu import parameter_overview

from jaxlm import sharding, tree
from jaxlm.config import Config, DataConfig
from jaxlm.data import loader, shards
from jaxlm.eval import loss as eval_loss
from jaxlm.eval import samples
from jaxlm.plan import flops, params
from jaxlm.processes import together
from jaxlm.programs import setup
from jaxlm.programs.setup import say
from jaxlm.train import checkpoint, ledger, loop, metrics, pretraining, profile, state


def run(config: Config, args: argparse.Namespace) -> int:
    """Trains to `train.steps`; returns the exit code."""
    del args
    mesh = setup.start(config)
    asked, config = config, setup.for_platform(config, jax.devices()[0].platform)
    workdir = together(lambda: check(config, mesh))
    held = together(lambda: ledger.lock(workdir), first_only=True)
    together(lambda: setup.make_data(config), first_only=True)
    data, mixture = together(lambda: setup.data(config))
    config = setup.fit(config, mesh)
    parts = pretraining.make(config, mesh)
    sample = together(lambda: samples.make(config.sample, config.seed, parts.model, data, workdir))
    order = {"seed": config.seed, "seq_len": config.train.seq_len, "batch_size": config.train.batch_size}
    fingerprint = loader.data_fingerprint(data, mixture, **order)
    checkpointer = checkpoint.Checkpointer(workdir / "checkpoints", config.checkpoint)
    if checkpointer.steps():
        now, meta = checkpointer.restore_latest(parts.abstract, parts.shardings)
        loader.check_fingerprint(meta["fingerprint"], fingerprint)
    else:
        now, meta = parts.create(), {"interrupted": False}
    first = int(now.step)
    if first >= config.train.steps:
        say(f"complete: {workdir} is at step {first} of {config.train.steps}; raise config.train.steps to continue")
        checkpointer.close()
        return loop.DONE
    profile.check(config.profile, first + 1)

    rows = sharding.local_rows(mesh, config.train.batch_size)
    kept = {"row_indices": rows, "start_step": first, **speed(config.data)}
    batches = together(lambda: loader.TrainLoader(data, mixture, **order, **kept))
    writer = together(lambda: begin(workdir, asked, config, data, mesh, first), first_only=True)
    announce(config, now, mesh, first)
    hooks = loop.Hooks(
        evaluate=eval_loss.make(config, parts.model, data, mixture, mesh),
        sample=sample,
        meta={"config": dataclasses.asdict(config), "fingerprint": fingerprint},
        interrupted=meta["interrupted"],
    )
    meter = make_meter(config, writer)
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
    say(f"{done}: {workdir}" + ("; the same command goes on" if code == loop.PREEMPTED else ""))
    return code


def check(config: Config, mesh: jax.sharding.Mesh) -> pathlib.Path:
    """Refuses what can be refused before anything is read or made; returns the run's folder. Raises ConfigError."""
    workdir = setup.workdir(config)
    size = config.train.microbatch_size if config.train.microbatch_size > 0 else config.train.batch_size
    sharding.check_batch(mesh, **{"train.microbatch_size": size, "eval.batch_size": config.eval.batch_size})
    sharding.check_context(mesh, config.train.seq_len, config.model)
    sharding.check_tensor(mesh, config.model)
    setup.check_offload(config, mesh.local_devices[0])
    setup.check_same_model(workdir, config)
    setup.check_same_optimizer(workdir, config)
    metrics.check(config.log)
    return workdir


def begin(
    workdir: pathlib.Path, asked: Config, config: Config, data: shards.DataDir, mesh: jax.sharding.Mesh, first: int
) -> metrics.Writer:
    """Records this start and opens the metrics, on the first process."""
    choices = {"attention": config.model.attention, "dtype": config.model.dtype, "mesh": dict(mesh.shape)}
    choices |= {"remat": config.model.remat, "microbatch_size": config.train.microbatch_size}
    # The config as asked for, so that `sample` finds its own best attention on another machine.
    ledger.record_start(workdir, asked, step=first, manifest_sha256=data.sha256, choices=choices)
    return metrics.Writer(workdir, config.log, dataclasses.asdict(config))


def speed(d: DataConfig) -> dict[str, float]:
    """What makes the loader fast or patient, and no batch different."""
    threads = {"num_threads": d.num_threads, "num_workers": d.num_workers, "prefetch": d.prefetch}
    return threads | {"stall_seconds": d.timeout_s}


def announce(config: Config, now: state.TrainState, mesh: jax.sharding.Mesh, first: int) -> None:
    """What is about to be trained, on what."""
    kind, shape = jax.devices()[0].device_kind, " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    say(parameter_overview.get_parameter_overview(stacked_shapes(now.params), include_stats=False))
    say(
        f"{config.model.family}, {params.count_params(config.model):,} parameters; {mesh.size} x {kind} ({shape}); "
        f"attention {config.model.attention}, {config.model.dtype}, remat {config.model.remat}"
    )
    tokens = config.train.batch_size * config.train.seq_len
    at = f"resuming at step {first}, " if first else ""
    say(f"{at}to step {config.train.steps}: {metrics.human(config.train.steps * tokens)} tokens, {tokens:,} a step")


def stacked_shapes(params: typing.Any) -> typing.Any:
    """Shapes of the parameters with all layers under one name, so that a table of them is short at any depth."""
    layers = [part for name, part in params.items() if tree.layer_of(name) is not None]
    rest = {name: part for name, part in params.items() if tree.layer_of(name) is None}
    stack = jax.tree.map(lambda x: jax.ShapeDtypeStruct((len(layers), *x.shape), x.dtype), layers[0])
    return {**rest, "layers": stack}


def make_meter(config: Config, writer: metrics.Writer | None) -> metrics.Meter:
    """The meter of this run; the wall time of earlier starts counts."""
    per_token = flops.flops_per_token(config.model, config.train.seq_len)
    peak = config.hardware.peak_tflops or flops.peak_tflops(jax.devices()[0].device_kind)
    return metrics.Meter(
        tokens_per_step=config.train.batch_size * config.train.seq_len,
        flops_palm=per_token.palm,
        flops_causal=per_token.causal,
        peak_flops=peak * 1e12 * jax.device_count() if peak else None,
        usd_per_hour=config.hardware.usd_per_hour,
        wall_s=writer.last.get("wall_s", 0.0) if writer else 0.0,
    )
