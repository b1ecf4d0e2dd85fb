"""Interprets older versions' keys, for all code that reads a config file, a flag, a run's config.json or a ladder.

Until 26d2768 the held-out text was `eval.max_batches` batches of `eval.batch_size` rows (0 = all of the text), and `seed`,
not `data.seed`, chose the held-out documents. Until 506c14f `jaxlm prepare` had a stage `perplexity`, and `dpo.loss` had
three more values.
"""

import copy
import json
import pathlib
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ml_collections import config_dict

from jaxlm.config.corpora import PrepareConfig
from jaxlm.config.posttraining import DpoConfig
from jaxlm.config.prepare_stages import PiiSettings
from jaxlm.config.schema import MATRICES, ROWS, Config, EvalConfig, with_keys
from jaxlm.host.errors import ConfigError

GONE = {"dpo.loss": ("hinge", "sigmoid_norm", "apo_zero")}  # their runs can be read, but not trained further
_BATCHES = "eval.max_batches"
# Removed keys -> what holds instead. No result depends on them, so readers of stored configs drop them.
_GONE = {
    "optim.matrix_lr_ratio": f"it is the line {MATRICES!r} and its number in config.optim.rates",
    "optim.rows_lr_ratio": f"it is the line {ROWS!r} and its number in config.optim.rates",
    "checkpoint.verify": "each checkpoint is read back from disk, and compared",
    "checkpoint.mirror_weights_only": "a mirror holds whole checkpoints",
    "prepare.examples": "20 removed documents are shown for each source, stage and reason",
    "prepare.excerpt_chars": "500 characters of each removed document are recorded",
    "tune.step_seconds": "a candidate is timed for 20 seconds at most",
    "data.num_threads": "one thread per core, at most four, makes batches and encodes texts",
    "data.num_workers": "threads make the batches, one per core, at most four",
    "data.prefetch": "eight batches are made ahead",
    "data.block_tokens": "records of new shards hold 8,192 tokens; older shards are read as they are",
}
# Removed keys -> (the value that all runs have now, its meaning). A run with another value can't continue.
_FIXED: dict[str, tuple[object, str]] = {
    "eval.redteam.max_new_tokens": (64, "red-team texts have 64 tokens"),
    "eval.redteam.temperature": (0.0, "red-team texts take the likeliest tokens"),
    "eval.redteam.seed": (0, "red-team texts take the likeliest tokens"),
    "stability.window": (256, "a loss is a spike by the last 256 losses"),
}
# Stages -> their removed settings, with the values that hold now. Caches and recipes contain these settings.
_SETTINGS: dict[str, dict[str, object]] = {
    "debris": dict.fromkeys(("entities", "tags", "styles", "menus", "notices"), True)
    | {"max_mentions": 1, "min_menu_lines": 3, "max_menu_chars": 30, "max_notice_chars": 200}
}
_INSTEAD = _GONE | {name: meaning for name, (_, meaning) in _FIXED.items()}
for _stage, _settings in _SETTINGS.items():
    _INSTEAD |= {f"prepare.stages.{_stage}.{key}": f"it is {value}" for key, value in _settings.items()}
_EMAILS = [
    r".*@([\w-]+\.)*example\.(com|org|net|edu)",
    r"(git|hg|svn|no-?reply|do-?not-?reply)@.*",
    r".*@users\.noreply\.github\.com",
]
_JUNK = ["annotation", "chat_tokens"]
# Settings of stages -> (older, newer) defaults, also those of recipes for folders. Data that the older ones prepared stays.
CHANGED: dict[str, dict[str, tuple[tuple[object, object], ...]]] = {
    "pii": {
        "kinds": ((["secret", "email", "iban", "card", "ssn", "ip", "phone"], list(PiiSettings().kinds)),),
        "keep_emails": ((_EMAILS, list(PiiSettings().keep_emails)),),
    },
    "lines": {"max_removed": ((0.5, 1.0),)},
    "near": {"threshold": ((0.6, 0.8),)},
    "junk": {
        "patterns": (
            (_JUNK, [*_JUNK, "log_run", "blob"]),
            (_JUNK, [*_JUNK, "unk", "lorem", "assistant", "log", "blob", "invisible", "homoglyph", "mojibake"]),
        )
    },
}
# Removed stages of `prepare` -> the defaults of their settings. Documents that they prepared stay valid.
STAGES: dict[str, dict[str, object]] = {
    "perplexity": dict.fromkeys(("reference", "model", "pieces", "scorer"), "")
    | {"min_bits_per_byte": 0.0, "max_bits_per_byte": 0.0, "chars": 4000}
}
_NO_STAGE = (
    "the stage {} was removed and prepares nothing any more: put the stage `function` in its place, with a Python "
    "function of yours (prepare.stages.function.path=FILE.py:FUNCTION)"
)


