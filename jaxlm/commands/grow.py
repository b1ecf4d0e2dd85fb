"""`jaxlm grow`: makes a run of a larger model from a smaller one's weights; checkpoint 0 computes the same function."""

import argparse
import dataclasses
import pathlib
import shlex
import time

import jax
import numpy as np

from jaxlm import models
from jaxlm.commands.import_hf import becoming, check_new, write
from jaxlm.config import GROWS, Config, ConfigError, MeshConfig
from jaxlm.devices import processes, sharding, tree
from jaxlm.devices.processes import say, together
from jaxlm.host.console import human
from jaxlm.host.redact import redact
from jaxlm.interop import peft
from jaxlm.models import growth
from jaxlm.models import params as params_lib
from jaxlm.plan import rules, settle
from jaxlm.plan.flops import count_params
from jaxlm.run import lineage
from jaxlm.run.checkpoints import saving
from jaxlm.run.workdir import TOKENIZER
from jaxlm.train import origin


def run(config: Config, args: argparse.Namespace) -> int:
    """Grows `config.origin`'s model into the config's, in the new run `config.workdir`."""
    del args
    if not config.optim.grown_from:
        raise ConfigError(
            "grow takes a config of the larger model, and the smaller run: jaxlm grow CONFIG --config.origin=RUN"
        )
    out, began = pathlib.Path(config.workdir).absolute(), time.perf_counter()
    together(lambda: check_new(out, "--config.workdir"), first_only=True)
    config = settle.by_rule(config, say)
    opened = origin.open(config.origin, config.origin_checkpoint, peft.READERS)
    mesh = processes.start(
        config.hardware, config.distributed, MeshConfig(data=1, fsdp=-1, tensor=1, context=1), config.model.dtype
    )
    own = config.data.tokenizer != ""  # else that of the data
    made = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=str(out / TOKENIZER) * own))
    old, words = opened.config.model, f"{opened.provenance['path']}, step {opened.provenance.get('step', 0)}"
    parts = {key: (getattr(old, key), getattr(config.model, key)) for key in GROWS}
    changes = ", ".join(f"{key} {was} -> {now}" for key, (was, now) in parts.items() if was != now)
    with becoming(out, 4 * count_params(config.model), "--config.workdir") as part:
        saving.save_weights(
            part / "checkpoints", lambda: _params(config, opened, mesh), redact(dataclasses.asdict(made))
        )
        why = f"grown from {words}: {changes}"
        together(lambda: write(made, opened.tokenizer() if own else None, part, why), first_only=True)
    say(
        f"grown: {count_params(old):,} -> {count_params(config.model):,} parameters ({changes}), the same function "
        f"({time.perf_counter() - began:.0f} s)"
    )
    _say_whether_it_pays(config, opened)
    say(f"next: jaxlm train {shlex.quote(config.workdir)}")
    return 0


def _params(config: Config, opened: origin.Origin, mesh: jax.sharding.Mesh) -> dict:
    """Returns the larger model's parameters, made one by one."""
    settled = settle.to_read(config.model, jax.devices()[0].platform)
    model = models.build(settled, settled.attention)
    shardings = sharding.tree_shardings(models.abstract_params(model), models.logical_axes(model), mesh)
    placed, leaf = dict(tree.named_leaves(shardings)), opened.grown(config.model).leaf
    made = []
    for name, drawn in params_lib.each_param(model, jax.random.key(config.seed), shardings):
        below, copied = growth.source(name, config.optim.grown_from[0], config.model.n_layers)
        grown = growth.grown(name, leaf(below).astype(np.float32), np.asarray(drawn), copied)
        made.append((name, jax.device_put(grown, placed[name])))
    return tree.nested(made)


def _say_whether_it_pays(config: Config, opened: origin.Origin) -> None:
    """Says from how many tokens on a growth like this pays, by the scaling laws, and how many the origin has seen."""
    small, large, t = count_params(opened.config.model), count_params(config.model), opened.config.train
    tokens = config.train.steps * config.train.batch_size * config.train.seq_len
    folder, own = pathlib.Path(config.origin), opened.provenance.get("step", 0) * t.batch_size * t.seq_len
    seen = own + sum(row["tokens"] or 0 for row in lineage.stages(lineage.origins(folder), folder)[:-1])
    least = rules.growth_pays_from(small, large, tokens)
    less = "; at the same compute the small model, trained on, may end lower" if seen < least else ""
    say(
        f"by the scaling laws, with {human(tokens)} tokens to come, to grow pays from {least / small:.2g} tokens a parameter "
        f"on; this origin has seen {seen / small:.2g}{less}"
    )
