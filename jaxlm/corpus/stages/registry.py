"""Maps names to cleaning stages, and parses lines such as `"gopher_quality min_words=30"`.

A new stage gets a line in `DOCUMENT_STAGES`.
"""

import ast
import dataclasses
import glob
import hashlib
import importlib
import json
import pathlib
from collections.abc import Mapping

from jaxlm import config as config_lib
from jaxlm.config import ConfigError, older
from jaxlm.config.prepare_stages import StagesConfig
from jaxlm.corpus.stage import Settings, Stage

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
    "function": ("function", "Function"),
    "toxicity": ("toxicity", "Toxicity"),
    "code": ("code", "Code"),
    "pii": ("pii", "Pii"),
    "junk": ("junk", "Junk"),
    "decontaminate": ("decontaminate", "Decontaminate"),
}
# Stages that compare all documents; they come after the others, in this order (see `jaxlm.corpus.dedup`).
GLOBAL_STAGES = ("exact", "near", "lines")


@dataclasses.dataclass(frozen=True)
class StageSpec:
    """A stage as a source's config asks for it."""

    name: str
    settings: dict
    inputs: str = ""  # a digest of the files that the settings name

    @property
    def recorded(self) -> dict:
        """Returns the settings plus removed ones, which older caches and recipes hold."""
        return older.with_settings(self.name, self.settings)

    @property
    def key(self) -> str:
        """Returns a name for a folder, equal for equal name, settings and files."""
        text = json.dumps([self.name, self.recorded, self.inputs], sort_keys=True)
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def parse(line: str, defaults: Mapping[str, Mapping], config_key: str) -> StageSpec:
    """Returns the stage of a line `NAME key=value ...`; `defaults[NAME]` for other keys. Raises ConfigError for a bad line."""
    name, *words = line.split() or [""]
    known = [*DOCUMENT_STAGES, *GLOBAL_STAGES]
    if name not in known and name not in older.STAGES:
        raise ConfigError(f"{config_key}: no stage {name!r}; {config_lib.nearest(name, known)}")
    settings = dict(defaults[name] if name in defaults else older.STAGES[name])
    for word in words:
        key, equals, text = word.partition("=")
        if key not in settings:
            older.check_setting(name, key)
            near = config_lib.nearest(key, settings)
            raise ConfigError(f"{config_key}: stage {name} has no setting {word!r}; {near}")
        if not equals:
            raise ConfigError(f"{config_key}: write {key}=VALUE after {name}")
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
        settings[key] = (value,) if isinstance(value, str) and isinstance(settings[key], tuple | list) else value
    return StageSpec(name, settings)


def stage_class(name: str) -> type[Stage]:
    module, kind = DOCUMENT_STAGES[name]
    return getattr(importlib.import_module(f"jaxlm.corpus.stages.{module}"), kind)


def typed_settings(spec: StageSpec) -> Settings:
    """Returns the settings as a dataclass. Raises ConfigError for a value of a wrong type or size."""
    typed = config_lib.build(type(getattr(StagesConfig(), spec.name)), spec.settings, f"prepare.stages.{spec.name}")
    for key, most in (settings := dataclasses.asdict(typed)).items():
        least = settings.get(f"min_{key.removeprefix('max_')}") if key.startswith("max_") else None
        if least and most and least > most:
            raise ConfigError(f"prepare.stages.{spec.name}: min_{key[4:]}={least} is above {key}={most}")
    return typed


def digest(spec: StageSpec) -> str:
    """Returns a digest of the local files that the settings name; "" if they name none. URLs are not read."""
    content = b""
    for key in stage_class(spec.name).inputs if spec.name in DOCUMENT_STAGES else ():
        value = spec.settings[key]
        for path in [value] if isinstance(value, str) else value:
            for file in _files(path) if path else ():
                content += f"{key}\0{file.name}\0".encode() + hashlib.sha256(file.read_bytes()).digest()
    return hashlib.sha256(content).hexdigest()[:16] if content else ""


def _files(path: str) -> list[pathlib.Path]:
    place = pathlib.Path(path.partition(".py:")[0] + ".py" if ".py:" in path else path).expanduser()
    if place.is_dir():
        return sorted(file for file in place.rglob("*") if file.is_file())
    return [place] if place.is_file() else sorted(map(pathlib.Path, glob.glob(str(place), recursive=True)))


def make(spec: StageSpec, folder: pathlib.Path) -> Stage:
    """Returns the stage of a spec. `folder` has a subfolder for each stage with what it built."""
    stage = stage_class(spec.name)(typed_settings(spec), folder / spec.key)
    stage.name = spec.name
    return stage
