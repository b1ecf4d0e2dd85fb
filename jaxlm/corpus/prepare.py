"""Makes prepared documents from the sources of a config: makes the plan, runs the phases, writes `prepared.json`.

DATA/documents/SOURCE/NNNNN.parquet   id, text, meta
DATA/removed/STAGE.jsonl.gz           what each stage removed (and examples of what it changed), why, an excerpt
DATA/examples.jsonl                   some of these records, for the report
DATA/clusters.json  timings.json      groups of duplicates; seconds by source and stage
DATA/prepared.json                    recipe, counts by source and stage, sha256 of every file
DATA/work/                            while it runs
"""

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import pickle
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow.parquet as pq

from jaxlm.config import ConfigError, DataConfig, PrepareConfig, RunError, config_files, older
from jaxlm.corpus import lists, pipeline, recipes, shared_blocks
from jaxlm.corpus.dedup import compared, lines, near, signatures
from jaxlm.corpus.dedup.near import ROW_BITS
from jaxlm.corpus.dedup.sql import connect, quoted
from jaxlm.corpus.documents import read_rows
from jaxlm.corpus.pipeline import LISTED, SHOWN, Plan, SourcePlan
from jaxlm.corpus.recipes import MANIFEST
from jaxlm.corpus.sources import survey
from jaxlm.corpus.sources.base import SourceSpec, Unit
from jaxlm.corpus.sources.units import check_fields, split_source
from jaxlm.corpus.stages import html, registry
from jaxlm.corpus.tally import Tally
from jaxlm.host import console, files
from jaxlm.host.console import Say

