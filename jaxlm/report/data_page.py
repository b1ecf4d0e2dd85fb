"""Writes the report of a data directory: what was read, what each stage removed and why, with examples.

`write` takes a summary with these keys. Only `sources` is required:

sources        NAME -> path, read {documents, bytes, failed {reason: n}, failures [..]}, stages [{name, documents_in,
               documents_out, bytes_in, bytes_out, removed {reason: n}, edits {name: n}}], kept {documents, bytes}
examples       [{source, stage, reason, detail, id, excerpt}] of removed documents; of changed ones `reason` is
               "", `detail` a part before the change ("" of personal data) and `excerpt` after it
clusters       sizes {size: how many}, largest [{size, kept, members [id, ...]}]
junk, mismatch, tokenizer_fit, manifest      as corpus.audit and data.shards write them
run            the folder of the run that trains on the data; "" = none
left_out       what the page lacks, and how to add it
"""

import collections
import difflib
import itertools
import json
import math
import pathlib
import re
from collections.abc import Callable

from jaxlm.corpus import removals
from jaxlm.corpus.tally import stage_order
from jaxlm.host.console import count, share, size
from jaxlm.report import markup
from jaxlm.report.markup import Markup, cell, details, join, table, tag

_JUNK_ROWS = 40  # shown at once; the others on demand


def write(path: pathlib.Path, summary: dict) -> None:
    """Writes the page of a summary. The module's docstring lists the summary's keys."""
    parts = [
        ("Funnel", _funnel, summary["sources"]),
        ("Edits", _edits, summary["sources"]),
        ("Removed and changed documents", _examples, summary.get("examples")),
        ("Duplicate clusters", _clusters, summary.get("clusters")),
        ("Junk", _junk, summary.get("junk")),
        ("Mismatch", _mismatch, summary.get("mismatch")),
        ("Tokenizer fit", _tokenizer_fit, summary.get("tokenizer_fit")),
        ("Manifest", _manifest, summary.get("manifest")),
    ]
    sections = ((title, render(content)) for title, render, content in parts if content)
    markup.write(path, f"Data report: {'/'.join(path.resolve().parent.parts[-2:])}", _lead(path, summary), sections)


def _lead(path: pathlib.Path, summary: dict) -> Markup:
    parts = []
    if run := summary.get("run"):
        link = markup.link(f"run {pathlib.Path(run).resolve().name}", pathlib.Path(run) / markup.NAME, path)
        parts.append(tag("p", "Made for the ", link, ", whose page is written when it ends."))
    if summary.get("left_out"):
        parts.append(tag("p", "Left out: ", summary["left_out"], ".", class_="dim"))
    return join([*parts, _tiles(summary["sources"])])


def _tiles(sources: dict[str, dict]) -> Markup:
    read, kept = _total(sources, "read"), _total(sources, "kept")
    removed: collections.Counter[str] = collections.Counter()
    for stage in (stage for source in sources.values() for stage in source["stages"]):
        removed[stage["name"]] += sum(stage["removed"].values())
    tiles = [
        (count(len(sources)), "sources"),
        (count(read[0]), f"documents read, {size(read[1])}"),
        (count(kept[0]), f"kept, {share(kept[0], read[0])}"),
        (size(kept[1]), f"kept, {share(kept[1], read[1])} of the bytes with their markup"),
        *((count(n), f"removed by {name}") for name, n in removed.most_common(2) if n),
    ]
    return markup.tiles(tiles)


def _total(sources: dict[str, dict], key: str) -> tuple[int, int]:
    return tuple(sum(source[key][unit] for source in sources.values()) for unit in ("documents", "bytes"))


def _stages(sources: dict[str, dict]) -> list[str]:
    return stage_order([[stage["name"] for stage in source["stages"]] for source in sources.values()])


def _funnel(sources: dict[str, dict]) -> Markup:
    """Returns tables of all sources by stage, of documents and of bytes by source and stage, and of the reasons."""
    keys = markup.keys({"kept": "still there", "gone": "removed", "failed": "failed: unreadable"})
    parts = [
        tag("p", "Read = kept + removed by each stage + failed.", *keys),
        _all_stages(sources),
        tag("h3", "Documents by source"),
        _matrix(sources, "documents", count),
        tag("h3", "Bytes by source"),
        tag("p", "Bytes that edits removed count too, such as markup in the stage html."),
        _matrix(sources, "bytes", size),
        _reasons(sources),
    ]
    return join(parts)


