"""The stages and the audit on sets of texts that were written before their rules (see sets/README.md)."""

import collections
import importlib.util
import json
import pathlib
import random
import re
import time

import pytest
from tiny_stage import SETS, rows, words

from jaxlm.configs import base, presets
from jaxlm.corpus.audit import audit
from jaxlm.corpus.sources import mediawiki
from jaxlm.corpus.stage import Document
from jaxlm.corpus.stages import registry

DEFAULTS = base.get_config().prepare.stages.to_dict()
WRITTEN_BY_READERS = ("blog", "rtl")  # whose comments the setting `comments` keeps


def text_of(html, **settings):
    document = Document(text=html, id="page", metadata={"format": "html"})
    stage = registry.make(registry.StageSpec("html", DEFAULTS["html"] | settings), pathlib.Path())
    removed = stage.apply(document, collections.Counter())
    return "" if removed else document.text


PAGES = sorted((SETS / "pages").glob("*.json"))


def test_pages_keep_their_text_and_lose_their_furniture():
    lost, left, phrases = {}, [], collections.Counter()
    for path in PAGES:
        wanted = json.loads(path.read_text(encoding="utf-8"))
        comments = path.stem in WRITTEN_BY_READERS
        text = words(text_of(path.with_suffix(".html").read_text(encoding="utf-8"), comments=comments))
        missing = [phrase for phrase in wanted["keep"] if words(phrase) not in text]
        lost[path.stem] = len(missing) / len(wanted["keep"])
        cells = [cell for cell in wanted["cells"] if words(cell) not in text]
        phrases.update(cells=len(wanted["cells"]), lost_cells=len(cells), furniture=len(wanted["drop"]))
        left += [phrase for phrase in wanted["drop"] if words(phrase) in text]
    assert sorted(lost.values())[len(lost) // 2] <= 0.01, lost
    assert max(lost.values()) <= 0.05, lost
    assert phrases["lost_cells"] <= 0.01 * phrases["cells"]
    assert len(left) <= 0.15 * phrases["furniture"], (
        left
    )  # of single pages: what a site's pages share is another stage's


def test_numbers_of_a_page_are_those_of_its_text():
    for path in PAGES:
        wanted = json.loads(path.read_text(encoding="utf-8"))
        html = path.with_suffix(".html").read_text(encoding="utf-8")
        shown = collections.Counter(re.findall(r"\d+", re.sub(r"<[^>]*>|&#?\w+;", " ", html)))
        numbers = collections.Counter(re.findall(r"\d+", text_of(html)))
        assert not {number for number in numbers if number not in shown} - {"1", "2", "3", "4", "5", "6", "7"}, (
            path.stem
        )
        kept = {number for phrase in wanted["keep"] + wanted["cells"] for number in re.findall(r"\d+", phrase)}
        if path.stem not in WRITTEN_BY_READERS:
            assert kept <= numbers.keys(), path.stem


def test_markup_that_carries_meaning():
    wrong = [row["html"] for row in rows("markup.jsonl") if not _is_right(row)]
    assert len(wrong) <= 4, (
        wrong
    )  # `D<sup>r</sup>`, lists in Roman numbers, a picture of a formula, what `ins` corrects


def _is_right(row):
    text = text_of(f"<html><body><main>{row['html']}</main></body></html>", min_chars=0)
    plain = words(text)
    lines = [line for line in text.splitlines() if line.startswith("|") and "---" not in line]
    cells = iter([[cell.strip() for cell in line.strip("| ").split("|") if cell.strip()] for line in lines])
    in_order = all(
        any([words(cell) for cell in row_cells if cell] == line for line in cells) for row_cells in row.get("rows", [])
    )
    return (
        words(row.get("text", plain)) == plain
        and all(words(part) in plain for part in row.get("contains", []))
        and not any(words(part) in plain for part in row.get("lacks", []))
        and all(any(words(part) in plain for part in parts) for parts in row.get("any", []))
        and in_order
    )


def test_templates_say_their_words():
    wrong = collections.Counter()
    for row in rows("templates.jsonl"):
        silent = collections.Counter()
        text = mediawiki.to_markdown(row["wikitext"], frozenset({"file", "category"}), silent)
        said = all(part in text for part in row["expect"]) and not any(part in text for part in row["lacks"])
        wrong[row["words"]] += not said
        assert said or silent or not row["words"], row  # a hole is counted
    assert wrong[True] <= 6
    assert wrong[False] <= 2


@pytest.mark.parametrize("text", [
    "{{" * 100 + "x|y" + "}}" * 100, "{{x|" * 100 + "y" + "}}" * 100, "{{a|" * 50, "{|\n" + "| c || d\n|-\n" * 2000 + "|}",
    "{{" * 3000, "<ref>" * 500, "[[a|" * 60,
])  # fmt: skip
def test_wikitext_that_is_broken_or_deep_ends(text):
    mediawiki.to_markdown(text, frozenset())


def test_a_long_line_of_templates_takes_linear_time():
    took = []
    for n in (2000, 8000):
        began = time.process_time()
        mediawiki.to_markdown("A {{convert|5|km}} b. " * n, frozenset())
        took.append(time.process_time() - began)
    assert took[1] < 10 * took[0]


def planted_kinds():
    spec = importlib.util.spec_from_file_location("junk", SETS / "junk.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def audited(texts):
    counts = [audit.scan("source", texts)]
    return audit.rank(counts, audit.contrast_of([each.bytes for each in counts], "", {}))


def clean_documents(number):
    """Documents of two clean texts each, in which every pair occurs once."""
    texts, rng = [row["text"] for row in rows("clean.jsonl")], random.Random(0)
    pairs = rng.sample([(a, b) for a in range(len(texts)) for b in range(a)], number)
    return [(f"clean{i}", f"{texts[a]}\n\n{texts[b]}") for i, (a, b) in enumerate(pairs)]


def test_planted_junk_is_among_the_first_findings():
    junk, missed = planted_kinds(), []
    clean = clean_documents(400)
    for kind in junk.KINDS:
        rng = random.Random(3)
        texts = [*clean, *((f"junk{i}", junk.planted(kind, rng)) for i in range(4))]
        rng.shuffle(texts)
        first = audited(texts)[:30]
        if not any(doc_id.startswith("junk") for finding in first for doc_id, _ in finding.examples):
            missed.append(kind)
    assert len(missed) <= 1, missed


def test_words_of_a_domain_are_seldom_among_the_first_findings():
    findings = audited([(str(i), row["text"]) for i, row in enumerate(rows("clean.jsonl"))])
    assert not [finding for finding in findings if finding.is_junk]
    assert sum(finding.kind in ("word", "token") for finding in findings[:20]) <= 3


def test_good_manuals_stay():
    config = base.get_config()
    lines = presets.docs(config)
    stages = config.prepare.stages.to_dict()
    chain = [
        registry.make(registry.parse(line, stages, ""), pathlib.Path())
        for line in lines
        if line.split()[0] in registry.DOCUMENT_STAGES
    ]
    gone, shorter = [], []
    for row in rows("manuals.jsonl"):
        document = Document(text=row["text"], id="manual", metadata={"format": "text"})
        why = next((why for stage in chain if (why := stage.apply(document, collections.Counter()))), None)
        if why:
            gone.append((row["kind"], why))
        elif len(document.text) < 0.97 * len(row["text"]):
            shorter.append(row["kind"])
    assert len(gone) <= 0.03 * len(rows("manuals.jsonl")), gone
    assert len(shorter) <= 3, shorter
