"""Tables of HTML and of wikis as rows of text: a cell that spans rows is repeated in each."""

import typing
from collections.abc import Iterable, Sequence

_MOST_SPANNED = 100  # columns; pages that claim more are broken
_MOST_REPEATED = 200  # characters of a cell that is repeated


_TO_THE_END = 10_000  # rows


class Cell(typing.NamedTuple):
    """A cell's text, and how many rows and columns it spans."""

    text: str
    rows: int = 1
    columns: int = 1

    @classmethod
    def of(cls, text: str, rowspan: str | None, colspan: str | None) -> "Cell":
        """Reads the spans as attributes of HTML state them. `rowspan=0` reaches to the table's end."""
        rows, columns = _number(rowspan), _number(colspan)
        return cls(" ".join(text.split()).replace("|", "\\|"), rows or _TO_THE_END, max(1, min(columns, _MOST_SPANNED)))


def _number(span: str | None) -> int:
    return int(span.strip()[:4]) if span and span.strip().isdecimal() else 1


def grid(rows: Iterable[Sequence[Cell]]) -> list[list[str]]:
    """Returns the texts by row and column, without empty rows. The columns that a cell spans after its first are empty."""
    texts: list[list[str]] = []
    reaching: dict[int, tuple[int, str]] = {}  # column -> further rows that a cell above reaches, and its text
    for row in rows:
        line: dict[int, str] = {column: text for column, (_, text) in reaching.items()}
        reaching = {column: (left - 1, text) for column, (left, text) in reaching.items() if left > 1}
        column, own = 0, False
        for cell in row:
            while column in line:
                column += 1
            own = own or bool(cell.text)
            for at in range(column, column + cell.columns):
                line[at] = cell.text if at == column else ""
                if cell.rows > 1:
                    reaching[at] = (cell.rows - 1, line[at] if len(line[at]) <= _MOST_REPEATED else "")
            column += cell.columns
        if own:
            texts.append([line.get(at, "") for at in range(max(line) + 1)])
    return texts


def pipes(texts: Sequence[Sequence[str]], header: bool = True) -> str:
    """Returns rows as lines of cells between pipes, with a rule under the first if it is a `header`."""
    width = max(map(len, texts))
    lines = [f"| {' | '.join([*row, *[''] * (width - len(row))])} |" for row in texts]
    if header:
        lines.insert(1, "|" + " --- |" * width)
    return "\n".join(lines)
