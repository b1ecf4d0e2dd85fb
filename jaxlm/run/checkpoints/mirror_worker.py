"""Copies checkpoints to the mirror and back, in a separate process that `mirror.py` may abandon. Imports no JAX.

Each job is answered with events, then `done` or `error`. The mirror holds:

run_id.json                        the run that owns the mirror, and which start of that run writes here
config.json, metrics.jsonl, ...    the newest logs of the run, and logs.json with their sizes and sha256
checkpoints/<step>/                the files of the checkpoint; in `workdir/`, the logs at the time of its copy
checkpoints/<step>/manifest.json   size and sha256 of each file: written when all files were read back
checkpoints/<step>/verified.json   written when the logs were read back too: only then the step counts
"""

import concurrent.futures
import contextlib
import hashlib
import json
import pathlib
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator

from jaxlm.host import console, files
from jaxlm.host.redact import redact, redact_url
from jaxlm.run.checkpoints import remote as remote_lib
from jaxlm.run.checkpoints.remote import Remote, Sum, measure, seal, sum_of, unseal

_LOGS = ("config.json", "run.json", "metrics.jsonl", "report.html", console.LOG)
_AT_ONCE = 4  # files copied at a time
_TRIES = 3  # of a file that does not read back as it was written

Tell = Callable[[dict], None]
Sums = dict[str, Sum]  # of files by their names


class Trouble(Exception):
    """An error in one line. `kind`: "run" (the run tries again), "config" (it is refused), "gone" (it skips the copy)."""

    kind = "run"


class Refused(Trouble):
    """An error that only a change of the config fixes."""

    kind = "config"


class Gone(Trouble):
    """The checkpoint to copy was deleted."""

    kind = "gone"


class Damaged(Trouble):
    """A copy in the mirror differs from the files that were copied there."""


class Unfinished(Damaged):
    """A copy that was never read back to its end."""


def claim(remote: Remote, job: dict, tell: Tell) -> dict:
    """Makes this start of the run the mirror's only writer. Raises Refused if the mirror belongs to another run.

    `job`: `id` of the run ("" if its folder has none), `new_id`, `start`, `workdir`, `empty` (no checkpoints in `workdir`).
    Returns the run's `id`, why the mirror can't be written (`unwritable`, "" if it can), and the mirror's steps as `copy` does.
    """
    record, name = owner(remote), pathlib.Path(job["workdir"]).name
    comes_back = record and not job["id"] and job["empty"] and record["workdir"] == name
    if record and record["id"] != job["id"] and not comes_back:
        raise Refused(
            f"the mirror belongs to another run, in a folder called {record['workdir']}: give another "
            "config.checkpoint.mirror" + ("" if job["id"] else ", or the config.workdir of that run to go on with it")
        )
    run_id, unwritable = record["id"] if record else job["id"] or job["new_id"], ""
    try:
        own(remote, run_id, job)
    except Exception as error:
        unwritable = one_line(error)
    return {"id": run_id, "unwritable": unwritable, **held(remote)}


