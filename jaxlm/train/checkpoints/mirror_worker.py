"""Copies checkpoints to the mirror and back, in a process of its own that `mirror.py` may abandon. Imports no JAX.

Jobs come as lines of JSON on standard input; for each go events, then `done` or `error`, to standard output.
"""

import concurrent.futures
import ctypes
import hashlib
import json
import os
import pathlib
import shutil
import signal
import sys
import typing
from collections.abc import Callable, Iterable, Iterator

from jaxlm import console, files
from jaxlm.redact import redact, redact_url
from jaxlm.train.checkpoints import mirror_layout as layout
from jaxlm.train.checkpoints import remote as remote_lib
from jaxlm.train.checkpoints.mirror_layout import Damaged, Gone, Refused, Trouble, Unfinished
from jaxlm.train.checkpoints.remote import Remote, measure, seal, unseal

WEIGHTS = ("params", "meta")  # the items of a checkpoint without the optimizer's state
_LOGS = ("config.json", "run.json", "metrics.jsonl", "report.html", console.LOG)
_AT_ONCE = 4  # files under way at a time
_TRIES = 3  # of a file that does not read back as it was written

Tell = Callable[[dict[str, typing.Any]], None]
Measured = dict[str, list]  # name -> [bytes, sha256]


def claim(remote: Remote, job: dict, tell: Tell) -> dict:
    """Makes this start of the run the one that writes to the mirror.

    Args:
      job: `id` of the run ("" if its folder has none), `new_id`, `start`, `workdir`, `empty` (it has no checkpoints).

    Returns:
      `id` of the run, why the mirror can't be written to (`unwritable`, "" if it can), and what it holds, as `copy`.

    Raises:
      Refused: the mirror belongs to another run.
    """
    name = pathlib.Path(job["workdir"]).name
    held = layout.owner(remote)
    if held:
        same = held["id"] == job["id"] or (not job["id"] and job["empty"] and held["workdir"] == name)
        if not same:
            raise Refused(
                f"the mirror belongs to another run, in a folder called {held['workdir']}: give another "
                "config.checkpoint.mirror"
                + ("" if job["id"] else ", or the config.workdir of that run to go on with it")
            )
    run_id = held["id"] if held else job["id"] or job["new_id"]
    unwritable = ""
    try:
        remote.write("run_id.json", seal({"id": run_id, "workdir": name, "start": job["start"]}))
    except Exception as error:
        unwritable = layout.one_line(error)
    return {"id": run_id, "unwritable": unwritable, **layout.held(remote)}


def copy(remote: Remote, job: dict, tell: Tell) -> dict:
    """Copies one checkpoint and the logs, reads all back, and only then marks the copy as verified.

    Args:
      job: `step`, `workdir`, `weights_only`, `id` and `start` of the run, and from an attempt that was abandoned
        `uploaded` (name -> [bytes, sha256]) and `read` (names).

    Returns:
      The steps that the mirror then holds `whole`, and those of which it has only a part (`partial`).
    """
    step, workdir = job["step"], pathlib.Path(job["workdir"])
    source, folder = workdir / "checkpoints" / str(step), f"checkpoints/{step}"
    layout.check_owner(remote, job)
    try:
        wanted = _measured(source, job["weights_only"])
    except FileNotFoundError:
        raise Gone(f"checkpoint {step} was deleted before it was copied") from None
    _check_source(source, wanted)
    if _has(remote, step, wanted, job["weights_only"]):
        write_logs(remote, job, tell)
        return layout.held(remote)
    if not job["uploaded"]:
        _make_way(remote, step)

    def upload(name: str) -> str:
        try:
            remote.put(source / name, f"{folder}/{name}")
        except FileNotFoundError:
            raise Gone(f"checkpoint {step} was deleted before its copy was whole") from None
        return name

    for name in _each(upload, [name for name, is_ in wanted.items() if job["uploaded"].get(name) != is_]):
        tell({"uploaded": name, "measured": wanted[name]})
    kept = _write_logs(remote, workdir, f"{folder}/workdir/")
    manifest = seal({"step": step, "weights_only": job["weights_only"], "files": wanted, "logs": kept})
    remote.write(f"{folder}/manifest.json", manifest)

    def read_back(name: str) -> str:
        for _ in range(_TRIES):
            try:
                if list(remote.measure(f"{folder}/{name}")) == wanted[name]:
                    return name
            except FileNotFoundError:
                pass
            upload(name)
        raise Damaged(f"checkpoint {step}: {name} does not read back as it was written")

    for name in _each(read_back, [name for name in wanted if name not in job["read"]]):
        tell({"read": name})
    for name, is_ in kept.items():
        if list(remote.measure(f"{folder}/workdir/{name}")) != is_:
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
            if manifest["weights_only"]:
                raise Refused(
                    f"the mirror's checkpoint {step} holds weights only, so no run can go on from it: give another "
                    "config.checkpoint.mirror or config.workdir"
                )
            _download(remote, step, manifest["files"], workdir / "checkpoints", tell)
        except Unfinished as error:
            tell({"line": f"{error}; going back to the copy before it"})
        except Damaged as error:
            damaged.append(step)
            tell({"line": f"{error}; going back to the copy before it"})
        else:
            for line in _restore_logs(remote, step, manifest["logs"], workdir):
                tell({"line": line})
            return {"step": step}
    if damaged:
        raise Refused(
            f"none of the mirror's checkpoints {sorted(damaged)} is what was copied there; to train from the start "
            "give another config.checkpoint.mirror"
        )
    return {"step": None}