_PACKAGES = (  # whose versions can change what is kept
    *("datatrove", "detect-secrets", "FastWARC", "ftfy", "mwparserfromhell", "numpy", "phonenumberslite", "py3langid"),
    *("pyarrow", "python-stdnum", "resiliparse", "scikit-learn"),
)
_HERE = __name__
_LEAST_GB = 0.25  # for a task that joins
_MOST_PARTS, _TASKS_OF_PART = 64, 32


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A finished preparation. The sha256 of prepared.json is equal for equal results."""

    path: pathlib.Path
    manifest: dict
    sha256: str


def prepare(settings: PrepareConfig, data: DataConfig, engine: str, log: Say = print) -> Prepared:
    """Runs all phases that are not done yet and returns the result.

    Raises ConfigError if the settings are wrong, or another recipe made the folder; RunError if tasks failed.
    """
    root = pathlib.Path(data.dir)
    if done := _finished(root, settings, data, log):
        return done
    older.check_stages(settings)
    _check_owner(root)
    files.make_folder(root, f"config.data.dir={root}", "; name another folder")
    with files.lock(root, "is writing", "config.data.dir"):
        if done := _finished(root, settings, data, log):
            return done
        return _run(root, settings, data, engine, log)


def _check_owner(root: pathlib.Path) -> None:
    """Raises ConfigError if `root` holds a folder that the result would replace, and that jaxlm did not make."""
    ours = (root / MANIFEST).is_file() or _owner(root) or any(root.glob("work/*/plan.pickle"))
    for name in ("documents", "removed", "work"):
        # Folders alone don't count: a first run that was killed at once leaves them.
        if not ours and any(names for _, _, names in os.walk(root / name)):
            raise ConfigError(
                f"{root / name} is there, and jaxlm did not make it: the result would replace it; name another folder "
                "(--out=DATA, --config.data.dir=DATA)"
            )


def _finished(root: pathlib.Path, settings: PrepareConfig, data: DataConfig, log: Say) -> Prepared | None:
    """Returns the finished result, None if there is none. Raises ConfigError if another recipe made it."""
    if not (root / MANIFEST).is_file():
        return None
    done = open_prepared(root)
    built, planned = done.manifest["recipe"], source_plans(settings, data)
    wanted = make_recipe(settings, planned, ())
    for name, source in planned.items():
        key = f"files of {name}"
        try:
            remote = "://" in source.spec.path or source.spec.path.startswith("hub:")
            spreads = () if remote else (True, False)  # earlier versions did not cut small sources
            cuts = [_signature(split_source(source.spec, int(settings.task_mb * 1e6), spread=x)) for x in spreads]
        except ConfigError:
            cuts = []  # finished data is often carried to another machine without its sources
        wanted[key] = cuts[0] if cuts and built.get(key) not in cuts else built.get(key)
        for spec in source.stages:
            if not spec.inputs:
                wanted[f"inputs of {name}/{spec.name}"] = built.get(f"inputs of {name}/{spec.name}", "")
    was, now = built.get("packages") or {}, wanted.get("packages") or {}
    if any(was[package] != now[package] for package in was.keys() & now.keys()):
        log(f"{root} was prepared with other versions of libraries: {was}")
    wanted["packages"] = built.get("packages")
    wanted["code"] = built.get("code")  # newer code does not outdate finished data
    built = recipes.with_newer_settings(built, wanted, **_defaults(), log=log)
    recipes.check_same(built, wanted, made=f"{root} was prepared", manifest=root / MANIFEST, again="prepare it again")
    shutil.rmtree(root / "work", ignore_errors=True)  # left if the end was cut short
    log(f"{root} is prepared already")
    return done


def _defaults() -> dict:
    """Returns the defaults of a source's and each stage's settings, in the form of a recipe."""
    source = config_files.module(config_files.find_config("base")).source()
    stages = config_files.load("base").prepare.stages.to_dict()
    return json.loads(json.dumps({"source": source, "stages": stages}))


def _run(root: pathlib.Path, settings: PrepareConfig, data: DataConfig, engine: str, log: Say) -> Prepared:
    """Runs all phases and returns the result. Skips tasks that an earlier call with the same recipe finished."""
    from jaxlm.corpus import engine as engines  # here, because a machine that only trains may lack datatrove

    plan, units, samples = make_plan(settings, data, engine, log)
    with engines.worker_processes(plan.threads) as pool:
        if (starting := min(plan.threads, len(units))) > 1:  # while this process plans
            names = {spec.name for source in plan.sources.values() for spec in source.stages}
            for _ in range(starting):
                pool.submit(pipeline.import_stages, names)
        recipe = make_recipe(settings, plan.sources, list(zip(plan.source_of, units, strict=True)))
        key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]
        folder = root / "work" / key
        if not folder.exists() and any(root.glob("work/*/plan.pickle")):
            log(f"{root} was half prepared by another recipe or version: this begins anew")
        if not (folder / "documents").exists() and _owner(root) != key:
            # Another recipe's documents replaced its own.
            shutil.rmtree(folder / "tasks" / "finish", ignore_errors=True)
        plan.save(folder, units, samples)
        _build_stages(plan, folder, log)
        phases = _phases(plan, len(samples))
        del units, samples  # of a million files, they take gigabytes
        for phase, function, tasks in phases:
            if tasks:
                began = time.perf_counter()
                engines.run(engine, settings, folder, phase, function, tasks)
                if phase == "shared":
                    _gather_shared(folder)
                if phase == "clean":
                    _check_read(folder, plan, log)
                log(f"{phase}: {tasks} task{'s' if tasks > 1 else ''} ({time.perf_counter() - began:.1f} s)")
    with console.working("gathering the results"):
        _conclude(root, folder, plan, recipe)
    done = open_prepared(root)
    for name, source in plan.sources.items():
        if source.without:
            taken = sum(stage["removed"].get(LISTED, 0) for stage in done.manifest["sources"][name]["stages"])
            log(f"{taken} of the {len(source.without)} documents of {name}'s list were there, and are taken out")
    return done


def _phases(plan: Plan, samples: int) -> list[tuple[str, str, int]]:
    """Returns each phase's name, function and number of tasks."""
    used = {stage for source in plan.sources.values() for stage in source.global_stages}
    return [
        ("shared", f"{_HERE}.find_shared", samples),
        ("clean", f"{pipeline.__name__}.clean", len(plan.source_of)),
        ("exact", f"{_HERE}.find_exact", _parts(plan)),
        ("pairs", f"{_HERE}.find_pairs", _bands(plan) if "near" in used else 0),
        ("near", f"{_HERE}.find_near", 1),
        ("lines", f"{_HERE}.find_lines", _parts(plan) if "lines" in used else 0),
        ("finish", f"{pipeline.__name__}.finish", len(plan.source_of)),
    ]