def _all_stages(sources: dict[str, dict]) -> Markup:
    whole, volume = _total(sources, "read")
    failed = sum(sum(source["read"]["failed"].values()) for source in sources.values())
    losses = [("read", 0, 0, "gone"), ("failed", failed, 0, "failed")]
    for name in _stages(sources):
        of_stage = [stage for source in sources.values() for stage in source["stages"] if stage["name"] == name]
        taken = (sum(_taken(stage, unit) for stage in of_stage) for unit in ("documents", "bytes"))
        losses.append((name, *taken, "gone"))
    rows, documents = [], whole
    for name, gone, gone_bytes, kind in losses:
        documents, volume = documents - gone, volume - gone_bytes
        parts = [(documents / (whole or 1), "kept"), (gone / (whole or 1), kind)]
        bar = cell(markup.bar(parts, f"{name}: {count(gone)} removed"), kind="text")
        removed = (count(gone), share(gone, whole)) if rows else ("", "")
        rows.append((name, bar, *removed, count(documents), size(volume)))
    return table(("", "documents", "removed", "of all", "left", "bytes left"), rows, "All sources by stage")


def _matrix(sources: dict[str, dict], unit: str, write_number: Callable[[float], str]) -> Markup:
    """Returns a table, source by stage, of the documents or bytes that a stage removed, shaded by their share of the source."""
    names, rows = _stages(sources), []
    failed = ["failed"] if unit == "documents" else []
    for source_name, source in sources.items():
        whole, kept = source["read"][unit], source["kept"][unit]
        taken = {stage["name"]: _taken(stage, unit) for stage in source["stages"]}
        taken["failed"] = sum(source["read"]["failed"].values())
        cells = [_shaded(taken[name], whole, write_number) if name in taken else "" for name in failed + names]
        first = tag("span", source_name, title=source.get("path"))
        rows.append((first, write_number(whole), *cells, write_number(kept), share(kept, whole)))
    return table(("source", "read", *failed, *names, "kept", ""), rows, f"{unit} by source and stage")


def _taken(stage: dict, unit: str) -> int:
    return sum(stage["removed"].values()) if unit == "documents" else stage["bytes_in"] - stage["bytes_out"]


def _shaded(number: float, whole: float, write_number: Callable[[float], str]) -> Markup:
    if not number:
        return cell("0", kind="zero")
    return cell(tag("span", write_number(number), title=share(number, whole)), number / whole if whole else 0.0)


def _reasons(sources: dict[str, dict]) -> Markup:
    rows, failures = [], []
    for name, source in sources.items():
        removed = {"failed": source["read"]["failed"]} | {stage["name"]: stage["removed"] for stage in source["stages"]}
        for stage, reasons in removed.items():
            for reason, n in ((reason, n) for reason, n in reasons.items() if n):
                shares = count(n), share(n, source["read"]["documents"])
                rows.append((name, _words(stage), _words(reason), *shares))
        failures += [(name, _words(line)) for line in source["read"].get("failures", ())]
    shown = [details(f"Reasons ({len(rows)})", table(("source", "stage", "reason", "documents", ""), rows, "Reasons"))]
    if failures:
        records = table(("source", "record"), failures, "Failures")
        shown.append(details(f"Records that failed or were repaired ({len(failures)} named)", records))
    return join(shown)


def _words(content: object) -> Markup:
    return cell(content, kind="text")


def _edits(sources: dict[str, dict]) -> Markup:
    """Returns the numbers of edits, in removed documents too: a row for each stage and edit, a column for each source."""
    totals: dict[tuple[str, str], dict[str, int]] = {}
    for name, (source_name, source) in itertools.product(_stages(sources), sources.items()):
        for stage in (stage for stage in source["stages"] if stage["name"] == name):
            for edit, n in stage["edits"].items():
                totals.setdefault((name, edit), {})[source_name] = n
    if not totals:
        return tag("p", "No stage changed any document.")
    used = [name for name in sources if any(name in by_source for by_source in totals.values())]
    rows = []
    for (name, edit), by_source in totals.items():
        numbers = (count(by_source[source]) if source in by_source else "" for source in used)
        rows.append((name, _words(edit), count(sum(by_source.values())), *numbers))
    return table(("stage", "edit", "all", *used), rows, "Edits by stage and source")


def _examples(examples: list[dict]) -> Markup:
    """Removed and changed documents by stage and reason, collapsed."""
    groups: dict[str, dict[str, list[dict]]] = {}
    for example in examples:
        groups.setdefault(example["stage"], {}).setdefault(example["reason"], []).append(example)
    parts = [tag("p", "Read some of each: a filter that removes what you would keep is the wrong filter.")]
    for stage, reasons in groups.items():
        titled = {reason or "changed: before and after": alike for reason, alike in reasons.items()}
        inner = [_folded(title, len(alike), *map(_example, alike)) for title, alike in titled.items()]
        parts.append(_folded(tag("b", stage), sum(map(len, reasons.values())), *inner))
    return join(parts)


