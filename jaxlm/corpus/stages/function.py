"""A filter that the user writes: keeps the documents to which a Python function gives a high score."""

import importlib
import pathlib
from collections.abc import Callable

from jaxlm.config import ConfigError, config_files
from jaxlm.corpus.stage import Document, Edits, Remove, Settings, Stage, scored


class Function(Stage):
    """Writes what the function returns to metadata["score"], and removes documents below `min_score`."""

    inputs = ("path",)

    def __init__(self, settings: Settings, folder: pathlib.Path):
        super().__init__(settings, folder)
        self._function = _load(settings.path)

    @classmethod
    def build(cls, settings: Settings, folder: pathlib.Path) -> None:
        _load(settings.path)

    def apply(self, document: Document, edits: Edits) -> Remove | None:
        score = float(self._function(document.text, document.metadata))
        return scored(document, "score", score, "low score", self.settings.min_score)


def _load(path: str) -> Callable[[str, dict], float]:
    place, _, name = path.rpartition(":")
    try:
        if place.endswith(".py"):
            return getattr(config_files.module(pathlib.Path(place).expanduser()), name)
        return getattr(importlib.import_module(place), name)
    except Exception as error:  # whatever the user's module raises
        raise ConfigError(
            f"prepare.stages.function.path={path!r}: {type(error).__name__}: {config_files.first_line(error)}; "
            "write FILE.py:FUNCTION or MODULE:FUNCTION"
        ) from error
