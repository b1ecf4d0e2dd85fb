"""Rules of thumb for prose, from Gopher (arXiv:2112.11446, table A1), C4 (arXiv:1910.10683) and FineWeb (arXiv:2406.17557).

Rules, names and verdicts are datatrove's (tests compare them). They are computed here, because datatrove's Gopher rules take
more time than all other stages together, and its C4 rules lose indentation.
"""

import collections
import pathlib
import re
from collections.abc import Iterator

import numpy as np

from jaxlm.corpus import words
from jaxlm.corpus.dedup.signatures import ngram_hashes
from jaxlm.corpus.stage import Document, Edits, Remove, Settings, Stage, first_broken


class _Prose(Stage):
    def apply(self, document: Document, edits: Edits) -> Remove | None:
        return None if document.metadata.get("format") == "code" else self._apply(document, edits)


class GopherQuality(_Prose):
    """Removes documents whose number and length of words, marks, bullets or stop words lie outside the limits of prose."""

    def __init__(self, settings: Settings, folder: pathlib.Path):
        from datatrove.utils.text import PUNCTUATION_SET

        super().__init__(settings, folder)
        self._punctuation = PUNCTUATION_SET
        self._stop_words = frozenset(settings.stop_words)

    def _apply(self, document: Document, edits: Edits) -> Remove | None:
        return first_broken(self._rules(document.text))

    def _rules(self, text: str) -> Iterator[tuple[bool, str, str]]:
        s, counts = self.settings, collections.Counter(words.split(text))
        n_words = counts.total()
        n_plain = n_plain_chars = n_alphabetic = 0
        for word, count in counts.items():
            if not self._punctuation.issuperset(word):
                n_plain += count
                n_plain_chars += count * len(word)
                if word.isalpha() or any(map(str.isalpha, word)):
                    n_alphabetic += count
        yield n_plain < s.min_words, "gopher_short_doc", f"words={n_plain}, min_words={s.min_words}"
        yield 0 < s.max_words < n_plain, "gopher_long_doc", f"words={n_plain}, max_words={s.max_words}"
        mean, least, most = n_plain_chars / max(n_plain, 1), s.min_mean_word_length, s.max_mean_word_length
        yield mean < least, "gopher_below_avg_threshold", f"letters a word={mean:.2f}, min={least}"
        yield 0 < most < mean, "gopher_above_avg_threshold", f"letters a word={mean:.2f}, max={most}"
        lines, ellipses = text.splitlines(), text.count("...") + text.count("…")
        bullets = sum(line.lstrip().startswith(("•", "-")) for line in lines)
        open_ends = sum(line.rstrip().endswith(("...", "…")) for line in lines) if ellipses else 0
        for reason, count, of, limit in (
            ("gopher_too_many_hashes", text.count("#"), n_words, s.max_symbols_per_word),
            ("gopher_too_many_ellipsis", ellipses, n_words, s.max_symbols_per_word),
            ("gopher_too_many_bullets", bullets, len(lines), s.max_bullet_lines),
            ("gopher_too_many_end_ellipsis", open_ends, len(lines), s.max_ellipsis_lines),
        ):
            yield 0 < limit < count / max(of, 1), reason, f"{count} of {of}, max={limit}"
        least, n_stop = s.min_alphabetic_words, sum(map(counts.__contains__, self._stop_words))
        few = n_alphabetic / max(n_words, 1) < least
        yield few, "gopher_below_alpha_threshold", f"{n_alphabetic} of {n_words}, min={least}"
        facts = f"stop words={n_stop}, min_stop_words={s.min_stop_words}"
        yield n_stop < s.min_stop_words, "gopher_enough_stop_words", facts


def _repeated(parts: list[str]) -> tuple[int, int]:
    """Returns how many of the parts have come before, and how many characters these have."""
    counts = collections.Counter(parts)
    return len(parts) - len(counts), sum(len(part) * (n - 1) for part, n in counts.items())