def source_plans(settings: PrepareConfig, data: DataConfig) -> dict[str, SourcePlan]:
    """Returns source -> how to read and clean it. Raises ConfigError if a setting is wrong."""
    if not settings.sources:
        raise ConfigError("nothing to prepare: config.prepare.sources is empty; see configs/data for examples")
    for name in registry.GLOBAL_STAGES:
        registry.typed_settings(registry.StageSpec(name, settings.stages[name]))
    planned = {}
    for name, source in settings.sources.items():
        document_stages, together = _stages(source.stages, settings.stages, f"config.prepare.sources.{name}.stages")
        spec = SourceSpec.of(name, source, data)
        planned[name] = SourcePlan(spec, document_stages, together, source.priority, _without(name, source.without))
    return planned


def _without(name: str, path: str) -> frozenset[str]:
    """Returns the sha256 of the texts that a source's list takes out. Raises ConfigError if it names none of the source."""
    key = f"config.prepare.sources.{name}.without"
    keys = lists.read(files.expanded(path), key) if path else set()
    listed = frozenset(sha256 for source, split, _, sha256 in keys if (source, split) == (name, "train"))
    if keys and not listed:
        raise ConfigError(f"{key}={path} names no training document of {name}: give a list of this source")
    return listed


def _stages(
    lines: tuple[str, ...], defaults: dict[str, dict], config_key: str
) -> tuple[tuple[registry.StageSpec, ...], tuple[str, ...]]:
    """Returns the document stages with their settings, and the names of the global stages. Raises ConfigError."""
    specs = [registry.parse(line, defaults, config_key) for line in lines]
    names = [spec.name for spec in specs]
    for spec in specs:
        if names.count(spec.name) > 1:
            raise ConfigError(f"{config_key}: {spec.name} is listed twice")
        if spec.name in registry.DOCUMENT_STAGES:
            registry.typed_settings(spec)
        elif spec.name in registry.GLOBAL_STAGES and spec.settings != defaults[spec.name]:
            raise ConfigError(f"{config_key}: all sources share {spec.name}; set config.prepare.stages.{spec.name}.KEY")
    together = tuple(name for name in registry.GLOBAL_STAGES if name in names)
    if tuple(names[len(names) - len(together) :]) != together:
        raise ConfigError(f"{config_key}: {', '.join(registry.GLOBAL_STAGES)} come last, in this order; got {names}")
    of_documents = (spec for spec in specs if spec.name not in registry.GLOBAL_STAGES)
    return tuple(dataclasses.replace(spec, inputs=registry.digest(spec)) for spec in of_documents), together


def make_plan(
    settings: PrepareConfig, data: DataConfig, engine: str, log: Say = print
) -> tuple[Plan, list[Unit], list[tuple[str, list[shared_blocks.Sample]]]]:
    """Returns (the plan, what each task reads, (source, sites) of each task that finds what pages share). Lists files.

    Arguments and errors are those of `prepare`.
    """
    planned, task_bytes = source_plans(settings, data), int(settings.task_mb * 1e6)
    units, source_of, samples, unread = [], [], [], {}
    for name, source in planned.items():
        others: collections.Counter[str] = collections.Counter()
        try:
            of_source = split_source(source.spec, task_bytes, others)
            check_fields(source.spec, of_source)
            units += of_source
            source_of += [name] * len(of_source)
            if any(stage.name == "html" for stage in source.stages):
                samples += [(name, sites) for sites in shared_blocks.samples(of_source)]
        except ConfigError as error:
            raise ConfigError(f"config.prepare.sources.{name}: {error}") from error
        path = source.spec.path  # two sources may share a folder: one reads its pages, the other its code
        unread[path] = unread.get(path, others) & others
    for path, others in unread.items():
        for line in survey.unread_lines(path, others):
            log(line)
    plan = Plan(
        sources=planned,
        source_of=tuple(source_of),
        global_settings={name: dict(settings.stages[name]) for name in registry.GLOBAL_STAGES},
        memory_gb=settings.memory_gb,
        # On a cluster the cores of this machine don't count.
        threads=(settings.workers or files.cores()) if engine == "local" else 1,
    )
    return plan, units, samples


