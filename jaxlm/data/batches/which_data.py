"""Decides which data a command line means, and refuses unusable data before anything is made. Imports no JAX."""

import collections
import os
import pathlib
import shlex
from collections.abc import Callable, Sequence

from ml_collections import config_dict

from jaxlm.config import Config, ConfigError, config_files, pip_install
from jaxlm.corpus.recipes import MANIFEST as PREPARED
from jaxlm.corpus.sources import registry
from jaxlm.data.shards.manifest import MANIFEST, unfinished
from jaxlm.host import files

_PROMPTS = ("The", "In order to")  # for text that nobody knows
_SHARED = ("data.sources", "data.path", "prepare.sources")


def take(config: config_dict.ConfigDict, file: pathlib.Path | None, overrides: Sequence[str]) -> str:
    """Changes a config so that it trains on finished data that the command line names; returns a line about it, or "".

    If DIR in `--config.data.dir=DIR` holds data that the config did not make, the data is used unchanged, with its own
    sources and weights, and replaces a shipped config's vocabulary and prompts. A changed recipe is refused later.
    """
    keys = [override.partition("=")[0] for override in overrides]
    if "data.dir" not in keys or any(key.startswith(_SHARED) for key in keys):
        return ""
    folder = pathlib.Path(config.data.dir)
    made = _made(folder)
    shipped = file is not None and _is_shipped(file)
    if not made or _is_own(config, made, shipped):
        return ""
    own = [*config.data.sources, *config.prepare.sources] or ([config.data.path] if config.data.path else [])
    with config.unlocked():
        config.data.path = ""
        config.data.sources, config.prepare.sources = config_dict.ConfigDict(), config_dict.ConfigDict()
        final = config.data.final
        final.weights = {name: w for name, w in final.weights.items() if f"data.final.weights.{name}" in keys}
        final.share = final.share if final.weights or "data.final.share" in keys else 0.0
    if shipped and "model.vocab_size" not in keys:
        config.model.vocab_size = 0
    if shipped and config.program == "pretrain" and config.sample.prompts and "sample.prompts" not in keys:
        config.sample.prompts = _PROMPTS
    names = sorted({name for _, name in made})
    instead = f", in place of the config's {', '.join(own)}" if own and not set(own) <= set(names) else ""
    return f"data: {folder} as it is, with its own sources ({', '.join(names)}){instead}"


def _made(folder: pathlib.Path) -> dict[tuple[str, str], str]:
    """Returns (manifest, source) -> the path that the source was read from, by the MANIFEST and PREPARED of a folder."""
    paths = {}
    for file in (MANIFEST, PREPARED):
        try:
            content = files.json_of(files.read_soon(folder / file))
            paths |= {(file, name): str(s.get("spec", s.get("path", ""))) for name, s in content["sources"].items()}
        except (OSError, files.NoAnswer, *files.MANGLED):
            continue  # whoever opens the data says what is wrong
    return paths


def _is_own(config: config_dict.ConfigDict, made: dict[tuple[str, str], str], shipped: bool) -> bool:
    """Returns True if the config made the data (a shipped one only if a source's path is equal), or weighs its sources."""
    data, prepared = config.data, config.prepare.sources
    paths = {"text": data.path} if data.path else {name: source["path"] for name, source in data.sources.items()}
    if paths and not any(paths.values()):  # weights alone
        return any(name in paths for _, name in made)
    file = MANIFEST if paths else PREPARED
    wanted = paths or {name: source["path"] for name, source in prepared.items()}
    shared = [(path, made[file, name]) for name, path in wanted.items() if (file, name) in made]
    return any(not shipped or os.path.realpath(a) == os.path.realpath(b) for a, b in shared)


def check(config: Config, word: str | None, overrides: Sequence[str], say: Callable[[str], None]) -> None:
    """Raises ConfigError if there is neither data nor a source for it, or if the source must be prepared first."""
    if config.program != "pretrain":
        if not config.data.path and not config.reward.tasks:
            rl = config.program in ("ppo", "grpo")
            tasks = "; or give it tasks: --config.reward.tasks=gsm8k:FILE.jsonl" * rl
            way = f"--config.data.path=FILE.jsonl, a parquet file, or a folder of them{tasks}"
            raise ConfigError(f"{config.program} reads {'prompts' if rl else 'examples'}: {way}")
        return
    folder, quoted = pathlib.Path(config.data.dir), shlex.quote(str(pathlib.Path(config.data.dir)))
    paths = [source.path for source in config.data.sources.values() if source.path]
    there = [name for name in (MANIFEST, PREPARED, "documents", "work") if (folder / name).exists()]
    named = bool(paths or config.prepare.sources) and not _names_the_folder_alone(word, overrides)
    if line := unfinished(folder):
        raise ConfigError(line)
    check_held_out(config, overrides)
    if not there and not named and (raw := _suffixes(folder)) and not _is_readme(folder):
        kinds, plain = registry.in_words(raw), all(_is_plain(suffix) for suffix in raw)
        prepared = f"first jaxlm prepare {quoted} --out=DATA, then --config.data.dir=DATA"
        way = f"--config.data.path={quoted}" if plain else prepared
        raise ConfigError(f"config.data.dir={folder} holds files ({kinds}) and no data that jaxlm made: {way}")
    for path in paths if MANIFEST not in there else ():
        _check_texts(path, say)
    if paths or config.prepare.sources or there:
        return
    texts = "or train on texts of your own: --config.data.path=FILES"
    recipes = config_files.shipped_configs("data")
    if maker := next((n for n in recipes if config_files.load(n).data.dir == config.data.dir), ""):
        sources = config_files.load(maker).prepare.sources.values()
        hub = any(source.path.startswith("hub:") for source in sources)
        first = f" (its sources come from the hub: {pip_install('hub')} first)" if hub else ""
        way = f"{maker} and jaxlm tokenize {maker}{first}"
    else:
        way = f"FOLDER --out={quoted}"
    raise ConfigError(f"no data in {folder}: make it with jaxlm prepare {way}, {texts}")


