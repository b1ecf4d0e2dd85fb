"""Extracts the main text of HTML pages, much like Markdown: headings, lists, fenced code and pipe tables stay.

Known generators of documentation mark their text; elsewhere resiliparse's rules find it (Bevendorff et al., SIGIR
2023).
"""

import collections
import functools
import pathlib
import pickle
import re
from html import unescape

from resiliparse.extract import html2text
from resiliparse.parse.html import HTMLTree

from jaxlm.corpus import page, shared_blocks, tables
from jaxlm.corpus.stage import Document, Edits, Remove, Settings, Stage
from jaxlm.corpus.stages import folded, notation

# Where known generators put their text: Sphinx, Read the Docs, DocBook and Publican, MediaWiki, mkdocs, Docusaurus,
# rustdoc, GitHub, Confluence exports, Doxygen.
_ROOTS = (
    "div.documentwrapper div.body, .rst-content [role=main], div.body[role=main], body > div:has(> .titlepage),"
    " body > section:has(> .titlepage), .mw-parser-output, #mw-content-text, article.md-content__inner,"
    " .theme-doc-markdown, .rustdoc #main-content, article.markdown-body, #main-content.wiki-content,"
    " .header + .contents"
)
# What is never text, whatever the page.
_FURNITURE = (
    "nav, button, select, template, noscript, svg, iframe, dialog, [hidden], [aria-hidden=true],"
    " [style*='display:none'], [style*='display: none'], [role=navigation], [role=search], [role=dialog],"
    " [role=alertdialog], [role=menu], [role=menubar], [role=toolbar], [role=complementary],"
    " .headerlink, .anchorjs-link, .heading-anchor,"
    " .hash-link, a.anchor, a.permalink, .skip-link, .skiplink, .skip-to-content, .sr-only, .visually-hidden,"
    " .breadcrumb, .breadcrumbs, #breadcrumbs, .cookie-banner, #cookie-banner, .cookie-notice, .cookie-consent,"
    " .cookies, #onetrust-consent-sdk, #CybotCookiebotDialog, .cc-window, .gdpr, .newsletter, .newsletter-signup,"
    " .social-share, .share-buttons, .sharedaddy, .addtoany_share_save_container, .navheader, .navfooter, .docnav,"
    " h1 a.mark, h2 a.mark, h3 a.mark, h4 a.mark, h5 a.mark, h6 a.mark,"
    " .viewcode-link, .copybtn, .copy-button, .mw-editsection, .mw-jump-link, .navbox, .catlinks, .printfooter,"
    " .noprint, sup.reference, .tagline, .mainmenu, .submenu, .toplang, .bottomlang, .language-selection, #path:has(> a + a),"
    " .viewcode-back, .footer, #footer, .page-footer, #page-footer, .site-footer, #site-footer,"
    " [role=contentinfo]"
)
# Elements inside sentences that resiliparse's rules would drop.
_INLINE = "p time, p label, li time, li label, dd time, td time"
# Line numbers next to code.
_GUTTERS = (
    "td.linenos, td.gutter, td.rouge-gutter, td.hljs-ln-numbers, td.blob-num, .linenodiv, .line-numbers-rows,"
    " .lineno, span.linenos, span.ln, span.line-number, span.line-numbers, pre.lineno"
)
# Parts inside documentation that are no text: tables of contents, links to the next page.
_WITHIN_ROOT = (
    ".toctree-wrapper, div.toc, #toc, nav.contents, div.contents.topic, aside.contents, .sphinxsidebar, .related,"
    " .rst-footer-buttons, .md-source-file, .theme-doc-footer, footer, p#title"
)
_PLACE = re.compile(rf"{page.OPEN}(\d+){page.CLOSE}")
_TOLD = "[class*=highlight-], [class*=language-], [class*=lang-], [class*=brush]"
_LANGUAGE = re.compile(r"(?:^|\s)(?:language|lang|highlight-source|highlight|brush:)-?\s*([a-zA-Z][\w+#-]*)")
_NOT_LANGUAGES = {"default", "none", "text", "notranslate", "plaintext", "source", "python3", "pycon3", "listing"}
_BULLET = re.compile(r"^( *)• ?", re.M)
_LIST_INDENT = re.compile(r"^  (?= *\S)", re.M)
_SEPARATORS = re.compile(r"\s+(?:[|\u2013\u2014·»«:/-]|::)\s+")
_MIN_SHARE = 0.3  # of the characters in the densest element: with less, the rules have missed the article
_SPACED = bytes(c if chr(c).isascii() and (chr(c).isalnum() or chr(c) in "-_") else 0x20 for c in range(0x100))
_SPELLED = re.compile(  # a letter, digit, "-" or "_" of a name as a character reference
    r"&#(?:45|95|4[89]|5[0-7]|6[5-9]|[78]\d|9[07-9]|1[01]\d|12[0-2]|x(?:2d|5f|3\d|[46][1-9a-f]|[57][0-9a]))(?!\w)", re.I
)
_IMPLIED = frozenset([b"html", b"head", b"body", b"tbody"])  # elements that a page may leave out
_LINKED = 0.6  # of a list's characters; a list with more in links is a menu
_LONG_ITEM = 70  # characters of an item, on average: no menu has so many
_BARS = re.compile(r"\||(?:^|(?<=\s))[<>«»\u2039\u203a\[\]]+(?=\s|$)")  # between the links of a line
_ARROW = re.compile("[>»\u203a]")
_LINES = (  # of a block that holds no other
    ":is(div, td, p, center):has(a):not(:has(div, td, p, center, ul, ol, table, pre, br, h1, h2, h3, h4, h5, h6, input, img))"
)
_TITLES = ("h1", "h2", "h3", "h4", "h5", "h6", "summary", "caption")
_NO_TITLES = "img, h2, h3, h4, h5, h6, a[href^='#']:not([href='#'])"  # of cards, of a table of contents
_BESIDE = "aside, nav, header, footer"
_SIGNS = re.compile(r"[\W_]+")


