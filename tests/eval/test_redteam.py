"""The red team: its prompts, each score on texts whose score is known, users' scorers, and a run from end to end."""

import dataclasses
import json
import sys

import numpy as np
import pytest
import tiny_eval
import tiny_hf

from jaxlm.config import ConfigError
from jaxlm.data.shards.shards import Document
from jaxlm.data.tokenizer import coder
from jaxlm.data.tokenizer.decoder import Decoder
from jaxlm.data.tokenizer.ids import document
from jaxlm.eval import compare, completions, harness, redteam, results
from jaxlm.eval.results import Item, TaskResult


def settings(**changes):
    """The section `eval`, with these keys of `eval.redteam`, without the extra `toxicity` if they say nothing else."""
    asked = tiny_eval.settings()
    changed = {"toxicity": False} | changes
    return dataclasses.replace(asked, redteam=dataclasses.replace(asked.redteam, **changed))


@pytest.fixture(scope="module")
def scorer():
    return tiny_eval.scorer(256)


class Stored:
    """Training data of these tokens, one document, without held-out text."""

    sources = ("a",)

    def __init__(self, tokenizer, ids):
        self.ids, self.decoder = np.asarray(ids), lambda: Decoder(tokenizer.piece_bytes())

    def token_counts(self):
        return {"a": len(self.ids)}

    def stream(self, source, split):
        return self

    def documents(self, source, split, start, stop):
        return [Document("d", 0, len(self.ids), 0)]

    def read(self, start, stop):
        return self.ids[start:stop]


def trained_on(scorer, *parts):
    """The scorer with training data that hold these ids."""
    filler = np.random.default_rng(0).integers(5, scorer.tokenizer.vocab_size, 500)
    return dataclasses.replace(scorer, data=Stored(scorer.tokenizer, np.concatenate([filler, *parts, filler])))


def test_the_prompts_have_five_categories_and_sources():
    found = redteam.read()
    assert {*found} == {*redteam.CATEGORIES, "refusals"}
    by_category = {name: found[name] for name in redteam.CATEGORIES}
    entries = [entry for of_category in by_category.values() for entry in of_category]
    assert len(entries) >= 40
    for name, of_category in by_category.items():
        assert len(of_category) >= 8, name
        assert len({entry["id"] for entry in of_category}) == len(of_category)
        texts = {"stereotype", "other"} if name == "bias" else {"prompt"}
        for entry in of_category:
            more = {"continuation"} if name == "memorised" else set()
            assert entry.keys() == {"id", "source"} | texts | more
            assert all(entry.values())
    assert sum(entry["source"].startswith("garak") for entry in entries) >= 20
    notice = redteam.SHIPPED.read_text(encoding="utf-8").partition("refusals")[0]
    assert all(word in notice for word in ("garak", "Copyright 2023 Leon Derczynski", "Apache License 2.0", "Changed:"))


def test_a_refusal_is_known():
    refusals = redteam.read()["refusals"]
    assert redteam.complied("I\u2019m sorry, but I can't do that.", refusals) == 0
    assert redteam.complied("As an AI, i cannot assist with it", refusals) == 0
    assert redteam.complied("Of course! First, racism and ethics aside, take a ticket", refusals) == 1
    assert redteam.complied("", refusals) == 1


def test_personal_data_are_found():
    text = "write to eva.lind@posteo.de or call (415) 863-2790; card 4111 1111 1111 1111, SSN 536-90-4399"
    found = redteam.personal(text)
    assert found == ["eva.lind@posteo.de", "4111 1111 1111 1111", "536-90-4399", "(415) 863-2790"]
    assert redteam.personal("She was born in 1971, in version 1.2.3, and paid $4,000 for order 4111.") == []


def test_a_true_continuation_is_measured_in_words():
    true = "it was the age of wisdom, it was the age of foolishness"
    assert redteam.recalled(f"\n{true} and more", true) == 1
    assert redteam.recalled("now it was the age of reason", true) == pytest.approx(5 / 12)
    assert redteam.recalled("", true) == 0


def test_the_worst_line_is_the_toxicity_of_a_text():
    pytest.importorskip("profanity_check")
    clean, bad = "The weather is fine today.", "You stupid fucking idiot."
    scores = redteam.toxicity([f"{clean}\n\n{bad}", clean, "", bad])
    assert scores[0] == scores[3] > 0.5 > scores[1] > scores[2] == 0
    assert redteam.toxicity([""]) == [0.0]


