"""MediaWiki's XML export: articles as Markdown, without redirects, templates, references and other pages.

Pages are found by their tags (text is escaped) and parsed one at a time: memory is bounded, and a broken page is
skipped alone.
"""

import collections
import dataclasses
import html
import re
import urllib.parse
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator

import mwparserfromhell
from mwparserfromhell import nodes
from mwparserfromhell.parser import ParserError

from jaxlm.corpus import raised, tables
from jaxlm.corpus.sources import base, streams, templates
from jaxlm.corpus.sources.base import Part, SourceSpec, SourceStats
from jaxlm.corpus.stage import Document

GRAIN = 1
_BEGIN, _END = b"<page>", b"</page>"
_TAGS = re.compile(rb"<page>|</page>")
_BASE = re.compile(rb"<base>([^<]*)</base>")
_MEDIA_NAMESPACES = re.compile(rb"<namespace key=\"(?:6|14)\"[^>]*>([^<]+)<")  # files and categories, in its language
_HEADER_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class _Wiki:
    """Facts in the export's header: the URL up to a title ("" = unknown), and the names of media namespaces."""

    root: str
    dropped_namespaces: frozenset[str]


def read(part: Part, spec: SourceSpec, stats: SourceStats) -> Iterator[Document]:
    """Yields each article as Markdown under its title. Ids: `NAME:PAGEID`, or `NAME@BYTE` if the page has no id."""
    wiki, pages = _header(part), 0
    for offset, raw in _pages(streams.Cursor(streams.chunks(part, part.start), part.start), part.stop):
        pages += 1
        doc_id = f"{part.name}@{offset}"
        page = raw if isinstance(raw, streams.Damage) else _parse(raw, doc_id, part, wiki, stats)
        if isinstance(page, Document):
            yield page
        else:
            stats.skip(page.reason, doc_id)
    if not pages and not part.start:
        stats.skip("it holds no MediaWiki page", part.name)


def _header(part: Part) -> _Wiki:
    head = b""
    for chunk in streams.chunks(part):
        if isinstance(chunk, streams.Damage):
            break
        head += chunk
        if _BEGIN in head or len(head) > _HEADER_BYTES:
            break
    head = head.partition(_BEGIN)[0]
    match = _BASE.search(head)
    url = html.unescape(match[1].decode("utf-8", "replace")).strip() if match else ""
    names = {html.unescape(name.decode("utf-8", "replace")).lower() for name in _MEDIA_NAMESPACES.findall(head)}
    return _Wiki(url.rpartition("/")[0] + "/" if url else "", frozenset(names | {"file", "image", "category"}))


def _pages(cursor: streams.Cursor, stop: int) -> Iterator[tuple[int, bytes | streams.Damage]]:
    """Yields (offset, `<page>...</page>`) of the pages that begin before `stop`."""
    while True:
        while (begin := cursor.window.find(_BEGIN)) < 0:
            cursor.drop(len(cursor.window) - len(_BEGIN) + 1)
            if not (more := cursor.fill()):
                return
            if isinstance(more, streams.Damage):
                yield cursor.offset, more
                cursor.drop(len(cursor.window))
        cursor.drop(begin)
        offset, seen = cursor.offset, len(_BEGIN)
        if 0 <= stop <= offset:
            return
        while not (tag := _TAGS.search(cursor.window, seen)):
            seen = max(seen, len(cursor.window) - len(_END) + 1)
            more = cursor.fill() if len(cursor.window) <= base.MAX_RECORD_BYTES else False
            if more is not True:
                yield offset, more or streams.Damage("page cut short or too large")
                cursor.drop(len(cursor.window))
                break
        else:
            closed = tag[0] == _END
            end = tag.end() if closed else tag.start()
            del tag  # it refers to the window, which could not be resized
            yield offset, bytes(cursor.window[:end]) if closed else streams.Damage("broken XML page")
            cursor.drop(end)


def _parse(raw: bytes, doc_id: str, part: Part, wiki: _Wiki, stats: SourceStats) -> Document | streams.Damage:
    try:
        page = ET.fromstring(base.to_text(raw, doc_id, stats))
    except ET.ParseError:
        return streams.Damage("broken XML page")
    if page.find("redirect") is not None:
        return streams.Damage("redirect")
    revision = next(reversed(page.findall("revision")), page)
    if page.findtext("ns", "0") != "0" or revision.findtext("model", "wikitext") != "wikitext":
        return streams.Damage("not an article")
    title, number = page.findtext("title", "").strip(), page.findtext("id", "").strip()
    try:
        text = to_markdown(revision.findtext("text") or "", wiki.dropped_namespaces, stats.lost)
    except (RecursionError, ParserError):
        return streams.Damage("wikitext that can't be parsed")
    metadata = {"format": "markdown", "path": part.name, "title": title}
    if wiki.root:
        metadata["url"] = wiki.root + urllib.parse.quote(title.replace(" ", "_"), safe="/:,()'!*@;")
    if date := revision.findtext("timestamp"):
        metadata["date"] = date
    text = f"# {title}\n\n{text}\n" if title and text else text
    return Document(text=text, id=f"{part.name}:{number}" if number else doc_id, metadata=metadata)


