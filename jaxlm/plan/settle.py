"""Settles a config: the only code that puts values where a config says auto, or 0 for a rule or for the data's vocabulary.

    settled = settle.on_platform(config, platform)      # model.attention, model.dtype
    settled = settled.as_begun(folder)                  # optim.lr, matrix_lr_ratio, b2
    settled = settled.with_vocabulary(size)             # model.vocab_size, once the data is open
    config = tune.fit(settled.runs, mesh, say, parts)   # model.remat, train.microbatch_size: those that fit

A plan has no devices, and perhaps no data: it takes `sized` and `assuming` in place of the last two.
"""

import dataclasses
import pathlib

from jaxlm.config import BY_RULE, Config, ModelConfig, OptimConfig, older, with_keys
from jaxlm.data.shards import vocabulary
from jaxlm.devices.processes import from_first, say
from jaxlm.host import files
from jaxlm.host.console import Say
from jaxlm.models import hardware
from jaxlm.plan import rules
from jaxlm.run import workdir
from jaxlm.step import optim as optimizer


@dataclasses.dataclass(frozen=True)
class Settled:
    """A config on its way from what was asked (which config.json keeps, `auto` and all) to what runs."""

    asked: Config
    runs: Config

    def as_begun(self, folder: pathlib.Path) -> "Settled":
        """Returns it with held-out text and rates of the folder's run, or by rule.

        Raises:
          ConfigError: a new run would learn nothing, or the run has a value that is gone (`older.check_goes_on`).
        """
        from_first(lambda: older.check_goes_on(files.json_there(folder / "config.json")))
        config = older.keep(self.runs, from_first(lambda: _older_batches(folder)), say)
        rates = from_first(lambda: rates_so_far(folder, config))
        config = by_rule(config, say, rates)
        if not rates:
            optimizer.check_learns(config.optim, config.train.steps)
            for line in rules.too_high(config):
                say(line)
        asked = dataclasses.replace(self.asked, eval=config.eval, optim=config.optim)
        return Settled(asked, config)

    def with_vocabulary(self, size: int) -> "Settled":
        return Settled(*(vocabulary.with_size(config, size) for config in (self.asked, self.runs)))


def on_platform(config: Config, platform: str) -> Settled:
    """Returns the config for a platform. Raises ConfigError if that can't run what is asked for (`hardware.for_platform`)."""
    model = hardware.for_platform(config.model, platform, config.mesh.context)
    return Settled(config, dataclasses.replace(config, model=model))


def to_read(model: ModelConfig, platform: str) -> ModelConfig:
    """Returns a model's config for a platform. Without gradients there is nothing to recompute or to offload."""
    return dataclasses.replace(hardware.for_platform(model, platform), remat="none", offload=False)


def sized(config: Config, say: Say, size: int = 0) -> Config:
    """Returns the config with this size of the vocabulary where it leaves that open; 0: as its data has it, or may have."""
    return vocabulary.with_size(config, size) if size else vocabulary.assumed(config, say)


def assuming(config: Config, *, remat: str, rows: int) -> Config:
    """Returns the config with this remat and these rows of a microbatch where it leaves them to the devices."""
    remat = remat if config.model.remat == "auto" else config.model.remat
    rows = rows if config.train.microbatch_size == -1 else config.train.microbatch_size
    return with_keys(config, model={"remat": remat}, train={"microbatch_size": rows})


def by_rule(config: Config, say: Say, begun: dict[str, float] | None = None) -> Config:
    return rules.by_rule(config, say, begun)


def ruled(config: Config, **changes) -> OptimConfig:
    """Returns `optim` as the rule has it for the config with these changes of `optim`, such as lr=0.0. Says nothing."""
    return by_rule(with_keys(config, optim=changes), lambda line: None).optim


def rates_so_far(folder: pathlib.Path, config: Config) -> dict[str, float] | None:
    """Returns the rates and `b2` of the run in the folder, or of the run that this one branches from; None for a new run."""
    begun = workdir.has_checkpoints(folder)
    home = folder if begun else files.expanded(config.origin)
    saved = workdir.saved_config(home) if begun or config.origin_state else None
    return {key: saved.optim[key] for key in BY_RULE} if saved else None


def _older_batches(folder: pathlib.Path) -> list[int]:
    saved = workdir.saved_config(folder) if workdir.has_checkpoints(folder) else None
    return list(saved.eval.older_batches) if saved else []
