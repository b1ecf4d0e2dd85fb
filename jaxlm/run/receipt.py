"""The receipt of a run: run.json gets a link for each save, so that whatever is changed later can be named.

A link holds the sha256 of each array's bytes (`arrays`, as long as the checkpoint is kept), of that table (`state`), of
metrics.jsonl up to a length, of config.json, of the data's manifest, of the link before, and of the link itself. A branch's
first link names that of the checkpoint it began with. A rollback removes no link: `valid` leaves out the steps that it undid.
"""

import datetime
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Collection, Iterator

from jaxlm.config import ConfigError, RunError
from jaxlm.data.shards import removal, shards
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
Link = dict


def link(folder: pathlib.Path, manifest: str, step: int, arrays: dict[str, str], kept: Collection[int]) -> None:
    """Adds the link of a saved checkpoint to run.json; links of steps that are not in `kept` lose `arrays`. Never raises."""
    try:
        if not arrays:
            raise OSError("its arrays could not be read again")
        book = ledger.read(folder)
        links = book["receipt"]
        with open(folder / "metrics.jsonl", "rb") as file:
            log = file.read()
            os.fsync(file.fileno())  # what a link covers must outlive a power cut, as the link does
        log = log[: log.rfind(b"\n") + 1]
        new = {
            "step": step,
            "time": round(time.time(), 3),
            "state": seal(arrays),
            "metrics": [len(log), _sha256(log)],
            "config": _sha256((folder / "config.json").read_bytes()),
            "manifest": manifest,
            "rollbacks": [len(book["rollbacks"]), seal(book["rollbacks"])],
            "passed_over": seal(book["passed_over"]),
            "without": _list(folder),
            "before": links[-1].get("sha256", "") if links else next(iter(_begun_from(folder)), ""),
        }
        links = [{k: v for k, v in old.items() if k != "arrays" or old.get("step") in kept} for old in links]
        ledger.put(folder, "receipt", [*links, new | {"sha256": seal(new), "arrays": arrays}])
    except (OSError, *files.MANGLED) as error:
        say(f"step {step} gets no link in the receipt: {error}")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _list(folder: pathlib.Path) -> str:
    """Returns the sha256 of the run's list of documents to leave out; "" if it has none."""
    path = folder / removal.LIST
    return _sha256(path.read_bytes()) if path.is_file() else ""


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
    """Yields a line on each link, and on the first part of metrics.jsonl and config.json, that is not as it was written."""
    links, begun, content, at = book["receipt"], _begun_from(folder), hashlib.sha256(), 0
    if not book["starts"]:
        yield "run.json is missing, and the receipt with it"
    if links and _sound(links[-1]) and _list(folder) != links[-1]["without"]:
        yield f"{removal.LIST} was changed"
    if damaged := next(folder.glob("run.json.damaged.*"), None):
        yield f"run.json was damaged, and begun anew: {damaged.name}"
    # Of a branch whose origin is gone or has no link, the first link's `before` can't be checked.
    before = links[0].get("before") if links and (begun == [] or links[0].get("before") in begun) else begun[:1]
    log, config = ((folder / name).read_bytes() for name in ("metrics.jsonl", "config.json"))
    for number, old in enumerate(links, start=1):
        if not _sound(old):
            yield f"link {number} of {len(links)} in run.json was changed"
        elif old["before"] != before:
            yield f"link {number} of {len(links)} in run.json, of step {old['step']}, does not follow the link before it"
        before = old.get("sha256")
    facts = [fact for start in book["starts"] for fact in (start, start.get("ended") or {})]
    if {fact.get("link", "") for fact in facts} - {"", *(old.get("sha256") for old in links)}:
        yield "run.json lacks a link that one of its starts names"
    links = [old for old in links if _sound(old)]
    yield from _undone(book, links, log)
    for old in links:
        size, sha256 = old["metrics"]
        content.update(log[at:size])
        if content.hexdigest() != sha256:
            yield f"metrics.jsonl was changed between bytes {at:,} and {size:,}, before step {old['step']} was saved"
            break
        at = size
    written = {links[-1]["config"], *(start.get("config_sha256") for start in book["starts"][-1:])} if links else ()
    if links and _sha256(config) not in written:
        yield "config.json was changed"


def _undone(book: dict, links: list[Link], log: bytes) -> Iterator[str]:
    """Yields a line on rollbacks and skipped batches that were changed, and on steps that were logged again."""
    for old in links:
        count, sealed = old["rollbacks"]
        if seal(book["rollbacks"][:count]) != sealed:
            yield f"rollbacks in run.json were changed, from before step {old['step']} was saved"
            break
    if links and not valid(book):
        yield "a rollback in run.json undoes all links"
    elif links and len(book["rollbacks"]) == links[-1]["rollbacks"][0]:
        last, start = links[-1], (book["starts"] or [{}])[-1]
        later = datetime.datetime.fromisoformat(start["time"]).timestamp() > last["time"] if start else False
        if not later and seal(book["passed_over"]) != last["passed_over"]:
            yield "passed_over in run.json was changed"
        first = min(last["step"], start.get("step", 0)) if later else last["step"]
        steps = (
            files.json_of(line).get("step") for line in log[last["metrics"][0] :].splitlines() if line.startswith(b"{")
        )
        if again := [step for step in steps if isinstance(step, int) and step < first]:
            yield f"metrics.jsonl has lines on step {again[0]} behind those on step {last['step']}"


def of_checkpoint(place: pathlib.Path, old: Link | None) -> str:
    """Returns a line if a checkpoint can't be read, or its arrays are not those of its link; else ""."""
    try:
        names = meta.read(place)["digests"]
        if old is None or seal(sums := verify.sha256s(place, names)) == old["state"]:
            return ""
        wrong = [name for name in names if sums[name] != old.get("arrays", {}).get(name)]
        return f"checkpoint {place.name} was changed: {', '.join(wrong)}"
    except (OSError, CorruptCheckpointError, *files.MANGLED) as error:
        gone = not place.is_dir()  # rotated away meanwhile
        return "" if gone else f"checkpoint {place.name} was changed: {str(error).splitlines()[0][:200]}"


def of_data(root: str, book: dict) -> str:
    """Returns a line on the first file of a data directory that is not as its manifest says, or on another manifest; or ""."""
    starts, manifests = book["starts"], [old["manifest"] for old in valid(book).values()]
    try:
        data = shards.open_data(root)
        for entry in data.files():
            data.verifier.check(entry)
    except (ConfigError, RunError, OSError) as error:
        return str(error)
    trained_on = (manifests or [start.get("manifest_sha256") for start in starts] or [data.sha256])[-1]
    return "" if data.sha256 == trained_on else f"{root}/manifest.json is not that of the data the run was trained on"


def exported(folder: pathlib.Path) -> str:
    """Returns the receipt as JSON; "" for a run without one."""
    links = ledger.read(folder)["receipt"]
    return json.dumps({"proves": PROVES, "links": links}, indent=1) + "\n" if links else ""
