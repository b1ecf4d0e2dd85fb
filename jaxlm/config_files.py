"""From a config file, by path or by shipped name, and command-line overrides to a locked ConfigDict."""

import difflib
import importlib.util
import json
import os
import pathlib
import typing

from absl import flags
from ml_collections import config_dict, config_flags

from jaxlm.config import ConfigError, nearest_key

CONFIG_PACKAGE = pathlib.Path(__file__).parent / "configs"


def shipped_configs(folder: str = "") -> list[str]:
    """Names of the configs that come with jaxlm, `base` left out: those to train, or those of a folder (`data`)."""
    paths = (CONFIG_PACKAGE / folder).glob("*.py")
    return sorted(str(pathlib.PurePosixPath(folder, p.stem)) for p in paths if p.stem not in ("base", "__init__"))


def find_config(name: str) -> pathlib.Path:
    """The file of a config given by path (`configs/quickstart.py`) or by shipped name (`quickstart`, `data/techdocs`)."""
    path = pathlib.Path(name)
    if path.suffix == ".py" and path.is_file():
        return path
    wanted = path.as_posix().removeprefix("configs/").removesuffix(".py")
    known = [*shipped_configs(), *shipped_configs("data")]
    if wanted in [*known, "base"]:
        return CONFIG_PACKAGE / f"{wanted}.py"
    near = difflib.get_close_matches(wanted, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"shipped: {', '.join(known)}"
    raise ConfigError(f"no config file or shipped config {name!r}; {hint}")


def load(name: str, overrides: typing.Sequence[str] = ()) -> config_dict.ConfigDict:
    """Loads a config file and applies overrides such as `train.steps=100`. Raises ConfigError."""
    path = find_config(name)
    try:
        spec = importlib.util.spec_from_file_location(f"jaxlm_config_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        config = module.get_config()
    except Exception as error:
        raise ConfigError(f"config {path}: {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(config, config_dict.ConfigDict):
        raise ConfigError(f"config {path}: get_config() must return an ml_collections ConfigDict")
    config.lock()
    for override in overrides:
        apply_override(config, override)
    return config


def apply_override(config: config_dict.ConfigDict, override: str) -> None:
    """Sets one `key=value` in place with the type of the existing value (parsed by ml_collections)."""
    key, sep, value = override.partition("=")
    keys = _flat_keys(config)
    if key not in keys:
        raise ConfigError(f"unknown key config.{key}; {nearest_key(key, keys)}")
    if not sep:
        raise ConfigError(f"--config.{key} needs a value: --config.{key}=VALUE")
    old = _lookup(config, key)
    if isinstance(old, config_dict.ConfigDict):
        raise ConfigError(f"config.{key} is a section, set one of its keys: {', '.join(f'{key}.{k}' for k in old)}")
    # A config of this key alone: the flags print the whole config for their help, a third of a second for each override.
    section, _, name = key.rpartition(".")
    alone = config_dict.ConfigDict({name: old})
    values = flags.FlagValues()
    argv = ["jaxlm", f"--config.{name}={value}"]
    config_flags.DEFINE_config_dict("config", alone, flag_values=values, sys_argv=argv)
    try:
        values(argv)
    except (flags.Error, TypeError, ValueError, SyntaxError) as error:
        kind = type(old).__name__
        raise ConfigError(f"config.{key}={value}: expected {kind}, such as {old!r}") from error
    (_lookup(config, section) if section else config)[name] = alone[name]


def _flat_keys(config: config_dict.ConfigDict, prefix: str = "") -> list[str]:
    keys = []
    for key, value in config.items():
        keys.append(prefix + key)
        if isinstance(value, config_dict.ConfigDict):
            keys += _flat_keys(value, f"{prefix}{key}.")
    return keys


def _lookup(config: config_dict.ConfigDict, key: str) -> typing.Any:
    for part in key.split("."):
        config = config[part]
    return config


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [""])[0]


def from_run(path: pathlib.Path) -> config_dict.ConfigDict:
    """WORKDIR/config.json as a ConfigDict that takes overrides; the folder may have been moved since."""

    def tuples(value: typing.Any) -> typing.Any:
        if isinstance(value, dict):
            return {k: tuples(v) for k, v in value.items()}
        return tuple(value) if isinstance(value, list) else value

    def merged(base: dict, saved: dict) -> dict:
        both = {
            k: merged(base[k], v) if isinstance(base.get(k), dict) and isinstance(v, dict) else v
            for k, v in saved.items()
        }
        return base | both

    # Keys that came after this run was made have their defaults.
    base = load("base").to_dict()
    try:
        saved = tuples(json.loads(path.read_text(encoding="utf-8")))
        config = config_dict.ConfigDict(merged(base, saved))
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{path} is not the config of a run ({first_line(error)}): delete it, or mend it by hand"
        ) from error
    if config.data.dir == os.path.join(config.workdir, "data"):
        config.data.dir = ""  # derived from the folder: derive it again
    config.workdir = str(path.parent)
    return config.lock()
