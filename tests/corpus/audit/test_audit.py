"""The junk audit: planted junk comes first, what people write does not, memory is bounded."""

import random
import re

import pytest

from jaxlm.config import ConfigError
from jaxlm.configs import base
from jaxlm.corpus.audit import audit
from jaxlm.corpus.audit import counts as audit_counts
from jaxlm.corpus.stages.junk_patterns import GROUPS

COMMON = """
the of and to in a is that for it was on are as with they at be this from have or by one had not but what all were when
we there can an your which their said if do will each about how up out them then she many some so these would
"""
PHYSICS = """quantum photon energy field momentum particle wave lattice boson spin entropy vacuum charge mass"""
COMMON, PHYSICS = COMMON.split(), PHYSICS.split()


def prose(rng, extra=(), words=120):
    """Sentences of common words with some `extra` ones."""
    pool = rng.choices(COMMON, k=words) + rng.choices(list(extra), k=words // 4 if extra else 0)
    rng.shuffle(pool)
    return " ".join(" ".join(pool[i : i + 9]).capitalize() + "." for i in range(0, len(pool), 9))


def documents(count, extra=(), seed=0, change=lambda text, i: text):
    rng = random.Random(seed)
    return [(f"doc{i}", change(prose(rng, extra), i)) for i in range(count)]


def atomic(text, i):
    return text.replace(".", " and PersonX thanks PersonY.", 3) + " AndroidRuntime" * 2


def audited(sources):
    return audit.rank([audit.scan(name, documents) for name, documents in sources.items()])


def kinds(text):
    return {name for name, group in GROUPS.items() for _ in group.matches(text)}


def test_junk_of_a_one_percent_source_comes_first():
    found = audited(
        {
            "web": documents(400),
            "physics": documents(95, PHYSICS, seed=1),
            "events": documents(5, seed=2, change=atomic),
        }
    )
    top = {finding.text: finding for finding in found[:4]}
    assert {"PersonX", "PersonY", "AndroidRuntime"} <= set(top)
    person = top["PersonX"]
    assert (person.kind, person.source, person.count, person.documents) == ("annotation", "events", 15, 5)
    assert (person.share_of_documents, person.concentration) == (1, 1)
    assert [doc_id for doc_id, _ in person.examples] == ["doc0", "doc1", "doc2"]
    assert all("PersonX thanks" in text for _, text in person.examples)
    assert person.score > 2
    assert not any(finding.source == "physics" for finding in found if finding.score > 2)


@pytest.mark.parametrize("tic", ["SpeakerQ", "entity_slot", "<name>", "[SPEAKER]", "ANONYMIZED", "#-#-#"])
def test_an_unknown_tic_of_a_small_source_is_found(tic):
    found = audited(
        {
            "web": documents(200),
            "physics": documents(50, PHYSICS, seed=1),
            "talk": documents(10, seed=2, change=lambda text, i: text.replace("the ", f"{tic} the ")),
        }
    )
    shown = tic[:4] if tic.startswith("#") else tic
    assert (found[0].source, found[0].kind, found[0].text) == ("talk", "token", shown)


def test_a_single_source_is_judged_by_shapes():
    found = audited({"events": documents(40, PHYSICS, change=lambda t, i: t.replace("the ", "the SpeakerQ "))})
    assert (found[0].text, found[0].concentration) == ("SpeakerQ", 1)
    assert not any(finding.kind == "word" for finding in found)


def test_of_the_words_of_a_domain_one_is_named_and_low():
    found = audited({"web": documents(200), "physics": documents(50, PHYSICS, seed=1)})
    words = [finding for finding in found if finding.kind == "word"]
    assert len(words) == 1
    assert words[0].text.lower() in PHYSICS
    assert all(finding.source == "physics" and finding.concentration > 0.99 for finding in words)
    assert max(finding.score for finding in words) < 2


def manual(text, i):
    """A page that speaks of PostgreSQL in sentences, and shows markup and a placeholder in code."""
    words = text.split()
    for at in range(i % 7, len(words), 12):
        words.insert(at, "PostgreSQL" if at % 3 else "PL/pgSQL")
    return (
        "## Synopsis\n\n"
        + " ".join(words)
        + "\n\n```\na &nbsp; <b>x</b> {{ name }}\nat SpeakerQ has one\n```\n\nThe ValueError is raised."
    )


@pytest.mark.parametrize("others", [{}, {"web": documents(200)}])
def test_what_a_manual_is_about_is_no_junk(others):
    found = audited({"manual": documents(60, PHYSICS, seed=1, change=manual)} | others)
    assert {"PostgreSQL", "&nbsp;", "ValueError"} <= {finding.text for finding in found}
    assert [finding.text for finding in found if finding.is_junk] == []


def test_junk_in_a_manual_comes_before_what_it_is_about():
    def change(text, i):
        page = manual(text, i)
        if i % 10 == 0:
            page += "\nWhen AgentP meets AgentQ, AgentP smiles.\nE/AndroidRuntime( 12): dead\n22&mdash;3"
        return f"Skip to main content\n{page}" if i % 5 == 0 else page

    found = audited({"manual": documents(60, PHYSICS, seed=1, change=change)})
    junk = [finding for finding in found if finding.is_junk]
    assert found[: len(junk)] == junk
    expected = {"Skip to main content", "&mdash;", "AgentP", "AndroidRuntime", "log line"}
    assert expected <= {finding.text for finding in junk}
    assert "PostgreSQL" not in {finding.text for finding in junk}
    runtime = next(finding for finding in junk if finding.text == "AndroidRuntime")
    assert next(finding for finding in junk if finding.text == "&mdash;").pattern == "\\&mdash;"  # `<b>` in code stays
    assert runtime.pattern == "AndroidRuntime"  # not the group, which would take each ValueError with it


def test_an_unnatural_word_is_junk_in_a_fixed_frame_alone():
    def judged(frame):
        rows = {
            "talk": documents(10, seed=2, change=lambda text, i: text.replace("the ", frame)),
            "web": documents(200),
        }
        return next((f.text, f.is_junk) for f in audited(rows) if f.text == "SpeakerQ")

    assert judged("the SpeakerQ has ") == ("SpeakerQ", True)
    assert judged("SpeakerQ ") == ("SpeakerQ", False)
    assert judged("the SpeakerQ ") == ("SpeakerQ", False)  # as before a noun


@pytest.mark.parametrize(
    ("place", "is_junk"),
    [
        (lambda text, i: f"{text}\nPart of the house({i})", True),  # the end of each page
        (lambda text, i: f"{text}\nPart of the house({i})\n{text[::-1]}", False),
        (lambda text, i: f"Our fine company\nCustomer support\nSpecial offers\n{text}", True),
        (lambda text, i: f"{text}\nThe value may not be null here.\n{text[::-1]}", False),
    ],
)
def test_lines_are_junk_by_their_place(place, is_junk):
    found = audited({"pages": documents(30, change=place)})
    lines = [finding for finding in found if finding.kind == "line"]
    assert any(finding.is_junk for finding in lines) == is_junk
    assert lines


def test_what_the_target_has_too_is_no_junk():
    counts = [audit.scan("events", documents(40, seed=2, change=atomic))]
    target = audit.scan("target", documents(40, seed=3, change=atomic))
    assert {"PersonX", "AndroidRuntime"} <= {finding.text for finding in audit.rank(counts) if finding.is_junk}
    assert not [finding for finding in audit.rank(counts, target) if finding.is_junk]


def test_two_sources_of_the_same_kind_have_nothing_to_say():
    assert audited({"a": documents(100, PHYSICS), "b": documents(100, PHYSICS, seed=1)}) == []


def test_boilerplate_lines_are_found_whatever_their_digits():
    def page(text, i):
        return f"{text}\nPosted on {i + 1} March 20{i % 10 + 10} | {i} comments\n{text[::-1]}"

    found = audited({"blog": documents(30, change=page), "web": documents(100, seed=1)})
    assert found[0].kind == "line"
    assert found[0].text == "Posted on 0 March 0 | 0 comments"
    assert found[0].documents == 30
    assert "Posted on" in found[0].examples[0][1]


def test_boilerplate_within_paragraphs_is_found_once_in_its_longest_form():
    plug = "Sign up to the weekly letter of our house"
    found = audited(
        {"blog": documents(30, change=lambda t, i: f"{t} {plug}! {t[::-1]}"), "web": documents(100, seed=1)}
    )
    assert [finding.text for finding in found if finding.kind in ("line", "clause")] == [plug]


@pytest.mark.parametrize(
    ("text", "kind", "label"),
    [
        ("the PROPN said", "annotation", "PROPN"),
        ("a cat -LRB- black -RRB- sat", "annotation", "-LRB-"),
        ("to the [MASK] and", "annotation", "[MASK]"),
        ("the <extra_id_0> of <extra_id_17>", "annotation", "<extra_id_0>"),
        ("Obama B-PER was O", "annotation", "B-PER"),
        ("xxbos xxmaj the film", "annotation", "xxbos"),
        ("the/DT dogs/NNS bark/VBP", "annotation", "word tag"),
        ("un ##believ ##able", "annotation", "word pieces"),
        ("un@@ believ@@ able", "annotation", "word pieces"),
        ("\u2581the \u2581cat \u2581sat", "annotation", "word pieces"),
        ("<|im_start|>user", "chat_tokens", "<|im_start|>"),
        ("end<|endoftext|>", "chat_tokens", "<|endoftext|>"),
        ("<s>[INST] hello [/INST]", "chat_tokens", "[INST]"),
        ("it was so.</s>", "chat_tokens", "</s>"),
        ("so.</s> <s>Then", "chat_tokens", "</s>"),
        ("the <unk> of", "unk", "<unk>"),
        ("five @-@ year", "unk", "@-@"),
        ("java.lang.NullPointerException: null", "exception", "java.lang.NullPointerException"),
        ("Traceback (most recent call last):", "exception", "Traceback (most recent call last)"),
        ("\n    at com.foo.Bar$1.run(Bar.java:12)\n", "exception", "stack frame"),
        ("E/AndroidRuntime( 123)", "exception", "AndroidRuntime"),
        ("#ff00aa, #00ff00; #0000ff", "hex_colour", "run of hex colours"),
        ("Dear {{ first_name }},", "template", "{{ first_name }}"),
        ("{% if user %}", "template", "{% if user %}"),
        ("in ${HOME} now", "template", "${HOME}"),
        ("hello %(name)s", "template", "%(name)s"),
        ("Lorem ipsum", "lorem", "Lorem ipsum"),
        ("As an AI language model, I", "assistant", "As an AI language model"),
        ("48/2 = <<48/2=24>>24", "calculator", "calculator mark"),
        ("fish &amp; chips", "markup", "&amp;"),
        ("a <br> b", "markup", "tags"),
        ("iVBORw0KGgoAAAANSUhEUgAAAAUA" * 3, "base64", "base64 or hex blob"),
        ("sha1 " + "0123456789abcdef" * 3, "base64", "base64 or hex blob"),
    ],
)
def test_known_junk(text, kind, label):
    found = audited({"a": [("d", text)]})
    assert (kind, label) in {(finding.kind, finding.text) for finding in found}


@pytest.mark.parametrize(
    "text",
    [
        "the `[MASK]` token and '<|im_start|>' of \u201cPersonX\u201d",
        "a <| b |> c, and <|psi|> and <|x|>",
        "<s>10 dollars</s> now 5 dollars</s> only".replace("</s> only", " only"),
        "a B-52, vitamin B-12, the I-95, Person X and PersonA",
        "Debian closes: #123456, #234567, #345678",
        "the hashtags #facade and #decade",
        r"\frac{{a}}{{b}} x^{{2}} and \mathbf{{x}}",
        "com/google/android/apps/something/other/more/and/then/some/more/still/Main",
        "GATTACA" * 20,
        "https://example.org/a-long-path/with-many-parts/and-words/that-go-on-and-on/for-ever.html",
        "Save 50% (say) or 20 %(half) of it",
        "an exception to the error of our ways",
        "Mr Kim is at home (Seoul)\nwe met at Bob's (cafe)",
        "x < y and a<b; AT&T & Sons",
        "the Maltese \u0120or\u0121 and \u0120u\u017ce",
        "xxii and Foxx",
        "--- a/f.py\n@@ -1,2 +1,2 @@ def",
        "in 1 << 3 = 8",
    ],
)
def test_what_only_looks_like_junk(text):
    assert kinds(text) == set()


def test_junk_next_to_quotes_counts():
    assert kinds('"<|im_start|>user') == {"chat_tokens"}
    assert kinds("PersonX'") == {"annotation"}


def test_memory_is_bounded_and_what_is_frequent_survives():
    def stream():
        for i in range(400):
            unique = " ".join(f"w{i}x{j}q" for j in range(50))
            yield f"d{i}", f"{unique}\nline number w{i} is of its own\n" + ("SpeakerQ " * 3 if i % 4 == 0 else "")

    counts = audit.scan("s", stream(), max_entries=200)
    for table in counts.tables:
        assert len(table.entries) <= 200
    assert counts.words.lost > 0
    entry = counts.words.entries["SpeakerQ"]
    assert 300 - counts.words.lost <= entry.count <= 300


def test_while_reading_too_memory_is_bounded(monkeypatch):
    made, sizes = [], []

    class Watched(audit_counts.Table):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    def stream():
        for i in range(300):
            sizes.append(max(len(table.entries) for table in made))
            yield f"d{i}", " ".join(f"w{i}x{j}q" for j in range(50))

    monkeypatch.setattr(audit_counts, "Table", Watched)
    audit.scan("s", stream(), max_entries=200)
    assert 200 < max(sizes) <= 2 * 200


def test_one_result_whatever_the_order_of_the_sources():
    sources = {
        "web": documents(60),
        "physics": documents(20, PHYSICS, seed=1),
        "events": documents(5, seed=2, change=atomic),
    }
    once = audited(sources)
    assert once == audited(sources) == audited(dict(reversed(sources.items())))
    assert once


HTML = base.get_config().prepare.stages.html.to_dict()


def test_the_target_comes_first(tmp_path):
    (tmp_path / "page.html").write_text("<html><body><p>" + "A target has SpeakerQ words. " * 40 + "</p></body></html>")
    like = audit.contrast_of([3, 3], str(tmp_path), HTML)
    assert like.words.entries["SpeakerQ"].count == 40


def test_general_prose_is_for_a_single_source_of_some_size():
    assert audit.contrast_of([9], "", HTML) is None
    assert audit.contrast_of([230_000, 3], "", HTML) is None
    like = audit.contrast_of([230_000], "", HTML)
    assert 0 < like.bytes <= 230_000
    assert like.words.entries["the"].count > 100


def test_a_target_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="nowhere"):
        audit.target_texts("nowhere", 1000, HTML)


