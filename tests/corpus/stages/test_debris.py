"""Stage `debris`: planted leftovers of HTML go, and what only looks like them stays."""
# ruff: noqa: RUF001 - menus in other scripts

import collections
import pathlib
import time

import pytest

from jaxlm.configs import base
from jaxlm.corpus.stage import Document
from jaxlm.corpus.stages import registry

DEFAULTS = base.get_config().prepare.stages.to_dict()


def clean(text, kind="text", **settings):
    """(text, edits)."""
    document, edits = Document(text=text, id="d", metadata={"format": kind}), collections.Counter()
    stage = registry.make(registry.StageSpec("debris", DEFAULTS["debris"] | settings), pathlib.Path())
    assert stage.apply(document, edits) is None
    return document.text, dict(edits)


@pytest.mark.parametrize(
    ("debris", "text", "edits"),
    [
        ("Tom &amp; Ann&#39;s caf&eacute;&nbsp;bar", "Tom & Ann's café bar", {"entity": 4}),
        ("Double &amp;amp; &amp;nbsp;and &amp;#8217; triple &amp;amp;quot;", 'Double &  and ’ triple "', {"entity": 4}),
        ("No semicolon:&nbsp here, 5 &lt; 6", "No semicolon:  here, 5 < 6", {"entity": 2}),
        ("First line.<br/>Second <b>bold</b> line.", "First line.\nSecond bold line.", {"tag": 3}),
        ("Text.</div>\n</div></td>\nMore text.", "Text.\nMore text.", {"tag": 3}),
        ('See <a href="http://x.y/z?a=1" target=_blank>the page</a> now.', "See the page now.", {"tag": 2}),
        ("Area of 5 m<sup>2</sup> of H<sub>2</sub>O", "Area of 5 m^2 of H_2O", {"tag": 2}),
        ("Before.\n<!-- ad slot\n 3 -->\nAfter.", "Before.\n\nAfter.", {"comment": 1}),
        ("A<script type='x'>var a = 1 < 2;\nf();</script>B<style>p {a: b}</style>C", "ABC", {"script": 1, "style": 1}),
        ('class="nav-item" id="main">Welcome to the town.', "Welcome to the town.", {"attribute": 1}),
        (
            "Good text.\n.nav a:hover { color: red; margin: 0; }\n#foot {\n  width: 10px;\n}\nMore text.",
            "Good text.\nMore text.",
            {"style": 4},
        ),
        (
            "Good text.\nvar _gaq = _gaq || [];\n_gaq.push(['_setAccount', 'UA-1']);\n})();\nMore text.",
            "Good text.\nMore text.",
            {"script": 3},
        ),
        ("Home\nAbout Us\nProducts\nContact\n\nThe story begins here.", "\nThe story begins here.", {"menu": 4}),
        ("Story.\n\n- Home\n- Our Range\n- FAQ\n- Log in\n\nEnd.", "Story.\n\n\nEnd.", {"menu": 4}),
        ("Home | About | Contact us | Login\nThe story.", "The story.", {"menu": 1}),
        ("Home / Blog / About / Contact\nThe story.", "The story.", {"menu": 1}),
        ("Home Help Search Login Register\nThe story.", "The story.", {"menu": 1}),
        ("Home > Docs > API\nThe story.", "The story.", {"menu": 1}),
        ("Home \u00bb News \u00bb A bridge opens after two years of works\nThe story.", "The story.", {"menu": 1}),
        ("You are here: Shop > Garden\nThe story.", "The story.", {"menu": 1}),
        ("首页 > 新闻 > 城市\n首页\n关于我们\n联系我们\n故事从这里开始。", "故事从这里开始。", {"menu": 4}),
        ("Startseite | Kontakt | Impressum\nDer Text.", "Der Text.", {"menu": 1}),
        ("We use cookies to improve your experience on our site.\nThe story.", "The story.", {"notice": 1}),
        ("This website uses cookies. By continuing you accept our policy.\nA.", "A.", {"notice": 1}),
        ("By continuing to browse this site you agree to our use of cookies.\nA.", "A.", {"notice": 1}),
        ("Share this:\nShare on Facebook\nTweet\nFollow us on Twitter!\nA.", "A.", {"notice": 4}),
        ("Subscribe to our newsletter and never miss a post\nA.", "A.", {"notice": 1}),
        ("Skip to main content\nA.\nBack to top\nRead more \u00bb", "A.", {"notice": 3}),
        ("A.\nCopyright \u00a9 2020 Acme Inc. All rights reserved.\nPowered by WordPress", "A.", {"notice": 2}),
        ("Please enable JavaScript to view this page.\n5 &gt; 4", "5 > 4", {"notice": 1, "entity": 1}),
    ],
)
def test_debris_goes(debris, text, edits):
    assert clean(debris) == (text, edits)


