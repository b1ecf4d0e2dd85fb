"""Powers and indices as text: ^x and _x, ^{..} and _{..} for more than a character."""

import re

_ORDINAL = re.compile(r"(?:st|nd|rd|th|e|er|re|ère|ème|eme|nde?|o|a|os|as|º|ª)", re.I)
_BASE = re.compile(r"[^\W\d_]+$")
_OF_POWERS = frozenset("+-\u2212*\u2032")
_LONGEST = 30  # characters; a longer text is small print
_MOST_WORDS = 3


def raised(text: str, before: str, variable: bool = False) -> str:
    """Returns a superscript that stands behind `before`. What is raised by custom stays plain: 1st, Mlle, a trademark.

    variable: True if the text is set as a variable of a formula.
    """
    return text if is_small_print(text) or _is_plain(text, before, variable) else script("^", text)


def lowered(text: str) -> str:
    return text if is_small_print(text) else script("_", text)


def script(sign: str, text: str) -> str:
    return sign + (text if len(text) == 1 else f"{{{text}}}") if text else ""


def is_small_print(text: str) -> bool:
    return len(text) > _LONGEST or len(text.split()) > _MOST_WORDS


def _is_plain(text: str, before: str, variable: bool) -> bool:
    if not text.isalpha():
        return not any(map(str.isalnum, text)) and _OF_POWERS.isdisjoint(text)
    if variable:
        return False
    if not before or before[-1].isspace():  # of no base: a word that is set high
        return True
    if _ORDINAL.fullmatch(text) and before[-1:].isalnum():
        return before[-1].isdecimal() or len(text) > 1 or before[-2:].isupper() or (before[-1] in "nN" and text == "o")
    base = _BASE.search(before)
    return base is not None and (len(base[0]) > 1 or (len(text) > 1 and base[0].isupper() and text.islower()))
