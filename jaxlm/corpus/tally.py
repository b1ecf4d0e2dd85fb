"""Counts a source's documents. Every document read is kept, removed by a stage, or failed, which `Tally.check` checks."""

import collections
import dataclasses
import typing
from collections.abc import Sequence

from jaxlm.config import RunError

Counts = collections.Counter
FAILURES = 20  # told by name, a source


def stage_order(sources: Sequence[Sequence[str]]) -> list[str]:
    """Merges the sources' stage lists into one order (a topological sort). A cycle keeps the first source's order."""
    left, names = [list(stages) for stages in sources], []
    while any(left):
        first = [stages[0] for stages in left if stages]
        free = [name for name in first if not any(name in stages[1:] for stages in left)]
        names.append((free or first)[0])
        left = [[name for name in stages if name != names[-1]] for stages in left]
    return names


@dataclasses.dataclass
class StageTally:
    """Counts of what one stage did to one source's documents.

    Attributes:
      name: the name of the stage.
      documents_in, documents_out, bytes_in, bytes_out: documents and bytes of text before and after the stage.
      changed: the number of documents that it changed.
      removed: reason -> the number of documents removed.
      edits: kind of change -> how often it was made.
      seconds: the time that the stage took; no part of any digest.
    """

    name: str
    documents_in: int = 0
    documents_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    changed: int = 0
    removed: Counts = dataclasses.field(default_factory=Counts)
    edits: Counts = dataclasses.field(default_factory=Counts)
    seconds: float = 0.0

    def add(self, other: "StageTally") -> None:
        """Adds the counts of another task."""
        for field in dataclasses.fields(self)[1:]:
            value = getattr(other, field.name)
            if isinstance(value, dict):
                getattr(self, field.name).update(value)
            else:
                setattr(self, field.name, getattr(self, field.name) + value)


@dataclasses.dataclass
class Tally:
    """The counts of one source. Bytes are those of texts in UTF-8.

    Attributes:
      documents, bytes: the documents and bytes that were read, before the first stage.
      failed: reason -> the number of records that could not be read or that made a stage fail.
      failures: the ids and reasons of the first failed records.
      repaired: reason -> the number of records that were repaired on reading.
      no_field: the message in `sources.base.SourceStats.no_field`.
      stages: the tallies of the stages, in order.
      kept, kept_bytes: the documents and bytes that are left after the last stage.
    """

    documents: int = 0
    bytes: int = 0
    failed: Counts = dataclasses.field(default_factory=Counts)
    failures: list[str] = dataclasses.field(default_factory=list)
    repaired: Counts = dataclasses.field(default_factory=Counts)
    no_field: str = ""  # see `sources.base.SourceStats`
    stages: list[StageTally] = dataclasses.field(default_factory=list)
    kept: int = 0
    kept_bytes: int = 0

    def add(self, other: "Tally") -> None:
        """Adds the counts of another task of the same source."""
        self.documents += other.documents
        self.bytes += other.bytes
        self.failed.update(other.failed)
        self.repaired.update(other.repaired)
        self.no_field = self.no_field or other.no_field
        self.failures = (self.failures + other.failures)[:FAILURES]
        self.kept += other.kept
        self.kept_bytes += other.kept_bytes
        names = [stage.name for stage in self.stages]
        for stage in other.stages:
            if stage.name not in names:
                self.stages.append(StageTally(stage.name))
                names.append(stage.name)
            self.stages[names.index(stage.name)].add(stage)

    def check(self, source: str) -> None:
        """Raises RunError if a document is neither kept, removed nor failed."""
        removed = sum(stage.removed.total() for stage in self.stages)
        if self.documents != self.kept + removed + self.failed.total():
            raise RunError(
                f"the books of source {source} don't balance: read {self.documents} != kept {self.kept} + removed {removed} + "
                f"failed {self.failed.total()}; this is a defect of jaxlm"
            )

    def to_dict(self) -> dict[str, typing.Any]:
        """Returns the counts as JSON values, without the seconds."""
        stages = [
            {field.name: getattr(stage, field.name) for field in dataclasses.fields(stage)} for stage in self.stages
        ]
        for stage in stages:
            del stage["seconds"]
        return {
            "read": {
                "documents": self.documents,
                "bytes": self.bytes,
                "failed": dict(sorted(self.failed.items())),
                "failures": self.failures,
                "repaired": dict(sorted(self.repaired.items())),
            },
            "stages": [
                stage | {name: dict(sorted(stage[name].items())) for name in ("removed", "edits")} for stage in stages
            ],
            "kept": {"documents": self.kept, "bytes": self.kept_bytes},
        }