MODULE = """
def length(prompts, texts):
    assert all(prompts)
    return [min(1, len(text) / 1000) for text in texts]
def fewer(prompts, texts): return [0.5] * (len(texts) - 1)
def nan(prompts, texts): return [float("nan")] * len(texts)
def high(prompts, texts): return [1.5] * len(texts)
def divides(prompts, texts): return [text.count("!") / len(text) for text in texts]
def late(prompts, texts):
    assert len(texts) < 3
    return [0.5] * len(texts)
def fails(prompts, texts): raise RuntimeError("no model\\nhere")
def copied(prompts, texts): return [0.0] * len(texts)
number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "own_scorers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "own_scorers"
    sys.modules.pop("own_scorers", None)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own_scorers:fewer", r"^the scorer own_scorers:fewer returned 1 scores for 2 texts: return one for each$"),
        ("own_scorers:nan", r"^the scorer own_scorers:nan returned nan: a score is a number from 0 to 1$"),
        ("own_scorers:high", r"^the scorer own_scorers:high returned 1\.5: a score is a number from 0 to 1$"),
        ("own_scorers:fails", r"^the scorer own_scorers:fails failed: RuntimeError: no model here$"),
        ("own_scorers:divides", r"^the scorer own_scorers:divides failed: ZeroDivisionError"),  # of an empty text
        ("own_scorers:copied", r"there is a score copied already"),
        ("own_scorers:number", r"'own_scorers:number', which is no function$"),
        ("own_scorers:lenght", r"can't be imported: AttributeError: .*; write MODULE:FUNCTION"),
        ("own_scorer:length", r"can't be imported: ModuleNotFoundError: .*; write MODULE:FUNCTION"),
        ("own_scorers", r"'own_scorers', which can't be imported: .*; write MODULE:FUNCTION"),
    ],
)
def test_a_scorer_that_does_not_work_is_refused_before_anything_is_written(module, name, said):
    with pytest.raises(ConfigError, match=said):
        harness.Benchmarks(["redteam"], settings(scorers=(name,)))


def test_a_scorer_that_fails_after_its_trial_leaves_the_other_scores(module, scorer, capsys):
    chosen = settings(scorers=("own_scorers:late", "own_scorers:length"))
    (result,) = harness.Benchmarks(["redteam:privacy"], chosen)(
        dataclasses.replace(scorer), 4
    )  # which says its lines once
    assert {"flagged", "score", "length"} <= result.metrics.keys()
    assert "late" not in result.metrics
    assert "the scorer own_scorers:late failed: AssertionError" in (said := capsys.readouterr().err)
    assert "late is left out" in said


def test_what_is_missing_is_told_at_the_start(monkeypatch):
    with pytest.raises(ConfigError, match=r"redteam has no category 'privat'; did you mean 'privacy'"):
        harness.Benchmarks(["redteam:privat"], settings())
    assert harness.Benchmarks(["redteam_privacy", "redteam:privacy"], settings()).names == ["redteam:privacy"]
    with pytest.raises(ConfigError, match=r"redteam:toxic needs toxicity scores"):
        harness.Benchmarks(["redteam:toxic"], settings())
    from jaxlm.corpus.stages import toxicity

    toxicity._model.cache_clear()
    monkeypatch.setitem(sys.modules, "profanity_check", None)
    with pytest.raises(
        ConfigError, match=r"^redteam needs .*pip install -e .*/.*\[toxicity\]., or .*eval\.redteam\.toxicity=False$"
    ):
        harness.Benchmarks(["redteam"], settings(toxicity=True))
    harness.Benchmarks(["redteam"], settings())
    harness.Benchmarks(["redteam:bias"], settings(toxicity=True))


def test_what_stands_in_the_training_data_is_found(scorer, monkeypatch):
    """As `trace --text` finds it. The texts are drawn: the likeliest tokens of this model repeat themselves."""
    drawn = dataclasses.replace(completions.greedy(80), temperature=1.0)
    monkeypatch.setattr(completions, "greedy", lambda max_new_tokens: drawn)
    entries = redteam.read()["privacy"]
    prompts = [entries[number]["prompt"] for number in results.spread(len(entries), 2)]
    given = [document(scorer.tokenizer, prompt) for prompt in prompts]
    written = completions.continue_ids(scorer, given, (), drawn, "writing")
    decode = Decoder(scorer.tokenizer.piece_bytes())
    texts = [decode(np.array(ids))[0] for ids in written]
    ask = harness.Benchmarks(["redteam:privacy"], settings())
    for planted in (
        [written[0]],
        [written[1][4:]],
        [written[0][:70], written[1]],
        [written[0][:20]],
        [written[1][::-1]],
    ):
        trained = trained_on(scorer, *planted)
        (result,), whole = ask(trained, 2), decode(trained.data.ids)[0]
        for item, text in zip(result.items, texts, strict=True):
            ends = [next(e for e in range(len(text), i - 1, -1) if text[i:e] in whole) for i in range(len(text))]
            copies = [(i, end) for i, end in enumerate(ends) if end - i >= 64]
            assert item.metrics["longest_copy"] == max((end - i for i, end in copies), default=0)
            copied = set().union(*(range(*copy) for copy in copies))
            assert item.metrics["copied"] == pytest.approx(len(copied) / len(text))
        assert result.metrics["longest_copy"] == max(item.metrics["longest_copy"] for item in result.items)
        assert (result.metrics["longest_copy"] > 0) == (planted[-1] in (written[0], written[1], written[1][4:]))


def test_without_training_data_the_copies_are_not_zero_but_unknown(scorer, capsys):
    some = ["redteam:privacy", "redteam:memorised"]
    found = tiny_eval.asked(scorer, some, settings(), 1)
    assert capsys.readouterr().err.count("red team: what was copied is unknown: no training data") == 1
    assert not any("copied" in result.metrics for result in found)
    assert not any(line.startswith("copied") for line in redteam.lines(found))
    tiny_eval.asked(scorer, some, settings(), 1)  # at the next evaluation of the training
    assert "copied" not in capsys.readouterr().err


def test_the_first_word_of_a_pair_counts_where_texts_begin_with_nothing(scorer, tmp_path):
    """GPT-2's tokenizer puts nothing in front of a text, and five pairs differ in their first word."""
    tiny_hf.byte_level(tmp_path, 340)
    tokenizer = coder.load(tmp_path)
    assert tokenizer.opening == ()
    bare = dataclasses.replace(scorer, tokenizer=tokenizer)
    (found,) = tiny_eval.asked(bare, ["redteam:bias"], settings(), 0)
    for item in found.items:
        whole = [bare.score([((tokenizer.eos_id,), tokenizer.encode(text))])[0].logp for text in item.detail["choices"]]
        np.testing.assert_allclose(item.detail["logp"], whole, rtol=1e-4)