class GopherRepetition(_Prose):
    """Removes documents that repeat too many of their lines, paragraphs or n-grams of words."""

    def __init__(self, settings: Settings, folder: pathlib.Path):
        super().__init__(settings, folder)
        self._top = [(n, limit) for n in (2, 3, 4) if (limit := getattr(settings, f"top_{n}_gram"))]
        self._dup = [(n, limit) for n in range(5, 11) if (limit := getattr(settings, f"dup_{n}_gram"))]
        self._least = min((limit for _, limit in self._dup), default=0.0)

    def _apply(self, document: Document, edits: Edits) -> Remove | None:
        if not document.text:
            return Remove("empty")
        shares = self._shares(document.text)
        return first_broken((share > limit, reason, f"{share:.3f}, max={limit}") for reason, share, limit in shares)

    def _shares(self, text: str) -> Iterator[tuple[str, float, float]]:
        """Yields (rule, the share of the text that repeats, the most that may), without rules that are off."""
        for kind, parts in (("para", re.split(r"\n{2,}", text.strip())), ("line", re.split(r"\n+", text))):
            repeated, chars = _repeated(parts)
            for unit, share in (("", repeated / len(parts)), ("_char", chars / len(text))):
                if limit := getattr(self.settings, f"dup_{kind}{unit}_frac"):
                    yield f"dup_{kind}{unit}_frac", share, limit
        grams = _Grams(words.split(text))
        for n, limit in self._top:
            yield f"top_{n}_gram", grams.top_chars(n) / len(text), limit
        for n, limit in self._dup:
            ordered = grams.ordered(n)
            covered = grams.covered_chars(n, *ordered) / len(text)
            if covered > limit:
                yield f"duplicated_{n}_n_grams", grams.repeated_chars(n, *ordered) / len(text), limit
            if covered <= self._least:
                return  # longer n-grams cover no more than the shorter ones inside them