def _folded(title: object, number: int, *children: Markup) -> Markup:
    return details(join([title, " ", tag("span", number, class_="dim")]), *children)


def _example(example: dict) -> Markup:
    about = tag("div", tag("b", example["source"]), " ", _id(example["id"]))
    if not example["reason"] and example["detail"] and example["excerpt"]:
        return tag("div", about, _change(example["detail"], example["excerpt"]), class_="example")
    detail = tag("div", example["detail"], class_="dim") if example["detail"] else ""
    return tag("div", about, detail, tag("pre", example["excerpt"]) if example["excerpt"] else "", class_="example")


def _change(before: str, after: str) -> Markup:
    """Returns two texts beside each other; words that only one of them has are marked."""
    words = [re.findall(r"\w+|\W", text) for text in (before, after)]
    steps = difflib.SequenceMatcher(None, *words, autojunk=False).get_opcodes()
    if steps[-1][0] != "equal" and len(steps) > 2:  # where both were cut
        steps[-1] = ("equal", *steps[-1][1:])
    sides = []
    for side, mark in enumerate(("del", "ins")):
        parts = [(step[0], "".join(words[side][step[2 * side + 1] : step[2 * side + 2]])) for step in steps]
        sides.append(tag("pre", *(part if kind == "equal" or not part else tag(mark, part) for kind, part in parts)))
    return tag("div", *sides, class_="beside")


def _id(text: str) -> Markup:
    return tag("code", text, class_="id")


def _clusters(clusters: dict) -> Markup:
    """The number of groups of duplicates by size, and the largest groups."""
    sizes = sorted((int(n), how_many) for n, how_many in clusters["sizes"].items())
    if not sizes:
        return tag("p", "No two documents are alike.")
    bins: collections.Counter[str] = collections.Counter()
    for n, how_many in sizes:
        low = 1 << (n.bit_length() - 1)
        bins[str(n) if n < 4 else f"{low} to {2 * low - 1}"] += how_many
    copies = count(sum((n - 1) * how_many for n, how_many in sizes))
    parts = [
        tag("p", f"{count(bins.total())} groups of like documents, {copies} copies. By size of the group:"),
        markup.columns([(name, n, count(n)) for name, n in bins.items()], "Groups by size"),
    ]
    for cluster in clusters.get("largest", ()):
        kept, named = cluster["kept"], cluster["members"]
        members = [tag("div", _id(member), tag("b", " kept") if member == kept else "") for member in named]
        if cluster["size"] > len(named):
            members.append(tag("div", f"and {count(cluster['size'] - len(named))} more", class_="dim"))
        head = join([f"{count(cluster['size'])} documents like ", _id(kept)])
        parts.append(details(head, tag("div", *members, class_="example")))
    return join([*parts, *_drawn(clusters.get("drawn") or {})])


def _drawn(drawn: dict) -> list[Markup]:
    """Near duplicates drawn at random, each beside the document that stays."""
    if not drawn.get("drawn"):
        return []
    false = (
        f"{drawn['false']} of {drawn['drawn']} near duplicates drawn at random say something that what stays does not "
        f"({removals.share_of_false(drawn)}): "
    )
    false += "over a fifth of their characters are in lines that it does not have. Judge these yourself:"
    parts = [tag("p", false)]
    for pair in drawn["shown"]:
        head = join(
            [_id(pair["removed"]), f" went, {pair['own_share']:.0%} of it its own; ", _id(pair["kept"]), " stays"]
        )
        texts = [tag("pre", pair[name]) for name in ("removed_text", "kept_text")]
        parts.append(details(head, tag("div", *texts, class_="beside")))
    return parts


def _junk(rows: list[dict]) -> Markup:
    """Returns a table of junk strings, the worst first, and below it of strings that are only characteristic of a source."""
    head = ("found", "what it is", "source", "score", "count", "documents", "share", "only here", "")
    junk = [_junk_row(row) for row in rows if row["junk"]]
    own = [_junk_row(row) for row in rows if not row["junk"]]
    about = "Strings that a source repeats and nobody would write. Score 0 to 100: how surely it is junk, times how much of "
    about += "the source it is in. “Only here” 100%: no other source has it."
    parts = [tag("p", about if junk else "Nothing looks like junk.")]
    parts += [table(head, junk[:_JUNK_ROWS], "Junk")] if junk else []
    if junk[_JUNK_ROWS:]:
        parts.append(details(f"{len(junk) - _JUNK_ROWS} more", table(head, junk[_JUNK_ROWS:], "More junk")))
    if own:
        title = f"Characteristic of a source, no junk: leave it in ({len(own)})"
        parts.append(details(title, table(head, own, "Characteristic")))
    return join(parts)


