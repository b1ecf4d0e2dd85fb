"""`jaxlm plan`: estimates the memory, hours and dollars of a config before anything is rented."""

import argparse
import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence

import jax
import numpy as np

from jaxlm.commands.train import without
from jaxlm.config import Config, ConfigError, with_keys
from jaxlm.data.batches import document_rows
from jaxlm.data.batches.open import open_order
from jaxlm.data.shards import shards
from jaxlm.host import console
from jaxlm.host.console import say
from jaxlm.plan import cost, fit, flops, lower, rules, settle, summary
from jaxlm.plan.ladder import budget, ladder
from jaxlm.plan.ladder import text as ladder_text
from jaxlm.plan.text import render
from jaxlm.plan.tune import machines
from jaxlm.run.checkpoints import keep
from jaxlm.run.workdir import has_checkpoints


def run(config: Config, args: argparse.Namespace) -> int:
    """Prints the plan for `plan.mesh`, for which it also compiles the step, or for one device of each accelerator.

    The plan is for the program that a GPU runs, even if this machine has no GPU. The row of this machine is measured.
    """
    jax.config.update("jax_platforms", "cpu")  # leaves a GPU of this machine to others
    if args.without is not None:
        found = without.find(args, args.overrides)
        print(json.dumps(found, indent=1) if args.json else "\n".join(without.lines(found)))
        return 0
    if args.budget:
        return best(config, budget.dollars_of(args.budget), args)
    config = rules.by_rule(_settled(config), say)
    if config.train.microbatch_size == -1:
        say("train.microbatch_size=-1 (all rows that fit) is planned as one row a device; the table shows how many fit")
    target = None
    if config.plan.mesh:
        mesh = fit.parse_mesh(config.plan.mesh)
        fit.check_mesh(config, mesh)
        if config.plan.compile:
            target = lower.target(fit.devices_of(mesh), summary.hosts(config, mesh))  # before JAX has any device
    plan = summary.summarise(settle.on_platform(config, "gpu").runs)
    plan["data"] = data(config) if config.program == "pretrain" else None
    plan["ladder"] = foretold(config) if config.program == "pretrain" else None
    plan["here"] = machines.row(config)
    plan["disk"] = disk(config, plan["checkpoint"]["bytes"])
    if target:
        planned = settle.on_platform(config, target.platform).runs
        planned = fit.with_changes(planned, microbatch=plan["memory"]["microbatch"])
        with console.working(f"compiling the step for {target.name}"):
            plan["compiled"] = lower.compile_step(dataclasses.replace(planned, mesh=mesh), mesh, target)
    print(json.dumps(_finite(plan), indent=1) if args.json else render(plan))
    return 0


def best(config: Config, usd: float, args: argparse.Namespace) -> int:
    """Prints the best model for `usd` dollars on each accelerator, in the proportions of the config."""
    budget.check(config)
    if "phases.shrink=cpu" in args.overrides:  # the config is small by now
        raise ConfigError("--budget is for the whole run: leave config.phases.shrink out")
    config = _settled(with_data(config, args.overrides))
    fitted, folder = ladder.known(config, say) or (None, None)
    with console.working("choosing a model for each accelerator"):
        choice = budget.plan(settle.on_platform(config, "gpu").runs, usd, fitted)
    choice["ladder"] = folder and str(folder)
    begun = config.workdir and has_checkpoints(pathlib.Path(config.workdir))
    for row in choice["accelerators"]:
        read = data(with_keys(config, train={key: row["overrides"][f"train.{key}"] for key in ("steps", "batch_size")}))
        row["epochs"] = read and read["epochs"]
        if begun:
            row["overrides"]["workdir"] = f"{config.workdir.rstrip('/')}-{usd:g}usd"  # a run keeps its model
    text = (
        json.dumps(_finite(choice), indent=1) if args.json else ladder_text.budget(choice, args.config, args.overrides)
    )
    print(text)
    return 0


def with_data(config: Config, overrides: Sequence[str] = ()) -> Config:
    """Returns the config with the vocabulary of the data in `data.dir`, if any; says so if a given folder has no data."""
    if not (pathlib.Path(config.data.dir) / shards.MANIFEST).is_file():
        if any(override.startswith("data.dir=") for override in overrides):
            say(f"there is no finished data in {config.data.dir}, so the number of epochs is unknown")
        return config
    return with_keys(config, model={"vocab_size": shards.open_data(config.data.dir).vocab_size})


def _settled(config: Config) -> Config:
    """Returns the config with its vocabulary's size set and, if remat is auto, with the slowest remat."""
    config = settle.sized(config, say)
    if config.model.remat == "auto":
        say("model.remat=auto is chosen on the device; planned here as full, the slowest that it may choose")
        config = settle.assuming(config, remat="full", rows=-1)
    return config


def data(config: Config) -> dict | None:
    """Returns the training tokens of each source in `data.dir`, and how often the run reads each; None if there is no data."""
    try:
        order, steps = open_order(config), config.train.steps
        epochs = order.passes(steps)
        for line in document_rows.rounded(order):
            say(line)
    except ConfigError as error:
        if (pathlib.Path(config.data.dir) / shards.MANIFEST).is_file():
            say(f"the data is left out of the plan: {error}")
        return None
    read = {"dir": config.data.dir, "tokens": order.data.token_counts(), "epochs": epochs}
    return read | ({"mixture": document_rows.mixture_words(order, steps)} if order.final else {})


def foretold(config: Config) -> dict | None:
    """Returns the held-out loss that the ladder in WORKDIR/ladder predicts, with its interval; None without a ladder."""
    if not (known := ladder.known(config, say)):
        return None
    fitted, folder = known
    parameters, tokens = flops.count_params(config.model), cost.tokens(config)
    loss, low, high = fitted.loss(parameters, tokens)
    beyond = {"parameters": parameters / fitted.params, "tokens": tokens / fitted.tokens}
    return {"dir": str(folder), "loss": loss, "low": low, "high": high, "beyond": beyond}


def disk(config: Config, checkpoint: int) -> dict:
    """Returns what a run needs on the disk: the bytes of a checkpoint, the most checkpoints at once, bytes per token."""
    c = config.checkpoint
    kept = {"keep_last": c.keep_last, "keep_best": c.keep_best, "keep_every": c.keep_every}
    kept["phases"] = len(config.phases.plan)
    return {
        "checkpoint": checkpoint,
        "checkpoints": keep.most(c, config.train.steps, kept["phases"]),
        "why": ", ".join(f"{name} {n}" for name, n in kept.items() if n),
        "bytes_per_token": np.dtype(shards.token_dtype(config.model.vocab_size)).itemsize,
    }


def _finite(value: object) -> object:
    """Returns the same values with None for infinities and NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