def copy(remote: Remote, job: dict, tell: Tell) -> dict:
    """Copies one checkpoint and the logs, reads all back, and only then marks the copy as verified.

    `job`: `step`, `workdir`, `id` and `start` of the run, and `copied`: file -> sum of the files that an abandoned attempt
    copied. Returns the steps of which the mirror then has a whole copy (`whole`), and of which only a part (`partial`).
    """
    step, workdir, folder = job["step"], pathlib.Path(job["workdir"]), f"checkpoints/{job['step']}"
    source = workdir / "checkpoints" / str(step)
    check_owner(remote, job)
    sums = _sums(source)
    _check_source(source, sums)
    if _has(remote, step, sums):
        write_logs(remote, job, tell)
        return held(remote)
    if not job["copied"]:
        if held(remote)["whole"] == [step]:
            only = f"another checkpoint {step} is the only whole one in the mirror"
            raise Trouble(f"{only}: it stays until a later one is copied")
        remove(remote, step)

    def put(name: str) -> str:
        for _ in range(_TRIES):
            try:
                remote.put(source / name, f"{folder}/{name}")
            except FileNotFoundError:
                raise Gone(f"checkpoint {step} was deleted before its copy was whole") from None
            with contextlib.suppress(FileNotFoundError):
                if remote.measure(f"{folder}/{name}") == sums[name]:
                    return name
        raise Damaged(f"checkpoint {step}: {name} does not read back as it was written")

    for name in _each(put, [name for name in sums if job["copied"].get(name) != sums[name]]):
        tell({"copied": name, "sum": sums[name]})
    logs = _write_logs(remote, workdir, f"{folder}/workdir/")
    manifest = seal({"step": step, "weights_only": False, "files": sums, "logs": logs})  # the key is for older readers
    remote.write(f"{folder}/manifest.json", manifest)
    for name in logs:
        if remote.measure(f"{folder}/workdir/{name}") != logs[name]:
            raise Damaged(f"checkpoint {step}: workdir/{name} does not read back as it was written")
    # Before the copy counts: else a run restored from it would lack the metrics since the previous copy.
    write_logs(remote, job, tell)
    remote.write(f"{folder}/verified.json", seal({"manifest": hashlib.sha256(manifest).hexdigest()}))
    manifest_of(remote, step)  # raises if the last two files do not read back either
    return held(remote)


def write_logs(remote: Remote, job: dict, tell: Tell) -> dict:
    """Copies the run's present logs; returns {}. `job`: `workdir`, `id` and `start` of the run."""
    check_owner(remote, job)
    remote.write("logs.json", seal({"files": _write_logs(remote, pathlib.Path(job["workdir"]), "")}))
    return {}


def delete(remote: Remote, job: dict, tell: Tell) -> dict:
    """Deletes `steps`, but never the last whole copy. Returns the mirror's steps as `copy` does."""
    check_owner(remote, job)
    whole = set(held(remote)["whole"])
    for step in job["steps"]:
        if whole - {step}:
            remove(remote, step)
            whole.discard(step)
    return held(remote)


def restore(remote: Remote, job: dict, tell: Tell) -> dict:
    """Copies the newest undamaged checkpoint and missing logs into `workdir`. Returns its `step`, or None. Raises Refused."""
    workdir, damaged, weights_only = pathlib.Path(job["workdir"]), [], []
    for step in reversed(steps(remote)):
        try:
            manifest = manifest_of(remote, step)
            if manifest.get("weights_only"):
                weights_only.append(step)
                continue
            _download(remote, step, manifest["files"], workdir / "checkpoints", tell)
        except Damaged as error:
            damaged += [] if isinstance(error, Unfinished) else [step]
            tell({"line": f"{error}; going back to the copy before it"})
        else:
            _restore_logs(remote, step, manifest["logs"], workdir, tell)
            return {"step": step}
    if weights_only:
        raise Refused(
            f"the mirror's checkpoint {weights_only[0]} holds weights only, so no run can go on from it: give another "
            "config.checkpoint.mirror or config.workdir"
        )
    if damaged:
        raise Refused(
            f"none of the mirror's checkpoints {sorted(damaged)} is what was copied there; to train from the start "
            "give another config.checkpoint.mirror"
        )
    return {"step": None}


JOBS = {"claim": claim, "copy": copy, "write_logs": write_logs, "delete": delete, "restore": restore}


def work(jobs: Iterable[dict], tell: Tell) -> None:
    """Does each job at its `url`, and tells its result or error. `mirror.Mirror` starts this function by its name."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the run, which may still wait for a copy
    remote = None
    for job in jobs:
        try:
            remote = remote or _open(job["url"])
            tell({"done": JOBS[job["do"]](remote, job, tell)})
        except Exception as error:
            words = one_line(error).replace(job["url"], redact_url(job["url"]))
            tell({"error": words, "kind": error.kind if isinstance(error, Trouble) else Trouble.kind})


def _open(url: str) -> Remote:
    try:
        return Remote(url)
    except (ImportError, ValueError) as error:
        raise Refused(f"can't be opened: {one_line(error)}") from error


def _sums(folder: pathlib.Path) -> Sums:
    """Returns the sum of each file of a checkpoint. Raises Gone if there are no files, or a file disappears."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    sums: Sums = {}
    with contextlib.suppress(FileNotFoundError):
        sums = dict(zip(names, _each(lambda name: measure(folder / name), names), strict=True))
    if not sums:
        raise Gone(f"checkpoint {folder.name} was deleted before it was copied")
    return sums


