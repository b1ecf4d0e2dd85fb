"""Replaces templates of wikis by their words. The shape of a template decides which, its name only where the shape misleads.

A wiki's own templates would be needed to expand them. Without these, a template inside a sentence becomes its first words, a
number with its unit, or a date. A template that follows a word without a space is a note, one that stands alone on a line is
a box unless it holds a quotation: both are removed.
"""

import collections
import re
from collections.abc import Callable, Mapping, Sequence

from jaxlm.corpus import raised

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
    changed = True
    while changed:
        before = text
        text = _FLAT.sub(lambda match: _said(match, silent), text)
        changed = text != before
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
    if len(before) - len(bare) and not following.startswith("'"):
        return True
    return not following.isalnum()


def _inside(name: str, positional: Sequence[str], named: Mapping[str, str]) -> str:
    """Returns the words that replace a template inside a sentence; "" for none."""
    if not positional:
        return _named_text(named)
    if any(key in _DATED for key in named) and not _NUMBER.fullmatch(positional[0]):
        return ""
    first, rest = positional[0], positional[1:]
    if _NUMBER.fullmatch(first):
        number = _date(positional) or _grouped(positional) or _pair(positional) or _quantity(positional)
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
    if rest and (_CODE.fullmatch(first) or _COLOUR.fullmatch(first)):
        return rest[0]
    if rest and first.isalpha() and first.islower() and " " in rest[0]:  # a colour, a size, a kind
        return rest[0]
    foreign = [word for word in rest[:2] if _is_foreign(first, word)]
    return f"{first} ({', '.join(rest[:2])})" if foreign else first


def _is_foreign(first: str, word: str) -> bool:
    """Returns True if `first` is ASCII, and `word` has letters, but none of the Latin alphabet."""
    return bool(_WORD.search(word)) and first.isascii() and not re.search(r"[A-Za-z]", word)


def _date(words: Sequence[str]) -> str:
    """Returns year, month and day as 1879-03-14; "" if the words are none."""
    if len(words) < 3 or not all(word.isdecimal() for word in words[:3]):
        return ""
    year, month, day = map(int, words[:3])
    return f"{year}-{month:02}-{day:02}" if year > 31 and 1 <= month <= 12 and 1 <= day <= 31 else ""


def _grouped(words: Sequence[str]) -> str:
    """Returns the groups of digits of one number; "" if the words are no such groups."""
    if len(words) < 3 or not all(word.isdecimal() and len(word) == 3 for word in words[1:]):
        return ""
    return ",".join(words) if words[0].isdecimal() and len(words[0]) <= 3 else ""


def _pair(words: Sequence[str]) -> str:
    """Returns two whole numbers as a fraction, or as a range of years; "" for other words."""
    if len(words) != 2 or not all(word.isdecimal() for word in words):
        return ""
    return ("\u2013" if len(words[0]) > 2 else "/").join(words)


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
