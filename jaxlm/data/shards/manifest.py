"""Reads manifest.json and checks its structure, once, so that its users meet no missing or broken key."""

import hashlib
import json
import pathlib
import re
import typing

from jaxlm.config import ConfigError, RunError
from jaxlm.host import files

FORMAT = 1
MANIFEST = "manifest.json"
HELD_OUT = "held_out"  # the manifest's key: source -> sha256 of its held-out text (`add_text`)
LIST = "without.jsonl"  # in a directory made without the documents of this list, from the beginning on
PARENT = "parent"  # the manifest's key: of which data this was made by `removal.without`
SPLITS = ("train", "val")
_Leaf, _TEXT, _whole = files.Leaf, files.TEXT, files.whole


def _inside(path: typing.Any) -> bool:
    parts = pathlib.PurePosixPath(path).parts if isinstance(path, str) and "\0" not in path else ()
    return bool(parts) and parts[0] != "/" and ".." not in parts


_SHA256 = _Leaf("a sha256 in hex", lambda value: isinstance(value, str) and bool(re.fullmatch("[0-9a-f]{64}", value)))
_WEIGHT = _Leaf("a number of at least 0", lambda value: files.is_number(value) and value >= 0)
_FILE = {"file": _Leaf("a path in the data directory", _inside), "size": _whole(0), "sha256": _SHA256}
_SPLIT = {
    "documents": _whole(0),
    "tokens": _whole(0),
    "bytes": _whole(0),
    "index": _FILE,
    "shards": [{**_FILE, "records": _whole(1), "tokens": _whole(1)}],
}
# What must be there; more may be. See `files.problem`.
_SHAPE = {
    "recipe": {str: _TEXT},
    "tokenizer": {
        "sha256": _SHA256,
        "vocab_size": _whole(1),
        "eos_id": _whole(0),
        "chat_tokens": _Leaf("true or false", lambda value: isinstance(value, bool)),
    },
    "dtype": _Leaf("<u2 or <u4", lambda value: value in ("<u2", "<u4")),
    "block_tokens": _whole(1),
    "mixture": {str: _WEIGHT},
    "files": [_FILE],
    "sources": {str: {split: _SPLIT for split in SPLITS}},
}


def read(root: pathlib.Path) -> tuple[dict, str]:
    """Returns (the manifest, its sha256 without HELD_OUT). Raises ConfigError if it is damaged; RunError if unreadable."""
    path = root / MANIFEST
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        unfinished = f"no {MANIFEST} in {root}: not a finished data directory"
        raise ConfigError(f"{unfinished}; make one with 'jaxlm tokenize' or set data.dir") from None
    except OSError as error:
        raise RunError(f"{path} can't be read: {error.strerror}; check the disk or network") from None
    try:
        manifest = files.json_of(content, object)
    except ValueError:
        raise ConfigError(f"{path} is not valid JSON; rebuild the data directory") from None
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if version != FORMAT:
        raise ConfigError(f"{path} has format {version}, this jaxlm reads {FORMAT}; rebuild it")
    texts = manifest.get(HELD_OUT, {})
    problem = files.problem(manifest, _SHAPE) or _mismatch(manifest) or files.problem(texts, {str: _TEXT}, HELD_OUT)
    if problem:
        raise ConfigError(f"{path} is damaged: {problem}; copy it again or rebuild the data directory")
    if texts:  # older versions wrote none, and their runs know the data by the hash without these
        content = _dump({key: value for key, value in manifest.items() if key != HELD_OUT})
    return manifest, hashlib.sha256(content).hexdigest()


def add_text(digest: "hashlib._Hash", raw: bytes) -> None:
    """Adds a document to the sha256 of a held-out text: its length in eight bytes, then its UTF-8."""
    digest.update(len(raw).to_bytes(8, "little") + raw)


def write(root: pathlib.Path, manifest: dict) -> None:
    """Writes manifest.json, as the last step of a build. Equal manifests give equal bytes."""
    files.write_atomically(root / MANIFEST, _dump({"format": FORMAT, **manifest}))


def _dump(manifest: dict) -> bytes:
    return (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _mismatch(manifest: dict) -> str:
    """Returns the first two values that contradict each other, in words; "" if there are none."""
    if not manifest["sources"]:
        return "sources is empty"
    if other := [name for name in manifest["mixture"] if name not in manifest["sources"]]:
        return f"mixture names '{other[0]}', which is no source"
    tokenizer, block = manifest["tokenizer"], manifest["block_tokens"]
    for key in ("eos_id", "separator_id"):
        number, size = tokenizer.get(key, 0), tokenizer["vocab_size"]  # recipe version 2 had no separator_id
        if not _whole(0).holds(number) or number >= size:
            return f"tokenizer.{key} is {json.dumps(number)[:60]}, but tokenizer.vocab_size {size}"
    for name, source in manifest["sources"].items():
        for split in SPLITS:
            tokens, shards = source[split]["tokens"], source[split]["shards"]
            records = sum(shard["records"] for shard in shards)
            held = sum(shard["tokens"] for shard in shards)
            if tokens != held or records != -(-tokens // block):
                there = f"{held:,} in {records:,} records of {block:,}"
                return f"sources.{name}.{split} has {tokens:,} tokens, but its shards have {there}"
    return ""


def unfinished(folder: pathlib.Path) -> str:
    """Returns a line if `jaxlm tokenize --without` left a folder unfinished; else ""."""
    if not (folder / LIST).is_file() or (folder / MANIFEST).is_file():
        return ""
    return f"{folder} is unfinished: run the same jaxlm tokenize --without again, or delete it"
