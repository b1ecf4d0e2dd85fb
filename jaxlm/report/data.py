"""Writes the report of a data directory: what was read, what each stage removed and why, with examples.

`write` takes a summary with these keys. Only `sources` must be there:

    sources        NAME -> path, read {documents, bytes, failed {reason: n}, failures [..]}, stages [{name, documents_in,
                   documents_out, bytes_in, bytes_out, removed {reason: n}, edits {name: n}}], kept {documents, bytes}
    examples       [{source, stage, reason, detail, id, excerpt}] of removed documents
    clusters       sizes {size: how many}, largest [{size, kept, members [id, ...]}]
    junk           rows of `corpus.audit` (`Finding.to_row`)
    mismatch       `corpus.comparison.Report.to_dict`
    tokenizer_fit  rows, one a source
    manifest       sha256, config
    run            the folder of the run that trains on the data; "" = none
    left_out       what the page does not have, and what adds it
"""

import collections
import json
import pathlib
import typing

from jaxlm.console import count, share, size
from jaxlm.corpus.tally import stage_order
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
    return join([*parts, _tiles(summary)])


def _tiles(summary: dict) -> Markup:
    sources = summary["sources"].values()
    read, kept = _total(sources, "read"), _total(sources, "kept")
    removed: collections.Counter[str] = collections.Counter()
    for source in sources:
        removed.update({stage["name"]: sum(stage["removed"].values()) for stage in source["stages"]})
    tiles = [
        (count(len(summary["sources"])), "sources"),
        (count(read[0]), f"documents read, {size(read[1])}"),
        (count(kept[0]), f"kept, {share(kept[0], read[0])}"),
        (size(kept[1]), f"kept, {share(kept[1], read[1])} of the bytes"),
    ]
    tiles += [(count(n), f"removed by {name}") for name, n in removed.most_common(2) if n]
    return tag(
        "div", *(tag("div", tag("b", big), tag("span", small), class_="tile") for big, small in tiles), class_="tiles"
    )


def _total(sources: typing.Iterable[dict], key: str) -> tuple[int, int]:
    """Documents and bytes of "read" or "kept" over all sources."""
    sources = list(sources)
    return sum(s[key]["documents"] for s in sources), sum(s[key]["bytes"] for s in sources)


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
    documents, volume = _total(sources.values(), "read")
    whole, rows = documents, []
    failed = sum(sum(s["read"]["failed"].values()) for s in sources.values())

    def row(name: str, gone: int, kind: str) -> None:
        bar = page.bar(
            [(documents / (whole or 1), "kept"), (gone / (whole or 1), kind)], f"{name}: {count(gone)} removed"
        )
        rows.append(
            (
                name,
                cell(bar, kind="text"),
                count(gone) if rows else "",
                share(gone, whole) if rows else "",
                count(documents),
                size(volume),
            )
        )

    row("read", 0, "gone")
    documents -= failed
    row("failed", failed, "failed")
    for name in _stages(sources):
        found = [stage for source in sources.values() for stage in source["stages"] if stage["name"] == name]
        gone = sum(sum(stage["removed"].values()) for stage in found)
        documents -= gone
        volume -= sum(stage["bytes_in"] - stage["bytes_out"] for stage in found)
        row(name, gone, "gone")
    return table(("", "documents", "removed", "of all", "left", "bytes left"), rows, "All sources by stage")


def _matrix(sources: dict[str, dict], unit: str, write_number: typing.Callable[[float], str]) -> Markup:
    """Sources by stages: what each took in documents or bytes, shaded by its share of what the source had."""
    names, rows = _stages(sources), []
    for source_name, source in sources.items():
        whole, kept = source["read"][unit], source["kept"][unit]
        taken = {stage["name"]: _taken(stage, unit) for stage in source["stages"]}
        cells = [_shaded(taken[name], whole, write_number) if name in taken else cell("") for name in names]
        if unit == "documents":
            cells.insert(0, _shaded(sum(source["read"]["failed"].values()), whole, write_number))
        first = tag("span", source_name, title=source.get("path"))
        rows.append((first, write_number(whole), *cells, write_number(kept), share(kept, whole)))
    head = ("source", "read", *(["failed"] if unit == "documents" else []), *names, "kept", "")
    return table(head, rows, f"{unit} by source and stage")


def _taken(stage: dict, unit: str) -> int:
    return sum(stage["removed"].values()) if unit == "documents" else stage["bytes_in"] - stage["bytes_out"]


def _shaded(number: float, whole: float, write_number: typing.Callable[[float], str]) -> Markup:
    if not number:
        return cell("0", kind="zero")
    return cell(tag("span", write_number(number), title=share(number, whole)), number / whole if whole else 0.0)


def _reasons(sources: dict[str, dict]) -> Markup:
    rows = []
    for name, source in sources.items():
        reasons = [("failed", reason, n) for reason, n in source["read"]["failed"].items()]
        reasons += [(stage["name"], reason, n) for stage in source["stages"] for reason, n in stage["removed"].items()]
        rows += [
            (name, stage, reason, count(n), share(n, source["read"]["documents"])) for stage, reason, n in reasons if n
        ]
    rows = [(name, cell(stage, kind="text"), cell(reason, kind="text"), *rest) for name, stage, reason, *rest in rows]
    failures = [(name, line) for name, source in sources.items() for line in source["read"].get("failures", ())]
    shown = [details(f"Reasons ({len(rows)})", table(("source", "stage", "reason", "documents", ""), rows, "Reasons"))]
    if failures:
        lines = [(name, cell(line, kind="text")) for name, line in failures]
        shown.append(
            details(f"Records that failed ({len(lines)} named)", table(("source", "record"), lines, "Failures"))
        )
    return join(shown)


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
        numbers = [cell(count(by_source[s]) if s in by_source else "") for s in used]
        rows.append((name, cell(edit, kind="text"), count(sum(by_source.values())), *numbers))
    return table(("stage", "edit", "all", *used), rows, "Edits by stage and source")


