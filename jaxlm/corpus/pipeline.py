"""The two tasks that touch text: `clean` reads a unit and applies its source's stages, `finish` removes duplicates.

The files that a task writes depend only on the plan and the task. A killed task starts again from its beginning.
"""

import collections
import contextlib
import dataclasses
import gzip
import hashlib
import json
import math
import pathlib
import pickle
import re
import time
import typing
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow.parquet as pq

from jaxlm.config import ConfigError
from jaxlm.corpus.dedup import lines, signatures
from jaxlm.corpus.dedup.near import ROW_BITS, Signer
from jaxlm.corpus.documents import DocumentWriter, describe, read_documents
from jaxlm.corpus.sources import streams
from jaxlm.corpus.sources.base import SourceSpec, Unit
from jaxlm.corpus.sources.units import read_unit
from jaxlm.corpus.stage import Document, Edits, Remove, Stage
from jaxlm.corpus.stages import registry
from jaxlm.corpus.tally import FAILURES, StageTally, Tally, counted

_WORD = re.compile(r"[^\W\d_]{2,}|[\u3040-\u9fff]")
_LEAST_WORDS = 5  # of what repeated lines leave of a page: fewer are no text
LISTED = "listed"  # why a document of a source's list is removed, by the stage "without"
_CHANGES = 2  # changed documents shown, for each stage and task
_CONTEXT = 60  # characters shown on either side of a change
SHOWN = 20  # removed documents that are shown, for each source, stage and reason
_EXCERPT = 500  # characters of a removed document that are recorded
_MARGIN = 2000  # characters beyond an excerpt that are looked at, so that personal data is not cut in two


@dataclasses.dataclass(frozen=True)
class SourcePlan:
    """How to read and clean a source: its document stages in order, the global stages that it takes part in."""

    spec: SourceSpec
    stages: tuple[registry.StageSpec, ...]
    global_stages: tuple[str, ...]
    priority: int
    without: frozenset[str] = frozenset()  # the sha256 of texts to take out


@dataclasses.dataclass(frozen=True)
class Plan:
    """What all tasks must know. What each of them reads is in `units/` and `samples/`: a source may have millions of files."""

    sources: dict[str, SourcePlan]
    source_of: tuple[str, ...]  # the source of each task that reads documents
    global_settings: dict[str, dict]
    memory_gb: float  # for the joins of deduplication
    threads: int

    def save(self, folder: pathlib.Path, units: Sequence[Unit], samples: Sequence[tuple]) -> None:
        make_folders(folder)
        for name, parts in (("units", units), ("samples", samples)):
            for task, part in enumerate(parts):
                (folder / name / f"{task:06d}.pickle").write_bytes(pickle.dumps(part))
        (folder / "plan.pickle").write_bytes(pickle.dumps(self))

    @classmethod
    def load(cls, folder: pathlib.Path) -> "Plan":
        return pickle.loads((folder / "plan.pickle").read_bytes())

    def name_of(self, doc: int, doc_id: str) -> str:
        """Returns a document's id with its source's name, because ids are unique only within a source."""
        return f"{doc_id} ({self.source_of[doc >> ROW_BITS]})"


# What the tasks read and write, each of these a file for each task.
_FOLDERS = ("units", "samples", "stages", "shared", "tally", "examples", "windows")
_TABLES = ("sign", "sketch", "lines", "exact", "pairs", "near", "repeats")  # of `jaxlm.corpus.dedup`


def make_folders(folder: pathlib.Path) -> None:
    for name in (*_FOLDERS, *_TABLES):
        (folder / name).mkdir(parents=True, exist_ok=True)


