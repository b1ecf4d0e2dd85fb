"""Makes the config of `jaxlm prepare DIR`: a source for each kind of document in the folder, by a shipped recipe."""

import argparse
import pathlib
import shlex
from collections.abc import Sequence

from ml_collections import config_dict

from jaxlm import config as config_lib
from jaxlm.config import ConfigError, config_files
from jaxlm.corpus import recipes
from jaxlm.corpus.sources import survey
from jaxlm.host import files
from jaxlm.host.console import size

_MADE = (recipes.MANIFEST, "tokenizer.model")  # files that jaxlm writes into a data directory
_LONG_BYTES = 1 << 16  # a longer text is probably a book
_KINDS = {
    "html": "HTML",
    "markdown": "Markdown",
    "code": "source",
    "mediawiki": "MediaWiki",
    "warc": "WARC",
    "readme": "README-like",
}


def config(args: argparse.Namespace, overrides: Sequence[str]) -> config_dict.ConfigDict | None:
    """Returns the config for the folder, file or glob that the command line names; None if it names a config or a run.

    Sets `args.preset` to the recipe's name, and `args.told` to lines on what the folder holds and where the result goes.
    """
    args.told = []
    try:
        named = config_files.find(args.config) if args.config else None
    except ConfigError as error:  # without the list of configs: a folder was meant
        raise ConfigError(str(error).partition("; shipped: ")[0]) from None
    documents = named is not None and named.kind == "documents"
    if not documents or any((named.path / name).is_file() for name in _MADE):
        if args.preset or args.out:
            raise ConfigError(
                "--preset and --out go with a folder of documents: jaxlm prepare DIR; a config has its own"
            )
        return None
    presets = config_files.module(config_files.CONFIG_PACKAGE / "presets.py")
    if args.preset is not None and args.preset not in presets.PRESETS:
        raise ConfigError(f"no preset {args.preset!r}; {config_lib.nearest(args.preset, presets.PRESETS)}")
    path, made = args.config, config_files.load("base")
    seen = survey.survey(path, presets.TOOLS)
    args.preset = args.preset or guess(seen)
    make, exclude = presets.PRESETS[args.preset]
    seen = survey.survey(path, exclude)
    if not seen.files:
        raise ConfigError("; ".join(survey.unread_lines(path, seen.unread)) or f"{path} holds no documents")
    made.unlock()
    made.data.dir = args.out or _out(named.path)
    stages = make(made)
    together = len(seen.files) > 1 and not named.path.is_dir()  # a glob
    finished = files.json_there(pathlib.Path(made.data.dir) / recipes.MANIFEST).get("sources", {"readme": {}})
    if "readme" not in finished:  # made by an earlier version, which did not read them
        seen.files.pop("readme", None)
    source = config_files.module(config_files.find_config("base")).source
    for kind in ["auto"] if together else seen.files:
        name = "documents" if together else kind
        made.prepare.sources[name] = source(path, stages, format=kind, exclude=exclude)
    made.lock()
    for override in overrides:
        config_files.apply_override(made, override)
    _check(made.data.dir, named.path, args.out)
    others = ", ".join(name for name in presets.PRESETS if name != args.preset)
    holds = ", ".join(
        f"{n:,} {_KINDS.get(kind, kind)} file{'s' * (n > 1)} ({size(seen.sizes[kind])})"
        for kind, n in seen.files.items()
    )
    args.told = [
        f"{path}: {holds}",
        f"preset {args.preset} (--preset={others.replace(', ', '|')}), into {made.data.dir} (--out=DATA)",
    ]
    return made


def guess(seen: survey.Survey) -> str:
    """Returns the name of the preset for the main kind of text in a folder, by bytes; in doubt `docs`, the mildest."""
    kind = next(iter(seen.sizes), "")
    if kind == "text" and seen.sizes[kind] >= _LONG_BYTES * seen.files[kind]:
        return "books"
    return {"code": "code", "warc": "web"}.get(kind, "docs")


def command(args: argparse.Namespace, data: str, kept_bytes: int) -> str:
    """Returns the command to run after `prepare`: `tokenize`, or for a folder `train` with a model that fits `kept_bytes`."""
    if args.preset:
        model = "quickstart" if kept_bytes < 20e6 else "local_35m"
        return f"jaxlm train {model} --config.data.dir={shlex.quote(data)}"
    overrides = [f"--config.{override}" for override in args.overrides]
    return shlex.join(["jaxlm", "tokenize", args.config, *overrides])


def _out(place: pathlib.Path) -> str:
    name = place.resolve().stem if place.is_file() else place.resolve().name
    return str(pathlib.PurePath("data", name if place.exists() else "documents"))


def _check(out: str, place: pathlib.Path, flag: str | None) -> None:
    """Raises ConfigError if the next run would read the result as documents, or if two folders are given for it."""
    if flag and pathlib.Path(flag) != pathlib.Path(out):
        raise ConfigError(f"two folders for the result: --out={flag} and --config.data.dir={out}; give one of them")
    into, read = pathlib.Path(out).resolve(), place.resolve()
    if read.is_dir() and (into == read or read in into.parents):
        beside = read.with_name(f"{read.name}-data")
        raise ConfigError(f"{out} lies in {place}, where it would be read as documents: give --out={beside}")