def make_recipe(settings: PrepareConfig, planned: Mapping[str, SourcePlan], units: Sequence[tuple[str, Unit]]) -> dict:
    """Returns all that decides the result: settings, files by name and size (of `units`), code, versions of libraries."""
    used = {spec.name for source in planned.values() for spec in source.stages}
    recipe: dict = {"version": FORMAT, "task_mb": settings.task_mb}
    for name, source in planned.items():
        recipe[f"source {name}"] = dataclasses.asdict(source.spec)
        recipe[f"stages of {name}"] = [*([spec.name, spec.recorded] for spec in source.stages), *source.global_stages]
        recipe |= {f"inputs of {name}/{spec.name}": spec.inputs for spec in source.stages}
        recipe[f"priority of {name}"] = source.priority
        if source.without:
            recipe[f"without of {name}"] = hashlib.sha256(repr(sorted(source.without)).encode()).hexdigest()
        recipe[f"files of {name}"] = _signature([unit for owner, unit in units if owner == name])
    recipe |= {f"stage {name}": settings.stages[name] for name in registry.GLOBAL_STAGES}
    recipe["code"] = recipes.own_code("corpus")
    if used:
        recipe["packages"] = {name: recipes.version(name) for name in _PACKAGES}
        recipe["packages"]["python"] = ".".join(map(str, sys.version_info[:2]))
    return json.loads(json.dumps(recipe))


def _signature(units: Sequence[Unit]) -> str:
    """Returns a digest of what the tasks read, by names and sizes. An edit that keeps a file's size is not noticed."""
    parts = [(u, part.name, part.start, part.stop, part.size) for u, unit in enumerate(units) for part in unit.parts]
    return f"sha256 {hashlib.sha256(repr(parts).encode()).hexdigest()[:16]} of {len(parts)} parts in {len(units)} units"


_COUNT = files.whole(0)
_BOTH = {"documents": _COUNT, "bytes": _COUNT}
_COUNTS = {str: _COUNT}
_STAGE = {f"{what}_{way}": _COUNT for what in ("documents", "bytes") for way in ("in", "out")}
_STAGE |= {"name": files.TEXT, "removed": _COUNTS, "edits": _COUNTS}
_SHAPE = {
    "recipe": {},
    "sources": {
        str: {
            "read": {**_BOTH, "failed": _COUNTS},
            "stages": [_STAGE],
            "kept": _BOTH,
            "files": [{"file": files.TEXT, "size": _COUNT}],
        }
    },
}


def open_prepared(root: pathlib.Path) -> Prepared:
    """Returns the result in a data directory. Raises ConfigError if there is none or it is damaged."""
    try:
        content = (root / MANIFEST).read_bytes()
        manifest = files.json_of(content)
    except OSError:
        raise ConfigError(f"no {MANIFEST} in {root}: make it with jaxlm prepare") from None
    except ValueError:
        raise ConfigError(f"{root / MANIFEST} is not valid JSON; delete it and run jaxlm prepare again") from None
    if manifest.get("format") != FORMAT or files.problem(manifest, _SHAPE):
        raise ConfigError(f"{root / MANIFEST} is damaged, or of another format; delete {root} and prepare again")
    for entry in (entry for source in manifest["sources"].values() for entry in source["files"]):
        path = root / entry["file"]
        if not path.is_file() or path.stat().st_size != entry["size"]:
            raise ConfigError(
                f"{path} is missing or differs in size; copy it again, or delete {root} and prepare again"
            )
    return Prepared(root, manifest, hashlib.sha256(content).hexdigest())


