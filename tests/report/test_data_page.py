"""The data report: the numbers stand where they belong, and nothing of a hostile document becomes markup."""

import collections
import dataclasses
import html.parser
import re

import pytest

from jaxlm.corpus.audit import mismatch
from jaxlm.corpus.audit.audit import Finding
from jaxlm.report import data_page

HOSTILE = (
    "</pre></td><script>alert(1)</script><img src=https://evil.example/x onerror='alert(2)'>\" onclick=x\u202e\x00 <!--"
)
VOID = {"meta", "!doctype"}


class Page(html.parser.HTMLParser):
    """Elements and the tables of a page; fails when an element is not closed where it should be."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.tags, self.attributes = [], collections.Counter(), []
        self.tables, self.text = [], ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += attrs
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, content):
        self.text += content
        if {"td", "th"} & set(self.open) and "title" not in self.open:
            self.tables[-1][-1][-1] += content


def written(tmp_path, summary: dict) -> tuple[str, Page]:
    path = tmp_path / "data" / "report.html"
    data_page.write(path, summary)
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]
    text = path.read_text(encoding="utf-8")
    return text, Page(text)


def books(documents: int, failed: dict, *stages: tuple) -> dict:
    """A source's books; stages are (name, removed, bytes taken, edits)."""
    read = {"documents": documents, "bytes": 1000 * documents, "failed": failed}
    read["failures"] = [f"file {reason}" for reason in failed]
    left, volume, rows = documents - sum(failed.values()), 1000 * documents, []
    for name, removed, taken, edits in stages:
        row = {"name": name, "documents_in": left, "bytes_in": volume, "removed": removed, "edits": edits}
        left, volume = left - sum(removed.values()), volume - taken
        rows.append(row | {"documents_out": left, "bytes_out": volume})
    return {"path": "corpora/x", "read": read, "stages": rows, "kept": {"documents": left, "bytes": volume}}


@pytest.fixture
def summary() -> dict:
    html = ("html", {"no main text": 90}, 600_000, {"boilerplate": 7})
    web = books(1000, {"bad byte": 10}, html, ("near", {"near duplicate": 400}, 200_000, {}))
    code = books(100, {}, ("code", {"minified": 5}, 5_000, {}), ("near", {}, 0, {"merged": 3}))
    return {"sources": {"web": web, "code": code}}


def test_the_funnel_accounts_for_every_document(tmp_path, summary):
    _, shown = written(tmp_path, summary)
    whole, documents, volume, reasons, failures, edits = shown.tables
    assert whole[1:] == [
        ["read", "", "", "", "1,100", "1.1 MB"],
        ["failed", "", "10", "0.9%", "1,090", "1.1 MB"],
        ["html", "", "90", "8.2%", "1,000", "500 kB"],
        ["code", "", "5", "0.5%", "995", "495 kB"],
        ["near", "", "400", "36.4%", "595", "295 kB"],
    ]
    assert documents == [
        ["source", "read", "failed", "html", "code", "near", "kept", ""],
        ["web", "1,000", "10", "90", "", "400", "500", "50.0%"],
        ["code", "100", "0", "", "5", "0", "95", "95.0%"],
    ]
    assert volume[1:] == [
        ["web", "1 MB", "600 kB", "", "200 kB", "200 kB", "20.0%"],
        ["code", "100 kB", "", "5 kB", "0", "95 kB", "95.0%"],
    ]
    assert ["web", "near", "near duplicate", "400", "40.0%"] in reasons
    assert failures[1:] == [["web", "file bad byte"]]
    assert edits == [
        ["stage", "edit", "all", "web", "code"],
        ["html", "boilerplate", "7", "7", ""],
        ["near", "merged", "3", "", "3"],
    ]
    heat = [float(style.removeprefix("--heat:").rstrip("%")) for key, style in shown.attributes if "--heat" in style]
    assert heat == [1, 9, 40, 5, 60, 20, 5]