class Books:
    """Counts and records what a task removes and changes.

    Writes `tally/PHASE-TASK.pickle`, `removed/STAGE/PHASE-TASK.jsonl.gz` and the first records of each kind to
    `examples/PHASE-TASK.jsonl`.
    """

    def __init__(self, folder: pathlib.Path, phase: str, task: int, source: str, chain: Sequence[Stage] = ()):
        """If `chain`, the stages, has the stage `pii`, that hides personal data in the records too."""
        self._pii = next((stage for stage in chain if stage.name == "pii"), None)
        self.tally = Tally(stages=[StageTally(stage.name) for stage in chain])
        self._source = source
        self._folder, self._name = folder, f"{phase}-{task:06d}"
        self._outs: dict[str, typing.IO[bytes]] = {}
        self._files = contextlib.ExitStack()
        self._shown: collections.Counter[tuple[str, str]] = collections.Counter()
        self._examples: list[str] = []

    def removed(self, stage: str, document: Document, why: Remove) -> None:
        excerpt = self._hidden(document.text[: _EXCERPT + _MARGIN])[:_EXCERPT]
        self._write(stage, why.reason, self._hidden(why.detail), document.id, excerpt)

    def changed(self, stage: str, document: Document, before: str) -> None:
        """Records a part of a document before and after its change, unless `_CHANGES` of its stage are recorded already.

        Changes of white space alone are left out. Of personal data only the text after it was replaced is recorded.
        """
        after = document.text
        if self._shown[stage, ""] >= _CHANGES or before.split() == after.split():
            return
        if stage != "pii":  # before the cut, of which the stage would not find half a number
            before, after = self._hidden(before), self._hidden(after)
        if before.split() == after.split():
            return
        words = zip(*(re.finditer(r"\S+", text) for text in (before, after)), strict=False)
        at = next(([a.start(), b.start()] for a, b in words if a[0] != b[0]), [min(len(before), len(after))] * 2)
        if stage == "html":  # a page's head is longer than what is shown: the first words that stand in both
            shared = next((run for run in re.findall(r"[\w ,]{30,}", after) if run in before), "")
            at = [before.find(shared), after.find(shared)]
        parts = [text[max(0, i - _CONTEXT) : i + 3 * _CONTEXT] for text, i in zip((before, after), at, strict=True)]
        self._write(stage, "", "" if stage == "pii" else parts[0], document.id, parts[1])

    def _write(self, stage: str, reason: str, detail: str, doc_id: str, excerpt: str) -> None:
        record = {"source": self._source, "stage": stage, "reason": reason, "detail": detail}
        line = json.dumps(record | {"id": doc_id, "excerpt": excerpt}, ensure_ascii=False) + "\n"
        if stage not in self._outs:
            place = self._folder / "removed" / stage
            place.mkdir(parents=True, exist_ok=True)
            raw = self._files.enter_context((place / f"{self._name}.jsonl.gz").open("wb"))
            self._outs[stage] = self._files.enter_context(gzip.GzipFile("", "wb", 3, raw, mtime=0))
        self._outs[stage].write(line.encode("utf-8", "replace"))
        self._shown[stage, reason] += 1
        if self._shown[stage, reason] <= SHOWN:
            self._examples.append(line)

    def _hidden(self, text: str) -> str:
        if not self._pii or not text:
            return text
        document = Document(text=text, id="")
        self._pii.apply(document, collections.Counter())
        return document.text

    def close(self) -> None:
        """Writes the tally and closes the files."""
        self._files.close()
        examples = "".join(self._examples).encode("utf-8", "replace")
        (self._folder / "examples" / f"{self._name}.jsonl").write_bytes(examples)
        (self._folder / "tally" / f"{self._name}.pickle").write_bytes(pickle.dumps(self.tally))


def size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def import_stages(names: Iterable[str]) -> None:
    for name in names:
        registry.stage_class(name)


def clean(folder: pathlib.Path, task: int) -> None:
    """Reads unit `task`, applies its source's stages, and writes the documents and their signatures."""
    plan = Plan.load(folder)
    name = plan.source_of[task]
    unit = pickle.loads((folder / "units" / f"{task:06d}.pickle").read_bytes())
    source = plan.sources[name]
    chain = [registry.make(spec, folder / "stages") for spec in source.stages]
    books = Books(folder, "clean", task, name, chain)
    together = {stage: plan.global_settings[stage] for stage in source.global_stages}
    signer = Signer(folder, task, source.priority, together)
    writer = DocumentWriter(folder / "clean" / f"{task:06d}.parquet")
    compressed = any(streams.compression(part.name) or part.format == "parquet" for part in unit.parts)
    whole = math.inf if compressed else unit.max_bytes or sum(part.size for part in unit.parts) or 1
    read = read_unit(unit, source.spec, books.tally)
    for document in counted(read, folder, "clean", task, lambda: books.tally.bytes / whole):
        if _apply(document, chain, books):
            writer.add(document)
            signer.add(document)
    signer.finish()
    writer.close()
    books.close()


def _apply(document: Document, chain: list[Stage], books: Books) -> bool:
    """Passes a document through the stages. Returns False if one removed it."""
    began, bytes_in = time.perf_counter(), size(document.text)
    for stage, counts in zip(chain, books.tally.stages, strict=True):
        before = document.text
        try:
            why = stage.apply(document, counts.edits)
        except ConfigError:
            raise
        except Exception as error:  # one document that a stage can't cope with must not cost the run
            reason = f"stage {stage.name}: {type(error).__name__}"
            books.tally.failed[reason] += 1
            if len(books.tally.failures) < FAILURES:
                books.tally.failures.append(f"{document.id}: {reason}")
            _warn(f"{document.id}: {reason}: {error}")
            return False
        reached = time.perf_counter()
        counts.seconds += reached - began
        counts.documents_in += 1
        counts.bytes_in += bytes_in
        began = reached
        if why is None and not document.text.strip():
            why = Remove("nothing left")
        if why is not None:
            counts.removed[why.reason] += 1
            document.text = before
            books.removed(stage.name, document, why)
            return False
        if document.text is not before and document.text != before:
            counts.changed += 1
            bytes_in = size(document.text)
            books.changed(stage.name, document, before)
        counts.documents_out += 1
        counts.bytes_out += bytes_in
    return True


