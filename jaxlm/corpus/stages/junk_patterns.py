"""Patterns of known junk, in named groups. The audit counts what they match; the stage `junk` removes it.

Sources of the patterns: ATOMIC's PersonX (Sap et al. 2019); Universal Dependencies' tags; the Penn Treebank's brackets;
CoNLL-2003's entity tags; BERT's, T5's and fastai's special tokens; SentencePiece's, GPT-2's, BERT's and BPE's marks of
word pieces; ChatML's, Llama's, Gemma's and DeepSeek's chat tokens; WikiText's `<unk>` and `@-@`; GSM8K's calculator marks.
"""

import bisect
import dataclasses
import re
from collections.abc import Iterator

# A token in these is talked about, not leaked: "the `[MASK]` token".
_QUOTES = frozenset("`\"'\u201c\u201d\u2018\u2019")


_FENCE = re.compile(r"^[ \t]*(?:```|~~~)", re.MULTILINE)
_CODE_LINE = re.compile(r" {4}|\t|>>> |\$ |\|")


class Shown:
    """Tells which places of a text are shown as they are: code, commands, tables."""

    def __init__(self, text: str):
        self._text = text
        has_fences = "```" in text or "~~~" in text
        self._fences = [match.start() for match in _FENCE.finditer(text)] if has_fences else []

    def at(self, start: int, end: int) -> bool:
        """Returns True if text[start:end] stands in a code block, an indented line, a table or quotes."""
        text = self._text
        if bisect.bisect(self._fences, start) % 2 or {text[start - 1 : start], text[end : end + 1]} & _QUOTES:
            return True
        return _CODE_LINE.match(text, text.rfind("\n", 0, start) + 1, start) is not None


@dataclasses.dataclass(frozen=True)
class Group:
    """Patterns of one kind of junk. A match's label is its named group, or its text; its group `keep` is never removed."""

    pattern: re.Pattern[str]
    needles: tuple[str, ...]  # a text without any of these has no match; () to search always
    severity: float  # how surely a match is junk, 0 to 1
    about: str  # what the matches are, for people
    mentions: bool = False  # a match in quotes or backticks is talked about, and stays
    label: str = ""  # of all matches, where these all differ (base64)
    min_run: int = 0  # characters without a space that every match needs
    debris: re.Pattern[str] = re.compile("")

    def matches(self, text: str) -> Iterator[re.Match[str]]:
        """Yields all matches in a text, in order."""
        if self.needles and not any(needle in text for needle in self.needles):
            return
        for match in self.pattern.finditer(text):
            start, end = match.span()
            if self.mentions and text[start - 1 : start] in _QUOTES and text[end : end + 1] in _QUOTES:
                continue
            yield match

    def label_of(self, match: re.Match[str]) -> str:
        """Returns the label under which a match is counted. Many matches share few labels."""
        if self.label or match.lastgroup not in (None, "keep"):
            return self.label or match.lastgroup.replace("_", " ")
        return re.sub(r"\d+", "0", " ".join(match[0].split()))[:80]

    def remover(self, name: str, label: str) -> str:
        """Returns the pattern by which the stage `junk` removes a label: the group's name, or one for this label alone."""
        if label == "stack frame":
            return STACK_FRAME
        if self.severity >= _SURE or self.label or label.replace(" ", "_") in self.pattern.groupindex:
            return name
        return re.escape(label).replace(r"\ ", r"\s+").replace("0", r"\d+")


def _compile(*alternatives: str) -> re.Pattern[str]:
    return re.compile("|".join(alternatives), re.MULTILINE)


_SURE = 0.8  # a severity from which on a whole group may be removed
STACK_FRAME = r"^[ \t]*at [\w.$<> \[\]]+\((?:[^()\n]*:\d+|Native Method|Unknown Source)\)[ \t]*$"
# Lines around a page's text, such as menus. Only lines that many documents repeat are compared with this.
FURNITURE = re.compile(
    r"\bskip to (?:the )?(?:main |primary )?(?:content|navigation)|\bback to top\b|\btoggle navigation\b"
    r"|\b(?:we|site|page|website)\b.{0,20}\buses? cookies\b"
    r"|\b(?:accept|use of|our) (?:all )?cookies\b|\bcookie (?:policy|settings)\b"
    r"|\bprivacy (?:policy|notice)\b|\bterms (?:of (?:use|service)|and conditions)\b|\ball rights reserved\b"
    r"|\b(?:sign up|subscribe) (?:to|for)\b|\bnewsletter\b|\bfollow us\b|\b(?:share|tweet) this\b|\bshare on [A-Z]"
    r"|\bposted (?:on|by|in)\b.*\b0|\b0 comments?\b|\bleave a (?:reply|comment)\b|\bread more\b|\bclick here\b"
    r"|\bpowered by [A-Z]|\b(?:please )?enable javascript\b|\badvertisement\b|\badd to (?:cart|basket)\b",
    re.IGNORECASE,
)

