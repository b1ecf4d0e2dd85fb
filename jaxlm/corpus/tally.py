"""The books of a source: every document that was read is kept, removed by a stage, or failed; checked."""

import collections
import dataclasses
import typing
from collections.abc import Sequence

from jaxlm.config import RunError

Counts = collections.Counter
FAILURES = 20  # told by name, a source


def stage_order(sources: Sequence[Sequence[str]]) -> list[str]:
    """The names of all sources' stages, each behind those that stand before it in any source, where that can be."""
    left, names = [list(stages) for stages in sources], []
    while any(left):
        first = [stages[0] for stages in left if stages]
        free = [name for name in first if not any(name in stages[1:] for stages in left)]
        names.append((free or first)[0])
        left = [[name for name in stages if name != names[-1]] for stages in left]
    return names


@dataclasses.dataclass
class StageTally:
    """What one stage did. `removed` and `edits` count by reason and by name; `seconds` are not part of any hash."""

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
    """All stages of one source. Bytes are of UTF-8 text; `bytes` is what was read, before the first stage."""

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
        """Adds the books of another task of the same source."""
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
        """Raises RunError when a document is unaccounted for."""
        removed = sum(stage.removed.total() for stage in self.stages)
        if self.documents != self.kept + removed + self.failed.total():
            raise RunError(
                f"the books of source {source} don't balance: read {self.documents} != kept {self.kept} + removed {removed} + "
                f"failed {self.failed.total()}; this is a defect of jaxlm"
            )

    def to_dict(self) -> dict[str, typing.Any]:
        """JSON-able, without the seconds."""
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