SHARED = "shared.pickle"  # source -> site -> what its pages share, see `jaxlm.corpus.shared_blocks`


class Html(Stage):
    """Replaces HTML by its main text, and sets metadata "format" to text and "from" to html. Other formats pass."""

    def __init__(self, settings: Settings, folder: pathlib.Path):
        super().__init__(settings, folder)
        path = folder.parent / SHARED
        self._shared = pickle.loads(path.read_bytes()) if path.is_file() else {}

    def apply(self, document: Document, edits: Edits) -> Remove | None:
        if document.metadata.get("format") != "html":
            return None
        html, tree = page.parse(document.text)
        if tree.body is None or tree.body.tag is None:  # the body of a page of frames is no element
            return Remove("no main text", "no body")
        if page.is_too_deep(tree):
            return Remove("nested too deep", f"elements nested over {page.DEPTH} deep")
        of_source = self._shared.get(document.metadata.get("source"), {})
        shared = of_source.get(shared_blocks.site_of(document.metadata), {})
        title, text = main_text(tree, _words(html), self.settings.markup, self.settings.comments, shared)
        if len(text) < max(1, self.settings.min_chars):
            return Remove("no main text", f"characters={len(text)}, min_chars={self.settings.min_chars}")
        document.text = _with_title(title, text, self.settings.markup)
        document.metadata |= {"format": "text", "from": "html"}
        edits["page"] += 1
        return None


def _words(html: str) -> frozenset[bytes]:
    """Returns all words of a page, names and values of attributes among them."""
    if _SPELLED.search(html):
        html += unescape(html)
    return frozenset(html.encode("utf-8", "replace").lower().translate(_SPACED).split())


def _find(body, words: frozenset[bytes], *groups: str) -> list:
    """Returns the elements that a selector matches, in document order. Tries only selectors whose words the page has."""
    tried = [selector for group in groups for selector, needed in _needed(group).items() if needed <= words]
    return body.query_selector_all(", ".join(tried)).values() if tried else []


@functools.cache
def _needed(group: str) -> dict[str, frozenset[bytes]]:
    selectors = [selector.strip() for selector in group.split(",")]
    return {s: _words(s.replace(":has(", " ").replace(")", " ")) - _IMPLIED for s in selectors}


