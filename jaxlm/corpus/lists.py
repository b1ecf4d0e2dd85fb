"""Reads lists of documents to take out, as `jaxlm trace --remove=FILE` writes them: one JSON object a line."""

import pathlib

from jaxlm.config import ConfigError
from jaxlm.host import files

FIELDS = ("source", "split", "doc_id", "sha256")  # the last is of the document's text
Key = tuple[str, str, str, str]


def read(path: pathlib.Path, option: str) -> set[Key]:
    """Returns the documents of a list that `option` names.

    Raises ConfigError if the list can't be read or is empty, or a line is no object with these fields.
    """
    try:
        lines = path.read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}={path} can't be read: {getattr(error, 'strerror', None) or error}") from None
    keys = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = files.json_of(line.encode())
            keys.add(tuple(str(row[name]) for name in FIELDS))
        except (ValueError, KeyError):
            why = f"is no JSON object with {', '.join(FIELDS)}: make the list by jaxlm trace --remove=FILE"
            raise ConfigError(f"{path}, line {number}, {why}") from None
    if not keys:
        raise ConfigError(f"{path} names no document")
    return keys
