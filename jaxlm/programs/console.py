"""What programs say: tables on standard output for people or as JSON lines for programs, progress on standard error."""

import json
import sys
import typing


def print_table(rows: list[dict[str, typing.Any]], as_json: bool) -> None:
    """Prints rows of like keys as an aligned table, or as JSON lines."""
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    if not rows:
        return
    text = [list(rows[0])] + [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    widths = [max(len(line[i]) for line in text) for i in range(len(text[0]))]
    for line in text:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def say(text: str) -> None:
    """A line for the person on standard error."""
    print(text, file=sys.stderr, flush=True)