def main_text(
    tree: HTMLTree, words: frozenset[bytes], markup: bool, comments: bool, shared: shared_blocks.Shared
) -> tuple[str, str]:
    """Returns the title and the main text of a page, with headings, code, tables and lists marked if `markup`."""
    body = tree.body
    headings = body.query_selector_all("h1").values()
    notation.write_formulas(tree, body, words)
    for heading in headings:
        notation.write_scripts(tree, heading, words)
    title = headings[0].text if len(headings) == 1 else tree.title or ""
    title = " ".join(title.replace(page.SAVE, "").replace("\u00b6", "").split())
    root = _root(body, words)
    if root is not None:  # first, as there is less to search then
        _isolate(root, body)
    else:
        shared_blocks.remove(body, shared)
    folded.unfold(tree, body, words)
    groups = (_FURNITURE, _GUTTERS) if root is None else (_FURNITURE, _GUTTERS, _WITHIN_ROOT)
    _drop(_find(body, words, *groups), root)
    notation.write_scripts(tree, body, words)
    notation.write_signs(tree, body, words)
    notation.write_numbers(tree, body, words)
    blocks: list[str] = []
    for pre in body.query_selector_all("pre").values():
        _take_code(tree, pre, blocks, markup)
    for table in body.query_selector_all("table").values():
        _take_table(tree, table, blocks)
    if markup:
        _mark_headings(tree, body)
    if root is None:
        _drop_menus(body, words)
        folded.forget_names(body, words, comments)
        for element in _find(body, words, _INLINE):
            element.replace_with(tree.create_text_node(element.text))
        _protect_lists(tree, body)
    _protect_figures(tree, body)
    text = _extract(tree, root is None, comments)
    if root is None:
        # Rules by class names sometimes take a whole article for furniture.
        missed = _densest(body, comments) if len(text) < _MIN_SHARE * len(body.text) else None
        if missed is None and not text.strip():  # the only text is in elements named comments
            missed = _densest(body, True)
        if missed is not None and len(text) < _MIN_SHARE * len(missed.text):
            _isolate(missed, body)
            text = _extract(tree, False, comments)
    return title, _finish(text, blocks, markup)


def _extract(tree: HTMLTree, main_content: bool, comments: bool) -> str:
    return html2text.extract_plain_text(
        tree, preserve_formatting=True, main_content=main_content, alt_texts=False, comments=comments, post_meta=False
    )


def _densest(body, comments: bool):
    """Returns the element that directly holds most text in paragraphs; None if there is no paragraph."""
    chars = collections.Counter()
    for p in body.query_selector_all("p").values():
        chars[p.parent] += len(p.text) - page.linked_chars(p)
    for element, _ in chars.most_common():  # equals in document order
        if comments or element.closest("[class*=comment], [id*=comment], [class*=forum]") is None:
            return element
    return None


def _root(body, words: frozenset[bytes]):
    """Returns the element that holds all the text, if a known generator made the page; else None."""
    roots = _find(body, words, _ROOTS)  # an element before those inside it
    return roots[0] if roots and all(roots[0].contains(other) for other in roots[1:]) else None


def _isolate(root, body) -> None:
    """Removes from `body` everything but `root` and its ancestors."""
    node = root
    while node != body:
        parent = node.parent
        for sibling in parent.child_nodes.values():
            if sibling != node:
                sibling.decompose()
        node = parent


def _drop(elements: list, root) -> None:
    for element in elements:
        # An element that was removed with its parent has no parent any more.
        if element.parent is not None and (root is None or not element.contains(root)):
            element.decompose()


def _put(blocks: list[str], text: str) -> str:
    blocks.append(text)
    return f"{page.OPEN}{len(blocks) - 1}{page.CLOSE}"


