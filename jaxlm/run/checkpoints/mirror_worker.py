"""Copies checkpoints to the mirror and back, in a process of its own that `mirror.py` may abandon. Imports no JAX.

Each job is answered with events, then `done` or `error`.
"""

import concurrent.futures
import contextlib
import hashlib
import json
import pathlib
import shutil
import signal
import typing
from collections.abc import Callable, Iterable, Iterator

from jaxlm.host import console, files
from jaxlm.host.redact import redact, redact_url
from jaxlm.run.checkpoints import mirror_layout as layout
from jaxlm.run.checkpoints import remote as remote_lib
from jaxlm.run.checkpoints.mirror_layout import Damaged, Gone, Refused, Trouble, Unfinished
from jaxlm.run.checkpoints.remote import Remote, Sum, measure, seal, sum_of, unseal

_LOGS = ("config.json", "run.json", "metrics.jsonl", "report.html", console.LOG)
_AT_ONCE = 4  # files under way at a time
_TRIES = 3  # of a file that does not read back as it was written

Tell = Callable[[dict[str, typing.Any]], None]
Sums = dict[str, Sum]  # of files by their names


def claim(remote: Remote, job: dict, tell: Tell) -> dict:
    """Makes this start of the run the one that writes to the mirror.

    Args:
      job: `id` of the run ("" if its folder has none), `new_id`, `start`, `workdir`, `empty` (it has no checkpoints).

    Returns:
      `id` of the run, why the mirror can't be written to (`unwritable`, "" if it can), and what it holds, as `copy`.

    Raises:
      Refused: the mirror belongs to another run.
    """
    record, name = layout.owner(remote), pathlib.Path(job["workdir"]).name
    comes_back = record and not job["id"] and job["empty"] and record["workdir"] == name
    if record and record["id"] != job["id"] and not comes_back:
        raise Refused(
            f"the mirror belongs to another run, in a folder called {record['workdir']}: give another "
            "config.checkpoint.mirror" + ("" if job["id"] else ", or the config.workdir of that run to go on with it")
        )
    run_id, unwritable = record["id"] if record else job["id"] or job["new_id"], ""
    try:
        layout.own(remote, run_id, job)
    except Exception as error:
        unwritable = layout.one_line(error)
    return {"id": run_id, "unwritable": unwritable, **layout.held(remote)}


def copy(remote: Remote, job: dict, tell: Tell) -> dict:
    """Copies one checkpoint and the logs, reads all back, and only then marks the copy as verified.

    Args:
      job: `step`, `workdir`, `id` and `start` of the run, and the sums of what an attempt that was
        abandoned has `copied`.

    Returns:
      The steps that the mirror then holds `whole`, and those of which it has only a part (`partial`).
    """
    step, workdir, folder = job["step"], pathlib.Path(job["workdir"]), f"checkpoints/{job['step']}"
    source = workdir / "checkpoints" / str(step)
    layout.check_owner(remote, job)
    sums = _sums(source)
    _check_source(source, sums)
    if _has(remote, step, sums):
        write_logs(remote, job, tell)
        return layout.held(remote)
    if not job["copied"]:
        _make_way(remote, step)

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
    manifest = seal({"step": step, "files": sums, "logs": logs})
    remote.write(f"{folder}/manifest.json", manifest)
    for name in logs:
        if remote.measure(f"{folder}/workdir/{name}") != logs[name]:
            raise Damaged(f"checkpoint {step}: workdir/{name} does not read back as it was written")
    # Before the copy counts: else a run that comes back to it lacks the steps since the last.
    write_logs(remote, job, tell)
    remote.write(f"{folder}/verified.json", seal({"manifest": hashlib.sha256(manifest).hexdigest()}))
    layout.manifest(remote, step)  # raises if the last two files do not read back either
    return layout.held(remote)


def write_logs(remote: Remote, job: dict, tell: Tell) -> dict:
    """Copies the run's logs as they are now. `job`: `workdir`, `id` and `start` of the run."""
    layout.check_owner(remote, job)
    remote.write("logs.json", seal({"files": _write_logs(remote, pathlib.Path(job["workdir"]), "")}))
    return {}


def delete(remote: Remote, job: dict, tell: Tell) -> dict:
    """Deletes `steps`, but never the last whole copy. Returns what the mirror then holds, as `copy`."""
    layout.check_owner(remote, job)
    whole = set(layout.held(remote)["whole"])
    for step in job["steps"]:
        if whole - {step}:
            layout.remove(remote, step)
            whole.discard(step)
    return layout.held(remote)


def restore(remote: Remote, job: dict, tell: Tell) -> dict:
    """Brings the newest checkpoint whose files all match into `workdir`, and the logs that are not there.

    Returns:
      `step`: the checkpoint's, or None if the mirror has none that was ever whole.

    Raises:
      Refused: all copies are damaged, or the newest one holds weights only.
    """
    workdir, damaged = pathlib.Path(job["workdir"]), []
    for step in reversed(layout.steps(remote)):
        try:
            manifest = layout.manifest(remote, step)
            if manifest.get("weights_only"):  # of a run before 2026-11-28
                raise Refused(
                    f"the mirror's checkpoint {step} holds weights only, so no run can go on from it: give another "
                    "config.checkpoint.mirror or config.workdir"
                )
            _download(remote, step, manifest["files"], workdir / "checkpoints", tell)
        except Damaged as error:
            damaged += [] if isinstance(error, Unfinished) else [step]
            tell({"line": f"{error}; going back to the copy before it"})
        else:
            _restore_logs(remote, step, manifest["logs"], workdir, tell)
            return {"step": step}
    if damaged:
        raise Refused(
            f"none of the mirror's checkpoints {sorted(damaged)} is what was copied there; to train from the start "
            "give another config.checkpoint.mirror"
        )
    return {"step": None}


