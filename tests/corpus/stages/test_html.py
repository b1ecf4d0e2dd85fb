"""Stage `html`: a gold set of small pages, each with what must stay and what must go."""

import collections
import pathlib
import time

import pytest

from jaxlm.configs import base
from jaxlm.corpus.stage import Document, Remove
from jaxlm.corpus.stages import registry

DEFAULTS = base.get_config().prepare.stages.to_dict()


def clean(page, kind="html", **settings):
    """(document, Remove or None, edits)."""
    document = Document(text=page, id="d", metadata={"format": kind})
    edits = collections.Counter()
    stage = registry.make(registry.StageSpec("html", DEFAULTS["html"] | settings), pathlib.Path())
    return document, stage.apply(document, edits), dict(edits)


def text_of(page, **settings):
    document, removed, _ = clean(page, **settings)
    assert removed is None, removed
    return document.text


PROSE = "<p>The program runs on several systems and each is tested before release.</p>" * 3
NEWS = """<html><head><title>Bridge reopens after two years | The Valley Herald</title><style>p{color:red}</style></head><body>
<a class="skip-link" href="#main">Skip to main content</a>
<div id="cookie-banner" class="cookie-banner"><p>We value your privacy and use cookies to personalise ads.</p>
<button>Accept all</button></div>
<header class="site-header"><nav><ul><li><a href="/">Home</a></li><li><a href="/sport">Sport</a></li></ul></nav></header>
<div class="breadcrumbs"><a href="/">Home</a> &gt; <a href="/local">Local</a></div>
<main><article><h1>Bridge reopens after two years</h1>
<div class="social-share"><a href="#">Share on Facebook</a></div>
<p>The old stone bridge over the river opened to traffic again on Monday, two years after the flood.</p>
<p>Engineers had to replace <b>three</b> of its arches, the town said, at a cost of 4 million.</p>
<ul><li>The bridge carries buses only on weekdays, between six in the morning and eight at night.</li>
<li>Cyclists may cross it at any time, but are asked to dismount when the path is crowded.</li></ul>
<script>track("view");</script></article>
<aside class="related"><h3>More stories</h3><ul><li><a href="/a">Mayor resigns over parking</a></li></ul></aside></main>
<footer class="site-footer"><p>Copyright 2024 Valley Herald. All rights reserved.</p></footer></body></html>"""

SPHINX = """<!DOCTYPE html><html><head><title>queue - A queue - Manual 3.1 documentation</title></head><body>
<div class="related" role="navigation"><ul><li><a href="i.html">index</a></li><li>modules |</li></ul></div>
<div class="document"><div class="documentwrapper"><div class="bodywrapper"><div class="body" role="main">
<section id="queue"><h1>queue<a class="headerlink" href="#queue" title="Permalink">¶</a></h1>
<p>See <a href="a.html">heap</a>, <a href="b.html">deque</a>.</p>
<ul><li><p><a href="put.html">put()</a> adds</p></li><li><p><a href="get.html">get()</a> takes</p></li></ul>
<dl class="py"><dt>queue.put(item, block=True)<a class="headerlink" href="#p">¶</a></dt><dd><p>Puts an item.</p></dd></dl>
<div class="highlight-python3 notranslate"><div class="highlight"><table class="highlighttable"><tr>
<td class="linenos"><div class="linenodiv"><pre>41
42</pre></div></td><td class="code"><pre><span class="k">def</span> <span>work</span>():
    <span class="k">while</span> a &lt; b:

        <span>q</span>.get()
</pre></td></tr></table></div></div>
<aside class="sidebar"><p>A queue of size zero has no limit at all.</p></aside>
<table class="docutils"><thead><tr><th>Name</th><th>Order</th></tr></thead>
<tbody><tr><td><p>Queue</p></td><td><p>first in | first out</p></td></tr></tbody></table>
</section></div></div></div>
<div class="sphinxsidebar" role="navigation"><h4>Previous topic</h4><p><a href="p.html">sched events</a></p></div></div>
<div class="footer">&copy; Copyright 2001, Some Foundation.</div></body></html>"""

