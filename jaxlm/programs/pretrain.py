"""Pretraining: text -> tokens -> next-token prediction. Run it again to resume; raise `train.steps` to continue."""

import argparse
import dataclasses
import json
import pathlib
import typing

import jax
from clu import parameter_overview

from jaxlm import models, sharding
from jaxlm.config import Config, ConfigError
from jaxlm.data import loader
from jaxlm.eval import loss as eval_loss
from jaxlm.eval import samples
from jaxlm.objectives import lm
from jaxlm.plan import flops, params
from jaxlm.programs import setup
from jaxlm.programs.setup import say
from jaxlm.train import checkpoint, ledger, loop, metrics, optim, state, step

# Keys of the model that change how it is computed, not which function it is: free to differ on resuming.
_FREE_MODEL_KEYS = ("attention", "dtype", "dropout", "fuse_projections", "init_std", "remat", "scan_layers")


def run(config: Config, args: argparse.Namespace) -> int:
    """Trains to `train.steps`; returns the exit code."""
    del args
    workdir = setup.workdir(config)
    mesh = setup.start(config)
    asked, config = config, setup.for_platform(config, jax.devices()[0].platform)
    t, e = config.train, config.eval
    sharding.check_batch(mesh, **{"train.microbatch_size": t.microbatch_size, "eval.batch_size": e.batch_size})
    check_same_model(workdir, config)
    data, mixture = setup.data(config)
    fingerprint = loader.data_fingerprint(data, mixture, seed=config.seed, seq_len=t.seq_len, batch_size=t.batch_size)

    model = setup.build_model(config)
    tx = optim.make(config.optim, models.abstract_params(model))
    abstract = state.abstract(model, tx)
    shardings = state.shardings(abstract, model, tx, mesh)
    checkpointer = checkpoint.Checkpointer(workdir / "checkpoints", config.checkpoint)
    if checkpointer.steps():
        loader.check_fingerprint(checkpointer.meta(checkpointer.steps()[-1])["fingerprint"], fingerprint)
        now = checkpointer.restore_latest(abstract, shardings)
    else:
        now = state.create(model, tx, mesh, config.seed)
    first = int(now.step)
    if first >= t.steps:
        say(f"complete: {workdir} is at step {first} of {t.steps}; raise config.train.steps to continue")
        checkpointer.close()
        return loop.DONE

    choices = {"attention": config.model.attention, "dtype": config.model.dtype, "mesh": dict(mesh.shape)}
    if jax.process_index() == 0:
        # The config as asked for, so that `sample` finds its own best attention on another machine.
        ledger.record_start(workdir, asked, step=first, manifest_sha256=data.sha256, choices=choices)
    announce(config, now, mesh, first)
    writer = metrics.Writer(workdir, config.log, dataclasses.asdict(config)) if jax.process_index() == 0 else None
    hooks = loop.Hooks(
        evaluate=eval_loss.make(config, model, data, mixture, mesh),
        sample=samples.make(config, model, data, workdir),
        meta={"config": dataclasses.asdict(config), "fingerprint": fingerprint},
    )
    train_step = step.make(config, lm.make(model, config.model, config.loss), tx, optim.schedule(config.optim, t.steps))
    batches = loader.TrainLoader(
        data,
        mixture,
        seed=config.seed,
        seq_len=t.seq_len,
        batch_size=t.batch_size,
        row_indices=sharding.local_rows(mesh, t.batch_size),
        start_step=first,
        num_threads=config.data.num_threads,
        num_workers=config.data.num_workers,
        prefetch=config.data.prefetch,
        stall_seconds=config.data.timeout_s,
    )
    try:
        code = loop.run(
            config,
            mesh,
            now,
            step.jit(train_step, shardings, mesh),
            batches,
            checkpointer,
            make_meter(config, writer),
            writer,
            hooks,
        )
    finally:
        batches.close()
        if writer:
            writer.close()
    done = {loop.DONE: "done", loop.STOPPED: "stopped", loop.PREEMPTED: "interrupted, the state is saved"}[code]
    say(f"{done}: {workdir}" + ("; the same command goes on" if code == loop.PREEMPTED else ""))
    return code


def check_same_model(workdir: pathlib.Path, config: Config) -> None:
    """Refuses to go on with another model than the one this folder holds. Raises ConfigError."""
    saved = workdir / "config.json"
    if not saved.is_file():
        return
    old, new = json.loads(saved.read_text())["model"], dataclasses.asdict(config.model)
    for key in new:
        if key not in _FREE_MODEL_KEYS and old.get(key) != new[key]:
            raise ConfigError(
                f"{workdir} holds a model with {key}={old.get(key)}, now model.{key}={new[key]}: set it back, or give "
                "another config.workdir"
            )


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
    layers = [tree for name, tree in params.items() if name.startswith("layers_")]
    rest = {name: tree for name, tree in params.items() if not name.startswith("layers_")}
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
