"""Writes as text what HTML says by its markup: powers and indices, fractions, formulas, the numbers of lists.

`10<sup>80</sup>` becomes 10^{80}, MathML becomes its TeX annotation or a line such as (a + b)/2.
"""

import re

from resiliparse.parse.html import HTMLTree

from jaxlm.corpus import raised
from jaxlm.corpus.page import MARK, SAVE

NUMBERED = re.compile(rf"(?:\d+\. )?{MARK}([^{MARK}]*){MARK}\s*")
_NOTE = re.compile(r"\W{0,2}\w{1,3}(?:\W{1,2}\w{1,3})*\W{0,2}")  # the marks of footnotes: 1, [1], a), 1,2
_SLASH = re.compile(r"\s*[/\u2044]\W*")
_INLINE = re.compile(r"span|mjx-.*|nobr|i|em|b|strong")
_DISPLAY = re.compile(r"\{\\(?:displaystyle|textstyle|scriptstyle) (.*)\}", re.S)
_UNSEEN = "\u2061\u2062\u2063\u2064"
_CLOSE = (*"()[]{},.!'", *_UNSEEN)  # signs without spaces around them
_UNREAD = ("#text", "#comment", "annotation", "annotation-xml")


def write_formulas(tree: HTMLTree, body, words: frozenset[bytes]) -> None:
    """Replaces formulas in `body`, hidden ones too. `words`: all words of the page, which tell at once what it can't hold."""
    if b"math" in words:
        for selector in ("script[type^='math/tex']", "math"):  # a script removes what it drew
            for formula in body.query_selector_all(selector).values():
                _write_formula(tree, formula)


def write_scripts(tree: HTMLTree, body, words: frozenset[bytes]) -> None:
    """Replaces powers, indices and fractions in `body`; removes marks of footnotes."""
    if not words.isdisjoint((b"sup", b"sub")):
        for over in body.query_selector_all("sup").values():
            _write_fraction(tree, over)
        for element in reversed(body.query_selector_all("sup, sub").values()):  # inner ones first
            _write_script(tree, element)


def write_signs(tree: HTMLTree, body, words: frozenset[bytes]) -> None:
    """Writes quotation marks, and brackets around the readings of Chinese characters."""
    quotes = [("q", f"\u201c{SAVE}", f"\u201d{SAVE}")] if b"q" in words else []
    readings = [("rt", "(", ")")] if b"rt" in words and b"rp" not in words else []
    for tag, first, last in quotes + readings:
        for element in body.query_selector_all(tag).values():
            if element.first_child is not None:
                element.insert_before(tree.create_text_node(first), element.first_child)
                element.append(tree.create_text_node(last))


def write_numbers(tree: HTMLTree, body, words: frozenset[bytes]) -> None:
    """Writes the items' numbers into the lists of `body` that don't count 1, 2, 3."""
    if b"ol" in words and not words.isdisjoint((b"start", b"type", b"value")):
        for items in body.query_selector_all("ol").values():
            _number_items(tree, items)


def _write_formula(tree: HTMLTree, formula) -> None:
    tex = formula if formula.tag == "script" else formula.query_selector("annotation[encoding*=tex i]")
    if tex is not None:
        text = _tex(tex.text)
    else:
        text = " ".join(_linear(formula).split())
    whole, drawn = formula, formula.previous_element_sibling
    if formula.tag == "script" and drawn is not None and (drawn.getattr("id") or "").startswith(formula.id or "?"):
        drawn.decompose()  # what the script drew, in a saved page
    # Pages hide a formula in an element of its own, beside a picture of it.
    while _INLINE.fullmatch(whole.parent.tag or "") and whole.parent.text.strip() == formula.text.strip():
        whole = whole.parent
    whole.replace_with(tree.create_text_node(text))


def _tex(text: str) -> str:
    text = " ".join(text.split())
    return f"${(_DISPLAY.fullmatch(text) or (text, text))[1].strip()}$"


