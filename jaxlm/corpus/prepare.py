"""From the sources of a config to prepared documents: the plan, the phases, the books, `prepared.json`.

DATA/documents/SOURCE/NNNNN.parquet   id, text, meta
DATA/removed/STAGE.jsonl.gz           what each stage removed (and examples of what it changed), why, an excerpt
DATA/clusters.json  timings.json      groups of duplicates; seconds by source and stage
DATA/prepared.json                    recipe, counts by source and stage, sha256 of every file
DATA/work/                            while it runs
"""

import collections
import contextlib
import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import pathlib
import pickle
import shutil
import time
import typing
from collections.abc import Callable, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from jaxlm import files
from jaxlm.config import Config, ConfigError, RunError
from jaxlm.corpus import engine as engine_lib
from jaxlm.corpus import sources, stages
from jaxlm.corpus.dedup import exact, lines, near
from jaxlm.corpus.dedup.sql import connect, quoted
from jaxlm.corpus.pipeline import Plan, SourcePlan
from jaxlm.corpus.tally import Tally

MANIFEST = "prepared.json"
FORMAT = 1
_PACKAGES = (  # whose versions can change what is kept
    *("datatrove", "detect-secrets", "FastWARC", "ftfy", "mwparserfromhell", "numpy", "phonenumbers", "py3langid"),
    *("pyarrow", "python-stdnum", "resiliparse", "scikit-learn"),
)
_HERE = __name__
_OWNER = ".recipe"  # in documents/: the key of the recipe that they were made by
_LEAST_GB = 0.25  # for a task that joins
_CLUSTERS, _MEMBERS = 20, 10  # shown in clusters.json


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A finished preparation: the content of prepared.json and its sha256, equal for equal results."""

    path: pathlib.Path
    manifest: dict[str, typing.Any]
    sha256: str


def prepare(config: Config, log: Callable[[str], None] = print) -> Prepared:
    """Runs all phases that are not done yet and returns the result; a finished folder with the same recipe is left alone.

    Raises ConfigError for bad settings, and for a folder that another recipe made (naming what differs); RunError that
    names the tasks that failed.
    """
    root = pathlib.Path(config.data.dir)
    if found := _finished(root, config, log):
        return found
    root.mkdir(parents=True, exist_ok=True)
    with files.lock(root):
        if found := _finished(root, config, log):
            return found
        plan = make_plan(config, log)
        return _run(root, config, plan, make_recipe(config, plan), log)


def _finished(root: pathlib.Path, config: Config, log: Callable[[str], None]) -> Prepared | None:
    """What is there already, by the same recipe as far as can be told: its sources may be gone, libraries may be newer."""
    if not (root / MANIFEST).is_file():
        return None
    found = open_prepared(root)
    built, planned = found.manifest["recipe"], source_plans(config)
    wanted = make_recipe(config, Plan.of(config, planned, ()))
    for name, source in planned.items():
        key = f"files of {name}"
        try:
            remote = "://" in source.spec.path or source.spec.path.startswith("hub:")
            units = () if remote else sources.units(source.spec, int(config.prepare.task_mb * 1e6))
            wanted[key] = _signature(units) if units else built.get(key)
        except ConfigError:
            wanted[key] = built.get(key)  # finished data is often carried to another machine without its sources
        for spec in source.stages:
            if not spec.inputs:
                wanted[f"inputs of {name}/{spec.name}"] = built.get(f"inputs of {name}/{spec.name}", "")
    if built.get("packages") != wanted.get("packages"):
        log(f"{root} was prepared with other versions of libraries: {built.get('packages')}")
        wanted["packages"] = built.get("packages")
    _compare(root, built, wanted)
    log(f"{root} is prepared already")
    return found


def _run(root: pathlib.Path, config: Config, plan: Plan, recipe: dict, log: Callable[[str], None]) -> Prepared:
    """All phases; those tasks that are done stay done."""
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]
    folder = root / "work" / key
    if not (folder / "documents").exists() and _owner(root) != key:
        shutil.rmtree(folder / "tasks" / "finish", ignore_errors=True)  # what it wrote was replaced by another recipe's
    plan.save(folder)
    _build_stages(plan, folder, log)
    engine = engine_lib.Engine(
        config.engine, config.prepare.workers, config.prepare.memory_gb + 1, _options(config.prepare.engine_options)
    )
    uses_near = any("near" in source.global_stages for source in plan.sources.values())
    phases = [
        ("clean", "jaxlm.corpus.pipeline.clean", len(plan.units)),
        ("exact", f"{_HERE}.find_exact", 1),
        ("pairs", f"{_HERE}.find_pairs", plan.global_settings["near"]["bands"] if uses_near else 0),
        ("joins", f"{_HERE}.find_joins", 1),
        ("finish", "jaxlm.corpus.pipeline.finish", len(plan.units)),
    ]
    try:
        for phase, function, tasks in phases:
            if tasks:
                began = time.perf_counter()
                engine_lib.run(engine, folder, phase, function, tasks)
                if phase == "clean":
                    _check_read(folder, plan)
                log(f"{phase}: {tasks} task{'s' if tasks > 1 else ''} ({time.perf_counter() - began:.1f} s)")
    finally:
        engine_lib.close()
    return _conclude(root, folder, plan, recipe)


def source_plans(config: Config) -> dict[str, SourcePlan]:
    """The sources and their stages, nothing read or listed but the files that stages name. Raises ConfigError."""
    p = config.prepare
    if not p.sources:
        raise ConfigError("nothing to prepare: config.prepare.sources is empty; see configs/data for examples")
    for name in stages.GLOBAL_STAGES:
        stages.check_ranges(name, p.stages[name])
    planned = {}
    for name, source in p.sources.items():
        document_stages, together = _stages(source.stages, p.stages, f"config.prepare.sources.{name}.stages")
        spec = sources.SourceSpec(
            name=name,
            path=source.path,
            format=source.format,
            text_key=source.text_key,
            max_bytes=source.max_bytes,
            licences=source.licences,
            tfds_dir=config.data.tfds_dir,
            hub_dir=config.data.hub_dir,
        )
        planned[name] = SourcePlan(spec, document_stages, together, source.priority)
    return planned


def _stages(
    lines: tuple[str, ...], defaults: dict[str, dict], where: str
) -> tuple[tuple[stages.Spec, ...], tuple[str, ...]]:
    """Document stages with their settings, and the names of the global ones. Raises ConfigError."""
    specs = [stages.parse(line, defaults, where) for line in lines]
    names = [spec.name for spec in specs]
    for spec in specs:
        if names.count(spec.name) > 1:
            raise ConfigError(f"{where}: {spec.name} is there twice")
        if spec.name in stages.DOCUMENT_STAGES:
            stages.typed_settings(spec)
        elif spec.settings != defaults[spec.name]:
            raise ConfigError(
                f"{where}: {spec.name} looks at all sources together; set config.prepare.stages.{spec.name}.KEY"
            )
    together = tuple(name for name in stages.GLOBAL_STAGES if name in names)
    if tuple(names[len(names) - len(together) :]) != together:
        raise ConfigError(f"{where}: {', '.join(stages.GLOBAL_STAGES)} come last, in this order; got {names}")
    of_documents = (spec for spec in specs if spec.name in stages.DOCUMENT_STAGES)
    return tuple(dataclasses.replace(spec, inputs=stages.digest(spec)) for spec in of_documents), together


def make_plan(config: Config, log: Callable[[str], None] = print) -> Plan:
    """The sources' stages and units of work. Raises ConfigError."""
    planned, task_bytes = source_plans(config), int(config.prepare.task_mb * 1e6)
    units = []
    for name, source in planned.items():
        others: collections.Counter[str] = collections.Counter()
        units += [(name, unit) for unit in sources.units(source.spec, task_bytes, others)]
        if others:
            kinds = ", ".join(f"{suffix} {count:,}" for suffix, count in others.most_common(5))
            log(f"{name}: {others.total():,} files in {source.spec.path} are of no format that is read here ({kinds})")
    return Plan.of(config, planned, units)


