"""The parts of a report page: elements that escape their content, tables, small charts, and the page around them.

Any text on a page may come from a hostile document. So the children of an element are escaped unless they are `Markup`,
and only this module makes `Markup`. Characters that a browser hides or obeys (controls, bidi marks) are spelled out.
The page's own policy forbids scripts and requests. Its links lead to other pages on the same disk.
"""

import html
import os
import pathlib
import re
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence

from jaxlm.host import files
from jaxlm.host.console import count

NAME = "report.html"  # of each page, in its folder
_STYLE = pathlib.Path(__file__).with_suffix(".css")
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff\ufff9-\ufffb]"
)
_OPTION = re.compile(r"(--\w[^\s;,]*)")  # of a command; lines break after its hyphens


class Markup(str):
    """Finished HTML, which is not escaped again."""


def text(value: object) -> Markup:
    """Returns a value as escaped text, in which a hidden character becomes [U+200B]. Returns Markup unchanged."""
    if isinstance(value, Markup):
        return value
    visible = _HIDDEN.sub(lambda match: f"[U+{ord(match[0]):04X}]", str(value).replace("\r\n", "\n"))
    return Markup(html.escape(visible))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """Returns an element. `class_` stands for `class`, `aria_label` for `aria-label`; attributes that are None are left out."""
    pairs = [
        f' {key.strip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items() if value is not None
    ]
    opened = f"<{name}{''.join(pairs)}>"
    return Markup(opened if name == "meta" else f"{opened}{join(children)}</{name}>")


def sentence(line: str) -> Markup:
    """Returns a line of text in which an option of a command (`--config.KEY=VALUE`) is kept on one line where it fits."""
    parts = _OPTION.split(line)
    return join(tag("span", part, class_="option") if i % 2 else part for i, part in enumerate(parts))


def join(parts: Iterable[object]) -> Markup:
    return Markup("".join(text(part) for part in parts))


def value(item: object) -> object:
    """Returns any value as text for a cell: numbers with a few digits, lists with commas, dicts as `key: value`."""
    if isinstance(item, bool) or item is None:
        return {True: "yes", False: "no", None: ""}[item]
    if isinstance(item, int):
        return count(item)
    if isinstance(item, float):
        return f"{item:,.0f}" if abs(item) >= 1000 else f"{item:.3g}"
    if isinstance(item, dict):
        return ", ".join(f"{key}: {value(inner)}" for key, inner in item.items())
    if isinstance(item, (list, tuple)):
        return ", ".join(str(value(inner)) for inner in item)
    return item


def table(head: Sequence[object], rows: Iterable[Sequence[object]], label: str) -> Markup:
    """Returns a table, which scrolls sideways if it is too wide. The first item of a row is its header."""
    lines, left = [], {0}
    for first, *rest in rows:
        cells = [c if isinstance(c, Markup) and c.startswith("<td") else cell(c) for c in rest]
        left |= {i for i, c in enumerate(cells, start=1) if c.startswith('<td class="text')}
        lines.append(tag("tr", tag("th", first, scope="row"), *cells))
    titles = [tag("th", title, scope="col", class_="text" if i in left else None) for i, title in enumerate(head)]
    inner = tag("table", tag("thead", tag("tr", *titles)), tag("tbody", *lines))
    return tag("div", inner, class_="scroll", role="region", aria_label=label, tabindex="0")


def cell(content: object, heat: float | None = None, kind: str = "") -> Markup:
    """Returns a cell of a table. `heat` from 0 to 1 shades it. `kind` is its class: "text" wraps and is aligned left."""
    style = None if heat is None else f"--heat:{min(1.0, max(0.0, heat)) * 100:.1f}%"
    return tag("td", content, class_=kind + (" heat" if heat is not None else "") or None, style=style)


def tiles(tiles: Iterable[tuple[str, str]]) -> Markup:
    boxes = (tag("div", tag("b", big), tag("span", small), class_="tile") for big, small in tiles if big)
    return tag("div", *boxes, class_="tiles")


def with_error(point: Mapping, metric: str) -> str:
    """Returns a score of `point`, which has `metrics` and `stderr`, with two standard errors if known; "" without the score."""
    error = point["stderr"].get(metric)
    if metric not in point["metrics"]:
        return ""
    return f"{point['metrics'][metric]:.3f}" + (f" ± {2 * error:.3f}" if error is not None else "")


def details(summary: object, *children: object, opened: bool = False) -> Markup:
    body = join([tag("summary", summary), *children])
    return Markup(f"<details{' open' if opened else ''}>{body}</details>")


def bar(parts: Sequence[tuple[float, str]], label: str) -> Markup:
    """Returns a horizontal bar. Each part is (share of the bar's width, class of its colour)."""
    spans = [tag("span", class_=kind, style=f"width:{100 * max(0.0, part):.2f}%") for part, kind in parts if part > 0]
    return tag("div", *spans, class_="bar", role="img", aria_label=label, title=label)


def columns(rows: Sequence[tuple[str, float, str]], label: str) -> Markup:
    """Returns a histogram with a bar for each number. Each row is (name, number, text of the number)."""
    top = max((number for _, number, _ in rows), default=0) or 1
    bars = [bar([(number / top, "kept")], f"{name}: {shown}") for name, number, shown in rows]
    names, shown = ([tag("span", row[i]) for row in rows] for i in (0, 2))
    lines = [tag("div", *cells, class_="row") for cells in zip(names, bars, shown, strict=True)]
    return tag("div", *lines, class_="columns", role="group", aria_label=label)


def keys(meanings: Mapping[str, str]) -> list[Markup]:
    """Returns the legend of bars, given class -> meaning."""
    return [
        tag("span", tag("span", class_=f"key {kind}"), meaning, class_="nowrap") for kind, meaning in meanings.items()
    ]


def link(words: str, target: pathlib.Path, page: pathlib.Path) -> Markup:
    """Returns a link from `page` to `target` by a relative path, so that both may move together."""
    path = os.path.relpath(target.resolve(), page.resolve().parent)
    return tag("a", words, href=urllib.parse.quote(path))


def anchor(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower()).strip("-")


def write(path: pathlib.Path, title: str, lead: Markup, sections: Iterable[tuple[str, Markup]]) -> None:
    """Writes a page: title, lead, table of contents, sections. A crash leaves no half-written file.

    `sections`: (title, content); those without content are left out.
    """
    sections = [(name, content) for name, content in sections if content]
    links = [tag("a", name, href=f"#{anchor(name)}") for name, _ in sections]
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content="default-src 'none'; style-src 'unsafe-inline'"),
        tag("title", title),
        tag("style", Markup(_STYLE.read_text(encoding="utf-8"))),
    ]
    header = tag("header", tag("h1", title), lead, tag("nav", *links))
    parts = (tag("section", tag("h2", name), content, id=anchor(name)) for name, content in sections)
    body = tag("body", header, tag("main", *parts))
    content = f'<!doctype html>\n<html lang="en"><head>{join(head)}</head>{body}</html>\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomically(path, content.encode())