def _take_code(tree: HTMLTree, pre, blocks: list[str], markup: bool) -> None:
    """Replaces the text of a `pre` by a placeholder, because serialisation would indent only its first line."""
    for inner in pre.query_selector_all("br, div, li, p, code + code").values():
        before = inner.previous_sibling
        if inner.tag != "br" and before is not None and not (before.text or "").endswith("\n"):
            before.parent.insert_before(tree.create_text_node("\n"), inner)
        if inner.tag == "br" or not inner.text.endswith("\n"):
            inner.append(tree.create_text_node("\n"))
    code = pre.text.replace("\r\n", "\n").strip("\n").rstrip()
    if not code.strip():
        return
    if markup:
        fence = "```"
        while fence in code:
            fence += "`"
        code = f"{fence}{_language(pre)}\n{code}\n{fence}"
    pre.text = _put(blocks, code)


def _language(pre) -> str:
    """Returns the language of a code block, by the class of its `code`, its own or that of an ancestor; "" if unknown."""
    for element in (pre.query_selector("code"), pre, pre.closest(_TOLD)):
        match = _LANGUAGE.search((element.getattr("class") or "") if element is not None else "")
        if match:
            name = match[1].lower()
            return "python" if name in ("python3", "pycon3") else "" if name in _NOT_LANGUAGES else name
    return ""


def _take_table(tree: HTMLTree, table, blocks: list[str]) -> None:
    """Turns a data table into lines of cells between pipes. Leaves a layout table as it is."""
    if table.query_selector("table, pre, ul, ol, h1, h2, h3, form, p + p, div + div") is not None:
        return
    for br in table.query_selector_all("br").values():
        br.append(tree.create_text_node(" "))
    cells: list[list[tables.Cell]] = []
    for element in table.query_selector_all("tr, th, td").values():  # in document order: the cells after their row
        if element.tag == "tr":
            cells.append([])
        elif cells:
            spans = element.getattr("rowspan"), element.getattr("colspan")
            cells[-1].append(tables.Cell.of(element.text, *spans))
    rows = tables.grid(cells)
    if len(rows) < 2 or max(map(len, rows)) < 2:
        return
    caption = table.query_selector("caption")
    above = f"{' '.join(caption.text.split())}\n\n" if caption is not None else ""
    place = tree.create_element("pre")
    place.text = _put(blocks, above + tables.pipes(rows))
    table.replace_with(place)


def _mark_headings(tree: HTMLTree, body) -> None:
    for heading in body.query_selector_all("h1, h2, h3, h4, h5, h6").values():
        if heading.text.strip():
            heading.insert_before(tree.create_text_node(f"{'#' * int(heading.tag[1])} "), heading.first_child)


def _in_place_of(tree: HTMLTree, element, tag: str):
    """Returns a new element with the class and id of another, so that rules about these still match."""
    new = tree.create_element(tag)
    for name in ("class", "id"):
        if element.getattr(name):
            new.setattr(name, element.getattr(name))
    return new


def _drop_menus(body, words: frozenset[bytes]) -> None:
    """Removes tables and columns of short links, lines of links with only signs between them, and forms to write in."""
    for form in _find(body, words, "form:has(textarea)"):  # one around the page is no form to write in
        if form.query_selector("h1, main, article, [role=main]") is None and 2 * len(form.text) < len(body.text):
            form.decompose()
    for table in reversed(_find(body, words, "table:has(a), td:has(a ~ br ~ a ~ br ~ a)")):  # inner ones first
        text, links = len(" ".join(table.text.split())), table.query_selector_all("a")
        short = len(links) > 1 and text < _LONG_ITEM * len(links)
        if short and page.linked_chars(table) > _LINKED * text and not _is_introduced(table):
            table.decompose()
    for line in body.query_selector_all(_LINES).values():
        text = line.text.replace(page.SAVE, "")
        if not _BARS.search(text) or _is_introduced(line):
            continue
        parts = [part.strip() for part in _BARS.split(text) if part.strip()]
        links = [link.text.replace(page.SAVE, "").strip() for link in line.query_selector_all("a").values()]
        trail = parts[:-1] if _ARROW.search(text) else parts  # ends at the page itself, which is no link
        if len(parts) > 2 and links in (parts, trail):
            line.decompose()


def _is_introduced(element) -> bool:
    """True if a paragraph or a heading stands right before the element; or a heading before what holds nothing but it."""
    if _below_paragraph(element):
        return True
    while element.previous_element_sibling is None and element.next_element_sibling is None:
        if element.parent is None or element.parent.tag != "div":
            return False
        element = element.parent
    return element.previous_element_sibling is not None and element.previous_element_sibling.tag in _TITLES


