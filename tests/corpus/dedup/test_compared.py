"""Documents are compared without what their kind shares: licences, imports, inherited members; few words must be equal."""

import json
import random

import numpy as np
import pytest

from jaxlm import config as config_lib
from jaxlm.config import config_files
from jaxlm.configs import base
from jaxlm.corpus import prepare
from jaxlm.corpus.dedup import compared, signatures
from jaxlm.corpus.removals import judged, shared
from jaxlm.corpus.stage import Document
from jaxlm.host import files

LICENCE = "\n".join(
    f"{{}} Line {i} of a licence that each file of the project repeats, word for word." for i in range(30)
)
WORDS = [
    f"{a}{b}" for a in ("get", "set", "run", "map", "put", "cut") for b in ("_row", "_all", "_key", "_end", "_max")
]


def body(seed, n=60):
    rng = random.Random(seed)
    return "\n".join(f"    {rng.choice(WORDS)}({rng.choice(WORDS)}, {rng.randrange(99)});" for _ in range(n // 4))


CODE = {  # language -> (comment, imports)
    "c": ("/*\n" + LICENCE.format(*[" *"] * 30) + "\n */", "#include <stdio.h>\n#include <stdlib.h>"),
    "cpp": (LICENCE.format(*["//"] * 30), "#include <vector>\nusing std::vector;"),
    "python": (LICENCE.format(*["#"] * 30), "import os\nfrom sys import path"),
    "lua": (LICENCE.format(*["--"] * 30), 'require "socket"'),
    "java": ("/*\n" + LICENCE.format(*[" *"] * 30) + "\n */", "package a.b;\nimport java.util.List;"),
}


def similarity(a, b):
    sketches = [signatures.sketch(signatures.shingles(signatures.word_hashes(compared.of(x), True), 5)) for x in (a, b)]
    return signatures.similarity(*sketches)


@pytest.mark.parametrize("language", CODE)
def test_a_licence_makes_no_copies(language):
    licence, imports = CODE[language]
    files = [
        Document(f"{licence}\n\n{imports}\n\nvoid part{i}()\n{{\n{body(i)}\n}}\n", str(i), {"format": "code"})
        for i in range(3)
    ]
    assert similarity(files[0], files[1]) < 0.3
    assert "licence" not in compared.of(files[0])
    assert f"part{0}" in compared.of(files[0])
    assert all(line in compared.of(files[0]) for line in body(0).splitlines())
    other_licence = Document(files[0].text.replace("a licence", "another licence"), "x", {"format": "code"})
    assert similarity(files[0], other_licence) == 1
    whole = [signatures.sketch(signatures.shingles(signatures.word_hashes(file.text), 5)) for file in files]
    assert signatures.similarity(whole[0], whole[1]) > 0.5  # it can fail: compared whole, they look like copies


def test_inherited_members_make_no_copies():
    inherited = "### Methods inherited from class java.lang.Object\n\n" + ", ".join(f"method{i}()" for i in range(60))
    words = {name: " ".join(random.Random(name).choices(WORDS, k=40)) for name in ("Alpha", "Beta")}
    texts = [f"# Class {name}\n\n{own}\n\n{inherited}\n\n## Details\n\n{name} is used." for name, own in words.items()]
    pages = [Document(text, "x", {"format": "text", "from": "html"}) for text in texts]
    assert similarity(*pages) < 0.3
    assert "method7" not in compared.of(pages[0])
    assert "Alpha is used." in compared.of(pages[0])
    plain = Document("The house was inherited.\nIt is old.", "x", {"format": "text"})
    assert compared.of(plain) is plain.text


SCALADOC = """# {name}

#### trait {name} extends AnyRef

1. #### abstract def {name}Of(x: Int): Int

  Definition Classes
  {name} → Base

2. #### final def !=(arg0: Any): Boolean

  Tests two objects for inequality, as every object can.

  Definition Classes
  AnyRef → Any

3. #### def last: Int
"""
TYPEDOC = (
    "# {name}\n\n## Methods\n\n### on\n\nAdds a listener.\n\nInherited from Emitter.on\n\n### own\n\n"
    + "This is what each of its kind says of itself. " * 3
    + "Of {name}.\n"
)


@pytest.mark.parametrize(("page", "gone"), [(SCALADOC, "two objects"), (TYPEDOC, "listener")])
def test_a_member_that_is_marked_as_inherited_makes_no_copies(page, gone):
    text = compared.of(Document(page.format(name="Tree"), "a", {"from": "html"}))
    assert gone not in text
    assert all(own in text for own in ("# Tree", "TreeOf" if page is SCALADOC else "Of Tree"))
    assert text.rstrip().endswith("def last: Int" if page is SCALADOC else "Of Tree.")
    prose = "# Trees\n\nThese traits are inherited from parents.\n\nInherited from both sides, they last.\n"
    assert compared.of(Document(prose, "b", {"from": "html"})) == prose


def test_a_page_about_what_is_inherited_is_compared_whole():
    text = "# Haemophilia\n\n## Inherited forms\n\n" + "It runs in families, and sons have it of their mothers. " * 9
    assert compared.of(Document(text, "a", {"from": "html"})) == text


def test_what_a_document_says_of_its_own():
    assert compared.own_share("a b\nc d", "A  b\nx") == pytest.approx(0.5)
    assert compared.own_share("see [a *b*](x.html), c\nd", "## See\na b\nc d") == 0  # wrapped and marked otherwise
    assert compared.own_share("a + b\ncd", "a - b\ncd") == pytest.approx(5 / 7)


def test_pages_that_differ_in_their_operators_are_no_copies():
    page = (
        "# Function template operator{0}\n\nCalls x{0}y, then {0}z.\n\n## Synopsis\n\n    auto operator{0}(A x, B y);\n"
    )
    pages = [Document(page.format(name), name, {"from": "html"}) for name in ("+", "~")]
    assert similarity(*pages) < 0.3
    assert len(signatures.word_hashes("a+b ~c", operators=True)) == 5
    assert compared.own_share("", "x") == 0


def test_the_judgement_has_an_interval():
    line = judged({"of": 5000, "drawn": 200, "false": 10})[0]
    assert "of 200 drawn 10 say" in line
    assert "(5%, 95% interval 3% to 9%)" in line
    assert "(0%, 95% interval 0% to 4%)" in judged({"drawn": 100, "false": 0, "of": 500})[0]
    assert judged({"of": 0, "drawn": 0, "false": 0}) == []


def test_texts_that_stand_in_another_share_their_windows():
    texts = [" ".join(random.Random(i).choices(WORDS, k=3000)) + f" word{i}" for i in range(3)]
    one, other, both = (
        signatures.windows(signatures.word_hashes(text)) for text in (texts[0], texts[1], texts[2] + " and " + texts[0])
    )
    assert len(one) > 100
    assert np.isin(one, both).mean() > 0.98
    assert 0.4 < np.isin(both, one).mean() < 0.6
    assert not np.isin(one, other).any()
    assert len(signatures.windows(signatures.word_hashes("few words"))) == 0


def test_a_source_that_stands_in_another_is_told(tmp_path):
    texts = [" ".join(random.Random(i).choices(WORDS, k=400)) for i in range(60)]
    (tmp_path / "web.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:40]))
    books = [f"{texts[i]}\n\n{texts[40 + i % 20]} {i}" for i in range(20)]
    (tmp_path / "books.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in books))
    config = config_files.load("base")
    config.unlock()
    config.data.dir, config.prepare.workers = str(tmp_path / "data"), 1
    for name in ("web", "books"):
        config.prepare.sources[name] = base.source(str(tmp_path / f"{name}.jsonl"), ("exact",))
    c = config_lib.resolve(config)
    done = prepare.prepare(c.prepare, c.data, c.engine, log=lambda line: None)
    pairs = files.json_there(done.path / "clusters.json")["shared_windows"]
    assert {(pair["source"], pair["stands_in"]) for pair in pairs} == {("web", "books"), ("books", "web")}
    assert all(0.4 < pair["share"] < 0.6 for pair in pairs)
    assert "to drop books from the mixture: --config.prepare.sources.books.weight=0" in "\n".join(shared(pairs))
