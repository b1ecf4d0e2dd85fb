"""Finds the config, run, model or documents that an argument names; loads configs, with overrides."""

import dataclasses
import difflib
import glob
import importlib.util
import os
import pathlib
import types
from collections.abc import Sequence
from typing import Literal

from absl import flags
from ml_collections import config_dict, config_flags

from jaxlm.config import ConfigError, PhaseConfig, nearest_key, older
from jaxlm.host import files

CONFIG_PACKAGE = pathlib.Path(__file__).parents[1] / "configs"
TOKENIZER = "tokenizer"  # the tokenizer's folder in an imported run, which has no data
_CONFIG_FOLDERS = ("configs", "data")  # the folders in names of shipped configs
AVERAGE = "average"  # in a run's folder: the run that `jaxlm average` makes of its checkpoints
_NO_CONFIGS = ("base", "presets", "__init__")


@dataclasses.dataclass(frozen=True)
class Found:
    """The file or folder that an argument of the command line names.

    Attributes:
      kind: the kind of thing: "config" is a config file, "run" a run's folder, "model" a folder with Hugging Face's
        files, "documents" any other file, folder or glob.
      path: the path of the file or folder.
    """

    kind: Literal["config", "run", "model", "documents"]
    path: pathlib.Path


def find(word: str, reads_run: bool = False) -> Found:
    """Returns the config, run, model or documents that `word` names.

    If a shipped config and a folder have the same name, the config wins. Write `./NAME` for the folder.

    Args:
      word: the argument.
      reads_run: True to report a path that does not exist as a missing run, False as a missing config.

    Raises:
      ConfigError: nothing has this name.
    """
    path, file = pathlib.Path(word), _config_file(word)
    only_path = word.endswith("/") or (word.startswith((".", "/")) and path.suffix != ".py")
    if file and not only_path:
        return Found("config", file)
    if path.is_dir():
        return Found(_kind(path), path)
    if path.exists() or any(glob.iglob(word)):
        return Found("documents", path)
    if reads_run and "/" in word and path.suffix != ".py" and path.parts[0] not in _CONFIG_FOLDERS:
        raise ConfigError(f"no run in {word}: {did_you_mean(path) or 'there is no such folder'}")
    raise ConfigError(f"no config file, shipped config or folder {word!r}; {_hint(word)}")


def in_words(folder: pathlib.Path) -> str:
    """Returns a folder as an argument for which `find` finds the folder, not a shipped config or an option."""
    return f"./{folder}" if str(folder).startswith("-") or _config_file(str(folder)) else str(folder)


def no_run(folder: str | pathlib.Path, word: str | None) -> str:
    """Returns "no run in FOLDER", and how to name a run beside it that is called like the config `word`."""
    here = pathlib.Path(word or "")
    named = not here.is_absolute() and in_words(here) != word and (here / "metrics.jsonl").is_file()
    return f"no run in {folder}" + f" ({word} is a shipped config; the run of that name is {in_words(here)})" * named


def run_named(word: str | None, option: str, usage: str) -> pathlib.Path:
    """Returns the folder of the run that `word` names. Raises ConfigError if it names none, which `option` needs."""
    place = find(word) if word else None
    if place is None or place.kind != "run":
        raise ConfigError(f"{option} needs the folder of a run: {usage}")
    return place.path


def at_step(word: str) -> tuple[str, str]:
    """Returns (the folder, the checkpoint) that RUN@STEP names: a step, latest or best; "" if the word names none.

    RUN@average is the run in RUN/average, which `jaxlm average` makes.
    """
    folder, at, step = word.rpartition("@")
    if at and folder and step == AVERAGE and not files.expanded(word).exists():
        return f"{folder}/{AVERAGE}", ""
    named = at and folder and (files.is_step(step) or step in ("latest", "best"))
    return (folder, step) if named and not files.expanded(word).exists() else (word, "")


def runs_in(word: str) -> list[str]:
    """Returns the runs in a folder that is no run itself, by name; else the word."""
    folder = files.expanded(word)
    runs = [] if (folder / "config.json").exists() else sorted(folder.glob("*/metrics.jsonl"))
    return [str(path.parent) for path in runs if (path.parent / "config.json").exists()] or [word]


