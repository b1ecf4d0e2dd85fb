"""Makes the mismatch section of a report: advice, how far sources are from each other, their lengths and formats."""

import math
import typing
from collections.abc import Callable

from jaxlm.host.console import count, share
from jaxlm.report import page
from jaxlm.report.page import Markup, cell, details, join, table, tag

TARGET = "target"


def render(report: dict[str, typing.Any]) -> Markup:
    """Returns the content of the section, given the dict that `corpus.mismatch.Report.to_dict` returns."""
    parts = [_advice(report["advice"])]
    if report["mixture"]:
        parts.append(_mixture(report["mixture"]))
    parts += [_distances(report), _lengths(report["sources"]), _formats(report["sources"])]
    return join(parts)


def _advice(advice: dict[str, dict]) -> Markup:
    rows = [(name, *(cell(said[key], kind="text") for key in ("action", "sentence"))) for name, said in advice.items()]
    about = tag("p", "What to try in a pilot. It comes from words alone, which say nothing of truth or worth.")
    return join([about, table(("source", "try", "why"), rows, "Advice")])


def _mixture(mixture: dict) -> Markup:
    top = max([*mixture["now"].values(), *mixture["nearest"].values()]) or 1.0
    rows = []
    for name, now in mixture["now"].items():
        nearest = mixture["nearest"][name]
        parts = ((now, "gone"), (nearest, "kept"))
        bars = join(page.bar([(part / top, kind)], f"{name}: {share(part, 1)}") for part, kind in parts)
        rows.append((name, share(now, 1), share(nearest, 1), cell(bars)))
    about = "Shares of words now and in the mixture of these sources that is nearest to the target: "
    about += f"{mixture['js_now']:.3f} bits from it now, {mixture['js_nearest']:.3f} then."
    keys = page.keys({"gone": "now", "kept": "nearest"})
    rows_of_sources = table(("source", "now", "nearest", ""), rows, "Mixture")
    return join([tag("h3", "Nearest mixture"), tag("p", about, *keys), rows_of_sources])


def _distances(report: dict) -> Markup:
    """Two maps of sources by sources: how much their words diverge, and how well a classifier tells them apart."""
    pairs = {frozenset((pair["a"], pair["b"])): pair for pair in report["pairs"]}
    if not pairs:
        return Markup("")
    top = max(pair["js_words"] for pair in pairs.values()) or 1.0
    names = list(report["sources"])

    def js(pair: dict) -> Markup:
        title = f"by chance {pair['floor_words']:.3f}; pairs of words {pair['js_bigrams']:.3f}"
        return cell(tag("span", f"{pair['js_words']:.2f}", title=title), pair["js_words"] / top)

    def auc(pair: dict) -> Markup:
        return cell("?") if pair["auc"] is None else cell(f"{pair['auc']:.2f}", 2 * pair["auc"] - 1)

    rows = sorted(report["pairs"], key=lambda pair: (pair["b"] != TARGET, -pair["distance"]))
    head = ("pair", "divergence", "by chance", "of pairs of words", "by chance", "AUC")
    head += ("the first is told by", "the second by")
    lines = [_pair(pair) for pair in rows]
    return join(
        [
            tag("h3", "Divergence of words"),
            tag("p", "Jensen-Shannon, in bits: 0 is alike, 1 nothing in common."),
            _map(names, pairs, js, "Jensen-Shannon divergence"),
            tag("h3", "Told apart by a classifier"),
            tag("p", "Area under the ROC curve: .5 is chance, 1 always right. ? where there are too few documents."),
            _map(names, pairs, auc, "AUC"),
            details(f"Pairs and the words that tell ({len(lines)})", table(head, lines, "Pairs")),
        ]
    )


def _map(names: list[str], pairs: dict[frozenset, dict], render_pair: Callable[[dict], Markup], label: str) -> Markup:
    rows = []
    for a in names:
        of_row = (pairs.get(frozenset((a, b))) for b in names)  # none of a source with itself
        rows.append((a, *(render_pair(pair) if pair else cell("·", kind="zero") for pair in of_row)))
    return table(("", *names), rows, label)


def _pair(pair: dict) -> tuple:
    numbers = [f"{pair[key]:.3f}" for key in ("js_words", "floor_words", "js_bigrams", "floor_bigrams")]
    auc = "?" if pair["auc"] is None else f"{pair['auc']:.3f}"
    telling = [cell(", ".join(pair[key]), kind="text") for key in ("telling_a", "telling_b")]
    return (f"{pair['a']}, {pair['b']}", *numbers, auc, *telling)


def _lengths(sources: dict[str, dict]) -> Markup:
    """Documents' lengths as boxes on one logarithmic scale."""
    known = [source["length"] for source in sources.values() if source["length"]]
    low = min((length["p5"] for length in known), default=1)
    high = max((length["p95"] for length in known), default=1)
    rows = []
    for name, source in sources.items():
        length = source["length"]
        numbers = [count(length[key]) if length else "" for key in ("p5", "p50", "p95")]
        box = _box(length, low, high, f"lengths of {name}") if length else ""
        rows.append((name, count(source["documents"]), cell(box), *numbers))
    about = "Characters a document: 5th percentile, median, 95th; the box is the middle half, the scale logarithmic."
    head = ("source", "documents", "", "5%", "median", "95%")
    return join([tag("h3", "Lengths"), tag("p", about), table(head, rows, "Lengths")])


def _box(length: dict[str, float], low: float, high: float, label: str) -> Markup:
    """A box plot as inline SVG, 100 wide."""
    span = math.log(max(high, 2) / max(low, 1)) or 1.0
    p5, p25, p50, p75, p95 = (100 * math.log(max(length[f"p{p}"], 1) / max(low, 1)) / span for p in (5, 25, 50, 75, 95))

    def rect(start: float, end: float, y: float, height: float, kind: str | None = None) -> Markup:
        width = max(0.8, end - start)
        return tag("rect", x=f"{start:.1f}", y=y, width=f"{width:.1f}", height=height, class_=kind)

    shapes = [tag("title", label), rect(p5, p95, 9, 2), rect(p25, p75, 4, 12), rect(p50, p50, 2, 16, "median")]
    return tag("svg", *shapes, viewBox="0 0 101 20", preserveAspectRatio="none", class_="spark", role="img")


def _formats(sources: dict[str, dict]) -> Markup:
    """A table of how readable each source is, and which share of its passages has lists, tables, headings or code."""
    kinds = list(dict.fromkeys(kind for source in sources.values() for kind in source["formats"]))
    rows = []
    for name, source in sources.items():
        ease = [f"{source['readability'][key]:.1f}" for key in ("words_per_sentence", "chars_per_word", "flesch")]
        shares = [source["formats"][kind]["passages"] for kind in kinds]
        rows.append((name, *ease, *(cell(share(part, 1), part) for part in shares)))
    head = ("source", "words a sentence", "characters a word", "Flesch", *kinds)
    about = (
        "Flesch's reading ease is about 60 for plain English, 30 for papers. Formats: share of passages that have them."
    )
    return join([tag("h3", "Readability and format"), tag("p", about), table(head, rows, "Readability and format")])
