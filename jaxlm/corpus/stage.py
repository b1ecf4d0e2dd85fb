"""Defines documents, and cleaning stages, which keep, change or remove a document and say why."""

import collections
import dataclasses
import pathlib
import typing
from collections.abc import Iterable

Settings = typing.Any  # a dataclass of config/prepare_stages.py
Edits = collections.Counter[str]  # kind of change -> how often it was made


@dataclasses.dataclass(slots=True)
class Document:
    """A text on its way through the stages. datatrove's filters take it too: they read its `text`."""

    text: str
    id: str  # leads back to the place that it was read from (see `jaxlm.corpus.sources`)
    metadata: dict = dataclasses.field(default_factory=dict)
    row: int = 0  # in its file of prepared documents


@dataclasses.dataclass(frozen=True)
class Remove:
    """Why a document is removed."""

    reason: str  # a counter of the stage, such as "too few words"; holds no numbers
    detail: str = ""  # the facts behind it ("words=12, min_words=50"), shown with the examples


def first_broken(rules: Iterable[tuple[bool, str, str]]) -> Remove | None:
    """Returns why a document is removed by rules that are (True if broken, reason, detail); None if all hold."""
    return next((Remove(reason, detail) for broken, reason, detail in rules if broken), None)


def scored(document: Document, key: str, score: float, reason: str, least: float) -> Remove | None:
    """Writes a score to the document's metadata. Returns why it is removed if the score is below `least`."""
    document.metadata[key] = round(score, 4)
    return Remove(reason, f"score={score:.3f}, min_score={least}") if score < least else None


class Stage:
    """A cleaning step of `prepare.sources.NAME.stages`. A worker makes one and passes it every document of its task.

    The effect of `apply` must depend only on the document and the settings (`config/prepare_stages.py`), never on other
    documents.
    """

    inputs: tuple[str, ...] = ()  # settings that name files, whose content changes the outcome too
    name: str  # as in the config; set by `stages.registry.make`

    def __init__(self, settings: Settings, folder: pathlib.Path):
        """`folder` holds the files that `build` wrote, if it wrote any."""
        self.settings = settings
        self.folder = folder

    @classmethod
    def build(cls, settings: Settings, folder: pathlib.Path) -> list[str] | None:
        """Writes files that all workers read, such as an index, once; they must be deterministic. Returns lines to show.

        Raises ConfigError if a setting is wrong, such as a missing file or an empty folder.
        """

    def apply(self, document: Document, edits: Edits) -> Remove | None:
        """Cleans a document in place and returns None, or returns why it must be removed.

        Its metadata has "source" and "format" (text, html, markdown or code), "from" ("html") if it was an HTML page,
        and "url", "site", "path", "licence" and "language" (of code) if the source knows them. `edits["EMAIL"] += 2`
        counts changes.
        """
        raise NotImplementedError
