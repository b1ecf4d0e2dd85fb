"""MediaWiki's XML export: articles as Markdown, without redirects, templates, references and other pages.

Pages are found by their tags (text is escaped) and parsed one at a time: memory is bounded, and a broken page is
skipped alone.

A template is replaced by its words: its shape decides which, its name only where the shape misleads. A wiki's own templates
would be needed to expand them. Without these, a template inside a sentence becomes its first words, a number with its unit,
or a date. A template that follows a word without a space is a note, one that stands alone on a line is a box unless it
holds a quotation: both are removed.
"""

import collections
import html
import re
import urllib.parse
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import mwparserfromhell
from mwparserfromhell import nodes
from mwparserfromhell.parser import ParserError

from jaxlm.corpus import raised, tables
from jaxlm.corpus.sources import base, streams
from jaxlm.corpus.sources.base import Part, SourceSpec, SourceStats
from jaxlm.corpus.stage import Document

GRAIN = 1
_BEGIN, _END = b"<page>", b"</page>"
_TAGS = re.compile(rb"<page>|</page>")
_BASE = re.compile(rb"<base>([^<]*)</base>")
_MEDIA_NAMESPACES = re.compile(rb"<namespace key=\"(?:6|14)\"[^>]*>([^<]+)<")  # files and categories, in its language
_HEADER_BYTES = 1 << 16


def read(part: Part, spec: SourceSpec, stats: SourceStats) -> Iterator[Document]:
    """Yields each article as Markdown under its title. Ids: `NAME:PAGEID`, or `NAME@BYTE` if the page has no id."""
    (root, dropped), pages = _header(part), 0
    for offset, raw in _pages(streams.Cursor(streams.chunks(part, part.start), part.start), part.stop):
        pages += 1
        doc_id = f"{part.name}@{offset}"
        page = raw if isinstance(raw, streams.Damage) else _parse(raw, doc_id, part, root, dropped, stats)
        if isinstance(page, Document):
            yield page
        else:
            stats.skip(page.reason, doc_id)
    if not pages and not part.start:
        stats.skip("it holds no MediaWiki page", part.name)


def _header(part: Part) -> tuple[str, frozenset[str]]:
    """Returns what the export's header says: (the URL up to a title, "" = unknown; the names of media namespaces)."""
    cursor = streams.Cursor(streams.chunks(part))
    while _BEGIN not in cursor.window and len(cursor.window) <= _HEADER_BYTES and cursor.fill() is True:
        pass
    head = cursor.window.partition(_BEGIN)[0]
    match = _BASE.search(head)
    url = html.unescape(match[1].decode("utf-8", "replace")).strip() if match else ""
    names = {html.unescape(name.decode("utf-8", "replace")).lower() for name in _MEDIA_NAMESPACES.findall(head)}
    return url.rpartition("/")[0] + "/" if url else "", frozenset(names | {"file", "image", "category"})


def _pages(cursor: streams.Cursor, stop: int) -> Iterator[tuple[int, bytes | streams.Damage]]:
    """Yields (offset, `<page>...</page>`) of the pages that begin before `stop`."""
    while True:
        while (more := cursor.seek(_BEGIN)) is not True:
            if not more:
                return
            yield cursor.offset, more
            cursor.drop(len(cursor.window))
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


def _parse(
    raw: bytes, doc_id: str, part: Part, root: str, dropped_namespaces: frozenset[str], stats: SourceStats
) -> Document | streams.Damage:
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
        text = to_markdown(revision.findtext("text") or "", dropped_namespaces, stats.lost)
    except (RecursionError, ParserError):
        return streams.Damage("wikitext that can't be parsed")
    metadata = {"format": "markdown", "path": part.name, "title": title}
    if root:
        metadata["url"] = root + urllib.parse.quote(title.replace(" ", "_"), safe="/:,()'!*@;")
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
    rendered = unescaped(_Renderer(dropped_namespaces, silent).render(code.nodes))
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

    said = spoken(_LITERAL.sub(put, text), silent)
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
        tags = (
            [cell for cell in cells if cell not in captions],
            *(_children(row, "th", "td") for row in _children(table, "tr")),
        )
        shown = [[self._cell(cell) for cell in row] for row in tags]
        first = next((row for row, texts in zip(tags, shown, strict=True) if any(cell.text for cell in texts)), ())
        rows = tables.grid(shown)
        body = [self.render(cell.contents.nodes).strip().removeprefix("+").strip() for cell in captions]
        if max(map(len, rows), default=0) > 1:
            body.append(tables.pipes(rows, header=all(str(cell.tag).strip() == "th" for cell in first)))
        else:
            body.append("\n\n".join(cell for row in rows for cell in row))
        return "\n\n" + "\n\n".join(body) + "\n\n"

    def _cell(self, cell: nodes.Tag) -> tables.Cell:
        spans = (str(cell.get(name).value) if cell.has(name) else None for name in ("rowspan", "colspan"))
        return tables.Cell.of(unescaped(self.render(cell.contents.nodes)), *spans)


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
    lines, below, fenced = [], 1, False  # below: the level of the heading that follows at once; 0 = text follows
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
        elif lines and not lines[-1]:
            continue
        lines.append(line)
    return "\n".join(reversed(lines))