def _examples(examples: list[dict]) -> Markup:
    """Removed and changed documents by stage and reason, folded away."""
    groups: dict[str, dict[str, list[dict]]] = {}
    for example in examples:
        groups.setdefault(example["stage"], {}).setdefault(example["reason"], []).append(example)
    parts = [tag("p", "Read some of each: a filter that takes what you would keep is the wrong filter.")]
    for stage, reasons in groups.items():
        inner = [
            details(
                join([reason or "changed: before -> after", " ", tag("span", len(found), class_="dim")]),
                *map(_example, found),
            )
            for reason, found in reasons.items()
        ]
        total = sum(map(len, reasons.values()))
        parts.append(details(join([tag("b", stage), " ", tag("span", total, class_="dim")]), *inner))
    return join(parts)


def _example(example: dict) -> Markup:
    about = tag("div", tag("b", example["source"]), " ", tag("code", example["id"], class_="id"))
    detail = tag("div", example["detail"], class_="dim") if example["detail"] else ""
    return tag("div", about, detail, tag("pre", example["excerpt"]) if example["excerpt"] else "", class_="example")


def _clusters(clusters: dict) -> Markup:
    """How many groups of duplicates of each size there are, and the largest."""
    sizes = sorted((int(n), how_many) for n, how_many in clusters["sizes"].items())
    bins: dict[str, int] = {}
    for n, how_many in sizes:
        low = 1 << (n.bit_length() - 1)
        name = str(n) if n < 4 else f"{low} to {2 * low - 1}"
        bins[name] = bins.get(name, 0) + how_many
    if not bins:
        return tag("p", "No two documents are alike.")
    copies = sum((n - 1) * how_many for n, how_many in sizes)
    parts = [
        tag(
            "p", f"{count(sum(bins.values()))} groups of like documents, {count(copies)} copies. By size of the group:"
        ),
        page.columns([(name, n, count(n)) for name, n in bins.items()], "Groups by size"),
    ]
    for cluster in clusters.get("largest", ()):
        members = [
            tag("div", tag("code", member, class_="id"), tag("b", " kept") if member == cluster["kept"] else "")
            for member in cluster["members"]
        ]
        more = cluster["size"] - len(cluster["members"])
        if more > 0:
            members.append(tag("div", f"and {count(more)} more", class_="dim"))
        head = [f"{count(cluster['size'])} documents like ", tag("code", cluster["kept"], class_="id")]
        parts.append(details(join(head), tag("div", *members, class_="example")))
    return join(parts)


def _junk(rows: list[dict]) -> Markup:
    """What a source repeats that nobody would write, worst first; below, what is only characteristic of a source."""
    head = ("found", "what it is", "source", "score", "count", "documents", "share", "only here", "")
    junk = [_junk_row(row) for row in rows if row["junk"]]
    own = [_junk_row(row) for row in rows if not row["junk"]]
    about = "Strings that a source repeats and nobody would write. Score 0 to 100: how surely it is junk, times how much of "
    about += "the source it is in. “Only here” 100%: no other source has it."
    parts = (
        [tag("p", about), table(head, junk[:_JUNK_ROWS], "Junk")] if junk else [tag("p", "Nothing looks like junk.")]
    )
    if junk[_JUNK_ROWS:]:
        parts.append(details(f"{len(junk) - _JUNK_ROWS} more", table(head, junk[_JUNK_ROWS:], "More junk")))
    if own:
        title = f"Characteristic of a source, no junk: leave it in ({len(own)})"
        parts.append(details(title, table(head, own, "Characteristic")))
    return join(parts)


def _junk_row(row: dict) -> tuple:
    examples = [
        tag("div", tag("code", example["document"], class_="id"), tag("pre", example["text"]), class_="example")
        for example in row["examples"]
    ]
    pattern = tag("div", "to remove it: ", tag("code", row["pattern"]), class_="dim") if row["junk"] else ""
    return (
        tag("code", row["text"]),
        cell(row["why"], kind="text"),
        cell(row["source"], kind="text"),
        page.value(float(row["score"])),
        count(row["count"]),
        count(row["documents"]),
        share(row["share_of_documents"], 1),
        share(row["concentration"], 1),
        cell(details("examples", pattern, *examples), kind="text"),
    )


def _tokenizer_fit(rows: list[dict]) -> Markup:
    head = list(dict.fromkeys(key for row in rows for key in row))
    lines = [[page.value(row.get(key)) for key in head] for row in rows]
    return table([key.replace("_", " ") for key in head], lines, "Tokenizer fit")


def _manifest(manifest: dict) -> Markup:
    config = json.dumps(manifest.get("config", {}), indent=1, ensure_ascii=False, default=str)
    about = tag(
        "p", "sha256 of the manifest ", tag("code", manifest["sha256"], class_="id"), ": equal results, equal hash."
    )
    return join([about, details("Config", tag("pre", config))])
