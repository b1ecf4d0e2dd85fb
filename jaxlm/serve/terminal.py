"""How a conversation looks in a terminal, or in a file: answers as they come, one after the other or side by side."""

import contextlib
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxlm import screen
from jaxlm.screen import BOLD, CYAN, DIM

COLUMN = 56  # columns of a terminal that an answer beside others takes, at least
_GAP = "  │  "
_RESET = "\x1b[0m"


def safe(text: str) -> str:
    """Returns a text without what steers a terminal: of the control characters only tabs and ends of lines are left."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def width(text: str) -> int:
    """Returns how many columns a line takes: wide characters two, combining ones none."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.category(c) in ("Mn", "Me", "Cf") for c in text)


def wrapped(text: str, columns: int) -> list[str]:
    """Returns a text as lines of so many columns at most. More text behind it changes the last line alone."""
    lines = []
    for line in text.expandtabs(4).split("\n"):
        lines.append("")
        for number, word in enumerate(line.split(" ")):
            joined = f"{lines[-1]} {word}" if number else word
            if width(joined) <= columns:
                lines[-1] = joined
                continue
            if number:
                lines.append("")
            for c in word:
                if width(lines[-1] + c) > columns:
                    lines.append("")
                lines[-1] += c
    return lines


class Terminal:
    """Writes on standard output, with thin colour if it is a terminal; notes go to standard error if it is none.

    Attributes:
      live: True if somebody types and reads: standard input and output are terminals.
    """

    def __init__(self):
        self.live = screen.is_terminal(sys.stdin) and screen.is_terminal(sys.stdout)
        self._colour = screen.has_colour(sys.stdout)

    def lines(self) -> Iterator[str]:
        """Yields what a user types, up to ctrl-D or a second ctrl-C; elsewhere standard input's lines but blank ones."""
        sys.stdin.reconfigure(errors="replace")
        if not self.live:
            yield from (line for line in sys.stdin if line.strip())
            return
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing, and the arrow keys' history)
        self.note("/help lists the commands; ctrl-C stops an answer, ctrl-D leaves")
        # Readline is told by \x01 and \x02 what takes no room.
        prompt = f"\x01{BOLD}{CYAN}\x02> \x01{_RESET}\x02" if self._colour else "> "
        interrupted = False
        while True:
            try:
                line = input(prompt)
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                if interrupted:
                    return
                interrupted = True
                self.note("ctrl-C again or ctrl-D leaves")
                continue
            interrupted = False
            yield line

    def note(self, text: str) -> None:
        """Shows a line that is no answer."""
        if self.live:
            for line in wrapped(safe(text), screen.columns(sys.stdout)):
                print(self._style(line, DIM), flush=True)
        else:
            screen.say(text)

    def heading(self, name: str) -> None:
        """Shows whose answer follows."""
        print(self._style(f"{name}:", CYAN), flush=True)

    def piece(self, text: str) -> None:
        """Shows a piece of an answer."""
        print(safe(text) if screen.is_terminal(sys.stdout) else text, end="", flush=True)

    def room(self, answers: int) -> int:
        """Returns how wide each of so many answers side by side may be; 0 if they have no room, or are not for eyes."""
        if not self.live or answers < 2:
            return 0
        each = (screen.columns(sys.stdout) - (answers - 1) * len(_GAP)) // answers
        return each if each >= COLUMN else 0

    def _style(self, text: str, style: str) -> str:
        return f"{style}{text}{_RESET}" if self._colour and style else text

    def beside(
        self, names: Sequence[str], each: int, pieces: Iterable[tuple[int, str]], ended: Callable[[int], bool]
    ) -> None:
        """Shows answers side by side, row by row: a row is written once it is whole in all of them.

        Args:
          each: columns for each.
          pieces: (number of the answer, what is new of it).
          ended: number -> True if the answer has ended.
        """
        texts, shown = [""] * len(names), 0
        self._row([wrapped(f"{name}:", each)[0] for name in names], each, CYAN)
        for number, piece in pieces:
            texts[number] += safe(piece)
            lines = [wrapped(text, each) for text in texts]
            whole = [None if ended(at) else len(found) - 1 for at, found in enumerate(lines)]
            sure = min((n for n in whole if n is not None), default=max(map(len, lines)))
            for at in range(shown, sure):
                self._row([found[at] if at < len(found) else "" for found in lines], each)
            shown = max(shown, sure)

    def _row(self, cells: Sequence[str], each: int, style: str = "") -> None:
        padded = [self._style(cell, style) + " " * (each - width(cell)) for cell in cells]
        print(_GAP.join(padded).rstrip(), flush=True)
