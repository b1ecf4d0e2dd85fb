"""Writes an arena's votes for `jaxlm compare --votes` and as preference pairs for `jaxlm train dpo`."""

import collections
import json
import pathlib
from collections.abc import Mapping, Sequence

from jaxlm.config import ConfigError
from jaxlm.host import files
from jaxlm.serve.arena.store import Vote


def votes(path: pathlib.Path, given: Sequence[Vote], names: Mapping[int, str]) -> int:
    """Writes a line {"winner": "a", "b" or "tie", "item": the prompt, "rater"} for each vote; returns their number.

    A is the first of `names`. Raises ConfigError unless two contestants are named.
    """
    if len(names) != 2:
        raise ConfigError(
            f"--export-votes is of two contestants, not of {len(names)}: jaxlm arena A B --export-votes=FILE"
        )
    a = next(iter(names))
    lines = []
    for vote in given:
        winner = {"first": vote.first, "second": vote.second}.get(vote.winner)
        side = "tie" if winner is None else "a" if winner == a else "b"
        lines.append({"winner": side, "item": vote.prompt, "rater": vote.rater})
    return _write(path, lines)


def pairs(path: pathlib.Path, given: Sequence[Vote]) -> int:
    """Writes a line {"prompt", "chosen", "rejected"} for each battle that one side won by most votes; returns their number.

    Battles in which a side is empty are left out: there is nothing to learn from.
    """
    ahead: dict[tuple[str, str, str], int] = collections.defaultdict(int)
    for vote in given:
        ahead[vote.prompt, vote.first_text, vote.second_text] += {"first": 1, "second": -1, "tie": 0}[vote.winner]
    lines = []
    for (prompt, first, second), lead in ahead.items():
        if lead and first.strip() and second.strip():
            chosen, rejected = (first, second) if lead > 0 else (second, first)
            lines.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return _write(path, lines)


def _write(path: pathlib.Path, lines: Sequence[dict]) -> int:
    content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    files.write_atomically(path, content.encode())
    return len(lines)
