"""A document, and what a cleaning stage does with one: it keeps, changes or removes it, and says why."""

import collections
import dataclasses
import pathlib
import typing


@dataclasses.dataclass(slots=True)
class Document:
    """A text on its way through the stages. datatrove's filters take it too: they read `text`.

    Attributes:
      text: what is cleaned.
      id: leads back to where the text was read (see `jaxlm.corpus.sources`).
      metadata: what the source knows of it; the keys are listed under `Stage.apply`.
    """

    text: str
    id: str
    metadata: dict[str, typing.Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Remove:
    """Why a document is removed.

    Attributes:
      reason: a counter's name: one of few that the stage has ("too few words", "duplicate"), never with numbers in it.
      detail: what in this document made it so ("words=12, min_words=50"), shown with the examples.
    """

    reason: str
    detail: str = ""


class Stage:
    """A step of `prepare.sources.NAME.stages`. A worker makes one and passes it all the documents of its task.

    A subclass sets `Settings`, a frozen dataclass without defaults whose keys and defaults stand in `configs/base.py`
    under `prepare.stages.NAME`, and `apply`. The outcome must depend on the document and the settings alone, so that it
    is the same whatever the order and the number of workers.
    """

    Settings: type
    inputs: tuple[str, ...] = ()  # settings that name files: what is in them decides the outcome too
    name: str  # as in the config; set by `stages.registry.make`

    def __init__(self, settings: typing.Any, folder: pathlib.Path):
        """`folder` is what `build` was given (nothing is in it unless `build` wrote there)."""
        self.settings = settings
        self.folder = folder

    @classmethod
    def build(cls, settings: typing.Any, folder: pathlib.Path) -> None:
        """Makes once, before the tasks, what all workers read: an index, a trained classifier. Default: nothing.

        Deterministic; raises ConfigError for bad settings (a file that is not there, an empty folder).
        """

    def apply(self, document: Document, edits: collections.Counter[str]) -> Remove | None:
        """Changes `document.text` (and metadata) in place, or tells why the document goes.

        Args:
          document: `text`, `id` and `metadata`: "source" (name in the config), "format" (text | html | markdown | code),
            "from" ("html" if it was a page), and where the source knows them "url", "site", "path", "licence" and
            "language" (of code).
          edits: add to it by name what was changed: {"EMAIL": 2}.
        """
        raise NotImplementedError
