"""Ends a preparation: checks the counts, moves the results into place, writes the manifest last."""

import collections
import hashlib
import json
import pathlib
import pickle
import shutil
import typing
from collections.abc import Sequence

import pyarrow.parquet as pq

from jaxlm.config import ConfigError, RunError
from jaxlm.corpus.dedup.sql import connect, quoted
from jaxlm.corpus.pipeline import SHOWN, Plan
from jaxlm.corpus.recipes import MANIFEST
from jaxlm.corpus.tally import Tally
from jaxlm.host import files

EXAMPLES = "examples.jsonl"
FORMAT = 1
OWNER = ".recipe"  # in documents/: the key of the recipe that they were made by
_CLUSTERS, _MEMBERS = 20, 10  # shown in clusters.json


def check_read(folder: pathlib.Path, plan: Plan) -> None:
    """Raises ConfigError if a source gave no document at all."""
    for name, tally in _tallies(folder, plan, ("clean",)).items():
        if any(stage.documents_in for stage in tally.stages) or tally.documents != tally.failed.total():
            continue
        why = tally.no_field or (tally.failures[0] if tally.failures else "check its path and format")
        raise ConfigError(f"source '{name}' gave no document; {why}")


def _tallies(folder: pathlib.Path, plan: Plan, phases: Sequence[str]) -> dict[str, Tally]:
    tallies = {name: Tally() for name in plan.sources}
    for task, (name, _) in enumerate(plan.units):
        for phase in phases:
            tallies[name].add(pickle.loads((folder / "tally" / f"{phase}-{task:06d}.pickle").read_bytes()))
    return tallies


def conclude(root: pathlib.Path, folder: pathlib.Path, plan: Plan, recipe: dict[str, typing.Any]) -> None:
    """Checks the counts, moves the results from `folder` to `root`, writes the manifest, and removes the work files.

    Args:
      root: the data directory.
      folder: the folder that the tasks wrote to.
      plan: the plan of the tasks.
      recipe: everything that decides the result, for the manifest.

    Raises:
      RunError: a document was read, but neither kept, removed nor counted as failed.
    """
    tallies = _tallies(folder, plan, ("clean", "finish"))
    written: dict[str, list[dict]] = {name: [] for name in plan.sources}
    for task, (name, _) in enumerate(plan.units):
        path = plan.document_file(folder, task)
        if not path.exists():  # moved by a conclusion that was cut short
            path = root / path.relative_to(folder)
        with path.open("rb") as content:
            sha256 = hashlib.file_digest(content, "sha256").hexdigest()
        entry = {"file": str(plan.document_file(pathlib.Path(), task)), "size": path.stat().st_size, "sha256": sha256}
        written[name].append(entry | {"documents": pq.read_metadata(path).num_rows})
    for name, tally in tallies.items():
        tally.check(name)
        if tally.kept != sum(entry["documents"] for entry in written[name]):
            raise RunError(
                f"{root / 'documents' / name} does not hold the {tally.kept} documents that the books tell of"
            )
    _merge_removed(root, folder)
    _write_examples(root, folder)
    _write_clusters(root, folder, plan)
    if (folder / "documents").exists():
        shutil.rmtree(root / "documents", ignore_errors=True)
        (folder / "documents" / OWNER).write_text(folder.name)
        (folder / "documents").rename(root / "documents")
    manifest = {
        "format": FORMAT,
        "recipe": recipe,
        "sources": {
            name: {"path": plan.sources[name].spec.path} | tally.to_dict() | {"files": written[name]}
            for name, tally in tallies.items()
        },
    }
    seconds = {name: {stage.name: round(stage.seconds, 3) for stage in tally.stages} for name, tally in tallies.items()}
    (root / "timings.json").write_text(json.dumps(seconds, indent=1) + "\n")
    content = (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode()
    files.write_atomically(root / MANIFEST, content)
    shutil.rmtree(root / "work")


def _merge_removed(root: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes removed/STAGE.jsonl.gz: what the tasks wrote, one gzip member after another, in the order of tasks."""
    place = root / "removed"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for stage in sorted((folder / "removed").glob("*")):
        with (place / f"{stage.name}.jsonl.gz").open("wb") as out:
            for part in sorted(stage.iterdir()):
                with part.open("rb") as records:
                    shutil.copyfileobj(records, out)


def _write_examples(root: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes examples.jsonl: the first records of each source, stage and reason."""
    counts: collections.Counter[tuple] = collections.Counter()
    with (root / EXAMPLES).open("wb") as out:
        for part in sorted((folder / "examples").iterdir()):
            for line in part.read_bytes().splitlines(keepends=True):
                record = json.loads(line)
                key = record["source"], record["stage"], record["reason"]
                counts[key] += 1
                if counts[key] <= SHOWN:
                    out.write(line)


def _write_clusters(root: pathlib.Path, folder: pathlib.Path, plan: Plan) -> None:
    """Writes clusters.json: the sizes of groups of duplicates, and the largest groups with some of their members."""
    with files.plain_path(folder) as folder, connect(folder, plan.memory_gb, plan.threads) as connection:
        connection.execute(f"""
            CREATE TEMP TABLE gone AS SELECT * FROM (
                SELECT * FROM read_parquet({quoted(folder / "exact.parquet")})
                UNION ALL SELECT * FROM read_parquet({quoted(folder / "near.parquet")}));
            CREATE TEMP TABLE clusters AS
            SELECT keeper, any_value(keeper_id) AS keeper_id, count(*) + 1 AS size FROM gone GROUP BY keeper""")
        sizes = connection.execute("SELECT size, count(*) FROM clusters GROUP BY size ORDER BY size").fetchall()
        largest = connection.execute(f"""
            SELECT c.keeper, c.keeper_id, c.size, list((s.doc, s.id) ORDER BY s.doc)[:{_MEMBERS}]
            FROM (SELECT * FROM clusters ORDER BY size DESC, keeper LIMIT {_CLUSTERS}) c JOIN gone g USING (keeper)
            JOIN (SELECT doc, id FROM read_parquet({quoted(folder / "sign/*.parquet")})) s USING (doc)
            GROUP BY ALL ORDER BY c.size DESC, c.keeper""").fetchall()
    clusters = {
        "sizes": {str(size): count for size, count in sizes},
        "largest": [
            {"kept": plan.name_of(doc, doc_id), "size": size, "members": [plan.name_of(*member) for member in members]}
            for doc, doc_id, size, members in largest
        ],
    }
    (root / "clusters.json").write_text(json.dumps(clusters, ensure_ascii=False) + "\n", encoding="utf-8")


def examples(root: pathlib.Path) -> list[dict[str, str]]:
    """Returns some removed documents of each source, stage and reason, and some changed ones (with the reason "").

    Each has the keys source, stage, reason, detail, id and excerpt.
    """
    keys = ("source", "stage", "reason", "detail", "id", "excerpt")
    return [line for line in files.json_lines(root / EXAMPLES) if all(isinstance(line.get(key), str) for key in keys)]