DOCBOOK = """<?xml version="1.0" encoding="UTF-8"?><!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.0 Transitional//EN" "x">
<html xmlns="http://www.w3.org/1999/xhtml"><head><title>5.2. Backups</title><script src="a.js"/></head><body>
<div class="navheader"><table><tr><td><a href="p">Prev</a></td><th>Chapter 5. Care</th><td><a href="n">Next</a></td></tr>
</table><hr/></div><div class="sect1" id="B"><div class="titlepage"><div><h2 class="title"><a id="x"/>5.2. Backups</h2></div>
</div><div class="toc"><dl><dt>5.2.1. <a href="#d">Dumps by hand</a></dt></dl></div>
<p>There are two ways to keep a copy:</p><div class="itemizedlist"><ul class="itemizedlist"><li class="listitem"><p>
 To dump with <a href="pg.html">the dump tool</a>:</p><pre class="screen">
<strong>dump  -a</strong> &gt; out
  restore out
</pre></li><li class="listitem"><p>To copy files.</p></li></ul></div></div>
<div class="navfooter"><table><tr><td>5.1. Start</td><td><a href="h">Home</a></td></tr></table></div></body></html>"""

WIKI = """<html><head><title>Tin - Openpedia</title></head><body><div id="mw-navigation"><h2>Navigation menu</h2>
<ul><li><a href="r">Random page</a></li></ul></div><div id="content"><h1 id="firstHeading">Tin</h1><div id="mw-content-text">
<div class="mw-parser-output"><p><b>Tin</b> is a metal.<sup class="reference"><a href="#1">[1]</a></sup></p>
<div id="toc" class="toc"><ul><li><a href="#P">1 Properties of it</a></li></ul></div>
<h2>Properties<span class="mw-editsection">[<a href="e">edit</a>]</span></h2>
<table class="wikitable"><caption>Metals</caption><tr><th>Metal</th><th colspan="2">Melts at</th></tr>
<tr><td>Tin</td><td>232&nbsp;°C</td><td>450<br/>°F</td></tr><tr><td>Lead</td><td>327 °C</td><td></td></tr></table>
<table class="navbox"><tr><td><a href="z">Zinc group</a></td><td>x</td></tr></table></div></div></div>
<div id="footer"><p>Text is available under a licence of some kind.</p></div></body></html>"""

CHINESE = """<html lang="zh"><head><meta charset="utf-8"><title>城市里的河 - 日报网</title></head><body>
<nav><a href="/">首页</a><a href="/n">新闻</a></nav><div class="content"><div class="article-body"><h1>城市里的河</h1>
<p>这条河穿过整座城市,两岸种满了柳树。每到春天,人们就来这里散步。</p>
<p>老人们说,五十年前河水很清,孩子们夏天在里面游泳。</p><ol><li>春天散步。</li>
<li>夏天游泳。</li></ol></div></div>
<div class="cookie-consent">本网站使用Cookie。</div><footer>版权所有 日报网</footer></body></html>"""


FORUM = """<html><head><title>Engine will not start - Tractor Forum</title></head>
<body><div class="navbar"><a href="/">Forums</a>
<a href="/login">Log in</a></div><div id="page-body"><h2 class="topic-title">Engine will not start</h2>
<div class="post"><div class="postbody"><div class="content">My tractor cranks but will not fire when it is cold outside.<br>
The battery is new.</div></div></div>
<div class="post"><div class="postbody"><div class="content">Check the glow plugs first, they fail on this model.
<pre><code class="language-sh">volts --min 11
  | grep low</code></pre></div></div></div></div>
<div class="pagination"><a href="2">2</a> <a href="3">Next page</a></div>
<div id="page-footer" class="footer">Powered by forum software</div></body></html>"""

