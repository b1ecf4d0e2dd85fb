"""A document, and what a cleaning stage does with one: it keeps, changes or removes it, and says why."""

import collections
import dataclasses
import pathlib
import typing


@dataclasses.dataclass(slots=True)
class Document:
    """A text on its way through the stages. datatrove's filters take it too: they read its `text`.

    Attributes:
      text: what the stages clean.
      id: leads back to the place that the text was read from (see `jaxlm.corpus.sources`).
      metadata: what the source knows about it; `Stage.apply` lists the keys.
    """

    text: str
    id: str
    metadata: dict[str, typing.Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Remove:
    """Why a document is removed.

    Attributes:
      reason: the name of a counter, one of the few that the stage has ("too few words", "duplicate"). It holds no numbers.
      detail: what in this document was the reason ("words=12, min_words=50"), shown with the examples.
    """

    reason: str
    detail: str = ""


class Stage:
    """A cleaning step of `prepare.sources.NAME.stages`. A worker makes one and passes it every document of its task.

    A subclass sets `Settings`, a frozen dataclass without defaults whose keys and defaults stand in `configs/base.py` under
    `prepare.stages.NAME`, and defines `apply`. What `apply` does must depend on the document and the settings alone, so
    that the order of documents and the number of workers don't matter.
    """

    Settings: type
    inputs: tuple[str, ...] = ()  # settings that name files: what is in them decides the outcome too
    name: str  # as in the config; set by `stages.registry.make`

    def __init__(self, settings: typing.Any, folder: pathlib.Path):
        """`folder` is the one that `build` was given; it is empty unless `build` wrote there."""
        self.settings = settings
        self.folder = folder

    @classmethod
    def build(cls, settings: typing.Any, folder: pathlib.Path) -> None:
        """Makes what all workers read, such as an index or a trained classifier. Runs once, before the tasks. Default: nothing.

        The result must be deterministic.

        Raises:
          ConfigError: bad settings, such as a file that is not there or an empty folder.
        """

    def apply(self, document: Document, edits: collections.Counter[str]) -> Remove | None:
        """Changes the document in place and returns None, or returns why the document is removed.

        Args:
          document: has `text`, `id` and `metadata`. Keys of metadata: "source" (its name in the config), "format"
            (text, html, markdown or code), "from" ("html" if it was a page), and if the source knows them "url",
            "site", "path", "licence" and "language" (of code).
          edits: counts changes by name; add to it, as in {"EMAIL": 2}.
        """
        raise NotImplementedError