def add_stages(stages: config_dict.ConfigDict) -> None:
    """Adds sections for the removed stages to `prepare.stages`, so that a config file may set their keys."""
    for name, settings in STAGES.items():
        stages[name] = config_dict.ConfigDict(settings)


def drop_stages(config: config_dict.ConfigDict) -> None:
    """Drops removed stages from `prepare.stages` if their keys have the defaults."""
    stages = config.get("prepare", {}).get("stages", {})
    for name, settings in STAGES.items():
        if name in stages and stages[name].to_dict() == settings:
            del stages[name]


def check_stages(prepare: PrepareConfig) -> None:
    """Raises ConfigError if documents would be prepared by a removed stage."""
    lines = (line for source in prepare.sources.values() for line in source.stages)
    for name in {*prepare.stages, *(word for line in lines for word in line.split()[:1])} & STAGES.keys():
        raise ConfigError(_NO_STAGE.format(name))


def check_trains(config: Config) -> None:
    """Raises ConfigError if the config's loss was removed: its run can be read, but not trained further."""
    if config.program == "dpo":
        _check_known("dpo.loss", config.dpo.loss)


def _check_known(key: str, value: str) -> None:
    if value in GONE.get(key, ()):
        known = typing.get_args(typing.get_type_hints(DpoConfig)["loss"])
        raise ConfigError(f"config.{key}={value} was removed: choose one of {', '.join(known)}")


def admit(config: config_dict.ConfigDict, key: str, value: str) -> None:
    """Prepares a config for an override of `key`: adds `key` if it is an older key, and drops a key that excludes it.

    Raises ConfigError if the key or the value was removed.
    """
    _check_known(key, value)
    _refuse(key)
    if any(key.startswith(f"prepare.stages.{name}.") and name not in config.prepare.stages for name in STAGES):
        with config.unlocked():
            add_stages(config.prepare.stages)
    if key not in (_BATCHES, "eval.max_mb", "eval.max_examples"):
        return
    with config.unlocked():
        if key == _BATCHES:
            config.eval.max_batches = 0
        else:
            config.eval.older_batches = ()
            if "max_batches" in config.eval:
                del config.eval["max_batches"]


def _refuse(key: str) -> None:
    if key in _INSTEAD:
        raise ConfigError(f"config.{key} is gone: {_INSTEAD[key]}; leave it out")


def _stored(config: dict, names: Iterable[str]) -> Iterator[tuple[str, dict, str]]:
    """Yields (a dotted key, its section, the key's last part) for those of `names` that a stored config has."""
    for name in names:
        *sections, key = name.split(".")
        owner = config
        for section in sections:
            owner = owner.get(section) if isinstance(owner, dict) else None
        if isinstance(owner, dict) and key in owner:
            yield name, owner, key


def known(config: dict) -> dict:
    """Returns the content of a run's config.json without removed keys, and without removed stages at their defaults."""
    today = copy.deepcopy(config)
    if isinstance(optim := today.get("optim"), dict):
        today["optim"] = with_rates(optim)
    for _, section, key in _stored(today, _INSTEAD):
        del section[key]
    if isinstance(prepare := today.get("prepare"), dict) and isinstance(prepare.get("stages"), dict):
        prepare["stages"] = {name: keys for name, keys in prepare["stages"].items() if keys != STAGES.get(name)}
    return today