def test_it_links_to_the_run_and_says_what_it_leaves_out(tmp_path, summary):
    summary |= {"run": str(tmp_path / "runs/<one>"), "left_out": "audit & more"}
    _, shown = written(tmp_path, summary)
    assert ("href", "../runs/%3Cone%3E/report.html") in shown.attributes
    assert "run <one>" in shown.text
    assert "Left out: audit & more." in shown.text


def test_what_is_not_there_has_no_section_or_table(tmp_path, summary):
    _, shown = written(tmp_path, summary)
    assert shown.tags["section"] == 2
    assert [value for key, value in shown.attributes if key == "href"] == ["#funnel", "#edits"]
    _, shown = written(tmp_path, {"sources": {"nothing": books(0, {}, ("html", {}, 0, {}))}})
    assert "No stage changed any document." in shown.text
    _, shown = written(tmp_path, summary | {"clusters": {"sizes": {}, "largest": []}})
    assert "No two documents are alike." in shown.text
    assert "By size of the group" not in shown.text


def test_what_a_change_changed_is_marked(tmp_path, summary):
    change = {"source": "web", "stage": "unicode", "reason": "", "id": "a"}
    summary["examples"] = [
        change
        | {"detail": "one <i> caf\u00c3\u00a9 is op", "excerpt": "one <i> caf\u00e9 is open to"},  # cut at a length
        change | {"detail": "old", "excerpt": "new"},
        change | {"detail": "'old' -> 'new', of an older version", "excerpt": ""},
        change | {"detail": "", "excerpt": "ask <EMAIL>"},
    ]
    text, _ = written(tmp_path, summary)
    for words in (
        "<pre>one &lt;i&gt; <del>caf\u00c3\u00a9</del> is op</pre><pre>one &lt;i&gt; <ins>caf\u00e9</ins> is open to</pre>",
        "<pre><del>old</del></pre><pre><ins>new</ins></pre>",
        "&#x27;old&#x27; -&gt; &#x27;new&#x27;, of an older version</div></div>",
        "<pre>ask &lt;EMAIL&gt;</pre>",
    ):
        assert words in text, words


def test_examples_clusters_junk_and_tokenizer_fit(tmp_path, summary):
    stage = {"stage": "near", "reason": "near duplicate", "detail": "J=.83 with a.html"}
    summary["examples"] = [{"source": "web", **stage, "id": f"page-{i}", "excerpt": f"words {i}"} for i in range(3)]
    sizes = {"2": 10, 3: 4, "5": 1, "700": 2}
    largest = [{"size": 700, "kept": "a.html", "members": ["b.html", "a.html"]}]
    summary["clusters"] = {"sizes": sizes, "largest": largest}
    finding = Finding(
        "token", "PersonX", "annotation", "a label", "web", 1234, 99, 0.25, 1.0, 77.7, (("page-1", "to PersonX,"),)
    )
    own = dataclasses.replace(finding, text="PostgreSQL", pattern="", why="a word of this source")
    summary["junk"] = [*[finding.to_row()] * 50, own.to_row()]
    summary["tokenizer_fit"] = [{"source": "web", "bytes_per_token": 4.5}, {"source": "code", "unused_pieces": 12345}]
    summary["manifest"] = {"sha256": "ab" * 32, "config": {"data": {"dir": "déjà"}}}
    _, shown = written(tmp_path, summary)
    assert "near duplicate 3" in shown.text
    assert "page-2J=.83 with a.htmlwords 2" in shown.text
    assert "17 groups of like documents, 1,420 copies" in shown.text
    assert re.search(r"2\s*10\s*3\s*4\s*4 to 7\s*1\s*512 to 1023\s*2", shown.text)
    assert "b.htmla.html keptand 698 more" in shown.text
    junk, more, characteristic, fit = shown.tables[-4:]
    assert characteristic[1][:3] == ["PostgreSQL", "a word of this source", "web"]
    assert "to remove it" not in characteristic[1][8]
    assert "no junk: leave it in (1)" in shown.text
    assert (len(junk), len(more)) == (41, 11)
    assert junk[1][:8] == ["PersonX", "a label", "web", "77.7", "1,234", "99", "25.0%", "100%"]
    assert "to remove it: annotation" in junk[1][8]
    assert fit == [["source", "bytes per token", "unused pieces"], ["web", "4.5", ""], ["code", "", "12,345"]]
    assert '"dir": "déjà"' in shown.text