_DROPPED_TAGS = frozenset(
    """ref references gallery timeline imagemap score graph mapframe maplink templatedata templatestyles categorytree
    inputbox indicator section hr style script noinclude""".split()  # noqa: SIM905
)
_LIST_MARKS = {"*": "- ", "#": "1. ", ":": "", ";": ""}
_BLOCKS = ("div", "p", "center", "blockquote", "poem", "ul", "ol", "dl")
_FENCED = ("pre", "source", "syntaxhighlight")
_VERBATIM = {"math": "$", "chem": "$", "ce": "$", "code": "`", "tt": "`", "kbd": "`", "samp": "`"}
_HIDDEN = re.compile(r"<!--.*?-->|<ref\b[^>]*/>|<ref\b[^>]*>.*?</ref\s*>", re.DOTALL | re.IGNORECASE)
_LITERAL = re.compile(
    rf"{_HIDDEN.pattern}|<(nowiki|pre|source|syntaxhighlight|math|chem|ce|templatedata)\b[^>]*?(?:/>|>.*?</\1\s*>)",
    re.DOTALL | re.IGNORECASE,
)
_OPEN, _CLOSE = "\ue006", "\ue007"  # around the number of a literal text, until it is put back
_PRIVATE = re.compile("[\ue004-\ue007]")
_PLACE = re.compile(rf"{_OPEN}(\d+){_CLOSE}")
_STYLE = re.compile(r"'{2,5}")
_MAGIC_WORD = re.compile(r"__[A-Z]{3,}__")
_EMPTY_PARENTHESES = re.compile(r" ?\((?:[\s,;:]|&nbsp;)*\)")
_HEADING = re.compile(r"(#+) ")


def to_markdown(text: str, dropped_namespaces: frozenset[str], silent: collections.Counter[str] | None = None) -> str:
    """Returns the page as a reader sees it, without links to `dropped_namespaces` (File and Category, lower case).

    `silent` counts, by name, the templates whose words were left out. Raises ParserError, and RecursionError if the nesting
    is too deep.
    """
    silent = collections.Counter() if silent is None else silent
    code = mwparserfromhell.parse(_without_templates(_PRIVATE.sub("", text), silent), skip_style_tags=True)
    rendered = templates.unescaped(_Renderer(dropped_namespaces, silent).render(code.nodes))
    fences = rendered.split("```")
    fences[::2] = map(_tidy, fences[::2])
    return _without_empty_sections("```".join(fences)).strip()


def _without_templates(text: str, silent: collections.Counter[str]) -> str:
    """Returns the text without comments and references; words replace templates; <nowiki>, <pre>, ... stay unchanged."""
    literal: list[str] = []

    def put(match: re.Match) -> str:
        if not match[1]:
            return ""
        literal.append(match[0])
        return f"{_OPEN}{len(literal) - 1}{_CLOSE}"

    said = templates.spoken(_LITERAL.sub(put, text), silent)
    return _PLACE.sub(lambda match: literal[int(match[1])], said)