_FLAT = re.compile(r"(?<!\{)\{\{([^{}|]*)((?:\|[^{}]*)?)\}\}")
_BAR = re.compile(r"\|(?![^\[\]]*\]\])")  # one that parts arguments, not a link's
_BAR_SAID, _EQUALS_SAID = "\ue004", "\ue005"  # until the wikitext is parsed
_WINDOW = 200  # characters around a template that tell where it stands
_PROSE = 8  # words; what stands alone and has fewer is no quotation, unless it is a sentence
_SENTENCE_WORDS = 4
_FEW = 3  # named arguments; what has more is a box or a source

_NUMBER = re.compile(r"[-+\u2212]?\d[\d.,\u00a0 ]*(?:[/e+\u00b1]\d+)?")
_UNIT = re.compile(r"(?!\d)\S{1,15}(?: \S{1,12})?")
_BETWEEN = {"-": "\u2013", "\u2013": "\u2013", "to": " to ", "x": " x ", "by": " by ", "and": " and ", "or": " or "}
_CODE = re.compile(r"[a-z]{2,3}(?:-[A-Za-z]{2,8})*")  # of a language
_YEAR = re.compile(r"[12]\d{3}")
_UNIT_NAME = re.compile(r"[a-z]{2,3}|m")
_POSITION = re.compile(r"((?:\d[\d.]*\|){0,2}\d[\d.]*)\|([NS])\|((?:\d[\d.]*\|){0,2}\d[\d.]*)\|([EWO])(?![^|])")
_PREFIX = re.compile(r"[A-Z]{2,4}\$?|\W|\w?\W")  # a name that is part of what is said: USD 5, USS Enterprise
_NAME = re.compile(r"[A-Z\u00c0-\u00de][^\W\d_]+")
_FORMULA = re.compile(r"[A-Z][a-z]?|\d{1,2}")
_SENTENCE = re.compile(r"[\W_]*[A-Z\u00c0-\u00de\u0400-\u042f].*[.!?\u2026][\W_]*", re.S)
_COLOUR = re.compile(r"#[0-9a-fA-F]{3,8}|[\d.]+(?:px|em|%|pt)")
_MARKUP = re.compile(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]|</?\w[^<>]*>|'{2,}")
_WORD = re.compile(r"[^\W\d_]{2,}")
_UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
_OPENS = '([{\u201c\u2018\u00ab\u201e"/-\u2013\u2014\u00a0=|>*#:;~$\u20ac\u00a3\u00a5+\u00d7&'
_DATED = ("date", "datum", "fecha", "data", "reason", "raison", "grund", "motivo")  # arguments of notes to editors

_FUNCTIONS = ("formatnum", "lc", "uc", "lcfirst", "ucfirst")  # of MediaWiki itself
# Names whose shape misleads: what each says of its positional arguments.
_SAYS: dict[str, Callable[[Sequence[str]], str]] = {
    **dict.fromkeys(("abbr", "tooltip", "hover", "mvar", "math", "code", "tt", "mono", "small", "big"), lambda w: w[0]),
    **dict.fromkeys(("ndash", "spnd", "snd", "spaced ndash"), lambda w: " \u2013 "),
    **dict.fromkeys(("mdash", "spaced mdash"), lambda w: " \u2014 "),
    **dict.fromkeys(("nbsp", "spaces"), lambda w: " "),
    **dict.fromkeys(
        ("frac", "sfrac", "fraction"), lambda w: "/".join(w[-2:]) if len(w) < 3 else f"{w[0]} {w[1]}/{w[2]}"
    ),
    "e": lambda w: raised.script("\u00d710^", w[0]),
    "sup": lambda w: raised.script("^", w[0]),
    "sub": lambda w: raised.script("_", w[0]),
    "=": lambda w: _EQUALS_SAID,
    "!": lambda w: _BAR_SAID,
}
_SILENT = re.compile(
    r"(?:coord|harv\w*|sfn\w*|refn?|efn|rp?|fact|cn|main|see also|redirect|infobox|.*[ -]stub)\b.*", re.I
)