def _linear(node) -> str:
    """Returns an element of MathML as a line of text."""
    parts = [_linear(child) for child in node.child_nodes.values() if child.tag not in _UNREAD]
    match node.tag, parts:
        case (("mi" | "mn" | "mtext" | "ms"), _):
            return node.text.strip()
        case "mo", _:
            sign = node.text.strip()
            return sign.strip(_UNSEEN) if sign in _CLOSE else f" {sign} "
        case "mfrac", [over, under]:
            return f"{_grouped(over)}/{_grouped(under)}"
        case "msqrt", _:
            return f"sqrt({''.join(parts).strip()})"
        case (("msup" | "mover"), [base, over]):
            return _grouped(base) + raised.script("^", over.strip())
        case (("msub" | "munder"), [base, under]):
            return base.strip() + raised.script("_", under.strip())
        case (("msubsup" | "munderover"), [base, under, over]):
            return base.strip() + raised.script("_", under.strip()) + raised.script("^", over.strip())
        case (("mtd" | "mtr" | "mlabeledtr"), _):
            return "".join(parts) + ("; " if node.tag == "mtr" else " ")
    return "".join(parts)


def _grouped(text: str) -> str:
    text = text.strip()
    return text if text.isalnum() or (text[:1] == "(" and text.find(")") == len(text) - 1) else f"({text})"


def _write_script(tree: HTMLTree, element) -> None:
    """Replaces a `sup` or `sub` by its text, behind ^ or _ if it is a power or an index. Removes marks of footnotes."""
    text = " ".join(element.text.split())
    if element.tag == "sup" and _is_note(element, text):
        element.decompose()
        return
    if raised.is_small_print(text):  # or a whole page, behind a tag that never ends
        return
    if element.tag == "sup":
        text = raised.raised(text, _text_before(element), element.query_selector("i, em, var") is not None)
    else:
        text = raised.lowered(text)
    element.replace_with(tree.create_text_node(text))


def _is_note(element, text: str) -> bool:
    around = element.closest("a[href*='#']")
    linked = element.query_selector("a[href*='#']") is not None or (around is not None and around.text.strip() == text)
    return _NOTE.fullmatch(text) is not None and (linked or (text[0], text[-1]) == ("[", "]"))


def _write_fraction(tree: HTMLTree, over) -> None:
    """Replaces `<sup>1</sup>/<sub>2</sub>` by 1/2."""
    slash = over.next_sibling
    under = slash.next_sibling if slash is not None and _SLASH.fullmatch(slash.text) else None
    if under is not None and under.tag == "sub":
        space = " " if _text_before(over)[-1:].isdecimal() else ""
        slash.replace_with(tree.create_text_node("/"))
        for element, text in ((over, space + over.text.strip()), (under, under.text.strip())):
            element.replace_with(tree.create_text_node(text))


def _text_before(element) -> str:
    return (element.previous_sibling.text if element.previous_sibling is not None else "") or ""


def _number_items(tree: HTMLTree, items) -> None:
    """Writes each item's number into a list that doesn't count 1, 2, 3."""
    rows = [item for item in items.child_nodes.values() if item.tag == "li"]
    letters = (items.getattr("type") or "1") in "aA"
    if not (letters or items.hasattr("start") or any(row.hasattr("value") for row in rows)):
        return
    number = _whole(items.getattr("start"), 1)
    for row in rows:
        number = _whole(row.getattr("value"), number)
        first = next((node for node in row.child_nodes.values() if node.text.strip()), row)
        name = chr(ord(items.getattr("type")) + number - 1) if letters and 0 < number <= 26 else str(number)
        label = tree.create_text_node(f"{MARK}{name}.{MARK}")
        place = first if first.tag == "p" else row
        place.insert_before(label, place.first_child) if place.first_child is not None else place.append(label)
        number += 1


def _whole(text: str | None, default: int) -> int:
    try:
        return int(text or "")
    except ValueError:
        return default