GOLD = {  # page, what stays, what goes
    "news": (
        NEWS,
        """# Bridge reopens after two years

The old stone bridge over the river opened to traffic again on Monday, two years after the flood.

Engineers had to replace three of its arches, the town said, at a cost of 4 million.

- The bridge carries buses only on weekdays, between six in the morning and eight at night.

- Cyclists may cross it at any time, but are asked to dismount when the path is crowded.""",
    ),
    "sphinx": (
        SPHINX,
        """# queue

See heap, deque.

- put() adds

- get() takes

queue.put(item, block=True)

Puts an item.

```python
def work():
    while a < b:

        q.get()
```

A queue of size zero has no limit at all.

| Name | Order |
| --- | --- |
| Queue | first in \\| first out |""",
    ),
    "docbook": (
        DOCBOOK,
        """## 5.2. Backups

There are two ways to keep a copy:

- To dump with the dump tool:

  ```
  dump  -a > out
    restore out
  ```

- To copy files.""",
    ),
    "wiki": (
        WIKI,
        """# Tin

Tin is a metal.

## Properties

Metals

| Metal | Melts at |  |
| --- | --- | --- |
| Tin | 232 °C | 450 °F |
| Lead | 327 °C |  |""",
    ),
    "chinese": (
        CHINESE,
        """# 城市里的河

这条河穿过整座城市,两岸种满了柳树。每到春天,人们就来这里散步。

老人们说,五十年前河水很清,孩子们夏天在里面游泳。

1. 春天散步。
2. 夏天游泳。""",
    ),
    "forum": (
        FORUM,
        """## Engine will not start

My tractor cranks but will not fire when it is cold outside.
The battery is new.
Check the glow plugs first, they fail on this model.

```sh
volts --min 11
  | grep low
```""",
    ),
}


@pytest.mark.parametrize("name", GOLD)
def test_gold(name):
    page, text = GOLD[name]
    document, removed, edits = clean(page)
    assert document.text == text
    assert (document.metadata["format"], removed, edits) == ("text", None, {"page": 1})


@pytest.mark.parametrize("main", ["main", "div"])
def test_lone_characters_stay_and_icons_go(main):
    page = (
        "<p>前の<b>中</b>後 <i>\u2013</i> <b>&mdash;</b> price <b>\u20ac</b> <i>\uf00c</i> with words to be a text.</p>"
    )
    assert text_of(f"<{main}>{page}</{main}>") == "前の中後 \u2013 \u2014 price \u20ac with words to be a text."


def test_other_formats_pass_untouched():
    for kind in ("text", "markdown", "code"):
        document, removed, edits = clean(NEWS, kind)
        assert (document.text, removed, edits, document.metadata["format"]) == (NEWS, None, {}, kind)


@pytest.mark.parametrize(
    "page",
    [
        "",
        "<html></html>",
        "<body><nav><a href=x>Home of all our pages</a></nav></body>",
        "<frameset cols=20%,80%><frame src=a><noframes><p>x</noframes></frameset>",
    ],
)
def test_pages_without_main_text_go(page):
    _, removed, edits = clean(page)
    assert removed.reason == "no main text"
    assert edits == {}


@pytest.mark.parametrize(
    "furniture",
    [
        "<DIV CLASS=navheader>gone</DIV>", "<div class='x breadcrumbs\ty'>gone</div>", "<div\nid = footer>gone</div>",
        '<div role="search">gone</div>', '<div class="menu submenu"><ul><li><a>gone</a></ul></div>',
        "<div HIDDEN>gone</div>", '<p style="color:red;display: none">gone</p>',
        '<p id="path"><a>gone</a><a>gone</a></p>', "<aside class=sidebar><sup class=reference>gone</sup></aside>",
        '<p class="cookie&#45;banner">gone</p>', "<p class='&#x68;eaderlink'>gone</p>",
    ],
)  # fmt: skip
def test_furniture_goes_however_it_is_written(furniture):
    page = f'<!DOCTYPE html><body><div class="rst-content"><div role="main">{PROSE}{furniture}<p>Stays.</p></div></div>'
    found = text_of(page)
    assert found.endswith("Stays.")
    assert "gone" not in found


@pytest.mark.parametrize(
    "menu",
    [
        "<table><tr><td><a>gone</a></td></tr><tr><td><a>gone as well</a></td></tr></table>",
        "<table><tr><td><a>gone</a> | <a>gone</a> | <a>gone</a></td><td>by us</td></tr></table>",
        "<div><span><a>gone</a></span> &gt; <span><a>gone</a></span> &gt; <span>gone, this page</span></div>",
        "<center>[ <a>gone</a> | <a>gone</a> | <a>gone</a> ]</center>",
        "<p><a>gone</a> \u00bb <a>gone</a> \u00bb <a>gone</a></p>",
    ],
)  # fmt: skip
def test_menus_without_a_name_go(menu):
    found = text_of(f"<body><div id=content><h1>T</h1>{PROSE}<div>{menu}</div>{PROSE}</div></body>")
    assert "gone" not in found


