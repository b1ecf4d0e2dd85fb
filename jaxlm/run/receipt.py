"""The receipt of a run: run.json gets a link for each save, so that whatever is changed later can be named.

A link holds the sha256 of each array's bytes (`arrays`, as long as the checkpoint is kept), of that table (`state`), of the
checkpoint's metadata, of metrics.jsonl up to a length, of config.json and the run's other files (`files`), of the data's
manifest, of what identifies the held-out text, of the link before, and of the link itself. A branch's first link names that
of the checkpoint it began with. A rollback removes no link: `valid` leaves out the steps that it undid.
"""

import contextlib
import datetime
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Collection, Iterator

from jaxlm.config import ConfigError, RunError
from jaxlm.data.shards import manifest as manifests
from jaxlm.data.shards import shards
from jaxlm.data.shards.verify import file_sha256
from jaxlm.host import files
from jaxlm.host.console import say
from jaxlm.run import ledger, metrics
from jaxlm.run.checkpoints import meta, verify
from jaxlm.run.checkpoints.damage import CorruptCheckpointError
from jaxlm.run.checkpoints.verify import seal

PROVES = (
    "A receipt shows whether a run's files were changed and whether its steps repeat. It does not show who made it, and only a "
    "replay from step 0 proves all of it."
)
FILES = (manifests.LIST, "*.npz")  # beside config.json: documents to leave out, a reference's words on pairs
Link = dict


class Chain:
    """Adds links to run.json. `manifest`: the sha256 of the data's. Of metrics.jsonl it reads each line once."""

    def __init__(self, folder: pathlib.Path, manifest: str):
        self._folder, self._manifest, self._log, self._size = folder, manifest, hashlib.sha256(), 0

    def link(self, step: int, arrays: dict[str, str], kept: Collection[int]) -> None:
        """Adds the link of a saved checkpoint. Links of steps that are not in `kept` lose `arrays`. Never raises."""
        try:
            if not arrays:
                raise OSError("its arrays could not be read again")
            folder, book = self._folder, ledger.read(self._folder)
            links = book["receipt"]
            new = {
                "step": step,
                "time": round(time.time(), 3),
                "state": seal(arrays),
                "meta": file_sha256(folder / "checkpoints" / str(step) / meta.FILE),
                "metrics": self._metrics(),
                "config": file_sha256(folder / "config.json"),
                "files": _files(folder),
                "manifest": self._manifest,
                "held_out": seal((book["starts"] or [{}])[-1].get("held_out")),
                "rollbacks": [len(book["rollbacks"]), seal(book["rollbacks"])],
                "passed_over": seal(book["passed_over"]),
                "before": links[-1].get("sha256", "") if links else next(iter(_begun_from(folder)), ""),
            }
            links = [{k: v for k, v in old.items() if k != "arrays" or old.get("step") in kept} for old in links]
            ledger.put(folder, "receipt", [*links, new | {"sha256": seal(new), "arrays": arrays}])
        except (OSError, *files.MANGLED) as error:
            say(f"step {step} gets no link in the receipt: {error}")

    def _metrics(self) -> list:
        """Returns (the bytes of metrics.jsonl that are whole lines, their sha256)."""
        with open(self._folder / "metrics.jsonl", "rb") as file:
            file.seek(self._size)
            new = file.read()
            os.fsync(file.fileno())  # what a link covers must outlive a power cut, as the link does
        new = new[: new.rfind(b"\n") + 1]
        self._log.update(new)
        self._size += len(new)
        return [self._size, self._log.hexdigest()]


def _files(folder: pathlib.Path) -> dict[str, str]:
    return {path.name: file_sha256(path) for pattern in FILES for path in sorted(folder.glob(pattern))}


def _begun_from(folder: pathlib.Path) -> list[str]:
    """Returns the sha256 of its origin's links, newest first, of the step with which a branch began; [""] for no branch."""
    c = files.json_there(folder / "config.json")
    if not c.get("origin_state"):
        return [""]
    links = files.json_there(pathlib.Path(c["origin"]) / "run.json").get("receipt", [])
    return [old.get("sha256", "") for old in links[::-1] if str(old.get("step")) == c["origin_checkpoint"]]


def gap(folder: pathlib.Path, done: int) -> str:
    """Returns a line if the checkpoint of step `done` has no link, as after a kill right after its save; else ""."""
    steps = [old.get("step") for old in ledger.read(folder)["receipt"]]
    if not steps or done in steps:
        return ""
    return f"checkpoint {done} has no link in the receipt (run.json): the next link follows that of step {steps[-1]}"


def valid(book: dict) -> dict[int, Link]:
    """Returns step -> its last link in run.json's content, without links that were changed or that a rollback undid."""
    return {old["step"]: old for old in book["receipt"] if _sound(old) and not metrics.undone(old, book["rollbacks"])}


def _sound(old: Link) -> bool:
    sealed = seal({key: value for key, value in old.items() if key not in ("sha256", "arrays")}) == old.get("sha256")
    return sealed and ("arrays" not in old or seal(old["arrays"]) == old["state"])