def test_two_scans_of_half_the_tables_give_what_one_gives():
    texts = documents(60, PHYSICS, change=lambda text, i: f"{atomic(text, i)} Write entity_slot here.")
    whole = audit_counts.scan("a", texts)
    words, lines = (audit_counts.scan("a", texts, halves=(half,)) for half in audit_counts.HALVES)
    assert audit.rank([audit_counts.joined(words, lines)]) == audit.rank([whole]) != []
    assert audit.rank([words]) != audit.rank([whole]) != audit.rank([lines])


def test_an_example_begins_where_its_numbers_stand_in_the_text():
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choice(["7", "07", "123 ", "ab", " c", "\n", "x9y"]) for _ in range(40))
        document = audit_counts._Document(1, "d", text)
        whole = document.digits_as_0.text
        begin = rng.randrange(len(whole) - 6)
        key = whole[begin : begin + 6]
        match = re.search(re.escape(key).replace("0", r"(?<!\d)\d+(?!\d)"), text)
        assert document.find_digits(key) == match.start()
    assert document.find_digits("no such") == -1


def test_examples_are_looked_up_in_the_beginning_of_a_long_document():
    line = "Go back to page 12 of 34 at once"
    pages = [("long", "word " * (audit_counts._SEARCHED // 5) + f"\n{line}\n" * 9), ("short", f"a\n{line}\nb")]
    entry = audit_counts.scan("a", pages).lines.entries["Go back to page 0 of 0 at once"]
    assert (entry.count, entry.documents) == (10, 2)
    assert entry.examples == (("short", f"a {line} b"),)