@pytest.mark.parametrize(
    "text",
    [
        "<h2>Pages of links</h2><table><tr><td><a>stays</a></td></tr><tr><td><a>stays as well</a></td></tr></table>",
        "<p>These are worth a look:</p><table><tr><td><a>stays</a><td><a>stays</a></tr></table>",
        "<table><tr><td><a>stays</a><td>which is a text of some more words</tr><tr><td><a>x</a><td>y</tr></table>",
        "<p>See <a>this stays</a> | <a>and this</a></p>", "<p><a>Set</a>&lt;<a>stays</a>&gt;</p>",
        "<p><a>Map</a>[<a>stays</a>]</p>", "<p><a>stays</a> | <a>None</a></p>", "<p><a>stays</a> &gt; 0</p>",
        "<h2>Functions</h2><div><div><table><tr><td><a>run</a></td></tr><tr><td><a>stays</a></td></tr></table></div></div>",
        "<div><a>stays</a> &gt; menu &gt; File &gt; Open</div>",
    ],
)  # fmt: skip
def test_links_that_are_text_stay(text):
    assert "stays" in text_of(f"<body><div id=content><h1>T</h1>{PROSE}<div>{text}</div>{PROSE}</div></body>")


def test_min_chars():
    page = "<body><p>Ten words.</p></body>"
    assert clean(page)[1] == Remove("no main text", "characters=10, min_chars=40")
    assert text_of(page, min_chars=10) == "Ten words."


def test_without_markup():
    text = text_of(SPHINX, markup=False)
    assert "```" not in text
    assert "#" not in text
    assert "def work():\n    while a < b:\n\n        q.get()" in text


def test_title_comes_first_unless_it_is_there():
    page = "<title>Acme | How to sharpen a knife well</title><body><p>Hold the stone still, then draw the blade.</p>"
    assert text_of(page) == "# How to sharpen a knife well\n\nHold the stone still, then draw the blade."
    page = "<title>A short Guide</title><body><h2>A short guide</h2><p>Hold the stone still, then draw the blade.</p>"
    assert text_of(page).startswith("## A short guide\n\nHold")


@pytest.mark.parametrize("page", ["<div>" * 100_000 + "x", "<ul><li>" * 20_000, "<table><tr><td>" * 10_000])
def test_deep_pages_go_at_once(page):
    start = time.monotonic()
    assert clean(page)[1].reason == "nested too deep"
    assert time.monotonic() - start < 5