def averaged(folder: str | pathlib.Path) -> pathlib.Path | None:
    """Returns RUN if the folder is RUN/average, the place of the run's average; else None."""
    run = pathlib.Path(folder).parent
    return run if pathlib.Path(folder).name == AVERAGE and (run / "config.json").is_file() else None


def _kind(folder: pathlib.Path) -> Literal["run", "model", "documents"]:
    config = folder / "config.json"
    if config.is_file():
        try:
            keys = files.json_of(config.read_bytes(), object)
        except ValueError:
            return "run"  # damaged: `from_run` says so
        keys = keys.keys() if isinstance(keys, dict) else set()
        if "train" in keys or (folder / "run.json").is_file():
            return "run"
        if {"architectures", "model_type"} & keys:
            return "model"  # any other config.json belongs to a website or a program
    return "model" if any(folder.glob("*.safetensors")) else "documents"


def shipped_configs(folder: str = "") -> list[str]:
    """Returns the names of the shipped configs: those for training, or those in `folder`.

    Leaves out the file of defaults, `base`, and the recipes, `presets`.
    """
    paths = (CONFIG_PACKAGE / folder).glob("*.py")
    return sorted(str(pathlib.PurePosixPath(folder, p.stem)) for p in paths if p.stem not in _NO_CONFIGS)


def find_config(name: str) -> pathlib.Path:
    """Returns the file of a config, given its path or its shipped name (`quickstart`, `data/techdocs`).

    Raises ConfigError if there is no such config.
    """
    if file := _config_file(name):
        return file
    raise ConfigError(f"no config file or shipped config {name!r}; {_hint(name)}")


def _config_file(name: str) -> pathlib.Path | None:
    path = pathlib.Path(name)
    if path.suffix == ".py" and path.is_file():
        return path
    shipped = _shipped_name(name)
    return CONFIG_PACKAGE / f"{shipped}.py" if shipped in [*_all_shipped(), "base"] else None


def _all_shipped() -> list[str]:
    return [*shipped_configs(), *shipped_configs("data")]


def _shipped_name(name: str) -> str:
    return pathlib.Path(name).as_posix().removeprefix("configs/").removesuffix(".py")


def _hint(name: str) -> str:
    if "/" in name and (beside := did_you_mean(pathlib.Path(name))):
        return beside
    here = [] if "/" in name else [path.name for path in pathlib.Path().glob("*")]
    near = difflib.get_close_matches(_shipped_name(name), [*_all_shipped(), *here], n=1)
    near = near or [shipped for shipped in _all_shipped() if name in shipped]  # 1b
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    if "/" in name:
        return "there is no such folder; a config is a shipped name or a FILE.py, a run a folder with config.json"
    return "jaxlm help configs lists the shipped ones"


def did_you_mean(path: pathlib.Path) -> str:
    """Returns a question that suggests a similar name in the same folder; "" if there is none."""
    beside = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*")], n=1)
    return f"did you mean '{path.parent / beside[0]}'?" if beside else ""