def _check_source(folder: pathlib.Path, sums: Sums) -> None:
    """Raises Trouble if a file differs from the checkpoint's `checksums.json`: it changed after it was verified."""
    try:
        verified = files.json_of((folder / "checksums.json").read_bytes())["files"]
        changed = [name for name in sums if verified.get(name, sums[name]) != sums[name]]
    except (OSError, *files.MANGLED):
        return  # not verified, or damaged checksums: then a restore checks the arrays themselves
    if changed:
        raise Trouble(f"checkpoint {folder.name}: {changed[0]} is not what was saved and verified, so it is not copied")


def _has(remote: Remote, step: int, sums: Sums) -> bool:
    """True if the mirror has a valid copy of the step with exactly the files and sums in `sums`."""
    try:
        manifest = manifest_of(remote, step)
        return manifest["files"] == sums and not manifest.get("weights_only")
    except Damaged:
        return False


def _write_logs(remote: Remote, workdir: pathlib.Path, prefix: str) -> Sums:
    """Copies each log to the mirror, under `prefix` and its path in `workdir`. Returns path -> sum."""
    paths = [workdir / name for name in _LOGS] + sorted((workdir / "samples").glob("**/*"))
    paths += sorted((workdir / "eval").glob("*/results.json"))  # not the items: they are large, and copied each time
    sums = {}
    for path in paths:
        try:
            content = path.read_bytes()
        except (FileNotFoundError, IsADirectoryError):
            continue
        # Others may read the mirror; the next start writes the whole config again.
        if path.name == "config.json" and not (content := _without_secrets(content)):
            continue
        if path.name in ("metrics.jsonl", console.LOG):
            content = content[: content.rfind(b"\n") + 1]  # the last line may be half written
        name = path.relative_to(workdir).as_posix()
        remote.write(prefix + name, content)
        sums[name] = sum_of([content])
    return sums


def _without_secrets(config: bytes) -> bytes:
    """Returns config.json with `***` in the place of secrets; b"" if the file is damaged."""
    with contextlib.suppress(ValueError):
        plain = files.json_of(config, object)
        hidden = redact(plain)
        return config if hidden == plain else (json.dumps(hidden, indent=1) + "\n").encode()
    return b""


def _download(remote: Remote, step: int, sums: Sums, checkpoints: pathlib.Path, tell: Tell) -> None:
    """Downloads a checkpoint to STEP.restoring, and renames that to STEP. Keeps undamaged files of an earlier attempt."""
    half, damaged = checkpoints / f"{step}.restoring", f"the mirror's copy of checkpoint {step} is damaged"

    def fetch(name: str) -> str:
        target = half / name
        if not below(name):
            raise Damaged(f"{damaged}: no file can be called {name!r}")
        if target.is_file() and measure(target) == sums[name]:
            return name
        try:
            right = any(remote.fetch(f"checkpoints/{step}/{name}", target) == sums[name] for _ in range(2))
        except FileNotFoundError:
            raise Damaged(f"{damaged}: {name} is missing") from None
        if not right:
            raise Damaged(f"{damaged}: {name} is not what was copied there")
        return name

    try:
        for name in _each(fetch, sums):
            tell({"fetched": name})
    except Damaged:
        shutil.rmtree(half, ignore_errors=True)
        raise
    half.rename(checkpoints / str(step))
    files.flush_folder(checkpoints)