LONG = "".join(
    f"<li><a href={i}>J. Smith, The flood of 190{i} in the lower town and its causes, Journal 12</a></li>" for i in "12"
)
ENTRIES = "".join(
    f"<li>\n<p>This is entry {i} of the list, and it is about a matter of its own.</p></li>" for i in range(4)
)
STORY = "<p>It is a long story of several sentences. It goes on for a while, as stories do.</p>" * 3
MENU = "<ul><li><a href=/a>Home</a></li><li><a href=/b>About</a></li><li><a href=/c>Contact</a></li></ul>"
READERS = (
    "<h1>Head</h1><p>The article has a sentence, and another one after it.</p><div class=outer><div class=comments>"
)
PAGES = {  # what a page has -> (the page, what stays, what goes)
    "lists of links in the text": (
        f"<article>{PROSE}<p>The module defines:</p><ul><li><a href=a>open_file</a></li><li><a href=b>close_file</a></li>"
        f"</ul>{PROSE}<h2>References</h2><ul>{LONG}</ul>{PROSE}<h3>end</h3><ul><li><code>buffer</code> <a>string</a> | "
        f"<a>Buffer</a> The bytes to decode.</li></ul>{PROSE}</article>",
        (
            "- open_file",
            "- close_file",
            "- J. Smith, The flood of 1902",
            "- buffer string | Buffer The bytes to decode.",
        ),
        (),
    ),
    "words in a sentence": (
        f"<article>{PROSE}<p>Released on <time>1 January</time>; tick <label>Always</label> then.</p>{PROSE}</article>",
        ("Released on 1 January; tick Always then.",),
        (),
    ),
    "comments alone": (f"<body><div class=comments>{PROSE}</div>", ("several systems",), ()),
    "comments": (
        f"<main><article>{READERS}<p>A reader disagrees.</p></div></div></article></main>",
        ("Head",),
        ("reader",),
    ),
    "blocks of code in one": (
        f"<article>{PROSE}<pre><code>import a</code><code>require('a')</code></pre>{PROSE}</article>",
        ("import a\nrequire('a')",),
        (),
    ),
    "code with breaks, blocks and fences": (
        "<p>Words to reach the least length here.</p><pre>a<br>  b<div>c</div>d\n```\ne</pre>",
        ("````\na\n  b\nc\nd\n```\ne\n````",),
        (),
    ),
    "no body": (
        f"<title>T</title><div class=chapter><div class=titlepage><h1>Head</h1></div>{PROSE}<div class=toc>gone</div></div>",
        ("several systems",),
        ("gone",),
    ),
    "a cell without a row": (
        f"<!DOCTYPE html><body><article>{PROSE}<table><caption><math><td>x</td></math></caption><tr><td>a<td>b<tr><td>c"
        f"<td>d</table>{PROSE}</article>",
        ("b",),
        (),
    ),
    "what the rules take for furniture": (
        f'<body><div class="donate popup"><div class="x">{STORY}</div></div><p>Short.</p></body>',
        (("It is a long story of several sentences. It goes on for a while, as stories do.\n\n" * 3).strip(),),
        (),
    ),
    "short items, captions and a menu": (
        f"<html><body>{MENU}<div id=content><h1>Systems</h1>{PROSE}<ul><li>Linux</li><li>macOS</li></ul>{PROSE}<figure>"
        f"<img src=a.png><figcaption>Figure 1: how the parts talk.</figcaption></figure>{PROSE}</div></body></html>",
        ("- Linux\n", "- macOS\n", "Figure 1: how the parts talk."),
        ("About",),
    ),
    "bullets with paragraphs": (
        f"<body><div class=body role=main><h1>T</h1><ul>{ENTRIES}</ul></div></body>",
        tuple(f"- This is entry {i} of" for i in range(4)),
        (),
    ),
    "a table that lays out the page": (
        "<table><tr><td><h1>Welcome here</h1><p>First words of text.</p><p>More words of text.</p></td></tr></table>",
        ("First words of text.\n\nMore words of text.",),
        ("|",),
    ),
    "private characters": (
        "<p>Icons \ue000 and \ue0000\ue001 in a sentence of text.</p><pre>code\n here</pre>",
        ("sentence of text", "code\n here"),
        (),
    ),
}


@pytest.mark.parametrize(("page", "stays", "goes"), PAGES.values(), ids=PAGES)
def test_pages(page, stays, goes):
    text = text_of(page)
    assert all(part in text for part in stays), text
    assert not any(part in text for part in goes), text


def test_comments_as_told():
    page = PAGES["comments"][0]
    assert "disagrees" in text_of(page, comments=True)