def make_recipe(config: Config, plan: Plan) -> dict[str, typing.Any]:
    """What decides the result: settings, files by name and size, versions of the libraries that clean."""
    used = {spec.name for source in plan.sources.values() for spec in source.stages}
    recipe: dict[str, typing.Any] = {"version": FORMAT, "task_mb": config.prepare.task_mb}
    for name, source in plan.sources.items():
        recipe[f"source {name}"] = dataclasses.asdict(source.spec)
        recipe[f"stages of {name}"] = [[spec.name, spec.settings] for spec in source.stages] + list(
            source.global_stages
        )
        recipe |= {f"inputs of {name}/{spec.name}": spec.inputs for spec in source.stages}
        recipe[f"priority of {name}"] = source.priority
        recipe[f"files of {name}"] = _signature([unit for owner, unit in plan.units if owner == name])
    recipe |= {f"stage {name}": settings for name, settings in plan.global_settings.items()}
    if used:
        recipe["packages"] = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return json.loads(json.dumps(recipe))


def _signature(units: Sequence[sources.Unit]) -> str:
    """What the tasks read, by name and size; an edit that keeps a file's size goes unseen."""
    parts = [(u, part.name, part.start, part.stop, part.size) for u, unit in enumerate(units) for part in unit.parts]
    return f"sha256 {hashlib.sha256(repr(parts).encode()).hexdigest()[:16]} of {len(parts)} parts in {len(units)} units"


