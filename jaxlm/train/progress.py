"""Shows a run's progress."""

import sys
import typing

from jaxlm import console
from jaxlm.console import duration, human


class Progress:
    """Shows progress: one line that is rewritten in a terminal, plain lines elsewhere. See `console.write` for a lost terminal.

    Args:
      total: the number of steps of the run.
      stream: the stream to write to; standard error by default.
    """

    def __init__(self, total: int, stream: typing.TextIO | None = None):
        self._total = total
        self._stream = stream
        self._live = console.is_terminal(stream or sys.stderr)
        self._width = 0

    def update(self, record: dict) -> None:
        """Shows step, loss, tokens/s, MFU (PaLM convention), dollars and time left."""
        line = self._line(record)
        if self._live:
            console.write("\r" + line.ljust(self._width), self._stream)
            self._width = len(line)
        else:
            console.write(line + "\n", self._stream)

    def message(self, text: str) -> None:
        """Writes a line that stays, above the one that is rewritten."""
        start = "\r" + " " * self._width + "\r" if self._live and self._width else ""
        console.write(f"{start}{text}\n", self._stream)
        self._width = 0

    def close(self) -> None:
        """Ends the progress line and leaves it on the screen."""
        if self._live and self._width:
            console.write("\n", self._stream)
            self._width = 0

    def _line(self, record: dict) -> str:
        parts = [f"step {record['step']}/{self._total}", f"loss {record['train/loss']:.4f}"]
        if record.get("tokens_per_second"):
            parts.append(f"{human(record['tokens_per_second'])} tokens/s")
            if record.get("mfu_palm"):
                parts.append(f"MFU {100 * record['mfu_palm']:.1f}%")
            if record["cost_usd"]:
                parts.append(f"${record['cost_usd']:.2f}")
            parts.append(f"ETA {duration(record['eta_s'])}")
        if record.get("train/skipped"):
            parts.append(f"skipped {record['train/skipped']:.0f}")
        return "  ".join(parts)
