"""Takes documents out of a data directory: writes lists of documents, and new shards without the documents of a list.

A list has one JSON object a line: source, split, doc_id, the sha256 of the document's decoded text, why. The new directory
has all other documents in their order, the same tokenizer, the list as without.jsonl, and its parent's hash in its manifest.
"""

import collections
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable

from jaxlm.config import ConfigError
from jaxlm.corpus import lists
from jaxlm.data.shards import manifest as manifests
from jaxlm.data.shards import search, shards
from jaxlm.data.shards.manifest import LIST, PARENT
from jaxlm.host import files
from jaxlm.host.console import Say, Tell, several


def check_new(path: pathlib.Path) -> None:
    """Raises ConfigError if a list can't be written to `path`, such as because the file exists, or its folder does not."""
    if path.exists():
        raise ConfigError(f"{path} exists: name another file for the list")
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is no folder: name a file in a folder that exists")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path} can't be written: name a file in another folder")


def write(path: pathlib.Path, matches: Iterable[search.Match], why: str) -> None:
    """Writes a list. Raises as `check_new`."""
    check_new(path)
    rows = ({name: getattr(match, name) for name in lists.FIELDS} | {"why": why} for match in matches)
    files.write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def without(data: shards.DataDir, path: pathlib.Path, out: pathlib.Path, held_out: bool, tell: Tell, say: Say) -> None:
    """Makes the data directory `out`: `data` without the documents of the list `path`. Held-out ones stay, unless `held_out`.

    Raises ConfigError if a document is not in the data, no document would go, none of a source would be left (nothing is
    written in these cases), or `out` holds data or anything else but what an interrupted call left.
    """
    _check_out(out)
    gone = places(data, lists.read(path, "--without"))
    if stay := 0 if held_out else sum(len(gone.pop(place)) for place in [*gone] if place[1] == "val"):
        say(f"kept: {several(stay, 'held-out document')}, so that one text measures old and new (--held-out: out too)")
    if not gone:
        raise ConfigError(f"all documents of {path} are held out: none would go; --held-out takes them out too")
    for (source, split), of_split in gone.items():
        if len(of_split) == data.entry(source, split)["documents"]:
            kind = "training" if split == "train" else "held-out"
            raise ConfigError(f"{path} takes all {kind} documents of {source}: take its lines out of the list")
    files.make_folder(out, f"--out={out}")
    with files.lock(out, "is writing", "--out"):
        _check_out(out)
        files.write_atomically(out / LIST, path.read_bytes())  # `make_data` builds nothing where this is
        shards.clear_leftovers(out)
        manifest, done = {**data.manifest, "sources": {}}, 0
        for source, entry in data.manifest["sources"].items():
            manifest["sources"][source] = dict(entry)
            for split in shards.SPLITS:
                records = max((shard["records"] for shard in entry[split]["shards"]), default=1)
                sizes = {"block_tokens": manifest["block_tokens"], "shard_blocks": records}
                writer = shards.StreamWriter(out, split, source, dtype=manifest["dtype"], **sizes)
                starts = {start for start, _ in gone.get((source, split), ())}
                for each, ids_N in search.each_document(data, source, split):
                    if each.start not in starts:
                        writer.add(each.doc_id, ids_N, each.n_bytes)
                    tell(done := done + len(ids_N))
                manifest["sources"][source][split] = writer.finish()
        for entry in data.manifest["files"]:
            files.write_atomically(out / entry["file"], data.content(entry["file"]))
        if held_out:
            manifest.pop(manifests.HELD_OUT, None)  # hashed anew when it is needed
        parent = {"sha256": data.sha256, "without": sum(map(len, gone.values()))}
        parent["list"] = hashlib.sha256(path.read_bytes()).hexdigest()
        manifests.write(out, manifest | {PARENT: parent})


def _check_out(out: pathlib.Path) -> None:
    if (out / shards.MANIFEST).exists():
        raise ConfigError(f"{out} holds data: name another folder by --out; no version is overwritten")
    names = {path.name for path in out.glob("[!.]*")}
    if names and (LIST not in names or "config.json" in names):  # a run may have a list too
        raise ConfigError(f"{out} holds other files, such as {min(names)}: name a new folder by --out")


def places(data: shards.DataDir, keys: set[lists.Key]) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """Returns (source, split) -> the tokens [start, end) of each listed document.

    Raises ConfigError if a document is not in the data with this text.
    """
    decode, missing = data.decoder(), set(keys)
    places: dict[tuple[str, str], list[tuple[int, int]]] = collections.defaultdict(list)
    for source, split in {key[:2] for key in keys if key[0] in data.sources and key[1] in shards.SPLITS}:
        stream = data.stream(source, split)
        for each in data.named(source, split, {key[2] for key in keys if key[:2] == (source, split)}):
            place = each.start, each.start + each.tokens
            key = (source, split, each.doc_id, hashlib.sha256(decode(stream.read(*place))[0]).hexdigest())
            if key in keys:
                places[source, split].append(place)
                missing.discard(key)
    if missing:
        first = min(missing)
        lost = f"{len(missing)} of the list's {several(len(keys), 'document')}, first {first[2]} of {first[0]}"
        advice = "nothing was removed; make the list of this data by jaxlm trace"
        raise ConfigError(f"not in {data.path} with this text: {lost}: {advice}")
    return places