def open_prepared(root: pathlib.Path) -> Prepared:
    """The result in a data directory. Raises ConfigError when there is none or it is damaged."""
    try:
        content = (root / MANIFEST).read_bytes()
        manifest = json.loads(content)
    except OSError:
        raise ConfigError(f"no {MANIFEST} in {root}: make it with jaxlm prepare") from None
    except ValueError:
        raise ConfigError(f"{root / MANIFEST} is not valid JSON; delete it and run jaxlm prepare again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ConfigError(f"{root / MANIFEST} is of another format; delete {root} and run jaxlm prepare again")
    for entry in (entry for source in manifest["sources"].values() for entry in source["files"]):
        path = root / entry["file"]
        if not path.is_file() or path.stat().st_size != entry["size"]:
            raise ConfigError(
                f"{path} is missing or differs in size; copy it again, or delete {root} and prepare again"
            )
    return Prepared(root, manifest, hashlib.sha256(content).hexdigest())


def _owner(root: pathlib.Path) -> str:
    path = root / "documents" / _OWNER
    return path.read_text() if path.is_file() else ""


def _compare(root: pathlib.Path, built: dict, wanted: dict) -> None:
    for key in [*wanted, *(key for key in built if key not in wanted)]:
        if built.get(key) != wanted.get(key):
            raise ConfigError(
                f"{root} was prepared with {key} = {built.get(key)}, now it is {wanted.get(key)}; set another data.dir, or "
                f"delete {root / MANIFEST} to prepare it again"
            )


def _options(words: tuple[str, ...]) -> dict[str, str | int]:
    for word in words:
        if "=" not in word:
            raise ConfigError(f"config.prepare.engine_options: {word!r} is not of the form NAME=VALUE")
    pairs = (word.split("=", 1) for word in words)
    return {name: int(value) if value.isdecimal() else value for name, value in pairs}


def _build_stages(plan: Plan, folder: pathlib.Path, log: Callable[[str], None]) -> None:
    """What stages make once for all tasks; a folder that is there is whole."""
    for spec in {spec.key: spec for source in plan.sources.values() for spec in source.stages}.values():
        place = folder / "stages" / spec.key
        if place.is_dir():
            continue
        part = place.with_name(spec.key + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        stages.stage_class(spec.name).build(stages.typed_settings(spec), part)
        if any(part.iterdir()):
            log(f"built what the stage {spec.name} needs")
        part.rename(place)


def find_exact(folder: pathlib.Path, task: int) -> None:
    """The task of the phase `exact`."""
    plan = Plan.load(folder)
    with connect(folder, plan.memory_gb, plan.threads) as connection:
        exact.find(connection, folder)


def find_pairs(folder: pathlib.Path, task: int) -> None:
    """The task of the phase `pairs` for band `task`."""
    plan = Plan.load(folder)
    with connect(folder, max(_LEAST_GB, plan.memory_gb / plan.threads), 1) as connection:
        near.find_pairs(connection, folder, task, plan.global_settings["near"]["threshold"])


def find_joins(folder: pathlib.Path, task: int) -> None:
    """The task of the phase `joins`: which near duplicates go, and which lines."""
    plan = Plan.load(folder)
    with connect(folder, plan.memory_gb, plan.threads) as connection:
        if any("near" in source.global_stages for source in plan.sources.values()):
            near.resolve(connection, folder)
        else:
            names = [("doc", pa.uint64()), ("keeper", pa.uint64()), ("keeper_id", pa.string())]
            pq.write_table(pa.schema(names).empty_table(), folder / "near.parquet")
        settings = plan.global_settings["lines"]
        lines.find(connection, folder, settings["min_documents"], settings["min_share"])


def _check_read(folder: pathlib.Path, plan: Plan) -> None:
    """Raises ConfigError for a source that gave no document at all."""
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


def _conclude(root: pathlib.Path, folder: pathlib.Path, plan: Plan, recipe: dict) -> Prepared:
    """Checks the books, moves the results into place, writes the manifest last, removes the work."""
    tallies = _tallies(folder, plan, ("clean", "finish"))
    written: dict[str, list[dict]] = {name: [] for name in plan.sources}
    for task, (name, _) in enumerate(plan.units):
        path = plan.document_file(folder, task)
        if not path.exists():  # moved by a conclusion that was cut short
            path = root / path.relative_to(folder)
        with path.open("rb") as content:
            sha256 = hashlib.file_digest(content, "sha256").hexdigest()
        where = str(plan.document_file(pathlib.Path(), task))
        written[name].append(
            {"file": where, "size": path.stat().st_size, "sha256": sha256, "documents": pq.read_metadata(path).num_rows}
        )
    for name, tally in tallies.items():
        tally.check(name)
        if tally.kept != sum(entry["documents"] for entry in written[name]):
            raise RunError(
                f"{root / 'documents' / name} does not hold the {tally.kept} documents that the books tell of"
            )
    _merge_removed(root, folder)
    _write_clusters(root, folder, plan)
    if (folder / "documents").exists():
        shutil.rmtree(root / "documents", ignore_errors=True)
        (folder / "documents" / _OWNER).write_text(folder.name)
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
    return Prepared(root, manifest, hashlib.sha256(content).hexdigest())


def _merge_removed(root: pathlib.Path, folder: pathlib.Path) -> None:
    """removed/STAGE.jsonl.gz of all tasks, in their order; the same bytes whenever it is done."""
    place = root / "removed"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        outs: dict[str, typing.IO[bytes]] = {}
        for path in sorted((folder / "removed").glob("*.jsonl.gz")):
            with gzip.open(path, "rb") as lines_in:
                for line in lines_in:
                    stage = json.loads(line)["stage"]
                    if stage not in outs:
                        raw = stack.enter_context((place / f"{stage}.jsonl.gz").open("wb"))
                        outs[stage] = stack.enter_context(gzip.GzipFile("", "wb", 3, raw, mtime=0))
                    outs[stage].write(line)


def _write_clusters(root: pathlib.Path, folder: pathlib.Path, plan: Plan) -> None:
    """clusters.json: how large the groups of duplicates were, and the largest with some of their members."""
    with connect(folder, plan.memory_gb, plan.threads) as connection:
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


def examples(root: pathlib.Path, limit: int) -> list[dict[str, str]]:
    """Up to `limit` removed documents of each source, stage and reason, and of changed ones (their reason is "")."""
    counts: collections.Counter[tuple] = collections.Counter()
    found = []
    for path in sorted((root / "removed").glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as records:
            for record in map(json.loads, records):
                key = record["source"], record["stage"], record["reason"]
                counts[key] += 1
                if counts[key] <= limit:
                    found.append(record)
    return found
