"""Keeps the documents that are written in certain languages, by py3langid or a local fastText model (arXiv:1607.01759).

Both get a sample of a long text, since it may begin with a licence, and prose only: code looks like other languages.
"""

import collections.abc
import functools
import pathlib
import re

import numpy as np

from jaxlm import config as config_lib
from jaxlm.config import ConfigError
from jaxlm.corpus.stage import Document, Edits, Remove, Settings, Stage

_FEATURE_BYTES = 6  # of the longest feature in py3langid 0.4's model
_NONE = ("zxx", "und")  # what the models call a text without a language
_LEAST_LETTERS = 40  # of prose; a text with fewer is judged whole
_NO_PROSE = re.compile(
    r"^ {0,3}(?P<fence>```+|~~~+).*?(?:^ {0,3}(?P=fence)[`~]*[ \t]*$|\Z)"  # a block of code
    r"|`[^`\n]+`|(?<=\])\([^()\s]*\)|\b(?:https?|ftp)://[^\s)>\]]+|</?[a-zA-Z][^<>\n]*>",  # code in a line, addresses, tags
    re.DOTALL | re.MULTILINE,
)
_INDENTED = re.compile(r"(?:\A|(?<=\n\n))(?:(?: {4}|\t)[^\n]*\n?)+")  # code, in Markdown


class Language(Stage):
    """Writes the language to metadata["language_id"]; removes documents in other or uncertain languages. Code passes."""

    inputs = ("model",)

    def __init__(self, settings: Settings, folder: pathlib.Path):
        super().__init__(settings, folder)
        self._classify = _fasttext(settings.model) if settings.model else _py3langid().classify

    @classmethod
    def build(cls, settings: Settings, folder: pathlib.Path) -> None:
        if settings.sample_chars < 100:
            raise ConfigError(f"prepare.stages.language.sample_chars={settings.sample_chars}: use 100 or more")
        if settings.model:
            _fasttext(settings.model)
            return
        known = _py3langid().labels
        for code in settings.languages:
            if code not in known:
                raise ConfigError(
                    f"prepare.stages.language.languages: no language {code!r}; {config_lib.nearest(code, known)}"
                )

    def apply(self, document: Document, edits: Edits) -> Remove | None:
        if document.metadata.get("format") == "code":
            return None
        s = self.settings
        text = prose(document.text, markdown=document.metadata.get("format") == "markdown")
        few = sum(map(str.isalpha, text[: 100 * _LEAST_LETTERS])) < _LEAST_LETTERS
        language, score = self._classify(sample(document.text if few else text, s.sample_chars))
        document.metadata["language_id"] = language
        if not s.languages or (s.keep_doubtful and (few or language in _NONE or score < s.min_score)):
            return None
        if language not in s.languages:
            return Remove("other language", f"{language} ({score:.2f})")
        if score < s.min_score:
            return Remove("uncertain language", f"{language} ({score:.2f}), min_score={s.min_score}")
        return None


def prose(text: str, markdown: bool = False) -> str:
    left = _NO_PROSE.sub(" ", text)
    return _INDENTED.sub("", left) if markdown else left


def sample(text: str, chars: int) -> str:
    """Returns the text if it is short, else `chars` characters of it: parts of its beginning, middle and end."""
    if len(text) <= chars:
        return text
    part = chars // 3
    middle = (len(text) - part) // 2
    return f"{text[:part]} {text[middle : middle + part]} {text[-part:]}"


@functools.cache
def _py3langid():
    """Returns py3langid's identifier, with its automaton run over all bytes at once: same scores, under half the time."""
    from py3langid import langid

    class Identifier(langid.LanguageIdentifier):
        def _raw_score(self, text: bytes) -> np.ndarray:
            features = self.tk_output[self._states(np.frombuffer(text, np.uint8))]
            features, counts = np.unique(features[features >= 0], return_counts=True)
            if not len(features):
                return super()._raw_score(text)
            return np.log1p(counts.astype(np.float32)) @ self.nb_ptc[features] + self.nb_pc

        def _states(self, text: np.ndarray) -> np.ndarray:
            """Returns the automaton's state after each byte, int[bytes]; only the last _FEATURE_BYTES bytes decide it."""
            padded = np.concatenate([np.zeros(_FEATURE_BYTES - 1, np.uint8), text])
            states = np.zeros(len(text), np.intp)
            for i in range(_FEATURE_BYTES):
                states = self.tk_nextmove[self._rowbase[states] + padded[i : i + len(text)]]
                states[: _FEATURE_BYTES - 1 - i] = 0
            return states

    identifier = Identifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
    for name in ("tk_nextmove", "tk_output", "_rowbase"):
        setattr(identifier, name, np.asarray(getattr(identifier, name)))
    identifier.nb_ptc = identifier.nb_ptc.astype(np.float32)  # from float16, which has no fast product
    return identifier


@functools.cache
def _fasttext(path: str) -> collections.abc.Callable[[str], tuple[str, float]]:
    try:
        import fasttext
    except ImportError as error:
        raise ConfigError(
            "prepare.stages.language.model needs fastText: pip install fasttext-numpy2-wheel, or leave it empty"
        ) from error
    if not pathlib.Path(path).is_file():
        raise ConfigError(f"prepare.stages.language.model={path}: no such file; download lid.176.ftz or leave it empty")
    try:
        model = fasttext.load_model(path)
    except ValueError as error:
        raise ConfigError(f"prepare.stages.language.model={path} is no fastText model: {error}") from error

    def classify(text: str) -> tuple[str, float]:
        labels, scores = model.predict(" ".join(text.split()))
        return (labels[0].removeprefix("__label__"), float(scores[0])) if labels else ("und", 0.0)

    return classify