def _owner(root: pathlib.Path) -> str:
    path = root / "documents" / OWNER
    return path.read_text() if path.is_file() else ""


def _build_stages(plan: Plan, folder: pathlib.Path, log: Say) -> None:
    """Runs `Stage.build` of each stage, once for all tasks. An existing folder is complete."""
    for spec in {spec.key: spec for source in plan.sources.values() for spec in source.stages}.values():
        place = folder / "stages" / spec.key
        if place.is_dir():
            continue
        part = place.with_name(spec.key + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        with console.working(f"building what the stage {spec.name} needs", end=False):
            lines = registry.stage_class(spec.name).build(registry.typed_settings(spec), part)
        for line in lines or ():
            log(f"{spec.name}: {line}")
        part.rename(place)


def find_shared(folder: pathlib.Path, task: int) -> None:
    """Runs task `task` of the phase `shared`: finds what the pages of some sites share."""
    name, sample = pickle.loads((folder / "samples" / f"{task:06d}.pickle").read_bytes())
    sites = shared_blocks.find(Plan.load(folder).sources[name].spec, sample)
    (folder / "shared" / f"{task:06d}.pickle").write_bytes(pickle.dumps({name: sites} if sites else {}))


def _gather_shared(folder: pathlib.Path) -> None:
    """Puts what the tasks found where the stage `html` looks for it: source -> site -> what its pages share."""
    shared: dict[str, dict[str, shared_blocks.Shared]] = collections.defaultdict(dict)
    for path in sorted((folder / "shared").iterdir()):
        for name, sites in pickle.loads(path.read_bytes()).items():
            shared[name] |= sites
    (folder / "stages" / html.SHARED).write_bytes(pickle.dumps(dict(shared)))


def _parts(plan: Plan) -> int:
    """Returns into how many tasks, by hash, the work on all documents is divided. The result does not depend on it."""
    return min(_MOST_PARTS, 1 + len(plan.source_of) // _TASKS_OF_PART)


def _bands(plan: Plan) -> int:
    return plan.global_settings["near"]["bands"]


@contextlib.contextmanager
def _tables(folder: pathlib.Path, parts: Callable[[Plan], int] = lambda plan: 1) -> Iterator[tuple]:
    """Gives (plan, connection, `folder` by a path that DuckDB can read) to one of `parts(plan)` tasks."""
    plan = Plan.load(folder)
    side = min(parts(plan), plan.threads)  # tasks that run side by side on one machine
    memory_gb, threads = max(_LEAST_GB, plan.memory_gb / side), plan.threads // side
    with files.plain_path(folder) as plain, connect(plain, memory_gb, threads) as connection:
        yield plan, connection, plain


def find_exact(folder: pathlib.Path, task: int) -> None:
    """Runs task `task` of the phase `exact`: finds exact duplicates among those of its part of the hashes."""
    with _tables(folder, _parts) as (plan, *tables):
        near.find_copies(*tables, task, _parts(plan))


def find_pairs(folder: pathlib.Path, task: int) -> None:
    """Runs task `task` of the phase `pairs`: finds similar documents among those that share the hash of band `task`."""
    with _tables(folder, _bands) as (plan, *tables):
        near.find_pairs(*tables, task, plan.global_settings["near"]["threshold"])


def find_near(folder: pathlib.Path, task: int) -> None:
    """Runs the phase `near`: decides which near duplicates are removed."""
    with _tables(folder) as (_, *tables):
        near.resolve(*tables)


def find_lines(folder: pathlib.Path, task: int) -> None:
    """Runs task `task` of the phase `lines`: decides which lines are removed, of those of its part of the hashes."""
    with _tables(folder, _parts) as (plan, *tables):
        lines.find(*tables, plan.global_settings["lines"], task, _parts(plan))


EXAMPLES = "examples.jsonl"
FORMAT = 1
OWNER = ".recipe"  # in documents/: the key of the recipe that made them
_CLUSTERS, _MEMBERS = 20, 10  # shown in clusters.json
_DRAWN = 200  # near duplicates whose removal is judged
_FALSE = 0.2  # of a document's characters, in lines that the document that stays has not
_SHOWN_CHARS = 1500
_MOST_WINDOWS = 1 << 24  # held to compare sources
_SHARED = 0.2  # of a source's windows, from which on it is told
_LEAST_WINDOWS = 20  # of a source: fewer tell nothing


def _check_read(folder: pathlib.Path, plan: Plan, log: Say) -> None:
    """Tells which sources gave no document. Raises ConfigError if none did."""
    empty = []
    for name, tally in _tallies(folder, plan, ("clean",)).items():
        if any(stage.documents_in for stage in tally.stages) or tally.documents != tally.failed.total():
            continue
        why = tally.no_field or (tally.failures[0] if tally.failures else "check its path and format")
        empty.append(f"source '{name}' gave no document; {why}")
    if len(empty) == len(plan.sources):
        raise ConfigError(empty[0])
    for line in empty:
        log(line)


def _tallies(folder: pathlib.Path, plan: Plan, phases: Sequence[str]) -> dict[str, Tally]:
    tallies = {name: Tally() for name in plan.sources}
    for task, name in enumerate(plan.source_of):
        for phase in phases:
            tallies[name].add(pickle.loads((folder / "tally" / f"{phase}-{task:06d}.pickle").read_bytes()))
    return tallies


def _conclude(root: pathlib.Path, folder: pathlib.Path, plan: Plan, recipe: dict) -> None:
    """Checks the counts, moves the results from `folder` to `root`, writes the manifest, and removes the work files."""
    tallies = _tallies(folder, plan, ("clean", "finish"))
    for name, tally in tallies.items():
        for entry in tally.files:
            path = folder / entry["file"]
            if not path.exists():  # moved by a conclusion that was cut short
                path = root / entry["file"]
            if path.stat().st_size != entry["size"]:
                raise RunError(f"{path} differs in size from what was written; delete {folder} and prepare again")
        tally.check(name)
        if tally.kept != sum(entry["documents"] for entry in tally.files):
            raise RunError(f"{root / 'documents' / name} does not hold its {tally.kept} documents")
    _merge_removed(root, folder)
    _write_examples(root, folder)
    _write_clusters(root, folder, plan)
    if (folder / "documents").exists():
        shutil.rmtree(root / "documents", ignore_errors=True)
        (folder / "documents" / OWNER).write_text(folder.name)
        (folder / "documents").rename(root / "documents")
    shared_file = folder / "stages" / html.SHARED
    shared = pickle.loads(shared_file.read_bytes()) if shared_file.exists() else {}
    manifest = {
        "format": FORMAT,
        "recipe": recipe,
        **({"shared": shared} if shared else {}),  # by site; sets
        "sources": {name: {"path": plan.sources[name].spec.path} | tally.to_dict() for name, tally in tallies.items()},
    }
    seconds = {name: {stage.name: round(stage.seconds, 3) for stage in tally.stages} for name, tally in tallies.items()}
    (root / "timings.json").write_text(json.dumps(seconds, indent=1) + "\n")
    content = (json.dumps(manifest, indent=1, ensure_ascii=False, default=sorted) + "\n").encode()  # sets of `shared`
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
    """Writes examples.jsonl: up to 20 records for each source, stage and reason."""
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
    with _tables(folder) as (_, connection, plain):
        connection.execute(f"""
            CREATE TEMP TABLE gone AS SELECT * FROM (
                SELECT * FROM read_parquet({quoted(plain / "exact/*.parquet")})
                UNION ALL SELECT * FROM read_parquet({quoted(plain / "near/*.parquet")}));
            CREATE TEMP TABLE clusters AS
            SELECT keeper, any_value(keeper_id) AS keeper_id, count(*) + 1 AS size FROM gone GROUP BY keeper""")
        sizes = connection.execute("SELECT size, count(*) FROM clusters GROUP BY size ORDER BY size").fetchall()
        largest = connection.execute(f"""
            SELECT c.keeper, c.keeper_id, c.size, list((s.doc, s.id) ORDER BY s.doc)[:{_MEMBERS}]
            FROM (SELECT * FROM clusters ORDER BY size DESC, keeper LIMIT {_CLUSTERS}) c JOIN gone g USING (keeper)
            JOIN (SELECT doc, id FROM read_parquet({quoted(plain / "sign/*.parquet")})) s USING (doc)
            GROUP BY ALL ORDER BY c.size DESC, c.keeper""").fetchall()
    clusters = {
        "drawn": _drawn(folder, plan),
        "shared_windows": _shared_windows(folder, plan),
        "sizes": {str(size): count for size, count in sizes},
        "largest": [
            {"kept": plan.name_of(doc, doc_id), "size": size, "members": [plan.name_of(*member) for member in members]}
            for doc, doc_id, size, members in largest
        ],
    }
    (root / "clusters.json").write_text(json.dumps(clusters, ensure_ascii=False) + "\n", encoding="utf-8")


def _shared_windows(folder: pathlib.Path, plan: Plan) -> list[dict]:
    """Returns which sources have a fifth of their 50-word windows in another source, with the share."""
    by_source: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    paths = [folder / "windows" / f"{task:06d}.u64" for task in range(len(plan.source_of))]
    one_in = np.uint64(1 + sum(path.stat().st_size for path in paths) // (8 * _MOST_WINDOWS))
    for name, path in zip(plan.source_of, paths, strict=True):
        part = np.fromfile(path, np.uint64)
        by_source[name].append(part[part // signatures.ONE_IN % one_in == 0])
    windows = {name: np.unique(np.concatenate(parts)) for name, parts in by_source.items()}
    pairs = [(a, b) for a in windows for b in windows if a != b and len(windows[a]) >= _LEAST_WINDOWS]
    shares = ((a, b, float(np.isin(windows[a], windows[b]).mean())) for a, b in pairs)
    return [{"source": a, "stands_in": b, "share": round(share, 3)} for a, b, share in shares if share >= _SHARED]


def _drawn(folder: pathlib.Path, plan: Plan) -> dict:
    """Returns near duplicates drawn at random beside what stays, and how many of them say something else.

    A removal is false if over a fifth of the document's characters are in lines that its keeper does not have.
    """
    table = pq.read_table(folder / "near", columns=["doc", "keeper"])
    rows = random.Random(0).sample(range(len(table)), min(_DRAWN, len(table)))
    pairs = [(table["doc"][row].as_py(), table["keeper"][row].as_py()) for row in rows]  # `take` imports pandas
    documents = {}
    for task, docs in itertools.groupby(sorted({doc for pair in pairs for doc in pair}), lambda doc: doc >> ROW_BITS):
        rows = (doc & ((1 << ROW_BITS) - 1) for doc in docs)
        for document in read_rows(folder / "clean" / f"{task:06d}.parquet", rows):
            documents[task << ROW_BITS | document.row] = document
    shown, false = [], 0
    for pair in pairs:
        removed, kept = (documents[doc] for doc in pair)
        share = compared.own_share(removed.text, kept.text)
        false += share > _FALSE
        if len(shown) < SHOWN:
            ids = {"removed": plan.name_of(pair[0], removed.id), "kept": plan.name_of(pair[1], kept.id)}
            texts = {"removed_text": removed.text[:_SHOWN_CHARS], "kept_text": kept.text[:_SHOWN_CHARS]}
            shown.append(ids | texts | {"own_share": round(share, 3)})
    return {"of": table.num_rows, "drawn": len(pairs), "false": false, "shown": shown}


def examples(root: pathlib.Path) -> list[dict[str, str]]:
    """Returns some removed documents of each source, stage and reason, and some changed ones (with the reason "")."""
    keys = ("source", "stage", "reason", "detail", "id", "excerpt")
    return [line for line in files.json_lines(root / EXAMPLES) if all(isinstance(line.get(key), str) for key in keys)]