def changed(folder: pathlib.Path, book: dict) -> Iterator[str]:
    """Yields a line on each link, and on the first part of each file that the links cover, that is not as it was written."""
    links, starts, begun = book["receipt"], book["starts"], _begun_from(folder)
    if not starts:
        yield "run.json is missing, and the receipt with it"
    if damaged := next(folder.glob("run.json.damaged.*"), None):
        yield f"run.json was damaged, and begun anew: {damaged.name}"
    # Of a branch whose origin is gone or has no link, the first link's `before` can't be checked.
    before = links[0].get("before") if links and (begun == [] or links[0].get("before") in begun) else begun[:1]
    for number, old in enumerate(links, start=1):
        if not _sound(old):
            yield f"link {number} of {len(links)} in run.json was changed"
        elif old["before"] != before:
            yield f"link {number} of {len(links)} in run.json, of step {old['step']}, does not follow the link before it"
        before = old.get("sha256")
    facts = [fact for start in starts for fact in (start, start.get("ended") or {})]
    if {fact.get("link", "") for fact in facts} - {"", *(old.get("sha256") for old in links)}:
        yield "run.json lacks a link that one of its starts names"
    if not (links := [old for old in links if _sound(old)]):
        return
    log, last = (folder / "metrics.jsonl").read_bytes(), links[-1]
    yield from _undone(book, links, log)
    content, at = hashlib.sha256(), 0
    for old in links:
        size, sha256 = old["metrics"]
        content.update(log[at:size])
        if content.hexdigest() != sha256:
            yield f"metrics.jsonl was changed between bytes {at:,} and {size:,}, before step {old['step']} was saved"
            break
        at = size
    if file_sha256(folder / "config.json") not in (last["config"], starts and starts[-1].get("config_sha256")):
        yield "config.json was changed"
    if last.get("held_out", "") not in {"", *(seal(start.get("held_out")) for start in starts)}:
        yield "held_out in run.json was changed"
    there = _files(folder)
    older = {manifests.LIST: sha256} if (sha256 := last.get("without")) else {}
    covered = last.get("files", older).items()
    yield from (f"{name} was changed" for name, sha256 in covered if there.get(name) != sha256)


def _undone(book: dict, links: list[Link], log: bytes) -> Iterator[str]:
    """Yields a line on rollbacks and skipped batches that were changed, and on steps that were logged again."""
    for old in links:
        count, sealed = old["rollbacks"]
        if seal(book["rollbacks"][:count]) != sealed:
            yield f"rollbacks in run.json were changed, from before step {old['step']} was saved"
            break
    last, start = links[-1], (book["starts"] or [{}])[-1]
    if not valid(book):
        yield "a rollback in run.json undoes all links"
    elif len(book["rollbacks"]) == last["rollbacks"][0]:
        later = datetime.datetime.fromisoformat(start["time"]).timestamp() > last["time"] if start else False
        if not later and seal(book["passed_over"]) != last["passed_over"]:
            yield "passed_over in run.json was changed"
        first = min(last["step"], start.get("step", 0)) if later else last["step"]
        for line in log[last["metrics"][0] :].splitlines():
            with contextlib.suppress(ValueError):  # a kill may have cut the last line short
                step = files.json_of(line).get("step")
                if isinstance(step, int) and step < first:
                    yield f"metrics.jsonl has lines on step {step} behind those on step {last['step']}"
                    break


def of_checkpoint(place: pathlib.Path, old: Link | None) -> str:
    """Returns a line if a checkpoint can't be read, or its arrays or metadata are not those of its link; else ""."""
    try:
        names = meta.read(place)["digests"]
        if old is None:
            return ""
        sums, arrays = verify.sha256s(place, names), old.get("arrays", {})
        wrong = [name for name in sums | arrays if sums.get(name) != arrays.get(name)] * (seal(sums) != old["state"])
        if "meta" in old and file_sha256(place / meta.FILE) != old["meta"]:
            wrong.append(str(meta.FILE))
        return f"checkpoint {place.name} was changed: {', '.join(wrong)}" if wrong else ""
    except (OSError, CorruptCheckpointError, *files.MANGLED) as error:
        gone = not place.is_dir()  # rotated away meanwhile
        return "" if gone else f"checkpoint {place.name} was changed: {str(error).splitlines()[0][:200]}"


def of_data(root: str, book: dict) -> str:
    """Returns a line on the manifest or the first file of a data directory that is not as the run read it; or ""."""
    starts, path = book["starts"], pathlib.Path(root)
    trained_on = [old["manifest"] for old in valid(book).values()] or [start.get("manifest_sha256") for start in starts]
    try:
        manifest, sha256 = manifests.read(path)
        if trained_on and sha256 != trained_on[-1]:
            return f"{path / manifests.MANIFEST} was changed, or is not of the data that the run was trained on"
        measured = starts[-1].get("held_out") or {} if starts else {}
        for source, text in manifest.get(manifests.HELD_OUT, {}).items():
            if measured.get(source, text).partition(" ")[0] != text:
                return f"{path / manifests.MANIFEST} was changed: {manifests.HELD_OUT} of {source}"
        data = shards.open_data(root)
        for entry in data.files():
            data.verifier.check(entry)
    except (ConfigError, RunError, OSError) as error:
        return str(error)
    return ""


def exported(folder: pathlib.Path) -> str:
    """Returns the receipt as JSON; "" for a run without one."""
    links = ledger.read(folder)["receipt"]
    return json.dumps({"proves": PROVES, "links": links}, indent=1) + "\n" if links else ""