def check_held_out(config: Config, overrides: Sequence[str]) -> None:
    """Raises ConfigError if the command names another `data.val_fraction` than that of finished data without texts."""
    file, texts = pathlib.Path(config.data.dir, MANIFEST), any(s.path for s in config.data.sources.values())
    if not texts and file.is_file() and any(override.startswith("data.val_fraction=") for override in overrides):
        try:
            had = float(files.json_of(files.read_soon(file))["recipe"]["val_fraction"])
        except (OSError, files.NoAnswer, *files.MANGLED):
            return  # whoever opens the data says what is wrong
        if had != config.data.val_fraction:
            anew = f"delete {file} to part them anew" if file.with_name(PREPARED).exists() else "leave the key out"
            raise ConfigError(f"{file.parent} holds out {had:g} of its documents (data.val_fraction): {anew}")


def _names_the_folder_alone(word: str | None, overrides: Sequence[str]) -> bool:
    """Returns True for a data folder with a shipped config and no texts: then the config's own texts are not meant."""
    keys = [override.partition("=")[0] for override in overrides]
    if "data.dir" not in keys or any(key.startswith(_SHARED) for key in keys):
        return False
    place = config_files.find(word) if word else None
    return place is not None and place.kind == "config" and _is_shipped(place.path)


def _is_shipped(file: pathlib.Path) -> bool:
    return config_files.CONFIG_PACKAGE.resolve() in file.resolve().parents


def _is_readme(folder: pathlib.Path) -> bool:
    names = (name for _, _, names in os.walk(folder) for name in names if _suffix(name))
    return all(name.lower().startswith("readme.") for name in names)


def _check_texts(path: str, say: Callable[[str], None]) -> None:
    """Raises ConfigError if a folder or file holds mostly formats that `jaxlm prepare` reads and training does not."""
    suffixes = _suffixes(files.expanded(path))
    raw = {suffix: count for suffix, count in suffixes.items() if not _is_plain(suffix)}
    if not raw:
        return
    command = f"jaxlm prepare {shlex.quote(path)} --out=DATA"
    if sum(suffixes.values()) < 2 * sum(raw.values()):
        raise ConfigError(f"{path} holds {registry.in_words(raw)}: prepare it first: {command}")
    say(f"{path}: not read: {registry.in_words(raw)}; {command} reads them too")


def _suffixes(path: pathlib.Path) -> collections.Counter[str]:
    """Returns suffix -> number of text files, plain or raw, in a folder, or of a single file."""
    names = [path.name] if path.is_file() else (name for _, _, names in os.walk(path) for name in names)
    suffixes = collections.Counter(map(_suffix, names))
    del suffixes[""]
    return suffixes


def _suffix(name: str) -> str:
    """Returns the suffix of a text file, compressed or not; "" for any other file."""
    known = [suffix for _, suffixes in registry.FORMATS.values() for suffix in suffixes]
    known += [suffix for suffixes in registry.DOCUMENTS for suffix in suffixes]
    name = name.lower()
    for packed in (".gz", ".zst", ".bz2", ".xz"):
        name = name.removesuffix(packed)
    return next((suffix for suffix in known if name.endswith(suffix)), "")


def _is_plain(suffix: str) -> bool:
    return any(suffix in registry.FORMATS[name][1] for name in registry.PLAIN)


def training(word: str, overrides: Sequence[str]) -> str:
    """Returns the command that trains on a config's data; for a recipe, which only makes data, with the first such config."""
    place = config_files.find(word)
    if place.kind == "documents":  # a data directory
        word, overrides = "quickstart", [f"data.dir={word}", *overrides]
    recipes = {config_files.find_config(name).resolve() for name in config_files.shipped_configs("data")}
    if place.path.resolve() in recipes:
        folder = config_files.load(word).data.dir
        word = next((n for n in config_files.shipped_configs() if config_files.load(n).data.dir == folder), word)
        overrides = [override for override in overrides if override.startswith("data.dir=")]
    return shlex.join(["jaxlm", "train", word, *(f"--config.{override}" for override in overrides)])