def with_rates(optim: Mapping, prefix: str = "") -> dict:
    """Returns keys of `optim` with `rates` in place of the older ratios; `prefix` begins the name of each key."""
    ratios = {MATRICES: f"{prefix}matrix_lr_ratio", ROWS: f"{prefix}rows_lr_ratio"}
    lines = [f"{pattern} {optim[key]!r}" for pattern, key in ratios.items() if optim.get(key, 1) != 1]
    kept = {key: value for key, value in optim.items() if key not in ratios.values()}
    return kept | ({f"{prefix}rates": type(kept.get(f"{prefix}rates", []))(lines)} if len(kept) < len(optim) else {})


def check_goes_on(saved: dict) -> None:
    """Raises ConfigError if a run's config.json has a removed key with a value that runs can't have any more."""
    for name, section, key in _stored(saved, _FIXED):
        value, meaning = _FIXED[name]
        if section[key] != value:
            advice = "delete it from the run's config.json to go on so, or go on with the jaxlm that began the run"
            has = f"this run has config.{name}={section[key]!r}, and that key was removed"
            raise ConfigError(f"{has}: {meaning}; {advice}")


def with_settings(stage: str, settings: Mapping) -> dict:
    """Returns a stage's settings with the fixed values of its removed settings, which caches and recipes contain."""
    return {**_SETTINGS.get(stage, {}), **settings}


def check_setting(stage: str, key: str) -> None:
    """Raises ConfigError if this setting of a stage was removed."""
    _refuse(f"prepare.stages.{stage}.{key}")


def read(config: dict, microbatch: int = 0) -> dict:
    """Returns a whole config, a dict, with today's keys.

    Args:
      microbatch: the microbatch size that was chosen on the device, if the config sets none; 0 = train.batch_size.

    Raises:
      ConfigError: the config has a removed key.
    """
    for name, _, _ in _stored(config, _INSTEAD):
        _refuse(name)
    evaluation = config.get("eval")
    if not isinstance(evaluation, dict) or "max_batches" not in evaluation:
        return config
    batches, train = evaluation["max_batches"], config["train"]
    chosen = train["microbatch_size"] if train["microbatch_size"] > 0 else microbatch or train["batch_size"]
    others = {key: value for key, value in evaluation.items() if key != "max_batches"}
    return config | {"eval": others | {"older_batches": (batches, evaluation["batch_size"] or chosen)}}


def read_run(saved: dict, whole: dict, folder: pathlib.Path) -> dict:
    """Returns the config of a run with today's keys.

    Args:
      saved: the content of its config.json.
      whole: `saved`, with the defaults of newer keys.
      folder: the run's folder.
    """
    if "seed" not in saved.get("data", {}):
        whole = whole | {"data": whole["data"] | {"seed": whole["seed"]}}
    return read(known(whole), _microbatch(folder))


def ladder_keys(evaluation: EvalConfig) -> dict[str, int]:
    """Returns the keys of an older ladder's ladder.json that limit the held-out text; {} for a newer ladder."""
    return dict(zip(("max_batches", "batch_size"), evaluation.older_batches, strict=False))


def as_in_ladder(config: Config, same: Mapping, say: Callable[[str], None]) -> Config:
    """Returns the config with an older ladder's held-out rows, from `same` in ladder.json; unchanged for a newer ladder."""
    if _BATCHES not in same:
        return config
    return keep(config, (same[_BATCHES], same["eval.batch_size"]), say)


def keep(config: Config, older_batches: Sequence[int], say: Callable[[str], None]) -> Config:
    """Returns the config with the `eval.older_batches` with which a run or ladder began; says so if that changes it."""
    if not older_batches or tuple(older_batches) == config.eval.older_batches:
        return config
    batches, rows = older_batches
    text = f"the first {batches} batches of {rows} rows of each source" if batches else "all there is"
    say(f"held out stays what it was at the beginning: {text} (eval.max_batches then), whatever eval.max_mb says")
    return with_keys(config, eval={"older_batches": tuple(older_batches)})


def _microbatch(folder: pathlib.Path) -> int:
    """Returns the microbatch size at the last start of a run; 0 if unknown."""
    try:
        return int(json.loads((folder / "run.json").read_bytes())["starts"][-1]["choices"]["microbatch_size"])
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return 0