JOBS = {"claim": claim, "copy": copy, "write_logs": write_logs, "delete": delete, "restore": restore}


def _measured(folder: pathlib.Path, weights_only: bool) -> Measured:
    """Returns [bytes, sha256] of each file of a checkpoint. Raises FileNotFoundError if the folder is absent or empty."""
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    if weights_only:
        names = [name for name in names if "/" not in name or name.split("/")[0] in WEIGHTS]
    if not names:
        raise FileNotFoundError(folder)
    return {
        name: list(measured) for name, measured in zip(names, _each(lambda n: measure(folder / n), names), strict=True)
    }


def _check_source(folder: pathlib.Path, wanted: Measured) -> None:
    """Raises Trouble if a file is no longer as it was when the checkpoint was verified (`checksums.json` in it)."""
    try:
        checksums = files.json_of((folder / "checksums.json").read_bytes())["files"]
        changed = [name for name, measured in wanted.items() if checksums.get(name, measured) != measured]
    except (OSError, *files.MANGLED):
        return  # not verified, or its checksums are damaged: a restore reads the arrays themselves then
    if changed:
        raise Trouble(f"checkpoint {folder.name}: {changed[0]} is not what was saved and verified, so it is not copied")


def _has(remote: Remote, step: int, wanted: Measured, weights_only: bool) -> bool:
    """True if the mirror holds exactly these files of the step already."""
    try:
        manifest = layout.manifest(remote, step)
    except Damaged:
        return False
    return manifest["files"] == wanted and manifest["weights_only"] == weights_only


def _make_way(remote: Remote, step: int) -> None:
    """Deletes what the mirror holds of a step that is about to be copied anew, unless it is the last whole copy."""
    if layout.held(remote)["whole"] == [step]:
        raise Trouble(
            f"another checkpoint {step} is the only whole one in the mirror: it stays until a later one is copied"
        )
    layout.remove(remote, step)


def _write_logs(remote: Remote, workdir: pathlib.Path, prefix: str) -> Measured:
    """Copies the logs to names that begin with `prefix`. Returns [bytes, sha256] of each."""
    paths = [workdir / name for name in _LOGS] + sorted((workdir / "samples").glob("**/*"))
    paths += sorted((workdir / "eval").glob("*/results.json"))  # not the items: they are large, and copied each time
    written = {}
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
        written[name] = [len(content), hashlib.sha256(content).hexdigest()]
    return written


def _without_secrets(config: bytes) -> bytes:
    """Returns config.json with `***` in the place of secrets; nothing of a file that is damaged."""
    try:
        plain = files.json_of(config, object)
    except ValueError:
        return b""
    hidden = redact(plain)
    return config if hidden == plain else (json.dumps(hidden, indent=1) + "\n").encode()


