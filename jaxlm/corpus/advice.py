"""Turns the numbers of a mismatch report into one sentence for each source: what to try with it in a pilot."""

import operator
import statistics
from collections.abc import Mapping, Sequence

from jaxlm.corpus.comparison import TARGET, Advice, Mixture, Pair

_ALIKE_AUC = 0.65  # below this, passages can hardly be told apart
_FAR_AUC = 0.9
_FAR_BITS = 0.05  # of divergence of words beyond chance
_GAIN = 0.005  # bits nearer to the target, below which another mixture is not worth it
_DROP = 0.02  # share in the nearest mixture
_APART = 1.5  # times the distance that is usual among the sources
_CHANGE = 1.5  # times more or less than now
_MANY = 2.0  # a share of format, a length: this many times the other's is worth a word
_NAMES = {"list": "lists", "table": "tables", "heading": "headings", "code": "code"}


def advise(sources: Mapping[str, dict], pairs: Sequence[Pair], mixture: Mixture | None) -> dict[str, Advice]:
    """Returns advice for each source.

    Args:
      sources, pairs, mixture: the fields of `comparison.Report`.
    """
    if mixture is not None and mixture.js_now - mixture.js_nearest < _GAIN:
        told = f"no mixture of these sources comes nearer to the target than the one now ({mixture.js_now:.2f} bits from it)"
        return {name: Advice("keep", f"Keep {name} as it is: {told}.") for name in mixture.now}
    if mixture is not None:
        to_target = {pair.a: pair for pair in pairs if pair.b == TARGET}
        return {name: _towards_target(name, sources, to_target[name], mixture) for name in mixture.now}
    nearest = {
        name: min((p for p in pairs if name in (p.a, p.b)), key=operator.attrgetter("distance"), default=None)
        for name in sources
    }
    usual = statistics.median(pair.distance for pair in nearest.values()) if pairs else 0.0
    return {name: _among_others(name, sources, pair, usual) for name, pair in nearest.items()}


def _towards_target(name: str, sources: Mapping[str, dict], pair: Pair, mixture: Mixture) -> Advice:
    now, nearest = mixture.now[name], mixture.nearest[name]
    near = f"{_percent(nearest)} in the mixture nearest to the target, {_percent(now)} now"
    far = pair.distance > _FAR_BITS and (pair.auc is None or pair.auc > _FAR_AUC)
    why = _why(sources[name], sources[TARGET], pair.telling_a)
    told = f"{pair.distance:.2f} bits from the target beyond chance{_auc(pair)}"
    if pair.auc is not None and pair.auc < _ALIKE_AUC:
        return Advice("keep", f"Keep {name}: it can hardly be told from the target (AUC {pair.auc:.2f}); {near}.")
    if nearest < _DROP and far:
        return Advice("drop", f"Drop {name}, or keep it only for what it teaches: {near}; it is {told}{why}.")
    if nearest * _CHANGE < now:
        return Advice("lower", f"Lower {name}: {near}; it is {told}{why}.")
    if nearest > now * _CHANGE:
        return Advice("raise", f"Raise {name}: {near}; it is {told}.")
    return Advice("keep", f"Keep {name} as it is: {near}; it is {told}.")


def _among_others(name: str, sources: Mapping[str, dict], nearest: Pair | None, usual: float) -> Advice:
    if nearest is None:
        return Advice("keep", f"Keep {name}: it is the only source, and there is no target to compare it with.")
    other = nearest.b if nearest.a == name else nearest.a
    if nearest.auc is not None and nearest.auc < _ALIKE_AUC:
        return Advice(
            "keep",
            f"Keep {name}, but as one with {other}: they can hardly be told apart (AUC {nearest.auc:.2f}), so that their "
            "two weights are one.",
        )
    apart = f"{nearest.distance:.2f} bits beyond chance from {other}, the nearest of the others{_auc(nearest)}"
    if nearest.distance > max(_FAR_BITS, _APART * usual):
        telling = nearest.telling_a if nearest.a == name else nearest.telling_b
        why = _why(sources[name], sources[other], telling)
        return Advice(
            "try",
            f"Try {name} at half its weight in a pilot: it stands apart, {apart}{why}; a target would tell whether that is "
            "wanted.",
        )
    return Advice("keep", f"Keep {name}: it stands no further apart than is usual here, {apart}.")


def _auc(pair: Pair) -> str:
    return "" if pair.auc is None else f", told apart with AUC {pair.auc:.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share >= 0.01 or share == 0 else "under 1%"


def _why(a: dict, b: dict, telling: Sequence[str]) -> str:
    """Names the largest difference of format, sentences or length, and the words that tell the source."""
    found = []
    for kind, shares in a["formats"].items():
        x, y = shares["lines"], b["formats"][kind]["lines"]
        if abs(x - y) > 0.05:
            found.append((abs(x - y) * 10, f"{_percent(x)} of its lines are {_NAMES[kind]} against {_percent(y)}"))
    for key, words in (("words_per_sentence", "words a sentence"), ("chars_per_word", "characters a word")):
        x, y = a["readability"][key], b["readability"][key]
        if min(x, y) > 0 and (ratio := max(x / y, y / x)) > (_MANY if key == "words_per_sentence" else 1.2):
            found.append((ratio / _MANY, f"it has {x:.1f} {words} against {y:.1f}"))
    x, y = a["length"]["p50"], b["length"]["p50"]
    if min(x, y) > 0 and (ratio := max(x / y, y / x)) > 2 * _MANY:
        found.append((ratio / 10, f"its documents' median is {x:,} characters against {y:,}"))
    text = f", {max(found)[1]}" if found else ""
    shown = [f"'{word}'" for word in telling if any(c.isalnum() for c in word)][:4] or [f"'{w}'" for w in telling[:4]]
    return text + (f", known by {', '.join(shown)}" if shown else "")
