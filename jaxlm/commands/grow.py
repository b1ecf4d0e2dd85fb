"""`jaxlm grow`: makes a run of a larger model from a smaller one's weights; checkpoint 0 computes the same function."""

import argparse
import dataclasses
import pathlib
import shlex
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.commands.import_hf import becoming, check_new, write
from jaxlm.config import GROWS, Config, ConfigError
from jaxlm.devices import tree
from jaxlm.devices.processes import say, together
from jaxlm.eval import model
from jaxlm.host.console import human
from jaxlm.host.redact import redact
from jaxlm.interop import peft
from jaxlm.models import growth
from jaxlm.models import params as params_lib
from jaxlm.ops import quantize
from jaxlm.plan import rules, settle
from jaxlm.plan.flops import count_params
from jaxlm.run import lineage
from jaxlm.run.checkpoints import saving, store
from jaxlm.run.checkpoints.meta import MOMENTS
from jaxlm.run.workdir import TOKENIZER, check_same_optimizer
from jaxlm.step import optim, parts
from jaxlm.step.objectives import lm
from jaxlm.train import origin


def run(config: Config, args: argparse.Namespace) -> int:
    """Grows `config.origin`'s model into the config's, in the new run `config.workdir`."""
    del args
    if not config.optim.grown_from:
        raise ConfigError(
            "grow takes a config of the larger model, and the smaller run: jaxlm grow CONFIG --config.origin=RUN"
        )
    out, began = pathlib.Path(config.workdir).resolve(), time.perf_counter()
    together(lambda: check_new(out, "--config.workdir"), first_only=True)
    carries, config = config.origin_state, rules.by_rule(dataclasses.replace(config, origin_state=False), say)
    opened = origin.open(config.origin, config.origin_checkpoint, peft.READERS)
    if carries:
        _check_moments(config, opened)
    mesh = model.mesh_of_all(config)
    own = config.data.tokenizer != ""  # else that of the data
    made = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=str(out / TOKENIZER) * own))
    old, words = opened.config.model, f"{opened.provenance['path']}, step {opened.provenance.get('step', 0)}"
    sizes = {key: (getattr(old, key), getattr(config.model, key)) for key in GROWS}
    changes = ", ".join(f"{key} {was} -> {now}" for key, (was, now) in sizes.items() if was != now)
    on_host = dataclasses.replace(config.optim, offload=False)
    built = dataclasses.replace(config, model=settle.to_read(config.model, jax.devices()[0].platform), optim=on_host)
    larger = parts.make(built, mesh, lm.make)
    with becoming(out, (12 if carries else 4) * count_params(config.model), f"--config.workdir={out}") as part:
        saving.save_weights(
            part / "checkpoints",
            lambda: _params(larger, opened),
            redact(dataclasses.asdict(made)),
            lambda: _moments(larger, opened) if carries else {},
        )
        why = f"grown from {words}: {changes}"
        together(lambda: write(made, opened.tokenizer() if own else None, part, why), first_only=True)
    say(
        f"grown: {count_params(old):,} -> {count_params(config.model):,} parameters ({changes}), the same function"
        f"{', the moments of the old part' * carries} ({time.perf_counter() - began:.0f} s)"
    )
    _say_whether_it_pays(config, opened)
    say(f"next: jaxlm train {shlex.quote(config.workdir)}{_data_of_origin(config)}")
    return 0


def _data_of_origin(config: Config) -> str:
    """Returns the flag that trains on the origin's data, where there is no folder of the config's own and no text for it."""
    has = pathlib.Path(config.data.dir).is_dir()
    theirs = "" if has or any(s.path for s in config.data.sources.values()) else origin.pretrained_on(config.origin)
    return f" --config.data.dir={shlex.quote(theirs)}" if theirs else ""


def _params(larger: parts.Parts, opened: origin.Origin) -> dict:
    """Returns the larger model's parameters, made one by one."""
    config, shardings = larger.config, larger.shardings.params["params"]
    placed, leaf = dict(tree.named_leaves(shardings)), opened.grown(config.model).leaf
    made = []
    for name, drawn in params_lib.each_param(larger.model, jax.random.key(config.seed), shardings):
        below, copied = growth.source(name, config.optim.grown_from[0], config.model.n_layers)
        grown = growth.grown(name, leaf(below).astype(np.float32), np.asarray(drawn), copied)
        made.append((name, jax.device_put(grown, placed[name])))
    return tree.nested(made)


def _check_moments(config: Config, opened: origin.Origin) -> None:
    """Raises ConfigError if the origin has no optimizer's state of the same form as the config's optimizer."""
    if opened.state is None or not any(name.startswith("train/") for name in opened.meta()["digests"]):
        raise ConfigError(f"{config.origin} holds weights and no moments to carry over: leave config.origin_state out")
    check_same_optimizer(pathlib.Path(config.origin), config.optim)


def _moments(larger: parts.Parts, opened: origin.Origin) -> dict:
    """Returns the item of the larger model's optimizer state: the old part's moments in place, those of new parts zero."""
    folder = pathlib.Path(opened.provenance["path"], "checkpoints", str(opened.provenance["step"]))
    read, saved, layers = store.reader(folder, "train"), opened.meta()["digests"], larger.config.model.n_layers
    params = [name for name, _ in tree.named_leaves(larger.abstract.params["params"])]

    def old_moment(name: str) -> np.ndarray:
        if f"train/{name}" in saved:
            return read(name)
        return np.asarray(quantize.decode(quantize.Blocked(read(f"{name}/codes"), read(f"{name}/exponents"))))

    def carried(path: tuple, leaf: optim.Moment, placed: optim.Moment) -> optim.Moment:
        name = f"opt_state/{tree.path_name(path)}"
        of = next((param for param in params if name.endswith(f"/{param}")), None)
        if of is None:  # a count
            return jax.device_put(read(name), placed)
        below, copied = growth.source(of, larger.config.optim.grown_from[0], layers)
        blocked = isinstance(leaf, quantize.Blocked)
        shape, old = (leaf.codes if blocked else leaf).shape, old_moment(name.removesuffix(of) + below)
        made = growth.moment(of, old, shape, copied, second="/nu/" in name)
        if blocked:  # all blocks round to one grid, so no noise is needed
            made = quantize.encode(jnp.asarray(made), jnp.zeros(shape, jnp.uint32), leaf.codes.dtype)
        return jax.device_put(made if blocked else made.astype(leaf.dtype), placed)

    state, blocks = (larger.abstract.opt_state, larger.shardings.opt_state), quantize.Blocked
    moments = jax.tree_util.tree_map_with_path(carried, *state, is_leaf=lambda leaf: isinstance(leaf, blocks))
    return {MOMENTS: {"opt_state": moments}}


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
