"""Fixes characters: mojibake (by ftfy), normal form C, white space, invisible characters.

No meaning changes: NFC, not NFKC, keeps x², ﬁ and full-width forms; quotes, tabs and indentation stay.
"""

import re
import unicodedata

import ftfy

from jaxlm.corpus.stage import Document, Edits, Remove, Stage

# What UTF-8 looks like when read as Latin-1 or Windows-1252, as Windows-1251, as Mac Roman; and C1 controls, which were
# punctuation of Windows-1252. ftfy is slow: only lines that hold one of these go to it.
_HIGH = "\u0080-\u00bf\u0152-\u0192\u02c6\u02dc\u2013-\u2122"
_SUSPICIOUS = re.compile(
    rf"[\u00c2-\u00f4][{_HIGH}]|[\u0420\u0421][\u0400-\u040f\u0450-\u045f{_HIGH}]|\u201a\u00c4|\u221a[\u00a1-\u00ff]|"
    "[\u0080-\u009f]"
)
_FTFY = ftfy.TextFixerConfig(
    unescape_html=False,
    remove_terminal_escapes=False,
    fix_latin_ligatures=False,
    fix_character_width=False,
    uncurl_quotes=False,
    fix_line_breaks=False,
    fix_surrogates=False,
    remove_control_chars=False,
    normalization=None,
    explain=False,
)
_PLAIN = bytes([9, 10, *range(0x20, 0x7F)])
_LINE_ENDS = re.compile("[\r\x0b\x0c\u2028\u2029]\n?")
_OVERSTRIKES = re.compile("[^\n\x08]\x08")  # of manual pages: "_\x08N_\x08A"
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[@-Z\\^_=>])")  # of terminals
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\ufdd0-\ufdef\ufff9-\ufffb\ufffe\uffff]")
_SPACES = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f]")  # U+3000, the space of Chinese and Japanese, stays

_UNSEEN = re.compile("[\u00ad\u061c\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff\U000e0001-\U000e007f]")
# Scripts from right to left need marks and isolates; nobody needs overrides, which show a text in another order.
_RIGHT_TO_LEFT = re.compile("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\U00010800-\U00010fff\U0001e800-\U0001efff]")
_BIDI = re.compile("[\u202a-\u202e\u206a-\u206f]")
_MARKS = re.compile("[\u061c\u200e\u200f\u2066-\u2069]")
# Soft hyphen, word joiner, invisible operators, byte order mark.
_INVISIBLE = re.compile("[\u00ad\u2060-\u2064\ufeff]")
# A zero-width space says where a line may break: of use between words of Thai, Lao, Burmese and Khmer only.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
_BREAKS = re.compile(f"(?<![{_UNSPACED}])\u200b+|\u200b+(?![{_UNSPACED}\u200b])")
# Joiners shape the letters of these scripts, and join emoji into one.
_SHAPED = "\u0590-\u109f\u1700-\u1cff\ua800-\uabff\ufb1d-\ufdff\ufe70-\ufefc\U00010a00-\U00011fff"
_EMOJI = "\u00a9\u00ae\u203c-\u2bff\u3030\u303d\u3297\u3299\ufe0f\U0001f000-\U0001faff\U000e007f"
_J = "\u200c\u200d"
_JOINERS = re.compile(
    f"(?<![{_SHAPED}{_EMOJI}{_J}])[{_J}]+(?![{_SHAPED}{_J}])|(?<=[{_EMOJI}])[{_J}]+(?![{_SHAPED}{_EMOJI}{_J}])"
)
# Tag characters spell the flags of regions, after a black flag; elsewhere they hide text.
_TAGS = re.compile("(?<![\U0001f3f4\U000e0020-\U000e007f])[\U000e0001-\U000e007f]+")

_TRAILING = re.compile("(?<![ \t])[ \t]+$", re.M)


class Unicode(Stage):
    """Fixes a document's characters; removes a document if too many of them could not be decoded."""

    def apply(self, document: Document, edits: Edits) -> Remove | None:
        text = document.text
        try:
            rare = _rare(text)
        except UnicodeEncodeError:
            # Pairs of surrogates are characters that JSON spelled in two parts; single ones are damage, and become U+FFFD.
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            edits["surrogates"] += 1
            rare = _rare(text)
        if _LINE_ENDS.search(rare):
            text = _replace(_LINE_ENDS, "\n", text, "line_ends", edits)
        if self.settings.mojibake and _SUSPICIOUS.search(rare):
            text = _mend(text, edits)
            rare = _rare(text)
        lost, most = rare.count("\ufffd"), self.settings.max_undecodable
        if lost > most * len(text):
            return Remove("undecodable", f"U+FFFD={lost / len(text):.4f}, max_undecodable={most}")
        if rare:
            text = self._unusual(text, rare, document.metadata.get("format") == "code", edits)
        document.text = self._blanks(text, edits)
        return None

    def _unusual(self, text: str, rare: str, code: bool, edits: Edits) -> str:
        """Removes control and invisible characters, and applies normal form C."""
        if _CONTROLS.search(rare):
            for name, pattern in (("overstrikes", _OVERSTRIKES), ("escapes", _ESCAPES), ("controls", _CONTROLS)):
                text = _replace(pattern, "", text, name, edits)
        if _SPACES.search(rare):
            text = _replace(_SPACES, " ", text, "spaces", edits)
        if _UNSEEN.search(rare):
            text = _unseen(text, code, edits)
        if not unicodedata.is_normalized("NFC", text):
            text = unicodedata.normalize("NFC", text)
            edits["nfc"] += 1
        return text

    def _blanks(self, text: str, edits: Edits) -> str:
        """Removes white space at line ends, long runs of blank lines, and blank lines at both ends."""
        if " \n" in text or "\t\n" in text or text.endswith((" ", "\t")):
            text = _replace(_TRAILING, "", text, "trailing", edits)
        most = "\n" * (self.settings.max_blank_lines + 1)
        if most + "\n" in text:
            text = _replace(re.compile(f"{most}\n+"), most, text, "blank_lines", edits)
        return text.strip("\n")


def _replace(pattern: re.Pattern, by: str, text: str, name: str, edits: Edits) -> str:
    text, count = pattern.subn(by, text)
    if count:
        edits[name] += count
    return text


def _rare(text: str) -> str:
    """Returns the text without plain characters: all that needs fixing is in this short rest, which is fast to search."""
    return text.encode().translate(None, _PLAIN).decode()


def _mend(text: str, edits: Edits) -> str:
    """Fixes mojibake line by line, because the parts of a page may have been read with different code pages."""
    lines = text.split("\n")
    for i, line in enumerate(lines):
        if _SUSPICIOUS.search(line) and (mended := ftfy.fix_text(line, _FTFY)) != line:
            lines[i] = mended
            edits["mojibake"] += 1
    return "\n".join(lines)


def _unseen(text: str, code: bool, edits: Edits) -> str:
    """Removes invisible characters. Keeps joiners that a script or an emoji needs."""
    text = _replace(_BIDI, "", text, "bidi", edits)
    if code or not _RIGHT_TO_LEFT.search(text):
        text = _replace(_MARKS, "", text, "bidi", edits)
    for pattern in (_INVISIBLE, _BREAKS, _JOINERS, _TAGS):
        text = _replace(pattern, "", text, "invisible", edits)
    return text