def _restore_logs(remote: Remote, step: int, of_step: Sums, workdir: pathlib.Path, tell: Tell) -> None:
    """Restores each log that `workdir` lacks: its newest copy or, if that is damaged, the copy made with checkpoint `step`."""
    newest: Sums = {}
    with contextlib.suppress(FileNotFoundError):
        newest = (unseal(remote.read("logs.json")) or {}).get("files", {})
    for name in sorted({*newest, *of_step}):
        path = workdir / name
        if not below(name) or (path.exists() and name != console.LOG):
            continue
        for place, sum_ in ((name, newest.get(name)), (f"checkpoints/{step}/workdir/{name}", of_step.get(name))):
            try:
                content = remote.read(place)
            except FileNotFoundError:
                continue
            if sum_of([content]) == sum_:
                of_this_start = path.read_bytes() if path.exists() else b""  # by this start
                path.parent.mkdir(parents=True, exist_ok=True)
                content = of_this_start if of_this_start.startswith(content) else content + of_this_start
                files.write_atomically(path, content, private=name == "config.json")
                break
        else:
            tell({"line": f"the mirror's {name} is damaged: the run goes on without it"})


def _each(do: Callable[[str], remote_lib.T], names: Iterable[str]) -> Iterator[remote_lib.T]:
    """Yields `do(name)` of each name, in order; up to _AT_ONCE run in parallel. After an error no further name is begun."""
    pool = concurrent.futures.ThreadPoolExecutor(_AT_ONCE)
    try:
        yield from pool.map(do, names)
    finally:
        pool.shutdown(cancel_futures=True)


def owner(remote: Remote) -> dict | None:
    """Returns the record of run_id.json; None if it is absent or damaged."""
    with contextlib.suppress(FileNotFoundError):
        record = unseal(remote.read("run_id.json"))
        return record if record and {"id", "workdir", "start"} <= record.keys() else None
    return None


def own(remote: Remote, run_id: str, job: dict) -> None:
    """Writes run_id.json: from now on this start of the run owns the mirror."""
    record = {"id": run_id, "workdir": pathlib.Path(job["workdir"]).name, "start": job["start"]}
    remote.write("run_id.json", seal(record))


def check_owner(remote: Remote, job: dict) -> None:
    """Raises Trouble if run_id.json names another run, or another start of this run. Writes run_id.json if it is missing."""
    record = owner(remote)
    if record is None:
        own(remote, job["id"], job)
    elif record["id"] != job["id"]:
        raise Trouble(f"the mirror belongs to another run, in a folder called {record['workdir']}")
    elif record["start"] != job["start"]:
        raise Trouble("a later start of this run has taken the mirror over")


def steps(remote: Remote) -> list[int]:
    return sorted(int(name) for name in remote.folders("checkpoints") if files.is_step(name))


def manifest_of(remote: Remote, step: int) -> dict:
    """Returns the manifest of a step. Raises Damaged, or Unfinished if the copy was never read back."""
    try:
        verified = remote.read(f"checkpoints/{step}/verified.json")
        content = remote.read(f"checkpoints/{step}/manifest.json")
    except FileNotFoundError:
        raise Unfinished(f"the mirror's copy of checkpoint {step} is not whole") from None
    record = unseal(content)
    # The mark has the hash of the manifest that was read back: a mark for another manifest proves nothing.
    mark = {"manifest": hashlib.sha256(content).hexdigest()}
    if record is None or unseal(verified) != mark or record["step"] != step:
        raise Damaged(f"the mirror's copy of checkpoint {step} is damaged: its manifest is not what was written")
    return record


def held(remote: Remote) -> dict[str, list[int]]:
    """Returns the steps whose copies have a valid manifest (`whole`), and the other steps (`partial`). Reads no arrays."""
    of_kind = {"whole": [], "partial": []}
    for step in steps(remote):
        try:
            if not manifest_of(remote, step).get("weights_only"):  # which a run before 28 November 2026 could ask for
                of_kind["whole"].append(step)
        except Damaged:
            of_kind["partial"].append(step)
    return of_kind


def remove(remote: Remote, step: int) -> None:
    """Deletes a step, the manifest first: so a half-deleted copy never looks whole."""
    folder = f"checkpoints/{step}"
    first = [f"{folder}/manifest.json", f"{folder}/verified.json"]
    remote.delete([*first, *(name for name in remote.names(folder) if name not in first)])
    remote.prune(folder)


def below(name: str) -> bool:
    path = pathlib.PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def one_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
