"""Keeps text that rules by name or by visibility would drop: tabs, accordions, sections with a name like a menu's.

The rules here read the page's structure: the panel that a button opens, elements of one kind, the section below a heading.
"""

import collections
import functools
import re
from collections.abc import Callable, Mapping

from resiliparse.parse.html import HTMLTree

from jaxlm.corpus import page

_HIDDEN = (
    "[hidden], [aria-hidden=true], [style*='display:none'], [style*='display: none'], .collapse, .hidden, .collapsed"
)
_PROSE = "p, pre, table, dl, ul, ol"
_OPENERS = "button, summary, h1, h2, h3, h4, h5, h6, dt, [role=button], [role=tab]"
_HEADINGS = "h1, h2, h3, h4, h5, h6"
_APART = "nav, header, footer, aside, form, dialog, [role=dialog], [role=navigation], [role=menu]"
# Attributes of what opens a panel -> the elements that may have them.
_POINTERS = {name: f"[{name}]" for name in ("aria-controls", "data-target", "data-bs-target")} | {
    "href": "a[href^='#']"
}
_NAMES = ("class", "id", "role", "aria-hidden", "hidden", "style")  # by which rules judge an element
_LINKED = 0.6  # of an element's characters; with more in links it is a menu
_NUMBER = re.compile(r"\s*\d+(?:\.\d+)*\.?\s+")  # of a section
_WORDLESS = re.compile(r"[\W_]+")
_WRITTEN = "[class*=comment], [class*=author], time, form"  # in a section of readers' comments
_READERS = "time, form, img, input, [rel~=nofollow], [datetime]"  # in what readers wrote


def unfold(tree: HTMLTree, body, words: frozenset[bytes]) -> None:
    """Shows what a click would show: hidden panels, and titles in buttons."""
    panels = []
    if not words.isdisjoint((b"hidden", b"aria-hidden", b"display", b"collapse", b"collapsed")):
        hidden = [element for element in body.query_selector_all(_HIDDEN).values() if _holds_text(element)]
        opened = {
            element.getattr(name).lstrip("#")
            for name, selector in (_POINTERS.items() if hidden else ())
            for element in body.query_selector_all(selector).values()
        }
        like = collections.Counter(map(_kind, body.query_selector_all("[class]").values() if hidden else ()))
        like.subtract(map(_kind, hidden))
        panels = [element for element in hidden if _is_panel(element, opened, like)]
    if b"button" in words:
        for button in body.query_selector_all("button").values():
            _write_title(tree, button)
    for panel in panels:
        _bare(panel)
        opener = panel.previous_element_sibling
        if opener is not None and opener.matches("[role=button]"):
            _write_paragraph(tree, opener)


def forget_names(body, words: frozenset[bytes], comments: bool) -> None:
    """Removes the attributes (`_NAMES`) for which resiliparse's rules would drop sections and documentation."""
    for main in body.query_selector_all("main, [role=main]").values():
        while main.parent is not None and main.parent != body:  # what holds the text is no sidebar, whatever its name
            main = main.parent
            _bare(main)
    commented = any(b"comment" in word for word in words)
    titles = "dt[id]" * (b"dt" in words), "h2[id*=comment], h3[id*=comment], h4[id*=comment]" * commented
    for title in body.query_selector_all(", ".join(filter(None, titles))).values() if any(titles) else ():
        below = title.next_element_sibling
        if title.tag == "dt" or (below is not None and below.tag in ("p", "pre", "table", "dl")):
            title.delattr("id")
    sections = body.query_selector_all("section[id], div[id]").values()
    kinds = functools.cache(lambda: collections.Counter(map(_kind, sections)))
    for section in [section for section in sections if _is_named_by_heading(section, kinds)]:
        if comments or section.query_selector(_WRITTEN) is None:
            _bare(section)
    if commented:
        named = body.query_selector_all("[class*=comment]:not([class*=comments])").values()
        like = collections.Counter(map(_kind, named))
        for element in named:
            if like[_kind(element)] == 1 and _is_documentation(element):
                _bare(element)


def _bare(element) -> None:
    for name in _NAMES:
        element.delattr(name)


def _write_title(tree: HTMLTree, button) -> None:
    """Replaces a button by its words if it is a title: in a heading, around one, or above the panel that it opens."""
    heading, parent = button.query_selector(_HEADINGS), button.parent
    if heading is not None:
        button.replace_with(heading)
    elif parent.tag in ("dt", *_HEADINGS.split(", ")):
        button.replace_with(tree.create_text_node(button.text))
    elif any(button.hasattr(name) for name in ("aria-expanded", *_POINTERS)):
        below = button.next_element_sibling
        if below is not None and _holds_text(below):
            _write_paragraph(tree, button)


def _write_paragraph(tree: HTMLTree, element) -> None:
    title = tree.create_element("p")
    title.text = element.text
    element.replace_with(title)


def _holds_text(element) -> bool:
    """Returns True if the element has a paragraph, code, a table or a list, and at most `_LINKED` of it is in links."""
    if element.tag not in ("p", "pre", "table") and element.query_selector(_PROSE) is None:
        return False
    return page.linked_chars(element) <= _LINKED * len(element.text) and bool(element.text.strip())


def _kind(element) -> tuple:
    """Returns (parent, tag, first class if any), which elements of one kind, such as the tabs of a group, share."""
    return element.parent, element.tag, *(element.getattr("class") or "").split()[:1]


def _is_panel(element, opened: set[str], shown: Mapping[tuple, int]) -> bool:
    """Returns True if a hidden element is text that a click shows. shown: `_kind` -> number of elements that show."""
    apart = element.closest(_APART)
    if apart is not None and (apart.tag != "form" or apart.query_selector("h1") is None):  # ASP.NET: a form is the page
        return False
    if element.getattr("role") == "tabpanel" or (element.getattr("id") or "-") in opened:
        return True
    before = element.previous_element_sibling
    if before is not None and before.tag != "h1" and (before.matches(_OPENERS) or _are_title_and_text(before, element)):
        return True
    kind = _kind(element)
    return len(kind) > 2 and shown[kind] > 0  # one of several tabs, of which another shows


def _are_title_and_text(before, element) -> bool:
    """Returns True if two elements of one tag are alone in theirs, and the first is a line without links."""
    alone = before.previous_element_sibling is None and element.next_element_sibling is None
    line = before.text.strip() and before.query_selector(f"a, img, {_PROSE}") is None
    return bool(alone and line) and before.tag == element.tag


def _is_named_by_heading(section, kinds: Callable[[], Mapping[tuple, int]]) -> bool:
    """Returns True if the section has a text, and its id is made of its heading, as pandoc makes it.

    If there are others of its kind (`_kind`), the id may be the heading's first words.
    """
    heading = section.first_element_child
    while heading is not None and heading.tag in ("div", "header"):
        heading = heading.first_element_child
    if heading is None or heading.tag not in _HEADINGS.split(", ") or not _holds_text(section):
        return False
    texts = _NUMBER.sub("", heading.text), section.getattr("id")
    slug, name = (_WORDLESS.sub("", text).casefold() for text in texts)
    slug, name = slug.rstrip("0123456789"), name.rstrip("0123456789")
    return bool(slug and name) and (name == slug or (slug.startswith(name) and kinds()[_kind(section)] > 1))


def _is_documentation(element) -> bool:
    """Returns True if nothing shows that a reader wrote the text of an element named comment."""
    return element.query_selector(_READERS) is None and element.closest("[class*=comments], [id*=comments]") is None