class _Grams:
    """The n-grams of a document's words, as 64-bit hashes of the words' numbers; n up to 10."""

    def __init__(self, tokens: list[str]):
        numbers = {word: i for i, word in enumerate(dict.fromkeys(tokens), 1)}
        self._words = np.fromiter(map(numbers.__getitem__, tokens), np.uint64, len(tokens))
        self._lengths = np.fromiter(map(len, numbers), np.int64, len(numbers))[self._words.astype(np.int64) - 1]
        self._ends = np.concatenate([[0], np.cumsum(self._lengths)])
        self._hashes = [self._words, *ngram_hashes(self._words, [*range(1, 11)])]

    def top_chars(self, n: int) -> int:
        """Returns the length (with spaces) of the most frequent n-gram, the first of equals, times its count.

        0 if none occurs twice. (Datatrove then takes the first n-gram, a large share of a short text that repeats nothing.)
        """
        _, places, counts = np.unique(self._hashes[n], return_index=True, return_counts=True)
        most = counts.max(initial=0)
        if most < 2:
            return 0
        first = places[counts == most].min()
        return int(most * (self._ends[first + n] - self._ends[first] + n - 1))

    def ordered(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the n-grams' places sorted by hash, and, from the second on, True if an n-gram equals the previous."""
        order = np.argsort(self._hashes[n], kind="stable")
        hashes = self._hashes[n][order]
        return order, hashes[1:] == hashes[:-1]

    def covered_chars(self, n: int, order: np.ndarray, same: np.ndarray) -> int:
        """Returns the number of characters of words inside n-grams that have occurred before."""
        again = order[1:][same]
        size = len(self._words) + 1
        inside = np.cumsum(np.bincount(again, minlength=size) - np.bincount(again + n, minlength=size)) > 0
        return int(self._lengths[inside[:-1]].sum())

    def repeated_chars(self, n: int, order: np.ndarray, same: np.ndarray) -> int:
        """Returns the number of characters of repeated n-grams, from left to right and without overlap, as in datatrove."""
        often = np.zeros(len(order), bool)
        often[1:] = same
        often[:-1] |= same
        places = np.sort(order[often])  # the others occur once
        seen = set()
        end = chars = 0
        for i, gram in zip(places.tolist(), self._hashes[n][places].tolist(), strict=True):
            if i < end:
                continue
            if gram in seen:
                chars += int(self._ends[i + n] - self._ends[i])
                end = i + n
            else:
                seen.add(gram)
        return chars


class C4(_Prose):
    """Removes the lines that C4's rules reject, and documents with too little left. Other lines keep their form."""

    def __init__(self, settings: Settings, folder: pathlib.Path):
        from datatrove.pipeline.filters import c4_filters

        super().__init__(settings, folder)
        self._rules = c4_filters

    def _apply(self, document: Document, edits: Edits) -> Remove | None:
        s = self.settings
        lines, n_sentences, changed = [], 0, False
        for line in document.text.splitlines():
            if not line.strip():
                lines.append("")
                continue
            rule, text = self._line(line)
            if rule in ("lorem_ipsum", "curly_bracket"):
                return Remove(rule, text.strip())
            if rule:
                edits[rule] += 1
                changed = True
                continue
            if text != line:
                edits["citation"] += 1
                changed = True
            if s.min_sentences > 0:
                n_sentences += len(words.sentence_ends(text))
            lines.append(text)
        if n_sentences < s.min_sentences:
            return Remove("too_few_sentences", f"sentences={n_sentences}, min_sentences={s.min_sentences}")
        if changed:
            document.text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")
        return None

    def _line(self, line: str) -> tuple[str, str]:
        """Returns (the rule that the line breaks, "" if none; the line without citations)."""
        s, tokens = self.settings, line.split()
        if s.max_word_length > 0 and len(line) > s.max_word_length and max(map(len, tokens)) > s.max_word_length:
            return "too_long_word", line
        if s.citations and "[" in line:
            line = self._rules.CITATION_REGEX.sub("", line)
        end, lower = line.rstrip(), line.lower()
        ended = end.endswith(self._rules.END_PUNCTUATION) and not end.endswith(self._rules.ELLIPSIS)
        rules = {
            "no_terminal_punc": s.terminal_punctuation and not ended,
            "too_few_words": len(tokens) < s.min_words_per_line,
            "lorem_ipsum": s.lorem_ipsum and "lorem ipsum" in lower,
            "javascript": s.javascript and "javascript" in lower,
            "curly_bracket": s.curly_bracket and "{" in line,
            "policy": s.policy and any(phrase in lower for phrase in self._rules.POLICY_SUBSTRINGS),
        }
        return next((rule for rule, broken in rules.items() if broken), ""), line


class FineWeb(_Prose):
    """Removes lists, menus and debris of pages: documents whose lines seldom end in punctuation, are short, or repeat."""

    def __init__(self, settings: Settings, folder: pathlib.Path):
        from datatrove.utils.text import TERMINAL_PUNCTUATION

        super().__init__(settings, folder)
        self._ends = tuple(TERMINAL_PUNCTUATION)

    def _apply(self, document: Document, edits: Edits) -> Remove | None:
        return first_broken(self._rules(document.text))

    def _rules(self, text: str) -> Iterator[tuple[bool, str, str]]:
        s, lines = self.settings, [line for line in text.split("\n") if line.strip()]
        yield not lines, "empty", ""
        ended = sum(line.endswith(self._ends) for line in lines) / len(lines)
        yield ended < s.min_punctuated_lines, "line_punct_ratio", f"min_punctuated_lines={s.min_punctuated_lines}"
        short = sum(len(line) <= s.short_line_chars for line in lines) / len(lines)
        yield short > s.max_short_lines, "short_line_ratio", f"max_short_lines={s.max_short_lines}"
        share, most = _repeated(lines)[1] / len(text.replace("\n", "")), s.max_repeated_line_chars
        yield share > most, "char_dup_ratio", f"max_repeated_line_chars={most}"
        newlines, most = text.count("\n") / len(words.split(text)), s.max_newlines_per_word
        yield newlines > most, "list_ratio", f"max_newlines_per_word={most}"
