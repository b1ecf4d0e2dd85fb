"""Takes documents out of a data directory: writes lists of documents, and new shards without the documents of a list.

A list has one JSON object a line: source, split, doc_id, the sha256 of the document's decoded text, why. The new directory
has all other documents in their order, and the same tokenizer; its manifest names its parent and the list.
"""

import hashlib
import json
import pathlib
import shutil
from collections.abc import Iterable

from jaxlm.config import ConfigError
from jaxlm.data.shards import manifest as manifests
from jaxlm.data.shards import search, shards
from jaxlm.data.shards.search import Decoder, Match
from jaxlm.data.shards.shards import DataDir
from jaxlm.host import files
from jaxlm.host.console import Say, Tell, count

PARENT = "parent"  # the manifest's key: which data this was made of, and without which list
Key = tuple[str, str, str, str]  # source, split, doc_id, sha256
_FIELDS = ("source", "split", "doc_id", "sha256")


def write(path: pathlib.Path, found: Iterable[Match], why: str) -> None:
    """Writes a list. Raises ConfigError if the file exists: a list is never overwritten."""
    if path.exists():
        raise ConfigError(f"{path} exists: name another file for the list")
    rows = ({name: getattr(match, name) for name in _FIELDS} | {"why": why} for match in found)
    files.write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def read(path: pathlib.Path) -> list[Key]:
    """Returns the documents of a list. Raises ConfigError if it can't be read, is empty, or a line lacks a field."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--without={path} can't be read: {error}") from None
    keys = []
    for number, line in enumerate(lines, start=1):
        try:
            row = files.json_of(line.encode())
            keys.append(tuple(str(row[name]) for name in _FIELDS))
        except (ValueError, KeyError) as error:
            raise ConfigError(
                f"{path}, line {number}: {error} ({', '.join(_FIELDS)} are needed): make the list by jaxlm trace DATA "
                "--string=TEXT --remove=FILE"
            ) from None
    if not keys:
        raise ConfigError(f"{path} names no document")
    return keys


def without(data: DataDir, path: pathlib.Path, out: pathlib.Path, held_out: bool, tell: Tell, say: Say) -> None:
    """Makes the data directory `out`: `data` without the documents of the list `path`. Held-out ones stay, unless `held_out`.

    Raises ConfigError if a document is not in the data (then nothing is written), no training document of a source would be
    left, or `out` holds data.
    """
    removed = set(read(path))
    if (out / shards.MANIFEST).exists():
        raise ConfigError(f"{out} holds data: name another folder by --out; no version is overwritten")
    kept = set() if held_out else {key for key in removed if key[1] == "val"}
    if kept:
        say(
            f"{count(len(kept))} held-out documents stay, so that old and new are measured on one text (--held-out: out too)"
        )
    places = _places(data, removed)
    out.mkdir(parents=True, exist_ok=True)
    with files.lock(out, "is writing", "--out"):
        shards.clear_leftovers(out)
        sources, done = {}, 0
        for name, entry in data.manifest["sources"].items():
            sources[name] = dict(entry)
            for split in shards.SPLITS:
                gone = {place for key, place in places.items() if key[:2] == (name, split) and key not in kept}
                writer = _writer(data, out, name, split)
                for group, ids_N in search.documents(data, name, split):
                    for each in (each for each in group if each.start not in gone):
                        at = each.start - group[0].start
                        writer.add(each.doc_id, ids_N[at : at + each.tokens], each.n_bytes)
                    tell(done := done + len(ids_N))
                sources[name][split] = writer.finish()
            if not sources[name]["train"]["documents"]:
                raise ConfigError(f"the list takes all training documents of {name}: give it the weight 0 instead")
        for entry in data.manifest["files"]:
            shutil.copyfile(data.path / entry["file"], out / entry["file"])
        made = {**data.manifest, "sources": sources}
        if held_out:
            made.pop(manifests.HELD_OUT, None)  # counted anew when it is needed
        parent = {"sha256": data.sha256, "without": hashlib.sha256(path.read_bytes()).hexdigest()}
        manifests.write(out, made | {PARENT: parent | {"documents": len(removed - kept)}})


def _places(data: DataDir, keys: set[Key]) -> dict[Key, int]:
    """Returns where each document begins in its stream. Raises ConfigError if one is not there with this text."""
    decode, places = Decoder(data.tokenizer()), {}
    for source, split in {key[:2] for key in keys if key[0] in data.sources and key[1] in shards.SPLITS}:
        wanted = {key[2] for key in keys if key[:2] == (source, split)}
        for group, ids_N in search.documents(data, source, split):
            for each in (each for each in group if each.doc_id in wanted):
                at = each.start - group[0].start
                sha256 = hashlib.sha256(decode(ids_N[at : at + each.tokens])[0]).hexdigest()
                places[source, split, each.doc_id, sha256] = each.start
    if missing := sorted(keys - places.keys()):
        raise ConfigError(
            f"{len(missing)} of {len(keys)} documents of the list are not in {data.path} with this text, first "
            f"{missing[0][2]} of {missing[0][0]}: nothing was removed; make the list of this data: jaxlm trace {data.path}"
        )
    return places


def _writer(data: DataDir, out: pathlib.Path, source: str, split: str) -> shards.StreamWriter:
    entries = data.entry(source, split)["shards"]
    sizes = {
        "block_tokens": data.manifest["block_tokens"],
        "shard_blocks": max((e["records"] for e in entries), default=1),
    }
    return shards.StreamWriter(out, split, source, dtype=data.manifest["dtype"], **sizes)