LOOK_ALIKES = {
    "maths": "If a < b and c > d, then x<y, y<z; p<q> r. Also 3 <5 and i<n && j>m, a&b; R&D, AT&T; &x.",
    "generics": "A List<String> or Map<Integer, List<Table>> holds Optional<Button>; vector<b> v; fn f<'a>(x: &'a str)",
    "placeholders": "Usage: cp <input> <output>; git clone <link> [<title line>]; see <https://x.org> and <me@x.org>.",
    "about HTML": "HTML has tags. Write <b>bold</b> or <br/> in HTML, and &amp; for an ampersand &nbsp; too.",
    "beside": "Use the <br/> tag to break a line. The entity &nbsp; is a space that does not break.",
    "example after a colon": 'Put this in your page:\n\n<div class="x">\n  <p>Hello &amp; bye</p>\n</div>\n\nThen save it.',
    "fence": 'Text\n\n```html\n<div class="a">&nbsp;</div>\nHome | About | Contact\n```\n\n~~~\nHome\nAbout\nContact\n~~~\n',
    "open fence": "Text\n```\n<p>x</p>\nHome\nAbout\nContact\n",
    "inline code": "Call `<br/>` or `&amp;` or `a<b>c</b>` here.",
    "xml": "<config><title>x</title><option>y</option><custom>z</custom></config>",
    "poem": "The rose is red\nThe violet blue\nHome is the sailor\nHome from sea\nAnd the hunter home\nFrom the hill",
    "list of terms": "aorta\natrium\nventricle\nvalve\nhelp\nseptum\nartery\nvein",
    "table": "| Home | About | Contact |\n| --- | --- | --- |\n| 3 | 4 | 5 |",
    "path in a sentence": "Go to Home > Settings > About and choose Contact.",
    "choice": "red / green / blue\nFile > Save As > PDF\nand / or / not",
    "headings": "# Home\n\nText of it.\n\n# About\n\nText of it.\n\n# Contact\n\nText of it.",
    "cookies to eat": "We use cookies to thank our helpers.\nShare this bread with the poor.",
    "subscribe in prose": "He asked them to subscribe to our newsletter.\nSign up for the army, they said, and see the world.",
    "licence": "By using the Software you agree to be bound by these terms.\nAll rights reserved.",
    "code without a fence": "int main() {\n  int width = 3;\n}\nvar box = { width: 3 };\nfunction f() {\n  g();\n}",
    "go": 'type T struct {\n\tName string `json:"name"`\n}\nx := T{Name: "a"}',
    "keywords": 'run(name="x", id="y")\nf(class="a", style="b")\nexport PATH="/usr/bin"\n[a href="b"]',
    "queries": "http://x.org/?a=1&copy=2&lt=3&reg=eu",
    "screenplay": "HOME\n\nANNA\nI am home.\n\nBEN\nSearch the house.\n",
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes_stay(name):
    assert clean(LOOK_ALIKES[name]) == (LOOK_ALIKES[name], {})


@pytest.mark.parametrize("kind", ["code", "html"])
def test_code_and_pages_pass(kind):
    text = "<p>Home</p>\nHome\nAbout\nContact\n&nbsp;"
    assert clean(text, kind) == (text, {})


def test_around_fences():
    text = "A &amp; B\n```\n&amp;\n```\nC &amp; D\n  ````\n```\n&amp;\n````\n&gt;"
    assert clean(text) == ("A & B\n```\n&amp;\n```\nC & D\n  ````\n```\n&amp;\n````\n>", {"entity": 3})


def test_thresholds():
    assert clean("Home\nAbout") == ("Home\nAbout", {})  # two lines are no menu
    notice = "Subscribe to our newsletter and never miss a post"
    assert clean(f"{notice}{' at all' * 30}")[1] == {}  # nor is a long line a notice
    assert clean("HTML is old, and so is XML.<br/>Really.")[1] == {}


@pytest.mark.parametrize(
    "piece",
    [
        "<script>", "<!-- ", "<b ", "&amp;", "a='", "<a b=c ", "```\n", "{", "home ", "Share this ", "a: b; ", "|",
        "  ", "``` \n\n~~~\n",
    ],
)  # fmt: skip
def test_long_runs_take_no_longer(piece):
    start = time.monotonic()
    clean(piece * (200_000 // len(piece)) + "\n" + "x" * 100)
    assert time.monotonic() - start < 5


def test_what_the_stage_html_made_keeps_the_tags_it_shows():
    text = "The defaults are <b> and </b>; write {{ foo|join:&quot;&amp;&quot; }}.\nSkip to main content"
    document, edits = Document(text=text, id="d", metadata={"format": "text", "from": "html"}), collections.Counter()
    registry.make(registry.StageSpec("debris", DEFAULTS["debris"]), pathlib.Path()).apply(document, edits)
    assert document.text == text.splitlines()[0]
    assert clean(text)[0] != document.text  # a text of elsewhere loses them