FOUND = [  # page, what stays, what goes
    (
        f"<div><div><div class='content-sidebar-wrap'><main><h1>Orzo</h1><div>{PROSE}</div><div>{PROSE}<p>Pour in.</p></div>"
        "<div><p>Leave it for an hour.</p></div></main></div></div></div>",
        ["Pour in.", "Leave it for an hour."],
        [],
    ),
    (
        f"<main><h1>Eels</h1>{PROSE}<section id='related-work'><h2>4.2 Related work</h2><p>Three lakes were fished.</p>"
        "</section></main>",
        ["## 4.2 Related work", "Three lakes were fished."],
        [],
    ),
    (f"<main><h1>Words</h1>{PROSE}<dl><dt id='menu'>Chasse</dt><dd>Part of a board.</dd></dl></main>", ["Chasse"], []),
    (
        f"<div class='mw-parser-output'>{PROSE}<figure><img alt='x'><figcaption>At the hearth.</figcaption></figure></div>",
        ["At the hearth."],
        [],
    ),
    (
        f"<main><div><div><div><div><h1>Course</h1>{PROSE}<h3>Readings</h3><ul><li><a href='a'>The coal <b>question</b>"
        "</a></li><li><a href='b'>Sweetness and power</a></li></ul></div></div></div></div></main>",
        ["- The coal question", "- Sweetness and power"],
        [],
    ),
    (  # a table of contents
        f"<main><div><div><div><div><h1>Course</h1><h2>Contents</h2><ul><li><a href='#a'>Coal</a></li><li><a href='#b'>Salt"
        f"</a></li></ul>{PROSE}</div></div></div></div></main>",
        ["several systems"],
        ["- Coal", "- Salt"],
    ),
    (  # a table of names: no menu, as no line ends between its links
        f"<h1>Zip</h1>{PROSE}<table><tr><td><a href='a'>Show</a> <a href='b'>Level</a> <a href='c'>Source</a><div>Shows it."
        "</div><div>In full.</div></td></tr></table>",
        ["Show Level Source"],
        [],
    ),
    (  # a section among others
        f"<main><h1>Eels</h1><section id='a' class='level2'><h2>A net</h2>{PROSE}</section><section id='comments' class="
        "'level2'><h2>Comments on it</h2><p>It is biased.</p></section></main>",
        ["Comments on it", "It is biased."],
        [],
    ),
    (
        f"<main><h1>On call</h1>{PROSE}<h2 id='x-comments'>Comments in the log</h2><p>Write what you did.</p></main>",
        ["Comments in the log", "Write what you did."],
        [],
    ),
    (f"<main><h1>Roof</h1>{PROSE}</main><div id='comments'><h2>Comments on it</h2><p>Well done.</p></div>", [], ["Well done."]),
    (  # a list inside a list
        f"<main><h1>Course</h1>{PROSE}<h3>Readings</h3><ul><li><a href='a'>The coal question</a><p>Also:</p><ul><li>"
        "<a href='b'>Sweetness</a></li><li><a href='c'>Power</a></li></ul></li></ul></main>",
        ["- The coal question", "- Sweetness", "- Power"],
        [],
    ),
    (
        f"<main><h1>Help</h1>{PROSE}<dl><dt><button aria-expanded='false'>How long does it take?</button></dt>"
        "<dd class='collapse'><p>Ten working days.</p></dd></dl></main>",
        ["How long does it take?", "Ten working days."],
        [],
    ),
    (
        f"<main><h1>Help</h1>{PROSE}<div><div><div><div><div role='button'><a>What if I lose it?</a></div>"
        "<div style='display:none'><p>Buy another one.</p></div></div></div></div></div></main>",
        ["What if I lose it?", "Buy another one."],
        [],
    ),
    (
        f"<form><h1>Permits</h1>{PROSE}<div><div>What may be burned?</div><div style='display: none;'><p>Brush and slash."
        "</p></div></div></form>",
        ["What may be burned?", "Brush and slash."],
        [],
    ),
    (
        f"<h1>Radio</h1><table><tr><td>Pages<br><a href='a'>Home</a><br><a href='b'>Swap meets</a><br><a href='c'>Guests</a>"
        f"</td><td>{PROSE}</td></tr></table>",
        ["several systems"],
        ["Swap meets"],
    ),
    (
        f"<main><h1>Leeks</h1>{PROSE}<form><h2>Your answer</h2><textarea></textarea><p>By posting you agree to all terms."
        "</p></form></main>",
        ["several systems"],
        ["Your answer", "By posting"],
    ),
    (
        f"<main><h1>Bed</h1>{PROSE}</main><div role='complementary'><h3>Other topics</h3><table><tr><td><a href='a'>Glue"
        "</a></td><td>19</td></tr><tr><td><a href='b'>Nozzle</a></td><td>7</td></tr></table></div>",
        ["several systems"],
        ["Other topics", "Nozzle"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("body", "stays", "goes"), FOUND)
def test_text_that_names_and_folding_hid(body, stays, goes):
    text = text_of(f"<html><body>{body}</body></html>")
    assert [part for part in stays if part not in text] == []
    assert [part for part in goes if part in text] == []


def test_a_popup_and_cards_below_a_heading_stay_out():
    popup = "<div><a href='#'>Open</a><div style='display:none'><p>Sign up for our letter.</p></div></div>"
    card = "<li><img src='a'><h3><a href='a'>Milk pitcher</a></h3></li>"
    deep = f"<main><div><div><div><div><h1>Crock</h1>{PROSE}{popup}<h2>You may like</h2><ul>{card}{card}</ul>"
    text = text_of(f"<html><body>{deep}</div></div></div></div></main></body></html>")
    assert "several systems" in text
    assert "Sign up" not in text
    assert "Milk pitcher" not in text
