"""Writes the report of a data directory: what was read, what each stage removed and why, with examples.

`write` takes a summary with these keys. Only `sources` must be there:

    sources        NAME -> path, read {documents, bytes, failed {reason: n}, failures [..]}, stages [{name, documents_in,
                   documents_out, bytes_in, bytes_out, removed {reason: n}, edits {name: n}}], kept {documents, bytes}
    examples       [{source, stage, reason, detail, id, excerpt}] of removed documents
    clusters       sizes {size: how many}, largest [{size, kept, members [id, ...]}]
    junk           rows of `corpus.audit` (`Finding.to_row`)
    mismatch       `corpus.mismatch.Report.to_dict`
    tokenizer_fit  rows, one a source
    manifest       sha256, config
    run            the folder of the run that trains on the data; "" = none
    left_out       what the page does not have, and what adds it
"""

import collections
import json
import pathlib
import typing
from collections.abc import Callable

from jaxlm.corpus.tally import stage_order
from jaxlm.host.console import count, share, size
from jaxlm.report import mismatch, page
from jaxlm.report.page import Markup, cell, details, join, table, tag

_JUNK_ROWS = 40  # shown at once; the others on demand


def write(path: pathlib.Path, summary: dict[str, typing.Any]) -> None:
    """Writes the page of a summary. The module's docstring lists the summary's keys."""
    parts = [
        ("Funnel", _funnel, summary["sources"]),
        ("Edits", _edits, summary["sources"]),
        ("Removed and changed documents", _examples, summary.get("examples")),
        ("Duplicate clusters", _clusters, summary.get("clusters")),
        ("Junk", _junk, summary.get("junk")),
        ("Mismatch", mismatch.render, summary.get("mismatch")),
        ("Tokenizer fit", _tokenizer_fit, summary.get("tokenizer_fit")),
        ("Manifest", _manifest, summary.get("manifest")),
    ]
    sections = [page.section(title, render(content)) for title, render, content in parts if content]
    page.write(path, f"Data report: {'/'.join(path.resolve().parent.parts[-2:])}", _lead(path, summary), sections)


def _lead(path: pathlib.Path, summary: dict) -> Markup:
    parts = []
    if run := summary.get("run"):
        link = page.link(f"run {pathlib.Path(run).resolve().name}", pathlib.Path(run) / page.NAME, path)
        parts.append(tag("p", "Made for the ", link, ", whose page is there once it has ended."))
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
        (size(kept[1]), f"kept, {share(kept[1], read[1])} of the bytes"),
        *((count(n), f"removed by {name}") for name, n in removed.most_common(2) if n),
    ]
    return tag(
        "div", *(tag("div", tag("b", big), tag("span", small), class_="tile") for big, small in tiles), class_="tiles"
    )


def _total(sources: dict[str, dict], key: str) -> tuple[int, int]:
    """Documents and bytes of "read" or "kept" over all sources."""
    return tuple(sum(source[key][unit] for source in sources.values()) for unit in ("documents", "bytes"))


def _stages(sources: dict[str, dict]) -> list[str]:
    return stage_order([[stage["name"] for stage in source["stages"]] for source in sources.values()])