JOBS = {"claim": claim, "copy": copy, "write_logs": write_logs, "delete": delete, "restore": restore}


def work(jobs: Iterable[dict], tell: Tell) -> None:
    """Does each job at its `url`. `mirror_layout.Worker` starts it by its name."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the run, which may still wait for a copy
    remote = None
    for job in jobs:
        try:
            remote = remote or _open(job["url"])
            tell({"done": JOBS[job["do"]](remote, job, tell)})
        except Exception as error:
            words = layout.one_line(error).replace(job["url"], redact_url(job["url"]))
            tell({"error": words, "kind": error.kind if isinstance(error, Trouble) else Trouble.kind})


def _open(url: str) -> Remote:
    try:
        return Remote(url)
    except (ImportError, ValueError) as error:
        raise Refused(f"can't be opened: {layout.one_line(error)}") from error


def _sums(folder: pathlib.Path) -> Sums:
    """Returns the sum of each file of a checkpoint. Raises Gone if there is none, or one goes."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    try:
        sums = dict(zip(names, _each(lambda name: measure(folder / name), names), strict=True))
    except FileNotFoundError:
        sums = {}
    if not sums:
        raise Gone(f"checkpoint {folder.name} was deleted before it was copied")
    return sums


def _check_source(folder: pathlib.Path, sums: Sums) -> None:
    """Raises Trouble if a file is no longer as it was when the checkpoint was verified (`checksums.json` in it)."""
    try:
        verified = files.json_of((folder / "checksums.json").read_bytes())["files"]
        changed = [name for name in sums if verified.get(name, sums[name]) != sums[name]]
    except (OSError, *files.MANGLED):
        return  # not verified, or its checksums are damaged: a restore reads the arrays themselves then
    if changed:
        raise Trouble(f"checkpoint {folder.name}: {changed[0]} is not what was saved and verified, so it is not copied")


def _has(remote: Remote, step: int, sums: Sums) -> bool:
    """True if the mirror holds exactly these files of the step already."""
    try:
        return layout.manifest(remote, step)["files"] == sums
    except Damaged:
        return False


def _make_way(remote: Remote, step: int) -> None:
    """Deletes what the mirror holds of a step that is about to be copied anew, unless it is the last whole copy."""
    if layout.held(remote)["whole"] == [step]:
        raise Trouble(
            f"another checkpoint {step} is the only whole one in the mirror: it stays until a later one is copied"
        )
    layout.remove(remote, step)


def _write_logs(remote: Remote, workdir: pathlib.Path, prefix: str) -> Sums:
    """Copies the logs to names that begin with `prefix`. Returns the sum of each."""
    paths = [workdir / name for name in _LOGS] + sorted((workdir / "samples").glob("**/*"))
    paths += sorted((workdir / "eval").glob("*/results.json"))  # not the items: they are large, and copied each time
    sums = {}
    for path in paths:
        try:
            content = path.read_bytes()
        except (FileNotFoundError, IsADirectoryError):
            continue
        if path.name == "config.json":  # others may read the mirror; the next start writes the whole config again
            content = _without_secrets(content)
            if not content:
                continue
        if path.name in ("metrics.jsonl", console.LOG):
            content = content[: content.rfind(b"\n") + 1]  # the last line may be half written
        name = path.relative_to(workdir).as_posix()
        remote.write(prefix + name, content)
        sums[name] = sum_of(content)
    return sums


def _without_secrets(config: bytes) -> bytes:
    """Returns config.json with `***` in the place of secrets; nothing of a file that is damaged."""
    try:
        plain = files.json_of(config, object)
    except ValueError:
        return b""
    hidden = redact(plain)
    return config if hidden == plain else (json.dumps(hidden, indent=1) + "\n").encode()


def _download(remote: Remote, step: int, sums: Sums, checkpoints: pathlib.Path, tell: Tell) -> None:
    """Brings a checkpoint into the folder `checkpoints`, under its name only when all of it is there and right.

    Files that an earlier attempt brought stay, if they are right.
    """
    half, damaged = checkpoints / f"{step}.restoring", f"the mirror's copy of checkpoint {step} is damaged"

    def fetch(name: str) -> str:
        target = half / name
        if not layout.below(name):
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
    """Brings back the logs that `workdir` lacks: the newest, or if that is damaged, the one copied along with the step.

    What log.txt of this start holds already is put behind what comes back.
    """
    try:
        newest = (unseal(remote.read("logs.json")) or {}).get("files", {})
    except FileNotFoundError:
        newest = {}
    for name in sorted({*newest, *of_step}):
        path = workdir / name
        if not layout.below(name) or (path.exists() and name != console.LOG):
            continue
        for place, sum_ in ((name, newest.get(name)), (f"checkpoints/{step}/workdir/{name}", of_step.get(name))):
            try:
                content = remote.read(place)
            except FileNotFoundError:
                continue
            if sum_of(content) == sum_:
                said = path.read_bytes() if path.exists() else b""  # by this start
                path.parent.mkdir(parents=True, exist_ok=True)
                content = said if said.startswith(content) else content + said
                files.write_atomically(path, content, private=name == "config.json")
                break
        else:
            tell({"line": f"the mirror's {name} is damaged: the run goes on without it"})


def _each(do: Callable[[str], remote_lib.T], names: Iterable[str]) -> Iterator[remote_lib.T]:
    """Yields `do(name)` of each name in their order, some at a time. An error drops what has not begun."""
    pool = concurrent.futures.ThreadPoolExecutor(_AT_ONCE)
    try:
        yield from pool.map(do, names)
    finally:
        pool.shutdown(cancel_futures=True)