def _junk_row(row: dict) -> tuple:
    texts = ((example["document"], example["text"]) for example in row["examples"])
    examples = [tag("div", _id(document), tag("pre", text), class_="example") for document, text in texts]
    pattern = tag("div", "to remove it: ", tag("code", row["pattern"]), class_="dim") if row["junk"] else ""
    names = (tag("code", row["text"]), _words(row["why"]), _words(row["source"]), markup.value(float(row["score"])))
    shares = (share(row[key], 1) for key in ("share_of_documents", "concentration"))
    shown = _words(details("examples", pattern, *examples))
    return (*names, count(row["count"]), count(row["documents"]), *shares, shown)


def _tokenizer_fit(rows: list[dict]) -> Markup:
    head = list(dict.fromkeys(key for row in rows for key in row))
    lines = [[markup.value(row.get(key)) for key in head] for row in rows]
    return table([key.replace("_", " ") for key in head], lines, "Tokenizer fit")


def _manifest(manifest: dict) -> Markup:
    config = json.dumps(manifest.get("config", {}), indent=1, ensure_ascii=False, default=str)
    about = tag("p", "sha256 of the manifest ", _id(manifest["sha256"]), ": equal results, equal hash.")
    return join([about, details("Config", tag("pre", config))])


TARGET = "target"


def _mismatch(report: dict) -> Markup:
    sources = report["sources"]
    advice = [(name, _words(row["action"]), _words(row["sentence"])) for name, row in report["advice"].items()]
    parts = [
        tag("p", "What to try in a pilot. It comes from words alone, which do not show truth or quality."),
        table(("source", "try", "why"), advice, "Advice"),
        *([_mixture(report["mixture"])] if report["mixture"] else []),
    ]
    return join([*parts, _distances(report), _lengths(sources), _formats(sources)])


def _mixture(mixture: dict) -> Markup:
    top = max([*mixture["now"].values(), *mixture["nearest"].values()]) or 1.0
    rows = []
    for name, now in mixture["now"].items():
        nearest = mixture["nearest"][name]
        parts = ((now, "gone"), (nearest, "kept"))
        bars = join(markup.bar([(part / top, kind)], f"{name}: {share(part, 1)}") for part, kind in parts)
        rows.append((name, share(now, 1), share(nearest, 1), cell(bars)))
    about = "Shares of words now and in the mixture of these sources that is nearest to the target: "
    about += f"{mixture['js_now']:.3f} bits from it now, {mixture['js_nearest']:.3f} then."
    keys = markup.keys({"gone": "now", "kept": "nearest"})
    rows_of_sources = table(("source", "now", "nearest", ""), rows, "Mixture")
    return join([tag("h3", "Nearest mixture"), tag("p", about, *keys), rows_of_sources])


def _distances(report: dict) -> Markup:
    """Returns two tables, source by source: how much their words diverge, and how well a classifier tells them apart."""
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
    parts = [
        tag("h3", "Divergence of words"),
        tag("p", "Jensen-Shannon, in bits: 0 is alike, 1 nothing in common."),
        _map(names, pairs, js, "Jensen-Shannon divergence"),
        tag("h3", "Told apart by a classifier"),
        tag("p", "Area under the ROC curve: .5 is chance, 1 always right. ? where there are too few documents."),
        _map(names, pairs, auc, "AUC"),
        details(f"Pairs and the words that tell ({len(lines)})", table(head, lines, "Pairs")),
    ]
    return join(parts)


def _map(names: list[str], pairs: dict[frozenset, dict], render_pair: Callable[[dict], Markup], label: str) -> Markup:
    rows = []
    for a in names:
        of_row = (pairs.get(frozenset((a, b))) for b in names)  # no pair of a source with itself
        rows.append((a, *(render_pair(pair) if pair else cell("·", kind="zero") for pair in of_row)))
    return table(("", *names), rows, label)


def _pair(pair: dict) -> tuple:
    numbers = [f"{pair[key]:.3f}" for key in ("js_words", "floor_words", "js_bigrams", "floor_bigrams")]
    auc = "?" if pair["auc"] is None else f"{pair['auc']:.3f}"
    telling = [cell(", ".join(pair[key]), kind="text") for key in ("telling_a", "telling_b")]
    return (f"{pair['a']}, {pair['b']}", *numbers, auc, *telling)


def _lengths(sources: dict[str, dict]) -> Markup:
    """Returns box plots of the documents' lengths by source, on one logarithmic scale."""
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
    """Returns a table of each source's readability, and of the share of its passages in each format, such as lists or code."""
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
