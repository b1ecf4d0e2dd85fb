"""Keeps the documents that are written in certain languages, by py3langid or a local fastText model (arXiv:1607.01759).

Both get a sample of a long text, since it may begin with a licence, and prose only: code looks like other languages. A text
is removed only for its running text: names, titles, recipes, formulas and quotations prove no language.
"""

import collections.abc
import functools
import pathlib
import re
import weakref

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
_LEAST_RUNNING = 40  # letters of running text that prove a language, about 8 words
_SHORT_RUNNING = 110  # with fewer letters, a text goes only if its probability of `languages`
_CLEAR = 0.1  # is at most this
_RUN = 4  # words in a row that are running text; a list has fewer between its commas
_WIDER = 4  # times the sample: a text that may go is looked at closely
_MIXED = 0.25  # share of running text in the languages asked for, from which on a text stays
_LIKELY = 0.1  # probability from which on a language is one of a text's likely ones
_QUOTATION = re.compile(
    r'"[^"\n]{2,120}"|\u201c[^\u201d\n]{2,120}\u201d|\u201e[^\u201c\u201d\n]{2,120}[\u201c\u201d]|«[^»\n]{2,120}»'
)
_SENTENCE_END = re.compile(r"(?<=[.!?\u2026\u3002])\s|[;:|\n]")
_WORDS = re.compile(  # in a row: no comma, number, file name, or operator between them
    r"(?:(?<![^\s(\xbf\xa1'\u2019\u2013\u2014-])[^\W\d_]+(?:['\u2019-][^\W\d_]+)*"
    rf"(?:[ \n](?=[^\W\d_])|(?=[\s.,;:!?)\u2026\u2013\u2014'\u2019-]|\Z))){{{_RUN},}}"
)
_INDENTED = re.compile(r"(?:\A|(?<=\n\n))(?:(?: {4}|\t)[^\n]*\n?)+")  # code, in Markdown


class Language(Stage):
    """Writes the language to metadata["language_id"]; removes documents in other or uncertain languages. Code passes."""

    inputs = ("model",)

    def __init__(self, settings: Settings, folder: pathlib.Path):
        super().__init__(settings, folder)
        if settings.model:
            self._classify = _fasttext(settings.model)
            self._scores = lambda text: dict([self._classify(text)])
        else:
            identifier = _load(folder) if folder.is_dir() else _py3langid()
            self._classify, self._scores = identifier.classify, identifier.scores

    @classmethod
    def build(cls, settings: Settings, folder: pathlib.Path) -> None:
        if settings.model:
            _fasttext(settings.model)
            return
        identifier = _load()
        for code in settings.languages:
            if code not in identifier.labels:
                near = config_lib.nearest(code, identifier.labels)
                raise ConfigError(f"prepare.stages.language.languages: no language {code!r}; {near}")
        folder.mkdir(parents=True, exist_ok=True)
        for name in _ARRAYS:
            np.save(folder / f"{name}.npy", getattr(identifier, name))

    def apply(self, document: Document, edits: Edits) -> Remove | None:
        if document.metadata.get("format") == "code":
            return None
        s = self.settings
        text = prose(document.text, markdown=document.metadata.get("format") == "markdown")
        few = sum(map(str.isalpha, text[: 100 * _LEAST_LETTERS])) < _LEAST_LETTERS
        language, score = self._classify(sample(document.text if few else text, s.sample_chars))
        document.metadata["language_id"] = language
        if not s.languages or (language in s.languages and score >= s.min_score):
            return None
        sentences = running_text(sample(text, _WIDER * s.sample_chars))
        letters = sum(sentences.values())
        if letters < _LEAST_RUNNING:
            if s.keep_doubtful or any(map(str.isalpha, text)):
                return None
            return Remove("uncertain language", f"{language} ({score:.2f}), no letters")
        own = sum(n for sentence, n in sentences.items() if self._own(sentence)[0] >= max(s.min_score, 0.5))
        if own >= _MIXED * letters:
            return None
        own, other, language = self._own("\n".join(sentences))
        unclear = language not in s.languages and letters < _SHORT_RUNNING and own > _CLEAR
        if unclear or own >= s.min_score or (s.keep_doubtful and other < s.min_score):
            return None
        if language in s.languages:
            return Remove("uncertain language", f"{language} ({own:.2f}), min_score={s.min_score}")
        return Remove("other language", f"{language} ({other:.2f})")

    def _own(self, text: str) -> tuple[float, float, str]:
        """Returns (the probability of the setting `languages` together, that of all others, the likeliest language)."""
        scores = self._scores(text)
        own = sum(scores.get(language, 0.0) for language in self.settings.languages)
        none = sum(scores.get(language, 0.0) for language in _NONE)
        return own, sum(scores.values()) - own - none, max(scores, key=scores.get)


def running_text(text: str) -> dict[str, int]:
    """Returns each sentence's running text -> the number of its letters, not counting names (words with a capital).

    Letters of scripts without capitals, many of which leave no space between words, count twice.
    """
    sentences = collections.Counter()
    for sentence in _SENTENCE_END.split(_QUOTATION.sub(' " ', text)):
        caseless = 0 if sentence.isascii() else sum(c.isalpha() and c.lower() == c.upper() for c in sentence)
        if caseless >= _RUN:
            sentences[sentence] += 2 * caseless
        elif runs := [run[0].strip() for run in _WORDS.finditer(sentence)]:
            sentences[" ".join(runs)] += sum(map(_letters, runs))
    return sentences


def _letters(run: str) -> int:
    """Returns the number of letters of the lower-case words; of all words if most are lower-case, or all upper-case."""
    words = run.split()
    plain = [word for word in words if word.islower()]
    all_count = len(plain) > len(words) / 2 or all(map(str.isupper, words))
    return sum(map(len, words if all_count else plain))


def likely(text: str, chars: int) -> list[str]:
    """Returns the languages that a text is probably in, by `chars` characters of it."""
    scores = _py3langid().scores(sample(prose(text), chars))
    return [language for language, score in scores.items() if score >= _LIKELY]


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


_ARRAYS = ("nb_ptc", "nb_pc", "nb_classes", "tk_nextmove", "tk_row", "tk_output")  # of py3langid's model


def _load(folder: pathlib.Path | None = None):
    """Returns py3langid's identifier, with its automaton run over all bytes at once: same scores, under half the time.

    `folder` has the arrays that `Language.build` saved, which all workers map; None reads py3langid's own file, which
    takes half a second.
    """
    from py3langid import langid, modelio

    class Identifier(langid.LanguageIdentifier):
        def scores(self, text: str) -> dict[str, float]:
            return {language: float(score) for language, score in self.rank(text)}

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

    if folder:
        arrays = [np.load(folder / f"{name}.npy", mmap_mode="r").view(np.ndarray) for name in _ARRAYS]
    else:
        arrays = map(np.asarray, modelio.load_model(langid.MODEL_DIR / langid.MODEL_FILE))
    ptc, pc, classes, nextmove, row, output = arrays
    ptc = ptc.astype(np.float32, copy=False)  # from float16, which has no fast product
    row = row.astype(np.int64)
    identifier = Identifier(ptc, pc, classes.tolist(), nextmove, output, norm_probs=True, tk_row=row)
    identifier._rowbase = row << 8  # of a list, which has no fast look-up
    _living.add(identifier)
    return identifier


_living: weakref.WeakSet = weakref.WeakSet()  # identifiers that a stage holds
_own = functools.cache(_load)


def _py3langid():
    """Returns the identifier of a living stage, which all workers share, else one of this process. Scores are equal."""
    return next(iter(_living), None) or _own()


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
