"""Finds and removes lines that many documents of a site have, and paragraphs that several documents have.

A paragraph stays in the best-ranked document alone (as in CCNet, Wenzek et al. 2019, and C4's three-sentence spans).
A paragraph is a single line here, so text wrapped at 80 columns has no paragraphs. Code and table rows stay.
"""

import pathlib
import re
from collections.abc import Iterator

import duckdb

from jaxlm.corpus.dedup import signatures
from jaxlm.corpus.dedup.sql import quoted


def keys(text: str, source: str, site: str, settings: dict) -> Iterator[tuple[int, bool]]:
    """Yields (hash, True if it is a paragraph) for each line and paragraph that may be removed from a text, each once."""
    keyed = (_key(line, source, site, settings) for line, prose in _marked(text) if prose)
    yield from dict.fromkeys(key for key in keyed if key)


def _key(line: str, source: str, site: str, settings: dict) -> tuple[int, bool] | None:
    """Returns (hash, True if a paragraph) of a line; None if it is too short."""
    if line.isascii() and len(line) < min(settings["min_chars"], settings["min_paragraph_chars"]):
        return None  # a shortcut: folding the case of ASCII text does not lengthen it
    words = " ".join(line.split()).casefold()
    if len(words) >= settings["min_paragraph_chars"]:
        return signatures.hash64(words), True
    if len(words) >= settings["min_chars"]:
        return signatures.hash64(f"{source}\0{site}\0{words}"), False
    return None


def _marked(text: str) -> Iterator[tuple[str, bool]]:
    """Yields (line with its end, True if it is prose)."""
    fence = ""
    for line in text.splitlines(keepends=True):
        mark = _FENCE.match(line) if "```" in line or "~~~" in line else None
        yield line, not (fence or mark or line.startswith(("    ", "\t", "|")))
        if fence:
            if mark and mark[1].startswith(fence) and not line[mark.end() :].strip():
                fence = ""
        elif mark:
            fence = mark[1]


_FENCE = re.compile(r"\s*(`{3,}|~{3,})")


def find(connection: duckdb.DuckDBPyConnection, folder: pathlib.Path, settings: dict, part: int, parts: int) -> None:
    """Writes to `repeats/PART.parquet` which lines and paragraphs to remove: (doc, key), sorted, of documents that stay.

    Looks at those of `parts` parts of the keys.
    """
    keyed, min_documents = f"read_parquet({quoted(folder / 'lines/*.parquet')})", settings["min_documents"]
    connection.execute(f"""
        CREATE TEMP VIEW here AS SELECT s.doc, s.rank, s.tie, s.site
        FROM read_parquet({quoted(folder / "sign/*.parquet")}) s
        ANTI JOIN read_parquet({quoted(folder / "exact/*.parquet")}) e ON s.doc = e.doc
        ANTI JOIN read_parquet({quoted(folder / "near/*.parquet")}) n ON s.doc = n.doc;
        CREATE TEMP TABLE again AS SELECT key FROM {keyed} WHERE key % {parts} = {part}
        GROUP BY key HAVING count(*) >= {min(2, min_documents)};
        CREATE TEMP VIEW repeats AS SELECT doc, key, paragraph, rank, tie, site
        FROM (FROM {keyed} SEMI JOIN again USING (key)) JOIN here USING (doc);
        CREATE TEMP TABLE sites AS SELECT site, count(*) AS documents FROM here GROUP BY site;
        CREATE TEMP TABLE often AS SELECT key FROM repeats JOIN sites USING (site) WHERE NOT paragraph GROUP BY key
        HAVING count(*) >= greatest({min_documents}, {settings["min_share"]} * any_value(sites.documents));
        CREATE TEMP TABLE first AS SELECT key, arg_min(doc, (rank::UHUGEINT << 64) | tie::UHUGEINT) AS keeper
        FROM repeats WHERE paragraph GROUP BY key HAVING count(*) > 1;
        COPY (
            SELECT r.doc, r.key FROM repeats r SEMI JOIN often o ON r.key = o.key WHERE NOT r.paragraph
            UNION ALL
            SELECT doc, key FROM repeats JOIN first USING (key) WHERE paragraph AND doc != keeper
            ORDER BY doc, key
        ) TO {quoted(folder / f"repeats/{part:03d}.parquet")} (FORMAT parquet);
        DROP TABLE first; DROP TABLE often; DROP TABLE sites; DROP VIEW repeats; DROP TABLE again; DROP VIEW here;
    """)


def remove(text: str, source: str, site: str, settings: dict, going: set[int], *, headings: bool) -> tuple[str, int]:
    """Removes lines with keys in `going`; if `headings`, also headings left without text. Returns (text, lines removed)."""
    lines: list[str] = []
    count, cut = 0, False  # cut: a line was removed since the last line that stayed
    for line, prose in _marked(text):
        key = _key(line, source, site, settings) if prose else None
        if key and key[0] in going:
            count, cut = count + 1, True
            continue
        if line.strip():
            if cut and headings:
                count += _drop_empty_sections(lines, _level(line) if prose else _BODY)
            cut = False
        elif cut and (not lines or not lines[-1].strip()):
            continue
        lines.append(line)
    if cut and headings:
        count += _drop_empty_sections(lines, 1)
    return "".join(lines).strip("\n"), count


_HEADING = re.compile(r"(#{1,6}) ")
_BODY = 7  # below all headings


def _level(line: str) -> int:
    heading = _HEADING.match(line)
    return len(heading[1]) if heading else _BODY


def _drop_empty_sections(lines: list[str], next_level: int) -> int:
    """Drops headings at the end that have no text before the next line, of `next_level`; returns how many."""
    count = 0
    for last in reversed(range(len(lines))):
        if not lines[last].strip():
            continue
        if not next_level <= _level(lines[last]) < _BODY:
            break
        del lines[last:]
        count += 1
    return count