def module(path: pathlib.Path) -> types.ModuleType:
    """Runs a config file and returns it as a module. Raises whatever the file raises."""
    spec = importlib.util.spec_from_file_location(f"jaxlm_config_{path.stem}", path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def load(name: str, overrides: Sequence[str] = ()) -> config_dict.ConfigDict:
    """Returns the locked ConfigDict of a config file, with overrides such as `train.steps=100`.

    Raises ConfigError if there is no such config, or if the file or an override is wrong.
    """
    path = find_config(name)
    try:
        config = module(path).get_config()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"config {path}: {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(config, config_dict.ConfigDict):
        raise ConfigError(f"config {path}: get_config() must return an ml_collections ConfigDict")
    older.drop_stages(config)
    config.lock()
    for override in overrides:
        apply_override(config, override)
    return config


def default_workdir(file: pathlib.Path, config: config_dict.ConfigDict) -> str:
    """Returns the folder of a run whose config sets no workdir: runs/NAME, or runs/NAME-shrunk for a shrunk config."""
    return f"runs/{file.stem}{'-shrunk' * bool(config.phases.shrink)}"


def apply_override(config: config_dict.ConfigDict, override: str) -> None:
    """Changes one key of `config` in place. `override` is the text KEY=VALUE; VALUE must have the type of the current value.

    A source that `data.final.weights` does not name yet is added to it, and a phase to `phases.plan`.

    Raises ConfigError if the key is unknown or a section, the value is missing, or it has the wrong type.
    """
    key, sep, value = override.partition("=")
    older.admit(config, key, value)
    *sections, name = key.split(".")
    match sections:
        case ["data", "final", "weights"] if name and name not in config.data.final.weights:
            with config.unlocked():
                config.data.final.weights[name] = 0.0
        case ["phases", "plan", phase] if phase not in config.phases.plan:
            with config.unlocked():
                config.phases.plan[phase] = dataclasses.asdict(PhaseConfig())
    owner = value_of(config, sections)
    if not isinstance(owner, config_dict.ConfigDict) or name not in owner:
        raise ConfigError(f"unknown key config.{key}; {nearest_key(key, flat_keys(config))}")
    if not sep:
        raise ConfigError(f"--config.{key} needs a value: --config.{key}=VALUE")
    old = owner[name]
    if isinstance(old, config_dict.ConfigDict):
        keys = f"set one of its keys: {', '.join(f'{key}.{k}' for k in old)}" if old else "which has no keys"
        raise ConfigError(f"config.{key} is a section, {keys}")
    # A config of this key alone: absl prints a flag's whole config for its help, which takes a third of a second.
    alone = config_dict.ConfigDict({name: old})
    values = flags.FlagValues()
    argv = ["jaxlm", f"--config.{name}={value}"]
    config_flags.DEFINE_config_dict("config", alone, flag_values=values, sys_argv=argv)
    try:
        values(argv)
    except (flags.Error, TypeError, ValueError, SyntaxError) as error:
        raise ConfigError(f"config.{key}={value}: expected {type(old).__name__}, such as {old!r}") from error
    owner[name] = alone[name]


def value_of(config: config_dict.ConfigDict, parts: Sequence[str]) -> object:
    """Returns the value of a dotted key, given its parts; None if there is no such key."""
    value: object = config
    for part in parts:
        value = value.get(part) if isinstance(value, config_dict.ConfigDict) else None
    return value


def flat_keys(config: config_dict.ConfigDict, prefix: str = "") -> list[str]:
    """Returns the dotted names of all sections and keys."""
    keys = []
    for key, value in config.items():
        keys.append(prefix + key)
        if isinstance(value, config_dict.ConfigDict):
            keys += flat_keys(value, f"{prefix}{key}.")
    return keys


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def from_run(path: pathlib.Path) -> config_dict.ConfigDict:
    """Returns WORKDIR/config.json as a ConfigDict that takes overrides.

    If the folder was moved, `workdir` and `data.dir` name the new place. Keys that are newer than the file have their
    defaults.

    Raises:
      ConfigError: the file is not the config of a run.
    """

    def tuples(value: object) -> object:
        if isinstance(value, dict):
            return {k: tuples(v) for k, v in value.items()}
        return tuple(value) if isinstance(value, list) else value

    def merged(base: object, saved: object) -> object:
        if not (isinstance(base, dict) and isinstance(saved, dict)):
            return saved
        return base | {key: merged(base.get(key), value) for key, value in saved.items()}

    base = load("base").to_dict()
    empty_source = tuples(module(find_config("base")).source())
    try:
        saved = tuples(files.json_of(path.read_bytes()))
        if "train" not in saved:
            raise ValueError("it has no section train")
        whole = older.read_run(saved, merged(base, saved), path.parent)
        sources = whole["prepare"]["sources"]
        whole["prepare"]["sources"] = {name: merged(empty_source, source) for name, source in sources.items()}
        config = config_dict.ConfigDict(whole)
        older.drop_stages(config)
        if config.data.dir == os.path.join(config.workdir, "data"):
            config.data.dir = ""  # derived from the folder: derive it again
        config.workdir = str(path.parent)
        if (path.parent / TOKENIZER).is_dir():
            config.data.tokenizer = str(path.parent / TOKENIZER)
    except files.MANGLED as error:
        raise ConfigError(f"{path} is not the config of a run ({first_line(error)}): delete or mend it") from error
    return config.lock()


def of_run(folder: pathlib.Path, overrides: Sequence[str]) -> config_dict.ConfigDict:
    """Returns the config of the run in a folder, with overrides. Raises ConfigError as `from_run` and `apply_override` do."""
    config = from_run(folder / "config.json")
    for override in overrides:
        apply_override(config, override)
    return config