def _download(remote: Remote, step: int, wanted: Measured, checkpoints: pathlib.Path, tell: Tell) -> None:
    """Brings a checkpoint into the folder `checkpoints`, under its name only when all of it is there and right.

    Files that an earlier attempt brought stay, if they are right.
    """
    half = checkpoints / f"{step}.restoring"

    def fetch(name: str) -> str:
        target = half / name
        if not layout.below(name):
            raise Damaged(f"the mirror's copy of checkpoint {step} is damaged: no file can be called {name!r}")
        if target.is_file() and list(measure(target)) == wanted[name]:
            return name
        try:
            right = any(list(remote.fetch(f"checkpoints/{step}/{name}", target)) == wanted[name] for _ in range(2))
        except FileNotFoundError:
            raise Damaged(f"the mirror's copy of checkpoint {step} is damaged: {name} is missing") from None
        if not right:
            raise Damaged(f"the mirror's copy of checkpoint {step} is damaged: {name} is not what was copied there")
        return name

    try:
        for name in _each(fetch, wanted):
            tell({"fetched": name})
    except Damaged:
        shutil.rmtree(half, ignore_errors=True)
        raise
    half.rename(checkpoints / str(step))
    files.flush_folder(checkpoints)


def _restore_logs(remote: Remote, step: int, of_step: Measured, workdir: pathlib.Path) -> Iterator[str]:
    """Brings back the logs that `workdir` lacks: the newest, or if that is damaged, the one copied along with the step.

    What log.txt of this start holds already is put behind what comes back.

    Yields a line for each that is damaged in both places.
    """
    try:
        newest = (unseal(remote.read("logs.json")) or {}).get("files", {})
    except FileNotFoundError:
        newest = {}
    for name in sorted({*newest, *of_step}):
        path = workdir / name
        if not layout.below(name) or (path.exists() and name != console.LOG):
            continue
        for at, is_ in ((name, newest.get(name)), (f"checkpoints/{step}/workdir/{name}", of_step.get(name))):
            try:
                content = remote.read(at)
            except FileNotFoundError:
                continue
            if [len(content), hashlib.sha256(content).hexdigest()] == is_:
                path.parent.mkdir(parents=True, exist_ok=True)
                if name == console.LOG and path.exists():  # this start has said something already
                    said = path.read_bytes()
                    content = said if said.startswith(content) else content + said
                files.write_atomically(path, content, private=name == "config.json")
                break
        else:
            yield f"the mirror's {name} is damaged: the run goes on without it"


def _each(do: Callable[[str], remote_lib.T], names: Iterable[str]) -> Iterator[remote_lib.T]:
    """Yields `do(name)` of each name in their order, some at a time. An error drops what has not begun."""
    pool = concurrent.futures.ThreadPoolExecutor(_AT_ONCE)
    try:
        yield from pool.map(do, names)
    finally:
        pool.shutdown(cancel_futures=True)


def _open(url: str) -> Remote:
    try:
        return Remote(url)
    except (ImportError, ValueError) as error:
        raise Refused(f"can't be opened: {layout.one_line(error)}") from error


def main() -> None:
    """Answers jobs until standard input closes. Dies with the process whose id is the argument."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
    if os.getppid() != int(sys.argv[1]):
        return  # it died before the line above
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # they are for the run, which may still wait for a copy
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer

    def tell(event: dict[str, typing.Any]) -> None:
        print(json.dumps(event), file=out, flush=True)

    remotes: dict[str, Remote] = {}
    for line in sys.stdin:
        job = json.loads(line)
        url = job["url"]
        try:
            remote = remotes.get(url) or remotes.setdefault(url, _open(url))
            tell({"done": JOBS[job["do"]](remote, job, tell)})
        except Exception as error:
            words = layout.one_line(error).replace(url, redact_url(url))
            tell({"error": words, "kind": getattr(error, "kind", "run")})


if __name__ == "__main__":
    main()