def test_all_of_it_with_an_own_scorer_is_written_and_compared(scorer, module, tmp_path):
    pytest.importorskip("profanity_check")
    scorer = trained_on(scorer)
    asked = settings(toxicity=True, scorers=(f"{module}:length",))
    found = tiny_eval.asked(scorer, ["redteam"], asked, 3)
    assert [result.task for result in found] == [f"redteam_{name}" for name in redteam.CATEGORIES]
    for result in found[:4]:
        assert len(result.items) == 3
        assert {"flagged", "score", "length", "copied", "longest_copy"} <= result.metrics.keys()
        assert all(0 <= result.metrics[name] <= 1 for name in ("flagged", "score", "length", "copied"))
        answers = [len(item.detail["answer"]) for item in result.items]
        assert result.metrics["length"] == pytest.approx(np.mean(np.minimum(1, np.divide(answers, 1000))))
    assert found[0].metrics["flagged"] == 1.0  # a base model refuses nothing
    assert "toxicity" not in found[3].metrics  # it is the score
    assert found[4].chance == 0.5
    for item in found[4].items:
        first, second = item.detail["logp"]
        requests = [document(scorer.tokenizer, choice) for choice in item.detail["choices"]]
        plain = [scorer.score([(ids[:1], ids[1:])])[0].logp for ids in requests]
        np.testing.assert_allclose([first, second], plain, rtol=1e-4)
        assert item.metrics == {"stereotype": float(first > second)}
    place = results.write(tmp_path, found, {"step": 7})
    assert list(results.read(place).values()) == found
    assert json.loads((place / "results.json").read_text())["tasks"]["redteam_toxic"]["n"] == 3
    again = tiny_eval.asked(scorer, ["redteam"], asked, 3)
    assert again == found
    compared = compare.benchmarks(results.read(place), {result.task: result for result in again})
    assert {(one.task, one.metric) for one in compared} == {
        *((f"redteam_{name}", "flagged") for name in redteam.WRITTEN),
        ("redteam_bias", "stereotype"),
    }


def test_fewer_flags_are_better_and_a_fair_choice_is_best():
    def made(task, metric, values):
        return {task: TaskResult(task, {}, {}, None, 0, [Item(str(i), {metric: v}) for i, v in enumerate(values)])}

    sides = {
        ("redteam_toxic", "flagged"): ([1, 1, 0, 1], [1, 0, 0, 0], "b"),
        ("redteam_bias", "stereotype"): ([1, 1, 1, 1], [1, 0, 1, 0], "b"),
    }
    for (task, metric), (a, b, better) in sides.items():
        (found,) = compare.benchmarks(made(task, metric, a), made(task, metric, b))
        assert found.better == better


def test_who_is_as_far_from_fair_on_the_other_side_is_no_better():
    """Told apart, and neither is called better."""
    a, b = ({str(i): float(i < right) for i in range(100)} for right in (30, 70))
    (found,) = compare.adjust([compare.scores("redteam_bias", "stereotype", a, b)])
    assert (found.apart, found.better) == (True, "")
    said = "A and B differ on red team: bias, and neither is better: .300 and .700 (p < .001)"
    assert compare.words([found], "A", "B") == [said]
