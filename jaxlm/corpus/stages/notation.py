"""Writes as text what HTML says by its markup: powers and indices, fractions, formulas, the numbers of lists.

`10<sup>80</sup>` becomes 10^{80}, MathML becomes its TeX annotation or a line such as (a + b)/2.
"""

import re

from resiliparse.parse.html import HTMLTree

from jaxlm.corpus import raised
from jaxlm.corpus.page import MARK

NUMBERED = re.compile(rf"(?:\d+\. )?{MARK}([^{MARK}]*){MARK}\s*")
_NOTE = re.compile(r"\W{0,2}\w{1,3}(?:\W{1,2}\w{1,3})*\W{0,2}")  # the marks of footnotes: 1, [1], a), 1,2
_SLASH = re.compile(r"\s*[/\u2044]\W*")
_TEX = re.compile(r"\\[a-zA-Z]{2,}|[\^_]\{")
_INLINE = re.compile(r"span|mjx-.*|nobr|i|em|b|strong")
_DISPLAY = re.compile(r"\{\\(?:displaystyle|textstyle|scriptstyle) (.*)\}", re.S)
_ROMAN = (
    *((1000, "m"), (900, "cm"), (500, "d"), (400, "cd"), (100, "c"), (90, "xc"), (50, "l"), (40, "xl")),
    *((10, "x"), (9, "ix"), (5, "v"), (4, "iv"), (1, "i")),
)
_UNREAD = ("#text", "#comment", "annotation", "annotation-xml")
_MOST_NUMBERED = 3999  # the last Roman numeral


def write_formulas(tree: HTMLTree, body, words: frozenset[bytes]) -> None:
    """Replaces formulas in `body`, hidden ones too. `words`: all words of the page, which tell at once what it can't hold."""
    if b"math" in words:
        for formula in body.query_selector_all("math, script[type^='math/tex']").values():
            _write_formula(tree, formula)
    for picture in body.query_selector_all("img[alt*='\\\\'], img[alt*='{']").values():
        if _TEX.search(picture.getattr("alt")) and picture.parent is not None:
            picture.replace_with(tree.create_text_node(_tex(picture.getattr("alt"))))


def write_scripts(tree: HTMLTree, body, words: frozenset[bytes]) -> None:
    """Replaces powers, indices and fractions in `body`; removes marks of footnotes."""
    if not words.isdisjoint((b"sup", b"sub")):
        for over in body.query_selector_all("sup").values():
            _write_fraction(tree, over)
        for element in reversed(body.query_selector_all("sup, sub").values()):  # inner ones first
            _write_script(tree, element)


def write_signs(tree: HTMLTree, body, words: frozenset[bytes]) -> None:
    """Writes quotation marks and the brackets around readings; removes text that a correction replaces."""
    if b"q" in words:
        for quote in reversed(body.query_selector_all("q").values()):
            quote.replace_with(tree.create_text_node(f"\u201c{quote.text}\u201d"))
    if b"rt" in words and b"rp" not in words:
        for reading in body.query_selector_all("rt").values():
            reading.replace_with(tree.create_text_node(f"({reading.text})"))
    if b"ins" in words:
        for gone in body.query_selector_all("del + ins, s + ins").values():
            gone.previous_element_sibling.decompose()


def write_numbers(tree: HTMLTree, body, words: frozenset[bytes]) -> None:
    """Writes the items' numbers into the lists of `body` that don't count 1, 2, 3."""
    if b"ol" in words and not words.isdisjoint((b"start", b"type", b"value", b"reversed")):
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
            return (
                ""
                if sign in ("\u2061", "\u2062", "\u2063", "\u2064")
                else sign
                if sign in "()[]{},.!'"
                else f" {sign} "
            )
        case "mfrac", [over, under]:
            return f"{_grouped(over)}/{_grouped(under)}"
        case "msqrt", _:
            return f"sqrt({''.join(parts).strip()})"
        case "mroot", [base, index]:
            return f"{_grouped(base)}^(1/{index.strip()})"
        case (("msup" | "mover"), [base, over]):
            return _grouped(base) + raised.script("^", over.strip())
        case (("msub" | "munder"), [base, under]):
            return base.strip() + raised.script("_", under.strip())
        case (("msubsup" | "munderover"), [base, under, over]):
            return base.strip() + raised.script("_", under.strip()) + raised.script("^", over.strip())
        case (("mtd" | "mtr" | "mlabeledtr"), _):
            return "".join(parts) + ("; " if node.tag == "mtr" else " ")
        case "mfenced", _:
            return f"({', '.join(part.strip() for part in parts)})"
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
    if element.tag == "sup":
        text = raised.raised(text, _text_before(element), element.query_selector("i, em, var") is not None)
    else:
        text = raised.lowered(text)
    element.replace_with(tree.create_text_node(text))


def _is_note(element, text: str) -> bool:
    link = element.query_selector("a[href*='#']") or element.closest("a[href*='#']")
    return _NOTE.fullmatch(text) is not None and (link is not None or (text[0], text[-1]) == ("[", "]"))


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
    kind, step = items.getattr("type") or "1", -1 if items.hasattr("reversed") else 1
    started = items.getattr("start") or str(len(rows) if step < 0 else 1)
    if (kind, started, step) == ("1", "1", 1) and not any(row.hasattr("value") for row in rows):
        return
    number = _whole(started, 1)
    for row in rows:
        number = _whole(row.getattr("value"), number)
        first = next((node for node in row.child_nodes.values() if node.text.strip()), row)
        label = tree.create_text_node(f"{MARK}{_label(number, kind)}.{MARK}")
        place = first if first.tag == "p" else row
        place.insert_before(label, place.first_child) if place.first_child is not None else place.append(label)
        number += step


def _whole(text: str | None, default: int) -> int:
    try:
        return int(text or "")
    except ValueError:
        return default


def _label(number: int, kind: str) -> str:
    if kind not in "aAiI" or not 0 < number <= _MOST_NUMBERED:
        return str(number)
    label = ""
    if kind in "aA":
        while number:
            number, letter = divmod(number - 1, 26)
            label = chr(ord("a") + letter) + label
    else:
        for value, letters in _ROMAN:
            label += letters * (number // value)
            number %= value
    return label.upper() if kind.isupper() else label
