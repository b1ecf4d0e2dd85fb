"""MediaWiki exports: articles alone, a broken page alone, and wikitext as a reader sees it."""

import bz2
import collections
import gzip
import html

import pytest

from jaxlm.corpus.sources import mediawiki, streams
from jaxlm.corpus.sources.units import split_source

HEAD = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="de">
  <siteinfo><sitename>Wiki</sitename><base>https://de.wiki.org/wiki/Hauptseite</base>
  <namespaces><namespace key="6" case="first-letter">Datei</namespace><namespace key="14">Kategorie</namespace></namespaces>
  </siteinfo>
"""


def page(number, text, title=None, ns=0, extra="", model="wikitext"):
    title = f"Page {number}" if title is None else title
    return (
        f"  <page>\n    <title>{html.escape(title)}</title>\n    <ns>{ns}</ns>\n    <id>{number}</id>\n{extra}"
        f"    <revision><id>9{number}</id><timestamp>2024-01-01T00:00:00Z</timestamp><model>{model}</model>"
        f'<text bytes="1" xml:space="preserve">{html.escape(text)}</text></revision>\n  </page>\n'
    )


def dump(*pages):
    return (HEAD + "".join(pages) + "</mediawiki>\n").encode()


def test_articles_alone_and_each_page_counted(tmp_path, read_source):
    pages = [
        page(1, "One <b>&amp; é</b> [[Datei:x.png|thumb|gone]]", title="Über & x"),
        page(2, "#REDIRECT [[x]]", extra='    <redirect title="x" />\n'), page(3, "talk", ns=1),
        page(4, "body {}", model="css"), page(5, "cut").replace("</revision>", ""),
        page(6, "unclosed").replace("</page>", ""), page(7, "bad\x01control"), page(8, "{{Infobox}}"), page(9, "Last."),
    ]  # fmt: skip
    (tmp_path / "x.xml").write_bytes(dump(*pages).replace(b"Last", b"La\xffst"))
    documents, stats = read_source(tmp_path)
    assert [(d.id, d.text) for d in documents] == [
        ("x.xml:1", "# Über & x\n\nOne & é\n"),
        ("x.xml:9", "# Page 9\n\nLa\ufffdst.\n"),
    ]
    assert documents[0].metadata == {
        "source": "web", "format": "markdown", "path": "x.xml", "title": "Über & x", "site": "de.wiki.org",
        "url": "https://de.wiki.org/wiki/%C3%9Cber_%26_x", "date": "2024-01-01T00:00:00Z",
    }  # fmt: skip
    assert stats.skipped == {"redirect": 1, "not an article": 2, "broken XML page": 3, "empty": 1}
    assert stats.repaired == {"bytes that are not UTF-8 became U+FFFD": 1}


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2"])
def test_pieces_and_compressed_dumps_are_the_same(tmp_path, monkeypatch, read_source, spec, suffix):
    monkeypatch.setattr(streams, "CHUNK_BYTES", 100)
    raw = dump(*(page(i, f"Text {i} " * (i % 7)) for i in range(1, 60)))
    compress = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress}[suffix]
    (tmp_path / f"x.xml{suffix}").write_bytes(compress(raw))
    documents, stats = read_source(tmp_path, 1000)
    assert len(documents) + sum(stats.skipped.values()) == 59
    assert (len(split_source(spec(tmp_path), 1000)) > 10) == (suffix == "")
    (tmp_path / f"x.xml{suffix}").unlink()
    (tmp_path / "x.xml").write_bytes(raw)
    whole, _ = read_source(tmp_path)
    assert [(d.text, d.metadata["url"]) for d in documents] == [(d.text, d.metadata["url"]) for d in whole]


def test_a_truncated_dump_yields_what_came_before(tmp_path, read_source):
    raw = dump(*(page(i, f"Text {i}") for i in range(1, 4)))
    (tmp_path / "x.xml").write_bytes(raw[: raw.index(b"Text 3")])
    documents, stats = read_source(tmp_path)
    assert [d.id for d in documents] == ["x.xml:1", "x.xml:2"]
    assert stats.skipped == {"page cut short or too large": 1}
    (tmp_path / "x.xml").write_bytes(b"<feed>other XML</feed>")
    assert read_source(tmp_path)[1].skipped == {"it holds no MediaWiki page": 1}


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("'''Bold''' and ''italic''<ref>gone</ref>.", "Bold and italic."),
        ("[[Target|words]], [[Plain]], [[:Category:X]] [[Category:X]]", "words, Plain, Category:X"),
        ("[https://a.org words] and https://b.org", "words and https://b.org"),
        ("A ({{lang-de|x}}; ) b{{cite}}.", "A (x;) b."),
        ("{{lang|fr|Bonjour}} {{convert|5|km|mi}} &nbsp;&ndash; x<!-- c -->", "Bonjour 5 km \u2013 x"),
        ("== Head ==\nText\n=== Empty ===\n== See ==\n{{reflist}}", "## Head\n\nText"),
        ("* a\n** [[b]]\n* c\n# one\n# two", "- a\n  - b\n- c\n1. one\n1. two"),
        ("a\n<syntaxhighlight lang=\"py\">\nx  =  ''y''\n\n\n\nz()\n</syntaxhighlight>",
         "a\n\n```py\nx  =  ''y''\n\n\n\nz()\n```"),
        ("<math>a^2 |x|</math> and <code>f(x)</code> <nowiki>[[raw]]</nowiki>", "$a^2 |x|$ and `f(x)` [[raw]]"),
        ('{| class="wikitable"\n|+ Caption\n! Name !! Size\n|-\n| [[a|b]] c || 1\n|-\n| d || {{x}}\n|}',
         "Caption\n\n| Name | Size |\n| --- | --- |\n| b c | 1 |\n| d | |"),
        ("{|\n| layout\n|}", "layout"),
        ("__NOTOC__ x [[File:a.png|thumb|a [[link]] in it]] y", "x y"),
        ("[[fr:Autre]] x {{{arg|d}}}", "fr:Autre x"),
        ("a [[unclosed and {{open", "a [[unclosed and {{open"),
    ],
)  # fmt: skip
def test_wikitext(source, shown):
    assert mediawiki.to_markdown(source, frozenset({"file", "image", "category"})) == shown


def test_templates_and_references_in_odd_places():
    text = (
        "A<ref name=a/> b<ref name='x'>{{cite|[[c]]|d={{e}}}} y</ref> <references/> {{lang|fr|{{gone}} mot}} "
        "{{Infobox|a=[[File:x.png|{{y}}]]|b={{nowrap|z}}}} {{{arg|{{t}}}}} <!-- {{ c --> {{open [[l|{{m}}n]]\n"
        "{|\n| a {{b}} || {{convert|1|{{u}}}}\n|-\n| {{!}} || c{{d|\n|e}}\n|}\n* {{item}}\n"
        "<nowiki>{{raw|x}}</nowiki> {{box|\n{| \n| in || a table\n|}\n}} \ue0060\ue007"
    )
    silent = collections.Counter()
    shown = mediawiki.to_markdown(text, frozenset({"file"}), silent)
    assert shown.splitlines()[0] == "A b mot {{open n"
    assert "| a | 1 |" in shown
    assert "{{raw|x}}" in shown
    assert silent == {name: 1 for name in ("Infobox", "d", "box", "b", "gone", "item", "m", "t", "u", "y")}


def test_powers_in_wikitext():
    text = "About 10<sup>30</sup> kg of H<sub>2</sub>O, on the 1<sup>st</sup>; x<sub>i</sub><sup>2</sup>."
    assert mediawiki.to_markdown(text, frozenset()) == "About 10^{30} kg of H_2O, on the 1st; x_i^2."


def test_a_cell_that_spans_rows_stands_in_each():
    text = "{|\n! Drug !! Dose !! Age\n|-\n| rowspan=2 | A || colspan=2 | 1\n|-\n| 2 || 3\n|}"
    assert mediawiki.to_markdown(text, frozenset()).splitlines()[2:] == ["| A | 1 | |", "| A | 2 | 3 |"]


@pytest.mark.parametrize(
    ("wikitext", "shown"),
    [
        ("She is {{height|ft=6|in=2}} tall.", "She is 6 ft 2 in tall."),
        ("At {{coord|52|31|12|N|13|24|E|display=inline}}, deep.", "At 52\u00b031\u203212\u2033N 13\u00b024\u2032E, deep."),
        ("At {{coord|52.5|N|13.4|W}} it is.", "At 52.5\u00b0N 13.4\u00b0W it is."),
        ("It holds {{ubl|a sextant|two charts|a flute}} alone.", "It holds a sextant, two charts, a flute alone."),
        ("A mill {{clear|date=3}} turns.", "A mill turns."),
    ],
)  # fmt: skip
def test_templates_whose_shape_says_what_they_mean(wikitext, shown):
    assert mediawiki.to_markdown(wikitext, frozenset()) == shown
