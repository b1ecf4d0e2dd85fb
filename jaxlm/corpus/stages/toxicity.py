"""Removes profane and abusive lines, or the documents that hold many of them.

A line is bad by alt-profanity-check (a linear SVM on words, for English), or if it holds an entry of a word list.
"""

import functools
import importlib.util
import pathlib
import re
import types

import ahocorasick
import numpy as np

from jaxlm.config import ConfigError, pip_install
from jaxlm.corpus.stage import Document, Edits, Remove, Settings, Stage

_SPACELESS = re.compile("[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]")  # Thai, Japanese, Chinese


class Toxicity(Stage):
    """Scores each line that is not blank. The settings say what happens to bad lines."""

    inputs = ("words",)

    def __init__(self, settings: Settings, folder: pathlib.Path):
        super().__init__(settings, folder)
        self._list = _automaton(settings.words) if settings.words else None

    @classmethod
    def build(cls, settings: Settings, folder: pathlib.Path) -> None:
        if settings.words:
            _automaton(settings.words)
        if settings.min_score < 1:
            require("the stage toxicity", "give min_score=1 and words=FILE")

    def apply(self, document: Document, edits: Edits) -> Remove | None:
        s, lines = self.settings, document.text.split("\n")
        filled = [i for i, line in enumerate(lines) if line.strip()]
        bad = set()
        if filled and s.min_score < 1:
            scores = profanity([lines[i] for i in filled])
            bad.update(filled[i] for i in np.flatnonzero(scores >= s.min_score))
        if self._list and listed(document.text, self._list):
            bad.update(i for i in filled if listed(lines[i], self._list))
        if not bad:
            return None
        if len(bad) / len(filled) > s.max_bad_lines:
            return Remove("bad lines", f"{len(bad)} of {len(filled)}: {lines[min(bad)].strip()[:200]}")
        if s.drop_lines:
            edits["bad line"] += len(bad)
            document.text = "\n".join(line for i, line in enumerate(lines) if i not in bad)
        return None


def require(who: str, otherwise: str) -> None:
    """Raises ConfigError unless alt-profanity-check is installed: `who` needs it, `otherwise` avoids the need."""
    if not importlib.util.find_spec("profanity_check"):
        needed = f"needs alt-profanity-check: {pip_install('toxicity')}"
        raise ConfigError(f"{who} {needed}, or {otherwise}")


def profanity(lines: list[str]) -> np.ndarray:
    """Returns the same float[lines] as `profanity_check.predict_prob`, whose every call costs 8 ms more."""
    m = _model()
    margins_LxK = m.vectorizer.transform(lines) @ m.coefficients_WxK + m.intercepts_K
    return (1 / (1 + np.exp(m.slopes_K * margins_LxK + m.offsets_K))).mean(axis=1)


@functools.cache
def _model() -> types.SimpleNamespace:
    """Returns what finds a line's words, and K linear models of them, each with a sigmoid."""
    from profanity_check.profanity_check import model, vectorizer

    linear = [part.estimator for part in model.calibrated_classifiers_]
    sigmoids = [part.calibrators[0] for part in model.calibrated_classifiers_]
    return types.SimpleNamespace(
        vectorizer=vectorizer,
        coefficients_WxK=np.array([part.coef_[0] for part in linear]).T,
        intercepts_K=np.array([part.intercept_[0] for part in linear]),
        slopes_K=np.array([part.a_ for part in sigmoids]),
        offsets_K=np.array([part.b_ for part in sigmoids]),
    )


@functools.cache
def _automaton(path: str) -> ahocorasick.Automaton:
    """Builds an automaton of the file's lines, without case. "#" begins a comment."""
    try:
        lines = pathlib.Path(path).expanduser().read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prepare.stages.toxicity.words={path}: {error}; give a text, one word a line") from error
    automaton = ahocorasick.Automaton()
    for line in lines:
        if entry := " ".join(line.partition("#")[0].lower().split()):
            automaton.add_word(entry, entry)
    if not automaton:
        raise ConfigError(f"prepare.stages.toxicity.words={path} holds no word; one word or phrase a line")
    automaton.make_automaton()
    return automaton


def listed(text: str, automaton: ahocorasick.Automaton) -> str:
    """Returns the first entry in the text that is no part of a word (Chinese, Japanese, Thai: any); "" if there is none."""
    text = text.lower()
    for last, entry in automaton.iter(text):
        start, end = last + 1 - len(entry), last + 1
        part_of_word = text[start - 1 : start].isalnum() or text[end : end + 1].isalnum()
        if not part_of_word or _SPACELESS.match(entry):
            return entry
    return ""