def spoken(text: str, silent: collections.Counter[str]) -> str:
    """Returns a wikitext with templates as words, inner ones first. `silent` counts, by name, those whose words are lost."""
    before = None
    while text != before:
        before, text = text, _FLAT.sub(lambda match: _said(match, silent), text)
    return text


def unescaped(text: str) -> str:
    """Returns the text with the `|` and `=` of templates, which parsing would have taken for markup."""
    return text.replace(_BAR_SAID, "|").replace(_EQUALS_SAID, "=")


def _said(match: re.Match, silent: collections.Counter[str]) -> str:
    name = " ".join(match[1].replace("_", " ").split())
    positional, named = _arguments(match[2])
    whole, start, end = match.string, match.start(), match.end()
    before = whole[max(0, start - _WINDOW) : start]
    after = whole[end : end + _WINDOW]
    function, colon, argument = name.partition(":")
    if colon and function.lower() in _FUNCTIONS:
        return argument
    known = _SAYS.get(name.lower())
    if known:
        return known(positional or [""])
    said, alone = "", _is_alone(before, after)
    inside = not alone and not _is_note(before, after)
    if inside and positional and positional[0][0].isdigit() and (place := _POSITION.match("|".join(positional))):
        return " ".join(_angle(place[i], place[i + 1]) for i in (1, 3))
    if not _SILENT.fullmatch(name):
        if alone:
            said = _quotation(positional, named, _follows_text(before))
        elif inside:
            said = _inside(name, positional, named)
    if not said and (inside or any(map(str.isalnum, "".join((*positional, *named.values()))))):
        silent[name] += 1
    return said


def _arguments(text: str) -> tuple[list[str], dict[str, str]]:
    """Returns the positional arguments that are not empty, `1=x` among them, and the named ones."""
    positional, named = [], {}
    for part in (_BAR.split(text) if "[[" in text else text.split("|"))[1:]:
        key, equals, value = part.partition("=")
        key = key.strip()
        if equals and re.fullmatch(r"[\w -]{1,30}", key) and not key.isdecimal():
            named[key.lower()] = value.strip()
        else:
            positional.append((value if equals and key.isdecimal() else part).strip())
    return [word for word in positional if word], {key: value for key, value in named.items() if value}


def _is_alone(before: str, after: str) -> bool:
    line = _FLAT.sub("", before.rpartition("\n")[2]), _FLAT.sub("", after.partition("\n")[0])
    return not any(part.strip() for part in line)


def _follows_text(before: str) -> bool:
    last = next((line for line in reversed(before.split("\n")) if line.strip()), "")
    return bool(last) and not last.startswith(("=", "{", "[[", "__")) and "}}" not in last


def _is_note(before: str, after: str) -> bool:
    """Returns True if a template follows a word or sentence without a space, and no letter or digit follows the template."""
    bare = before.rstrip("'")
    last, following = bare[-1:], after[:1]
    if not last or last.isspace() or last.isdigit() or last in _OPENS or _UNSPACED.match(last):
        return False
    after_style = len(before) > len(bare) and not following.startswith("'")
    return after_style or not following.isalnum()


