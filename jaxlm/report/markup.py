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
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff\ufff9-\ufffb]"
)
_OPTION = re.compile(r"(--\w[^\s;,]*)")  # of a command; lines break after its hyphens
# Light or dark like the reader's system, one column on a phone.
_CSS = """
:root { color-scheme: light dark; --back: #fff; --soft: #f4f5f7; --line: #d9dce1; --ink: #1b1e23; --dim: #5b626d;
  --kept: #2b6cb0; --gone: #d98c2b; --failed: #c0392b; --heat-ink: #d98c2b; --shade: #0004;
  --c0: #2b6cb0; --c1: #c0631f; --c2: #2f855a; --c3: #8a4fb0; --c4: #b83280; --c5: #6b7280; }
@media (prefers-color-scheme: dark) { :root { --back: #15171b; --soft: #1e2127; --line: #353a43; --ink: #e6e8ec;
  --dim: #a0a7b3; --kept: #5a9bdc; --gone: #d9994a; --failed: #e57366; --heat-ink: #c9812b; --shade: #fff5;
  --c0: #63a4e6; --c1: #e39a5c; --c2: #5fc08d; --c3: #b78be0; --c4: #ec7fb8; --c5: #a3aab6; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--back); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; margin: .5rem 0; } h2 { font-size: 1.3rem; margin: 2.5rem 0 .5rem; } h3 { margin: 1.5rem 0 .25rem; }
p { max-width: 46rem; margin: .4rem 0; } a { color: var(--kept); } .dim { color: var(--dim); } .small { font-size: .8rem; }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: 1rem 0; padding: .6rem 0; border: solid var(--line);
  border-width: 1px 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .6rem; margin: 1rem 0; }
.tile { background: var(--soft); border-radius: .4rem; padding: .6rem .8rem; }
.tile b { display: block; font-size: 1.4rem; line-height: 1.2; } .tile span { color: var(--dim); font-size: .85rem; }
/* Shadows at the edges behind which a table goes on; the two covers move with the table, and hide them at its ends. */
.scroll { overflow-x: auto; margin: .6rem 0; background:
  linear-gradient(to right, var(--back) 40%, transparent) left / 3rem 100% local no-repeat,
  linear-gradient(to left, var(--back) 40%, transparent) right / 3rem 100% local no-repeat,
  linear-gradient(to right, var(--shade), transparent) left / 1rem 100% no-repeat,
  linear-gradient(to left, var(--shade), transparent) right / 1rem 100% no-repeat; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap;
  vertical-align: top; unicode-bidi: isolate; }
th { font-weight: 600; } thead th { color: var(--dim); font-weight: 500; }
tbody th, .text { text-align: left; } td.text { white-space: normal; min-width: 8rem; max-width: 40rem; }
td.text code { overflow-wrap: anywhere; }
tbody th { position: sticky; left: 0; background: var(--back); max-width: 24rem; overflow: hidden; text-overflow: ellipsis; }
.option { display: inline-block; max-width: 100%; overflow-wrap: anywhere; }
.nowrap { white-space: nowrap; display: inline-block; }
.zero { color: var(--dim); opacity: .6; }
.heat { background: color-mix(in srgb, var(--heat-ink) calc(var(--heat) * .75), transparent); }
.bar { display: flex; height: .8rem; min-width: 7rem; background: var(--soft); border-radius: .2rem; overflow: hidden;
  margin-top: .3rem; }
.bar + .bar { margin-top: 1px; }
.bar span { display: block; min-width: 1px; } .bar .kept { background: var(--kept); } .bar .gone { background: var(--gone); }
.bar .failed { background: var(--failed); }
.key { display: inline-block; width: .8rem; height: .8rem; border-radius: .2rem; margin: 0 .3rem 0 .8rem; }
.key.kept { background: var(--kept); } .key.gone { background: var(--gone); } .key.failed { background: var(--failed); }
.columns { max-width: 40rem; font-size: .9rem; } .columns .row { display: grid; gap: .6rem;
  grid-template-columns: 7rem 1fr 6rem; } .columns .row span:last-child { font-variant-numeric: tabular-nums; }
.spark { width: 12rem; height: 1.6rem; fill: var(--kept); background: var(--soft); vertical-align: middle; }
.spark .median { fill: var(--gone); } td details { margin: 0; }
details { margin: .4rem 0; } details details { margin-left: 1rem; } summary { cursor: pointer; }
.beside { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; }
.beside pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }
.example { border-left: 3px solid var(--line); padding: .1rem 0 .1rem .8rem; margin: .8rem 0; font-size: .9rem; }
del { background: color-mix(in srgb, var(--failed) 25%, transparent); }
ins { background: color-mix(in srgb, var(--c2) 25%, transparent); text-decoration: none; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--soft); padding: .6rem; border-radius: .4rem;
  font: .8rem/1.45 ui-monospace, monospace; margin: .3rem 0; unicode-bidi: isolate; max-height: 24rem; overflow-y: auto; }
code { font: .85em ui-monospace, monospace; unicode-bidi: isolate; } .id { overflow-wrap: anywhere; }
figure { margin: 1rem 0; break-inside: avoid; } figcaption { font-size: .9rem; margin-bottom: .3rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); gap: 0 1.5rem; }
.plot { position: relative; padding: .4rem .8rem 1.6rem 3.6rem; }
.plot svg { display: block; width: 100%; height: 13rem; overflow: visible; }
.plot path { fill: none; vector-effect: non-scaling-stroke; } .grid { stroke: var(--line); }
.dot { stroke-width: 6; stroke-linecap: round; }
.mark { stroke: var(--dim); stroke-dasharray: 2 3; } .line { stroke-width: 1.6; stroke-linejoin: round; }
.dotted { stroke-dasharray: 4 4; }
.along { font-size: .75rem; color: var(--dim); text-align: center; padding-left: 2.8rem; }
.unit { margin-left: .8rem; white-space: nowrap; }
.ys, .xs { position: absolute; font-size: .75rem; color: var(--dim); font-variant-numeric: tabular-nums; }
.ys { left: 0; top: .4rem; bottom: 1.6rem; width: 3.2rem; }
.ys span { position: absolute; right: 0; transform: translateY(-50%); }
.xs { left: 3.6rem; right: .8rem; bottom: 0; height: 1.4rem; } .xs span { position: absolute; transform: translateX(-50%); }
path.c0 { stroke: var(--c0); } path.c1 { stroke: var(--c1); } path.c2 { stroke: var(--c2); } path.c3 { stroke: var(--c3); }
path.c4 { stroke: var(--c4); } path.c5 { stroke: var(--c5); }
.key.c0, .bar .c0 { background: var(--c0); } .key.c1, .bar .c1 { background: var(--c1); }
.key.c2, .bar .c2 { background: var(--c2); } .key.c3, .bar .c3 { background: var(--c3); }
.key.c4, .bar .c4 { background: var(--c4); } .key.c5, .bar .c5 { background: var(--c5); } .bar.wide { height: 1.2rem; }
.beside { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 18rem), 1fr)); gap: .8rem; }
@media (max-width: 40rem) { body { padding: .7rem; } .tile { padding: .3rem .5rem; } .tile b { font-size: 1.15rem; }
  .tiles { grid-template-columns: repeat(auto-fit, minmax(6.5rem, 1fr)); gap: .4rem; }
  .columns .row { grid-template-columns: 6.5rem 1fr 4rem; }
  th, td { padding: .3rem .4rem; } tbody th { max-width: 8rem; } .bar { min-width: 3rem; }
  td.text:has(> .bar) { min-width: 3rem; } }
@media print { .scroll { overflow: visible; } table { font-size: .75rem; } pre { max-height: none; }
  h2, h3, figcaption { break-after: avoid; } summary { list-style: none; break-after: avoid; }
  details::details-content { content-visibility: visible; block-size: auto; } }
"""


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


def section(title: str, *children: object) -> tuple[str, Markup]:
    return title, tag("section", tag("h2", title), *children, id=anchor(title))


def anchor(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower()).strip("-")


def write(path: pathlib.Path, title: str, lead: Markup, sections: Iterable[tuple[str, Markup]]) -> None:
    """Writes a page: title, lead, table of contents, sections. A crash leaves no half-written file."""
    sections = list(sections)
    links = [tag("a", name, href=f"#{anchor(name)}") for name, _ in sections]
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content="default-src 'none'; style-src 'unsafe-inline'"),
        tag("title", title),
        tag("style", Markup(_CSS)),
    ]
    header = tag("header", tag("h1", title), lead, tag("nav", *links))
    body = tag("body", header, tag("main", *(section for _, section in sections)))
    content = f'<!doctype html>\n<html lang="en"><head>{join(head)}</head>{body}</html>\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomically(path, content.encode())
