"""Counts a source's documents. Every document read is kept, removed by a stage, or failed, which `Tally.check` checks."""

import collections
import contextlib
import dataclasses
import pathlib
import time
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxlm.config import RunError
from jaxlm.corpus.sources.base import SourceStats

Counts = collections.Counter
FAILURES = 20  # listed by id, for each source
LOST = 1000  # listed by name, for each source
_EVERY_S = 1.0  # between two updates of a task's count

T = typing.TypeVar("T")


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
    """Counts of what one stage did to one source's documents."""

    name: str
    documents_in: int = 0
    documents_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    changed: int = 0
    removed: Counts = dataclasses.field(default_factory=Counts)  # reason -> documents
    edits: Counts = dataclasses.field(default_factory=Counts)  # kind of change -> how often
    seconds: float = 0.0  # no part of any digest

    def add(self, other: "StageTally") -> None:
        _add(self, other, [field.name for field in dataclasses.fields(self)[1:]])


@dataclasses.dataclass
class Tally(SourceStats):
    """The counts of one source: those of its reader, and what became of the documents. Bytes are those of texts in UTF-8."""

    failed: Counts = dataclasses.field(default_factory=Counts)  # made a stage fail
    failures: list[str] = dataclasses.field(default_factory=list)  # ids and reasons; of `add`, the reader's too
    stages: list[StageTally] = dataclasses.field(default_factory=list)
    kept: int = 0  # after the last stage
    kept_bytes: int = 0
    files: list[dict] = dataclasses.field(default_factory=list)  # of kept documents, see `documents.describe`

    def add(self, other: "Tally") -> None:
        """Adds the counts of another task of the same source."""
        _add(
            self, other, ("documents", "bytes", "skipped", "repaired", "lost", "failed", "kept", "kept_bytes", "files")
        )
        self.no_field = self.no_field or other.no_field
        self.failures = (self.failures + other.examples + other.failures)[:FAILURES]
        stages = {stage.name: stage for stage in self.stages}
        for stage in other.stages:
            stages.setdefault(stage.name, StageTally(stage.name)).add(stage)
        self.stages = list(stages.values())

    def check(self, source: str) -> None:
        """Raises RunError if a document is neither kept, removed nor failed."""
        removed = sum(stage.removed.total() for stage in self.stages)
        if self.documents != self.kept + removed + self.failed.total():
            raise RunError(
                f"the counts of source {source} don't add up: read {self.documents} != kept {self.kept} + removed {removed} + "
                f"failed {self.failed.total()}; this is a defect of jaxlm"
            )

    def to_dict(self) -> dict:
        """Returns the counts as JSON values, without the seconds."""
        stages = [dict(vars(stage)) for stage in self.stages]
        for stage in stages:
            del stage["seconds"]
            stage |= {name: dict(sorted(stage[name].items())) for name in ("removed", "edits")}
        return {
            "read": {
                "documents": self.documents + self.skipped.total(),
                "bytes": self.bytes,
                "failed": dict(sorted((self.skipped + self.failed).items())),
                "failures": self.failures,
                "repaired": dict(sorted(self.repaired.items())),
                **({"lost": dict(self.lost.most_common(LOST))} if self.lost else {}),
            },
            "stages": stages,
            "kept": {"documents": self.kept, "bytes": self.kept_bytes},
            "files": self.files,
        }


def _add(counts: StageTally | Tally, others: StageTally | Tally, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(others, name)
        if isinstance(value, Counts):
            getattr(counts, name).update(value)
        else:
            setattr(counts, name, getattr(counts, name) + value)


def counted(
    documents: Iterable[T], folder: pathlib.Path, phase: str, task: int, share: Callable[[], float] = lambda: 0.0
) -> Iterator[T]:
    """Yields a task's documents; once a second writes their number and the `share` that is done into a file for `progress`."""
    path, number, due = folder / "tasks" / phase / f"count-{task:05d}", 0, 0.0

    def note() -> None:
        with contextlib.suppress(OSError):  # a lost count must not fail the task
            path.write_text(f"{number} {min(share(), 1):.3f}")

    for document in documents:
        yield document
        number += 1
        if time.monotonic() >= due:
            note()
            due = time.monotonic() + _EVERY_S
    note()


def progress(place: pathlib.Path) -> tuple[int, float]:
    """Returns (documents read so far, tasks done, in parts) of the phase in this folder."""
    total, tasks = 0, 0.0
    for path in place.glob("count-*"):
        with contextlib.suppress(OSError, ValueError):  # it is being written
            documents, share = path.read_text().split()
            total, tasks = total + int(documents), tasks + float(share)
    return total, tasks
