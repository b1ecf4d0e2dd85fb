"""The stages by name, and how `"gopher_quality min_words=30"` in a config becomes one."""

import ast
import collections.abc
import dataclasses
import hashlib
import importlib
import json
import pathlib
import typing

from jaxlm import config as config_lib
from jaxlm.config import ConfigError
from jaxlm.corpus.stage import Stage

# Name -> module in this folder, class. Imported when first used: a run pays for the libraries of its own stages only.
DOCUMENT_STAGES = {
    "html": ("html", "Html"),
    "debris": ("debris", "Debris"),
    "unicode": ("unicode", "Unicode"),
    "language": ("language", "Language"),
    "gopher_quality": ("heuristics", "GopherQuality"),
    "gopher_repetition": ("heuristics", "GopherRepetition"),
    "c4": ("heuristics", "C4"),
    "fineweb": ("heuristics", "FineWeb"),
    "classifier": ("classifier", "Classifier"),
    "perplexity": ("perplexity", "Perplexity"),
    "toxicity": ("toxicity", "Toxicity"),
    "code": ("code", "Code"),
    "pii": ("pii", "Pii"),
    "junk": ("junk", "Junk"),
    "decontaminate": ("decontaminate", "Decontaminate"),
}
# Those that look at all documents together, after the others and in this order (see `jaxlm.corpus.dedup`).
GLOBAL_STAGES = ("exact", "near", "lines")


@dataclasses.dataclass(frozen=True)
class Spec:
    """A stage with its settings, as a source wants it."""

    name: str
    settings: dict[str, typing.Any]

    @property
    def key(self) -> str:
        """Equal for equal name and settings; usable as the name of a folder."""
        text = json.dumps([self.name, self.settings], sort_keys=True)
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def parse(line: str, defaults: collections.abc.Mapping[str, dict], where: str) -> Spec:
    """`NAME key=value ...` with `defaults[NAME]` for the other keys. Raises ConfigError that begins with `where`."""
    name, *words = line.split() or [""]
    known = [*DOCUMENT_STAGES, *GLOBAL_STAGES]
    if name not in known:
        raise ConfigError(f"{where}: no stage {name!r}; {config_lib.nearest(name, known)}")
    settings = dict(defaults[name])
    for word in words:
        key, equals, text = word.partition("=")
        if key not in settings or not equals:
            raise ConfigError(
                f"{where}: stage {name} has no setting {word!r}; {config_lib.nearest(key, settings)}"
                if key not in settings
                else f"{where}: write {key}=VALUE after {name}"
            )
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
        settings[key] = value
    return Spec(name, settings)


def stage_class(name: str) -> type[Stage]:
    """The class of a document stage."""
    module, kind = DOCUMENT_STAGES[name]
    return getattr(importlib.import_module(f"jaxlm.corpus.stages.{module}"), kind)


def typed_settings(spec: Spec) -> typing.Any:
    """The spec's settings as the stage's own dataclass. Raises ConfigError for a value of the wrong type."""
    return config_lib.build(stage_class(spec.name).Settings, spec.settings, f"prepare.stages.{spec.name}")


def make(spec: Spec, folder: pathlib.Path) -> Stage:
    """The stage itself; `folder` as in `Stage`."""
    stage = stage_class(spec.name)(typed_settings(spec), folder / spec.key)
    stage.name = spec.name
    return stage
