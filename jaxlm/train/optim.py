"""The optimizer: what turns gradients into updates, and the learning rate over the steps.

The learning rate is applied by the train step, from the step number, so that it is one schedule whatever the optimizer
and is not held back by skipped steps.
"""

import typing

import optax

from jaxlm import tree
from jaxlm.config import ConfigError, OptimConfig


def schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    """Learning rate of update s = 1, 2, ..., `steps`: linear warm-up, then cosine, wsd, linear or constant.

    `wsd` (warm-up, stable, decay; MiniCPM, arXiv:2404.06395) holds the peak and falls linearly in the last
    `decay_fraction` of all steps. The last update has `final_lr_ratio` times the peak, but for `constant`.
    """
    lr, end = config.lr, config.lr * config.final_lr_ratio
    rest = steps - config.warmup_steps
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(lr, rest, alpha=config.final_lr_ratio)
    elif config.schedule == "linear":
        after = optax.linear_schedule(lr, end, rest)
    elif config.schedule == "wsd":
        decay = min(max(round(steps * config.decay_fraction), 1), rest)
        after = optax.linear_schedule(lr, end, decay, transition_begin=rest - decay)
    else:
        after = optax.constant_schedule(lr)
    if not config.warmup_steps:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, lr, config.warmup_steps), after], [config.warmup_steps])


def make(config: OptimConfig, params: typing.Any) -> optax.GradientTransformation:
    """AdamW (decoupled weight decay, arXiv:1711.05101) without its learning rate.

    Raises:
      ConfigError: a parameter is in neither or both of `optim.decay` and `optim.no_decay`.
    """
    try:
        mask = tree.regex_mask(params, config.decay, config.no_decay)
    except ValueError as error:
        raise ConfigError(f"optim.decay and optim.no_decay must split all parameters: {error}") from error
    return optax.chain(
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=mask),
    )