_LETTERS = r"A-Za-z\u00c0-\u024f\u0400-\u04ff"
_LOG_LINE = (
    r"[VDIWEF]/[\w.:-]+ *\( *\d+\):.*"  # Android's
    r"|(?:\d\d-\d\d |\w{3} [ \d]\d |\[?\d{4}[-/]\d\d[-/]\d\d[T ])\d\d:\d\d:\d\d\S* +(?:[^\s:]+ +){0,3}?\[?"
    r"(?:[VDIWEF] [\w.]+ *:|[\w./-]+\[\d+\]:|(?:TRACE|DEBUG|INFO|WARN|WARNING|ERROR|FATAL)\b).*"  # Android's, syslog's
    r"|[\d.:a-f]{7,} \S+ \S+ \[[^\]\n]+\] \"[A-Z]+ .*"  # a web server's
)
_LOG_NEEDLES = (
    *("E/", "W/", "D/", " INFO", " WARN", " ERROR", " DEBUG", "FATAL", "]:", '] "'),
    *(" E ", " W ", " D ", " I "),
)

GROUPS = {
    "annotation": Group(
        _compile(
            r"\bPerson[XYZ]\b",
            r"\b(?:PROPN|SCONJ|CCONJ)\b",
            r"-(?:[LR][RSC]B|DOCSTART)-",
            r"\b[BI]-(?:PER|ORG|LOC|MISC|GPE)\b",
            r"\[(?:MASK|CLS|SEP|PAD)\]",
            r"<extra_id_\d+>",
            r"\bxx(?:bos|maj|unk|fld|rep|wrep)\b",
            r"(?P<word_tag>\b\w+/(?:NNPS?|NNS|VB[DGNPZ]|JJ[RS]|PRP\$)(?!\w))",
            r"(?P<word_pieces>(?:\u2581\w+ ?){3,}|(?:\u0120\w+ ?){3,}|\b\w+ \#\#[a-z]{1,8}\b|\w@@ \w+)",
        ),
        needles=(
            *("PersonX", "PersonY", "PersonZ", "PROPN", "CONJ", "B-", "-DOCSTART-", "MASK]", "CLS]", "SEP]", "PAD]"),
            *("<extra_id_", "xxbos", "xxmaj", "xxunk", "/NN", "\u2581", "\u0120", " ##", "@@ "),
        ),
        severity=1.0,
        about="labels of a data set",
        mentions=True,
    ),
    "chat_tokens": Group(
        _compile(
            # `<|x|>` alone may be mathematics; these names, and names with an underscore, are not.
            r"<\|(?:endoftext|endofprompt|startoftext|system|user|assistant|[a-z0-9]+(?:_[a-z0-9]+)+)\|>",
            r"\[/?INST\]",
            r"<</?SYS>>",
            r"<(?:start|end)_of_turn>",
            r"<(?:bos|eos)>",
            "<\uff5c[^\uff5c\\n]{2,40}\uff5c>",
            # Where </s> can't be HTML's end of struck text: before <s>, at the beginning of a line, at the end of the text.
            r"</s>(?=\s*(?:<s>|\Z))|^[ \t]*</s>",
        ),
        ("<|", "INST]", "SYS>>", "_of_turn>", "<bos>", "<eos>", "<\uff5c", "</s>"),
        1.0,
        "tokens of a chat template",
        mentions=True,
    ),
    "unk": Group(
        _compile(r"<unk>", r"\[UNK\]", r"\s?\u2047\s?", r"\s?@(?P<keep>[-,.])@\s?"),
        ("<unk>", "[UNK]", "\u2047", "@-@", "@,@", "@.@"),
        1.0,
        "stands for text that was lost",
        mentions=True,
    ),
    "lorem": Group(
        re.compile(r"lorem ipsum|dolor sit amet|consectetur adipiscing", re.IGNORECASE),
        ("orem ipsum", "olor sit amet", "onsectetur adip", "OREM IPSUM", "orem Ipsum"),
        0.8,
        "filler text",
        mentions=True,
    ),
    "assistant": Group(
        _compile(
            r"\b[Aa]s an? (?:AI|large) language model\b",
            r"\bmy knowledge cut-?off\b",
            r"\bI(?:'m| am) sorry, but I can(?:not|'t) (?:assist|help|fulfil+)\b",
        ),
        (" language model", "knowledge cut", " sorry, but I can"),
        0.8,
        "a chat model's phrases",
    ),
    "base64": Group(
        _compile(
            r"(?<![A-Za-z0-9+/])(?=[A-Za-z0-9+/]{40})(?:"
            r"(?=\S{0,60}\d)(?=\S{0,60}[a-z])(?=\S{0,60}[A-Z])[A-Za-z0-9+/]{60,}={0,2}"
            r"|(?:0x)?(?=\d*[a-fA-F])(?=[a-fA-F]*\d)[0-9a-fA-F]{40,}\b)",
        ),
        (),
        0.7,
        "encoded bytes",
        label="base64 or hex blob",
        min_run=40,
    ),
    "markup": Group(
        _compile(
            r"&(?:nbsp|amp|lt|gt|quot|apos|mdash|ndash|hellip|[lr][ds]quo);",
            r"(?P<numeric_entity>&#(?:\d{1,6}|[xX][0-9a-fA-F]{1,5});)",
            # `<style>`, `<table>` alone are how manuals write "a style", "a table".
            r"(?P<tags></?(?:b|br|center|div|em|h[1-6]|hr|li|ol|p|span|strong|td|tr|u|ul)(?:\s[^<>\n]{0,300})?/?>"
            r"|</(?:a|font|i|script|style|table)>|<(?:a|font|i|img|script|style|table)\s[^<>\n]{0,300}>)",
        ),
        ("&", "<"),
        0.7,
        "markup left over",
    ),
    "calculator": Group(  # GSM8K's: <<48/2=24>>
        re.compile(r"(?P<calculator_mark><<(?=[^<>\n]*\d)[^<>\n]{1,80}=[^<>\n]{1,40}>>)"),
        ("<<",),
        0.6,
        "GSM8K's calculator marks",
    ),
    "template": Group(
        _compile(
            # Not after a letter, backslash, brace, ^ or _: those are LaTeX.
            r"(?<![\w\\{}^])\{\{[#/>&!^]?\s*[A-Za-z_][^{}\n]{0,80}\}\}(?!\})",
            r"\{%-?\s*\w[^%\n]{0,120}%\}",
            r"\$\{[A-Za-z_][\w.-]*\}",
            r"%\([A-Za-z_]\w*\)[sdrif]\b",
            r"<%[=#-]?[^%\n]{1,120}%>",
        ),
        ("{{", "{%", "${", "%(", "<%"),
        0.6,
        "a template not filled in",
        mentions=True,
        debris=re.compile(r"\{\{|\{%|<%"),
    ),
    "hex_colour": Group(
        re.compile(r"#(?=\d{0,5}[a-fA-F])[0-9a-fA-F]{6}\b(?:[^#\n]{0,40}\n?[^#\n]{0,40}#[0-9a-fA-F]{6}\b){2,}"),
        ("#",),
        0.5,
        "style sheets",
        label="run of hex colours",
    ),
    "exception": Group(
        _compile(
            rf"(?P<stack_frame>{STACK_FRAME})",
            r'(?P<traceback_frame>^[ \t]*File "[^"\n]+", line \d+, in \S+)',
            r"Traceback \(most recent call last\)",
            r"\b(?:[a-z_]\w*+\.)*+[A-Z]\w+(?:Exception|Error)\b",
            r"\bAndroidRuntime\b|\bFATAL EXCEPTION\b|\bSegmentation fault\b",
        ),
        (
            *("Exception", "Error", "Traceback (", "AndroidRuntime", "FATAL EXC", "Segmentation f"),
            *("    at ", "\tat ", '", line '),
        ),
        0.4,
        "a program's errors",
        debris=re.compile(r"AndroidRuntime|FATAL EXCEPTION|stack frame"),
    ),
    "invisible": Group(
        re.compile(rf"(?<=[{_LETTERS}])[\u200b-\u200d\u2060\ufeff]+(?=[{_LETTERS}])"),
        ("\u200b", "\u200c", "\u200d", "\u2060", "\ufeff"),
        0.9,
        "characters of no width inside words, against filters",
        label="invisible character in a word",
    ),
    "homoglyph": Group(
        re.compile(r"\b(?:[a-zA-Z]+[\u0400-\u04ff]|[\u0400-\u04ff]+[a-zA-Z])[a-zA-Z\u0400-\u04ff]+\b"),
        tuple(map(chr, range(0x410, 0x450))),
        0.9,
        "Cyrillic letters in Latin words, against filters",
        label="word of two alphabets",
    ),
    "mojibake": Group(
        # UTF-8 read as Latin-1 or windows-1252: a letter with the second byte of a sign or an accented letter behind it.
        re.compile(r"\u00c3[\u0080-\u00bf\u0192\u2013-\u2022\u0152-\u017e]|\u00e2(?:\u20ac|\u0080).|\u00c2[\xa0-\xbf]"),
        ("\u00c3", "\u00e2", "\u00c2"),
        0.8,
        "text read in a wrong charset",
        label="UTF-8 read as Latin-1",
    ),
    "log_run": Group(
        re.compile(rf"(?:^(?:{_LOG_LINE})$\n?){{5,}}", re.MULTILINE),
        _LOG_NEEDLES,
        0.8,
        "five or more lines of a log",
        label="run of log lines",
    ),
    "blob": Group(
        re.compile(
            r"^[ \t]*[A-Za-z0-9+/]{200,}={0,2}[ \t]*$|(?:^[ \t]*[A-Za-z0-9+/]{60,76}={0,2}[ \t]*$\n?){4,}", re.M
        ),
        (),
        0.8,
        "encoded bytes, over 200 of them",
        label="block of base64",
        min_run=60,
    ),
    "log": Group(
        re.compile(rf"^(?:{_LOG_LINE})$", re.MULTILINE),
        _LOG_NEEDLES,
        0.7,
        "a log of a program",
        label="log line",
    ),
}
SURE = tuple(group for group in GROUPS.values() if group.severity >= _SURE)  # what they match is junk in any text
