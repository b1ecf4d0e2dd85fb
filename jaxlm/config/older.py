"""What keys of older versions meant. Every reader of a config file, a flag, a run's config.json or a ladder asks here.

Until 26d2768, `eval.max_batches` batches of `eval.batch_size` rows limited the held-out text, 0 = all of it; and `seed` chose
the held-out documents of the data, which `data.seed` does now. Until 506c14f, `dpo.loss` had three values more.
"""

import dataclasses
import json
import pathlib
import typing
from collections.abc import Callable, Mapping, Sequence

from ml_collections import config_dict

from jaxlm.config.schema import Config, ConfigError, DpoConfig, EvalConfig

GONE = {"dpo.loss": ("hinge", "sigmoid_norm", "apo_zero")}  # values of runs that can be read, but not trained on
_BATCHES = "eval.max_batches"
_INSTEAD = ("eval.max_mb", "eval.max_examples")


def check_trains(config: Config) -> None:
    """Raises ConfigError if the config has a loss that there was: a run with it can be read, but not trained on."""
    if config.program == "dpo":
        _check_known("dpo.loss", config.dpo.loss)


def _check_known(key: str, value: str) -> None:
    if value in GONE.get(key, ()):
        known = typing.get_args(typing.get_type_hints(DpoConfig)["loss"])
        raise ConfigError(f"config.{key}={value} is no longer there: choose one of {', '.join(known)}")


def admit(config: config_dict.ConfigDict, key: str, value: str) -> None:
    """Prepares a config for an override of `key`: adds a key that there was, and drops one that `key` takes the place of.

    Raises ConfigError if the value is one that there was.
    """
    _check_known(key, value)
    if key not in (_BATCHES, *_INSTEAD):
        return
    with config.unlocked():
        if key == _BATCHES:
            config.eval.max_batches = 0
        else:
            config.eval.older_batches = ()
            if "max_batches" in config.eval:
                del config.eval["max_batches"]


def read(config: dict[str, typing.Any], microbatch: int = 0) -> dict[str, typing.Any]:
    """Returns a whole config, as a dict, in today's keys.

    Args:
      microbatch: the rows of a microbatch that a machine chose, where the config leaves them open; 0 = train.batch_size.
    """
    evaluation = config.get("eval")
    if not isinstance(evaluation, dict) or "max_batches" not in evaluation:
        return config
    batches, train = evaluation["max_batches"], config["train"]
    chosen = train["microbatch_size"] if train["microbatch_size"] > 0 else microbatch or train["batch_size"]
    kept = {key: value for key, value in evaluation.items() if key != "max_batches"}
    return config | {"eval": kept | {"older_batches": (batches, evaluation["batch_size"] or chosen)}}


def read_run(saved: dict[str, typing.Any], whole: dict[str, typing.Any], folder: pathlib.Path) -> dict[str, typing.Any]:
    """Returns the config of a run in today's keys.

    Args:
      saved: what its config.json holds.
      whole: the same with the defaults of newer keys.
      folder: the run's.
    """
    if "seed" not in saved.get("data", {}):
        whole = whole | {"data": whole["data"] | {"seed": whole["seed"]}}
    return read(whole, _microbatch(folder))


def ladder_keys(evaluation: EvalConfig) -> dict[str, int]:
    """Returns the keys by which older ladders say what is held out, as ladder.json has them; {} for a newer one."""
    return dict(zip(("max_batches", "batch_size"), evaluation.older_batches, strict=False))


def as_in_ladder(config: Config, same: Mapping[str, typing.Any], say: Callable[[str], None]) -> Config:
    """Returns the config with the held-out rows of an older ladder, whose `same` that is; a newer one leaves it as it is."""
    if _BATCHES not in same:
        return config
    return keep(config, (same[_BATCHES], same["eval.batch_size"]), say)


def keep(config: Config, older_batches: Sequence[int], say: Callable[[str], None]) -> Config:
    """Returns the config with the held-out text that a run or a ladder began with; says so if the config asks for another."""
    if not older_batches or tuple(older_batches) == config.eval.older_batches:
        return config
    batches, rows = older_batches
    text = f"the first {batches} batches of {rows} rows of each source" if batches else "all there is"
    say(f"held out stays what it was at the beginning: {text} (eval.max_batches then), whatever eval.max_mb says")
    return dataclasses.replace(config, eval=dataclasses.replace(config.eval, older_batches=tuple(older_batches)))


def _microbatch(folder: pathlib.Path) -> int:
    """The rows of a microbatch at the last start of a run; 0 if that is not known."""
    try:
        return int(json.loads((folder / "run.json").read_bytes())["starts"][-1]["choices"]["microbatch_size"])
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return 0
