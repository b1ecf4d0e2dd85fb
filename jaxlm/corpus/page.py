"""Parses a page of HTML so that resiliparse 2.0.1 reads all of it."""

import re

from resiliparse.parse.html import HTMLTree

# resiliparse 2.0.1 takes a lone character of three bytes (a Chinese one, a dash) for an icon and drops it, unless this
# character follows it. Real icons are in the private use area.
SAVE = "\ue002"
# A code block or table is replaced by a number between these two, and put back when the rest is text.
OPEN, CLOSE = "\ue000", "\ue001"
MARK = "\ue003"  # around the number of a list item, which replaces the one that resiliparse counts
# A page nested deeper than this is an accident or an attack: extraction time grows with the square of the depth.
DEPTH = 400
_TOO_DEEP = " > ".join(["*"] * DEPTH)
_LONE = re.compile(r"[\u0800-\udfff\uf900-\uffff](?=\s*<)")
_LONE_ENTITY = re.compile(r"&(?!nbsp)#?\w{2,8};(?=\s*<)")
_STRAY = ("\0", OPEN, CLOSE, SAVE, MARK)
_XHTML = re.compile(r"^\s*<\?xml|xhtml", re.I)
_VOID = frozenset("area base br col embed hr img input link meta param source track wbr".split())  # noqa: SIM905
_NAME = re.compile(r"[a-zA-Z][\w:-]*")


def parse(html: str) -> tuple[str, HTMLTree]:
    """Returns the page's source without stray characters, and its tree."""
    html = _well_formed(html)
    return html, HTMLTree.parse(html)


def is_too_deep(tree: HTMLTree) -> bool:
    return tree.document.query_selector(_TOO_DEEP) is not None


def linked_chars(element) -> int:
    """Counts the characters in an element's links."""
    return sum(len(link.text) for link in element.query_selector_all("a").values())


def _well_formed(html: str) -> str:
    """Rewrites XHTML for an HTML parser, which would take `<title/>` for a title that never ends."""
    for stray in _STRAY:
        html = html.replace(stray, "")
    if "/>" in html and _XHTML.search(html[:2000]):
        html = _close(html)
    if not html.isascii():
        html = _LONE.sub(rf"\g<0>{SAVE}", html)
    return _LONE_ENTITY.sub(rf"\g<0>{SAVE}", html)


def _close(html: str) -> str:
    """Writes `<a/>` as `<a></a>`, except for elements that are always empty."""
    pieces = html.split("/>")
    for i, piece in enumerate(pieces[:-1]):
        start = piece.rfind("<")
        name = _NAME.match(piece, start + 1) if start >= 0 and piece.find(">", start) < 0 else None
        pieces[i] = f"{piece}></{name[0]}>" if name and name[0].lower() not in _VOID else f"{piece}/>"
    return "".join(pieces)