def _warn(line: str) -> None:
    """Writes a line into the task's log, which is datatrove's."""
    from loguru import logger  # here, because it comes with datatrove, which reading finished data does not need

    logger.warning(line)


def finish(folder: pathlib.Path, task: int) -> None:
    """Removes the duplicates and the repeated lines that the joins found among a task's documents."""
    plan = Plan.load(folder)
    name = plan.source_of[task]
    kinds = {"exact": _Copies, "near": _Copies, "lines": _Lines}
    chain = [kinds[stage](stage, plan, folder, task) for stage in plan.sources[name].global_stages]
    if plan.sources[name].without:
        chain.append(_Listed(plan.sources[name].without))
    books = Books(folder, "finish", task, name, chain)
    number = task - plan.source_of.index(name)  # within the source
    path = folder / "documents" / name / f"{number:05d}.parquet"
    writer = DocumentWriter(path)
    windows = [np.empty(0, np.uint64)]  # of the documents that stay, to tell what sources share
    for document in counted(read_documents(folder / "clean" / f"{task:06d}.parquet"), folder, "finish", task):
        if _apply(document, chain, books):
            writer.add(document)
            if len(plan.sources) > 1:
                windows.append(signatures.windows(signatures.word_hashes(document.text)))
            books.tally.kept += 1
            books.tally.kept_bytes += size(document.text)
    writer.close()
    books.tally.files.append(describe(path, folder))
    np.unique(np.concatenate(windows)).tofile(folder / "windows" / f"{task:06d}.u64")
    books.close()


class _Copies(Stage):
    """Removes a task's documents that copy a document that stays (`exact`), or are similar to one (`near`)."""

    def __init__(self, name: str, plan: Plan, folder: pathlib.Path, task: int):
        self.name, self._reason = name, "duplicate" if name == "exact" else "near duplicate"
        rows = _of_task(folder / name, task, "keeper", "keeper_id")
        self._keepers = {row: plan.name_of(keeper, keeper_id) for row, keeper, keeper_id in rows}

    def apply(self, document: Document, edits: Edits) -> Remove | None:
        keeper = self._keepers.get(document.row)
        return keeper and Remove(self._reason, f"of {keeper}")


class _Lines(Stage):
    """Removes from a task's documents the lines that many documents repeat, and paragraphs that another one has."""

    def __init__(self, name: str, plan: Plan, folder: pathlib.Path, task: int):
        self.name, self.settings = name, plan.global_settings[name]
        self._going = collections.defaultdict(set)
        for row, key in _of_task(folder / "repeats", task, "key"):
            self._going[row].add(key)

    def apply(self, document: Document, edits: Edits) -> Remove | None:
        going = self._going.get(document.row)
        if not going:
            return None
        before, meta = document.text, document.metadata
        headings = meta.get("format") == "markdown" or meta.get("from") == "html"
        place = meta.get("source", ""), meta.get("site", "")
        document.text, count = lines.remove(before, *place, self.settings, going, headings=headings)
        gone = 1 - len(document.text) / len(before)
        if gone > self.settings["max_removed"] or len(_WORD.findall(document.text)) < _LEAST_WORDS:
            return Remove("mostly repeated", f"{gone:.0%} of it stands in other documents")
        edits["repeated line or paragraph"] += count
        return None


class _Listed(Stage):
    """Removes the documents of a list, after the duplicates: no copy of theirs takes their place."""

    def __init__(self, sha256s: frozenset[str]):
        self.name, self._sha256s = "without", sha256s

    def apply(self, document: Document, edits: Edits) -> Remove | None:
        listed = hashlib.sha256(document.text.encode("utf-8", "replace")).hexdigest() in self._sha256s
        return Remove(LISTED, "by the source's list") if listed else None


def _of_task(place: pathlib.Path, task: int, *columns: str) -> Iterator[tuple]:
    """Yields (row, value of each column) for one task's documents, from the files of a table, each sorted by document."""
    first = task << ROW_BITS
    of_task = [("doc", ">=", first), ("doc", "<", first + (1 << ROW_BITS))]
    table = pq.read_table(place, columns=["doc", *columns], filters=of_task)
    rows = [doc - first for doc in table.column("doc").to_pylist()]
    yield from zip(rows, *(table.column(column).to_pylist() for column in columns), strict=True)
