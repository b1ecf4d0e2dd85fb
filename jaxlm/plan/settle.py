"""Settles a config: only this code replaces auto, and a 0 that stands for a rule's value or the data's vocabulary size.

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
    """A config as the user gave it (config.json keeps it, with each `auto`), and as it runs, settled so far."""

    asked: Config
    runs: Config

    def as_begun(self, folder: pathlib.Path) -> "Settled":
        """Returns both configs with the held-out text and the rates of the folder's run; a new run's rates are by rule.

        Raises:
          ConfigError: a new run would learn nothing, or the run has a value that is no longer allowed (`older.check_goes_on`).
        """
        from_first(lambda: older.check_goes_on(files.json_there(folder / "config.json")))
        config = older.keep(self.runs, from_first(lambda: _older_batches(folder)), say)
        rates = from_first(lambda: rates_so_far(folder, config))
        config = rules.by_rule(config, say, rates)
        if not rates:
            optimizer.check_learns(config.optim, config.train.steps)
            for line in rules.too_high(config):
                say(line)
        asked = dataclasses.replace(self.asked, eval=config.eval, optim=config.optim)
        return Settled(asked, config)

    def with_vocabulary(self, size: int) -> "Settled":
        return Settled(*(vocabulary.with_size(config, size) for config in (self.asked, self.runs)))


def on_platform(config: Config, platform: str) -> Settled:
    """Returns the config as asked and with a platform's attention and dtype. Raises ConfigError if it can't run the model."""
    model = hardware.for_platform(config.model, platform, config.mesh.context)
    return Settled(config, dataclasses.replace(config, model=model))


def to_read(model: ModelConfig, platform: str) -> ModelConfig:
    """Returns a model's config for inference on a platform: without gradients nothing is recomputed or offloaded."""
    return dataclasses.replace(hardware.for_platform(model, platform), remat="none", offload=False)


def sized(config: Config, say: Say, size: int = 0) -> Config:
    """Returns the config with vocabulary size `size` if it sets none. `size` = 0: the size in its data, or an assumed size."""
    return vocabulary.with_size(config, size) if size else vocabulary.assumed(config, say)


def assuming(config: Config, *, remat: str, rows: int) -> Config:
    """Returns the config with `remat` and microbatches of `rows` where it leaves them to the devices."""
    remat = remat if config.model.remat == "auto" else config.model.remat
    rows = rows if config.train.microbatch_size == -1 else config.train.microbatch_size
    return with_keys(config, model={"remat": remat}, train={"microbatch_size": rows})


def ruled(config: Config, **changes) -> OptimConfig:
    """Returns `optim` by rule, after changes such as lr=0.0. Prints nothing."""
    return rules.by_rule(with_keys(config, optim=changes), lambda line: None).optim


def rates_so_far(folder: pathlib.Path, config: Config) -> dict[str, float] | None:
    """Returns the rates and `b2` of the run in the folder, or of the run from which it branches; None for a new run."""
    begun = workdir.has_checkpoints(folder)
    home = folder if begun else files.expanded(config.origin)
    saved = workdir.saved_config(home) if begun or config.origin_state else None
    optim = OptimConfig(**saved.optim) if saved else None
    return optim and {key: getattr(optim, key) for key in BY_RULE}


def _older_batches(folder: pathlib.Path) -> list[int]:
    saved = workdir.saved_config(folder) if workdir.has_checkpoints(folder) else None
    return list(saved.eval.older_batches) if saved else []