def _protect_figures(tree: HTMLTree, body) -> None:
    """Turns figures into plain blocks: resiliparse would drop figures with all their text."""
    for figure in reversed(body.query_selector_all("figure, figcaption").values()):
        block = _in_place_of(tree, figure, "div" if figure.tag == "figure" else "p")
        block.append(*figure.child_nodes.values())
        figure.replace_with(block)


def _protect_lists(tree: HTMLTree, body) -> None:
    """Turns text lists into plain blocks: resiliparse drops every `ul` near the body or with over 20% of links."""
    # Items of a menu are short links: a list with other text, of long items or right below a paragraph stays.
    links = []
    for ul in reversed(body.query_selector_all("ul").values()):  # inner ones first
        text = len(ul.text)
        items = [item for item in ul.child_nodes.values() if item.tag == "li"]
        linked = page.linked_chars(ul)
        if not items or (linked > _LINKED * text and text < _LONG_ITEM * len(items) and not _below_paragraph(ul)):
            continue
        if linked > _LINKED * text and ul.query_selector(_NO_TITLES) is None:
            links += ul.query_selector_all("a").values()
        block = _in_place_of(tree, ul, "div")
        for item in items:
            line = tree.create_element("p")
            line.append(tree.create_text_node("- "))
            for node in item.child_nodes.values():
                if node.tag == "p":  # its text stands beside the bullet
                    line.append(*node.child_nodes.values(), tree.create_text_node(" "))
                else:
                    line.append(node)
            block.append_child(line)
        ul.replace_with(block)
    for link in links:  # resiliparse drops a line of links deep in the page
        if link.parent is not None:  # once, also in a list inside a list
            link.replace_with(tree.create_text_node(link.text))


def _below_paragraph(element) -> bool:
    """Returns True if a paragraph that is less than half links, or a heading of the main text, comes before the element."""
    before = element.previous_element_sibling
    if before is not None and before.tag in ("h2", "h3", "h4", "h5", "h6"):
        return element.closest("main, article, [role=main]") is not None and element.closest(_BESIDE) is None
    if before is None or before.tag != "p":
        return False
    return len(before.text) > 2 * page.linked_chars(before)


def _finish(text: str, blocks: list[str], markup: bool) -> str:
    """Puts code and tables back as separate paragraphs, and tidies lists and blank lines."""
    lines = map(str.rstrip, text.split("\n"))
    text = "\n".join((line.replace("\t\t", "  ").lstrip("\t") for line in lines) if "\t" in text else lines)
    text = _LIST_INDENT.sub("", text)
    if page.MARK in text:
        text = notation.NUMBERED.sub(r"\1 ", text)
    if markup and "•" in text:
        text = _BULLET.sub(r"\1- ", text)
    text = re.sub(r"\n{3,}", "\n\n", text)

    pieces = _PLACE.split(text)  # text, number, text, ...
    for i in range(1, len(pieces), 2):
        above, _, lead = pieces[i - 1].rpartition("\n")
        indent = " " * (len(lead) - len(lead.lstrip()))
        block = f"{indent}{blocks[int(pieces[i])]}".replace("\n", f"\n{indent}")
        pieces[i - 1] = f"{above}\n{lead}".rstrip()
        pieces[i] = f"\n\n{block}\n\n"
        pieces[i + 1] = pieces[i + 1].lstrip(" \t").lstrip("\n")
    return "".join(pieces).replace(page.SAVE, "").strip()


def _with_title(title: str, text: str, markup: bool) -> str:
    """Puts the title above the text, unless the text has one. Cuts the site's name off the title."""
    name = max(_SEPARATORS.split(title), key=len)
    lines = {_SIGNS.sub("", line).casefold() for line in text[: 2 * len(title) + 300].splitlines()}
    if not name or (markup and text.startswith("# ")):
        return text
    if not lines.isdisjoint(_SIGNS.sub("", t).casefold() for t in (title, name)):
        return text
    return f"{'# ' if markup else ''}{name}\n\n{text}"