def test_mismatch_as_the_corpus_reports_it(tmp_path, summary):
    texts = {
        "web": [f"the cat number {i} sat on the mat and slept all day long. " * 3 for i in range(12)],
        "code": [f"def run_{i}(x):\n    return x + {i}\n" * 4 for i in range(12)],
    }
    target = [f"a dog number {i} ran to the house and slept all night long. " * 3 for i in range(12)]
    report = summary["mismatch"] = mismatch.compare(texts, target, sample_mb=0.1)
    _, shown = written(tmp_path, summary)
    advice, mixture, divergence, auc, pairs, lengths, formats = shown.tables[-7:]
    assert advice[1][1:] == list(report["advice"]["web"].values())
    assert [row[:2] for row in mixture[1:]] == [["web", "50.0%"], ["code", "50.0%"]]
    by_names = {(pair["a"], pair["b"]): pair for pair in report["pairs"]}
    assert divergence[0] == ["", "web", "code", "target"]
    apart = [f"{by_names[names]['js_words']:.2f}" for names in (("web", "code"), ("code", "target"))]
    assert divergence[2] == ["code", apart[0], "·", apart[1]]
    assert auc[1][3] == f"{by_names['web', 'target']['auc']:.2f}"
    assert pairs[1][0] == "code, target"
    assert lengths[1][3] == f"{report['sources']['web']['length']['p5']:,}"
    assert shown.tags["svg"] == 3
    assert len(formats[0]) == 4 + len(report["sources"]["web"]["formats"])
    summary["mismatch"] = mismatch.compare(texts)
    assert "Nearest mixture" not in written(tmp_path, summary)[1].text


def poison(value):
    """The same structure with hostile text for every string and every name of a source, reason or edit."""
    if isinstance(value, dict):
        names = {"web", "code", "bad byte", "no main text", "boilerplate", "near duplicate"}
        return {key + HOSTILE if key in names else key: poison(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [poison(inner) for inner in value]
    return value + HOSTILE if isinstance(value, str) else value


def test_hostile_documents_stay_text(tmp_path, summary):
    finding = Finding("token", "x", "p", "why", "web", 1, 1, 0.5, 1.0, 7.0, (("d", "t"),))
    texts = {"web": ["one two three four five"] * 8, "code": ["six seven eight nine ten"] * 8}
    summary |= {
        "examples": [dict.fromkeys(("source", "stage", "reason", "detail", "id"), "s") | {"excerpt": "e\ud800\ufeff"}],
        "clusters": {"sizes": {2: 1}, "largest": [{"size": 2, "kept": "k", "members": ["m", "k"]}]},
        "junk": [finding.to_row()],
        "mismatch": mismatch.compare(texts, sample_mb=0.01),
        "tokenizer_fit": [{"source": "s"}],
        "manifest": {"sha256": "0", "config": {"a": "b"}},
    }
    _, clean = written(tmp_path, summary)
    text, shown = written(tmp_path, poison(summary))
    assert shown.tags == clean.tags
    assert {key for key, _ in shown.attributes} == {key for key, _ in clean.attributes}
    assert not {"script", "img", "iframe", "link", "object", "form"} & set(shown.tags)
    assert not [value for key, value in shown.attributes if key in ("src", "href") and not value.startswith("#")]
    assert shown.text.count("<script>alert(1)</script>") > 20
    assert not {"\x00", "\u202e", "\ufeff"} & {*text}
    assert not [code for code in ("0000", "202E", "FEFF", "D800") if f"[U+{code}]" not in text]
    assert any(key == "content" and "default-src 'none'" in value for key, value in shown.attributes)
    assert not [word for word in ("url(", "@import") if word in text]