def _funnel(sources: dict[str, dict]) -> Markup:
    """Three tables: all sources stage by stage; documents and bytes by source and stage; the reasons."""
    keys = page.keys({"kept": "still there", "gone": "removed", "failed": "failed: unreadable"})
    parts = [
        tag("p", "Read = kept + removed by each stage + failed.", *keys),
        _all_stages(sources),
        tag("h3", "Documents by source"),
        _matrix(sources, "documents", count),
        tag("h3", "Bytes by source"),
        tag("p", "What edits took counts too, as markup in the stage html."),
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
        losses.append(
            (name, *(sum(_taken(stage, unit) for stage in of_stage) for unit in ("documents", "bytes")), "gone")
        )
    rows, documents = [], whole
    for name, gone, gone_bytes, kind in losses:
        documents, volume = documents - gone, volume - gone_bytes
        parts = [(documents / (whole or 1), "kept"), (gone / (whole or 1), kind)]
        bar = cell(page.bar(parts, f"{name}: {count(gone)} removed"), kind="text")
        removed = (count(gone), share(gone, whole)) if rows else ("", "")
        rows.append((name, bar, *removed, count(documents), size(volume)))
    return table(("", "documents", "removed", "of all", "left", "bytes left"), rows, "All sources by stage")


def _matrix(sources: dict[str, dict], unit: str, write_number: Callable[[float], str]) -> Markup:
    """Sources by stages: what each took in documents or bytes, shaded by its share of what the source had."""
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
        removed = [("failed", source["read"]["failed"])]
        removed += [(stage["name"], stage["removed"]) for stage in source["stages"]]
        for stage, reason, n in ((stage, *item) for stage, reasons in removed for item in reasons.items()):
            if n:
                row = (_words(stage), _words(reason), count(n), share(n, source["read"]["documents"]))
                rows.append((name, *row))
        failures += [(name, _words(line)) for line in source["read"].get("failures", ())]
    shown = [details(f"Reasons ({len(rows)})", table(("source", "stage", "reason", "documents", ""), rows, "Reasons"))]
    if failures:
        records = table(("source", "record"), failures, "Failures")
        shown.append(details(f"Records that failed ({len(failures)} named)", records))
    return join(shown)


def _words(content: object) -> Markup:
    return cell(content, kind="text")


def _edits(sources: dict[str, dict]) -> Markup:
    """What the stages changed in documents that stayed or went: stage and name by source."""
    totals: dict[tuple[str, str], dict[str, int]] = {}
    for name in _stages(sources):
        for source_name, source in sources.items():
            for stage in source["stages"]:
                for edit, n in stage["edits"].items() if stage["name"] == name else ():
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
    """Removed and changed documents by stage and reason, folded away."""
    groups: dict[str, dict[str, list[dict]]] = {}
    for example in examples:
        groups.setdefault(example["stage"], {}).setdefault(example["reason"], []).append(example)
    parts = [tag("p", "Read some of each: a filter that takes what you would keep is the wrong filter.")]
    for stage, reasons in groups.items():
        inner = [
            _folded(reason or "changed: before -> after", len(alike), *map(_example, alike))
            for reason, alike in reasons.items()
        ]
        parts.append(_folded(tag("b", stage), sum(map(len, reasons.values())), *inner))
    return join(parts)


def _folded(title: object, number: int, *children: Markup) -> Markup:
    return details(join([title, " ", tag("span", number, class_="dim")]), *children)


def _example(example: dict) -> Markup:
    about = tag("div", tag("b", example["source"]), " ", _id(example["id"]))
    detail = tag("div", example["detail"], class_="dim") if example["detail"] else ""
    return tag("div", about, detail, tag("pre", example["excerpt"]) if example["excerpt"] else "", class_="example")


def _id(text: str) -> Markup:
    return tag("code", text, class_="id")


def _clusters(clusters: dict) -> Markup:
    """How many groups of duplicates of each size there are, and the largest."""
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
        page.columns([(name, n, count(n)) for name, n in bins.items()], "Groups by size"),
    ]
    for cluster in clusters.get("largest", ()):
        kept, named = cluster["kept"], cluster["members"]
        members = [tag("div", _id(member), tag("b", " kept") if member == kept else "") for member in named]
        if cluster["size"] > len(named):
            members.append(tag("div", f"and {count(cluster['size'] - len(named))} more", class_="dim"))
        head = join([f"{count(cluster['size'])} documents like ", _id(kept)])
        parts.append(details(head, tag("div", *members, class_="example")))
    return join(parts)


def _junk(rows: list[dict]) -> Markup:
    """What a source repeats that nobody would write, worst first; below, what is only characteristic of a source."""
    head = ("found", "what it is", "source", "score", "count", "documents", "share", "only here", "")
    junk = [_junk_row(row) for row in rows if row["junk"]]
    own = [_junk_row(row) for row in rows if not row["junk"]]
    about = "Strings that a source repeats and nobody would write. Score 0 to 100: how surely it is junk, times how much of "
    about += "the source it is in. “Only here” 100%: no other source has it."
    if not junk:
        parts = [tag("p", "Nothing looks like junk.")]
    else:
        parts = [tag("p", about), table(head, junk[:_JUNK_ROWS], "Junk")]
    if junk[_JUNK_ROWS:]:
        parts.append(details(f"{len(junk) - _JUNK_ROWS} more", table(head, junk[_JUNK_ROWS:], "More junk")))
    if own:
        title = f"Characteristic of a source, no junk: leave it in ({len(own)})"
        parts.append(details(title, table(head, own, "Characteristic")))
    return join(parts)


def _junk_row(row: dict) -> tuple:
    examples = [
        tag("div", _id(example["document"]), tag("pre", example["text"]), class_="example")
        for example in row["examples"]
    ]
    pattern = tag("div", "to remove it: ", tag("code", row["pattern"]), class_="dim") if row["junk"] else ""
    return (
        *(tag("code", row["text"]), _words(row["why"]), _words(row["source"]), page.value(float(row["score"]))),
        *(
            count(row["count"]),
            count(row["documents"]),
            share(row["share_of_documents"], 1),
            share(row["concentration"], 1),
        ),
        _words(details("examples", pattern, *examples)),
    )


def _tokenizer_fit(rows: list[dict]) -> Markup:
    head = list(dict.fromkeys(key for row in rows for key in row))
    lines = [[page.value(row.get(key)) for key in head] for row in rows]
    return table([key.replace("_", " ") for key in head], lines, "Tokenizer fit")


def _manifest(manifest: dict) -> Markup:
    config = json.dumps(manifest.get("config", {}), indent=1, ensure_ascii=False, default=str)
    about = tag("p", "sha256 of the manifest ", _id(manifest["sha256"]), ": equal results, equal hash.")
    return join([about, details("Config", tag("pre", config))])