class _Renderer:
    """Renders the nodes of one page as text."""

    def __init__(self, dropped_namespaces: frozenset[str], silent: collections.Counter[str]):
        self._dropped, self._silent = dropped_namespaces, silent
        self._depth = 0  # of list marks that follow one another
        self._before = ""  # what was rendered before the node

    def render(self, children: Iterable[nodes.Node]) -> str:
        out = []
        for node in children:
            if isinstance(node, nodes.Tag) and node.wiki_markup in _LIST_MARKS:
                self._depth += 1
                indent = "  " * (self._depth - 1)
                if self._depth > 1:
                    out.pop()
                out.append(indent + _LIST_MARKS[node.wiki_markup])
                continue
            depth, self._depth = self._depth, 0
            self._before = out[-1] if out else ""
            shown = self._node(node)
            out.append(shown.lstrip(" ") if depth else shown)
        return "".join(out)

    def _node(self, node: nodes.Node) -> str:
        if isinstance(node, nodes.Text):
            return _STYLE.sub("", node.value)
        if isinstance(node, nodes.Wikilink):
            return self._link(node)
        if isinstance(node, nodes.Tag):
            return self._tag(node)
        if isinstance(node, nodes.Heading):
            return f"\n\n{'#' * max(2, node.level)} {self.render(node.title.nodes).strip()}\n\n"
        if isinstance(node, nodes.ExternalLink):
            if node.title is not None:
                return self.render(node.title.nodes)
            return "" if node.brackets else str(node.url)
        if isinstance(node, nodes.HTMLEntity):
            return node.normalize().replace("\xa0", " ")
        if isinstance(node, nodes.Template):  # one with a table in it: the others are said already
            self._silent[str(node.name).strip()] += 1
        return ""  # comments, arguments of templates

    def _link(self, node: nodes.Wikilink) -> str:
        title = str(node.title).strip()
        prefix = title.partition(":")[0].strip().lower() if ":" in title[1:] else ""
        if prefix in self._dropped:
            return ""
        if node.text is not None:
            return self.render(node.text.nodes)
        return title.removeprefix(":")

    def _tag(self, node: nodes.Tag) -> str:
        name = str(node.tag).strip().lower()
        if name in _DROPPED_TAGS:
            return ""
        if name == "br":
            return "\n"
        if name == "table":
            return self._table(node)
        contents = node.contents
        if name in _FENCED:
            lang = next((str(a.value) for a in node.attributes if str(a.name).strip() == "lang"), "")
            return f"\n```{lang}\n{str(contents).strip(chr(10))}\n```\n"
        if name == "nowiki":
            return str(contents)
        if name in _VERBATIM:
            inner = str(contents).strip() if name in ("math", "chem", "ce") else self.render(contents.nodes).strip()
            return f"{_VERBATIM[name]}{inner}{_VERBATIM[name]}" if inner else ""
        before = self._before
        inner = self.render(contents.nodes) if contents is not None else ""
        if name in ("sup", "sub"):
            return raised.raised(inner.strip(), before) if name == "sup" else raised.lowered(inner.strip())
        if name == "li":
            return f"\n- {inner.strip()}"
        return f"\n\n{inner}\n\n" if name in _BLOCKS else inner

    def _table(self, table: nodes.Tag) -> str:
        """Returns rows as Markdown under the caption, with a rule under a first row of headers."""
        cells = _children(table, "th", "td")  # of the first row, which needs no tag
        captions = [cell for cell in cells if str(cell).startswith("|+")]
        shown: list[list[tables.Cell]] = []
        header = None  # True if the first row with text holds headers alone
        for row in ([cell for cell in cells if cell not in captions], *map(_cells, _children(table, "tr"))):
            shown.append([self._cell(cell) for cell in row])
            if header is None and any(cell.text for cell in shown[-1]):
                header = all(str(cell.tag).strip() == "th" for cell in row)
        rows = tables.grid(shown)
        above = [self.render(cell.contents.nodes).strip().removeprefix("+").strip() for cell in captions]
        wide = max(map(len, rows), default=0) > 1
        body = tables.pipes(rows, header or False) if wide else "\n\n".join(cell for row in rows for cell in row)
        return "\n\n" + "\n\n".join([*above, body]) + "\n\n"

    def _cell(self, cell: nodes.Tag) -> tables.Cell:
        spans = (str(cell.get(name).value) if cell.has(name) else None for name in ("rowspan", "colspan"))
        return tables.Cell.of(templates.unescaped(self.render(cell.contents.nodes)), *spans)


def _cells(row: nodes.Tag) -> list[nodes.Tag]:
    return _children(row, "th", "td")


def _children(tag: nodes.Tag, *names: str) -> list[nodes.Tag]:
    return [n for n in tag.contents.nodes if isinstance(n, nodes.Tag) and str(n.tag).strip().lower() in names]


def _tidy(text: str) -> str:
    """Returns the text without empty parentheses, runs of spaces and empty list items, which removed templates leave."""
    text = _EMPTY_PARENTHESES.sub("", _MAGIC_WORD.sub("", text))
    text = re.sub(r"(?<=\S)[ \t]{2,}", " ", text)
    text = re.sub(r"(?<=\S) +([,.;:)])(?=\s)", r"\1", text)
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"^(?:-|1\.)$\n?", "", text, flags=re.MULTILINE)  # items that only held a template


def _without_empty_sections(text: str) -> str:
    """Returns the text without headings with no text before the next one of their level or above, and without blank runs."""
    kept, below, fenced = [], 1, False  # below: the level of the heading that follows at once; 0 = text follows
    for line in reversed(text.split("\n")):
        if line.startswith("```"):
            fenced = not fenced
        if fenced or line.startswith("```"):
            below = 0
        elif match := _HEADING.match(line):
            if below and below <= len(match[1]):
                continue
            below = len(match[1])
        elif line:
            below = 0
        elif kept and not kept[-1]:
            continue
        kept.append(line)
    return "\n".join(reversed(kept))