def _inside(name: str, positional: Sequence[str], named: Mapping[str, str]) -> str:
    """Returns the words that replace a template inside a sentence; "" for none."""
    if not positional:
        return _measures(named) or _named_text(named)
    if any(key in _DATED for key in named) and not _NUMBER.fullmatch(positional[0]):
        return ""
    first, rest = positional[0], positional[1:]
    if _NUMBER.fullmatch(first):
        number = _whole_numbers(positional) or _quantity(positional)
        number += raised.script("\u00d710^", named.get("e", "")) + " " * ("u" in named) + named.get("u", "")
        return f"{name} {number}" if not rest and _PREFIX.fullmatch(name) else number
    if not rest and first[0].isdecimal() and _PREFIX.fullmatch(name):
        return f"{name} {first}"
    if rest and all(map(_FORMULA.fullmatch, positional)):
        return "".join(positional)
    if rest and (len(rest) == 1 or first.isupper()) and _NAME.fullmatch(first) and _NAME.fullmatch(rest[0]):
        return f"{first} {rest[0]}"
    if _PREFIX.fullmatch(name) and name.isupper() and _NAME.match(first):
        return f"{name} {first}"
    if len(rest) > 1 and _CODE.fullmatch(first) and _CODE.fullmatch(rest[0]):  # a second language, or a short word
        return " ".join(rest[:2])
    if rest and (_CODE.fullmatch(first) or _COLOUR.fullmatch(first)):
        return rest[0]
    if rest and all(map(_YEAR.fullmatch, rest[:2])):
        return f"{first} ({_BETWEEN['-'].join(rest[:2])})"
    if rest and first.isalpha() and first.islower() and " " in rest[0]:  # a colour, a size, a kind
        return rest[0]
    # In another alphabet: words with letters, but none of the Latin alphabet.
    foreign = first.isascii() and any(_WORD.search(word) and not re.search("[A-Za-z]", word) for word in rest[:2])
    if len(rest) > 1 and all(" " in word for word in positional):  # a list
        return ", ".join(positional)
    return f"{first} ({', '.join(rest[:2])})" if foreign else first


def _whole_numbers(words: Sequence[str]) -> str:
    """Returns a date (1879-03-14), the groups of digits of a number, a fraction or a range of years; "" for other words."""
    if len(words) > 2 and all(map(str.isdecimal, words[:3])):
        year, month, day = map(int, words[:3])
        if year > 31 and 1 <= month <= 12 and 1 <= day <= 31:
            return f"{year}-{month:02}-{day:02}"
    if len(words) < 2 or not all(map(str.isdecimal, words)):
        return ""
    if len(words) == 2:
        return ("\u2013" if len(words[0]) > 2 else "/").join(words)
    return ",".join(words) if len(words[0]) <= 3 and all(len(word) == 3 for word in words[1:]) else ""


def _quantity(words: Sequence[str]) -> str:
    """Returns numbers with their units and the words or dashes between them: 5 km, 5-10 km, 6 ft 2 in."""
    said, expects_number = "", True
    for word in words:
        if expects_number and _NUMBER.fullmatch(word):
            said, expects_number = said + (" " if said and said[-1].isalpha() else "") + word, False
        elif not expects_number and word in _BETWEEN:
            said, expects_number = said + _BETWEEN[word], True
        elif not expects_number and _UNIT.fullmatch(word):
            said, expects_number = f"{said} {word}", True
        else:
            break
    return said.strip()


def _measures(named: Mapping[str, str]) -> str:
    """Returns numbers by their units: 6 ft 2 in of ft=6 and in=2; "" for other arguments."""
    if not all(_NUMBER.fullmatch(value) and _UNIT_NAME.fullmatch(key) for key, value in named.items()):
        return ""
    return " ".join(f"{value} {key}" for key, value in named.items())


def _angle(numbers: str, direction: str) -> str:
    """Returns `52|31` and "N" as 52\u00b031\u2032N."""
    return "".join(map("".join, zip(numbers.split("|"), "\u00b0\u2032\u2033", strict=False))) + direction


def _named_text(named: Mapping[str, str]) -> str:
    """Returns the only text among a few named arguments; "" if there are several, or they describe a source."""
    if len(named) > _FEW or any(key in _DATED for key in named) or any("://" in value for value in named.values()):
        return ""
    values = sorted(named.values(), key=len, reverse=True)
    if not values or not _WORD.search(values[0]) or (len(values) > 1 and len(values[1]) * 2 > len(values[0])):
        return ""
    return values[0]


def _quotation(positional: Sequence[str], named: Mapping[str, str], follows: bool) -> str:
    """Returns the longest argument of a template that stands alone, if it is prose; "" if it is a box or a notice.

    The argument is prose if it is a sentence, or if it has eight words or more and `follows` a text.
    """
    if len(named) > _FEW or any(key in _DATED for key in named):
        return ""
    longest = max((*positional, *named.values()), key=len, default="")
    plain = _MARKUP.sub(r"\1", longest)
    words = len(plain.split())
    is_prose = (follows and words >= _PROSE) or (words >= _SENTENCE_WORDS and _SENTENCE.fullmatch(plain))
    return longest if is_prose else ""
