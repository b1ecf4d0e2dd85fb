"""What is wrong with examples is found and told with its place, and a file without faults has none."""

import json

import pytest
import tiny_chats

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.data.batches import survey


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_chats.tokenizer()


def ask(i: int, answer: str = "", prompt: str = "") -> dict:
    return {"prompt": prompt or f"one two {i}", "response": answer or f"red sun {i}"}


def surveyed(path, tokenizer, records, pairs=False, leaks=None, seq_len=64):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    found = survey.Survey(seq_len, leaks)
    made = tiny_chats.make(str(path), tokenizer, pairs=pairs, sizes=(0, seq_len, 2), see=found.see)
    return found, made


def findings(found) -> dict[str, list[str]]:
    return {one.what: [place.rpartition("/")[2] for place in one.places] for one in found.findings()}


def test_nothing_is_wrong_with_good_chats(tokenizer, tmp_path):
    found, made = surveyed(tmp_path / "a.jsonl", tokenizer, [ask(i) for i in range(30)])
    figures = found.figures()
    assert found.findings() == []
    assert (figures["examples"], figures["answers"], figures["pairs"], figures["asked_alike"]) == (30, 30, 0, 0)
    assert figures["answer_tokens"][-1] == max(made.train.counted().max(), made.val.counted().max())
    assert len(found.lines()) == 3


def test_faults_of_chats(tokenizer, tmp_path):
    faults = [
        ask(0), ask(0), ask(0, "blue moon"), ask(3, " "), ask(4, "As an AI language model I see <|im_end|> PersonX"),
        ask(5, prompt="one " * 200), ask(6, "two " * 60),
    ]  # fmt: skip
    found, _ = surveyed(tmp_path / "a.jsonl", tokenizer, faults)
    told = findings(found)
    assert told["repeated examples"] == ["a.jsonl:1"]  # "... = FILE:1"
    assert told["empty answers"] == ["a.jsonl:4"]
    assert told["junk in an answer: assistant (As an AI language model)"] == ["a.jsonl:5"]
    assert told["junk in an answer: chat_tokens (<|im_end|>)"] == ["a.jsonl:5"]
    assert told["junk in an answer: annotation (PersonX)"] == ["a.jsonl:5"]
    assert told["prompts longer than a row of 64 tokens"] == ["a.jsonl:6"]
    assert told["longer than a row of 64 tokens together with the answer"] == ["a.jsonl:7"]
    assert len(told) == 7
    assert found.figures()["asked_alike"] == 2
    assert "repeated examples: 1 (14.3%): a.jsonl:2 = a.jsonl:1" in found.lines()
    found.write(tmp_path)
    assert (tmp_path / survey.TEXT).read_text().splitlines() == found.lines()
    assert json.loads((tmp_path / survey.JSON).read_text()) == found.figures()


def test_faults_of_pairs(tokenizer, tmp_path):
    def pair(i, chosen, rejected):
        return {"prompt": f"one {i}", "chosen": chosen, "rejected": rejected}

    given = [pair(0, "sun", "sea moon"), pair(1, "sun", "sun"), pair(0, "sea moon", "sun"), pair(2, "red", "")]
    given.append(pair(3, "two " * 30, "six " * 30))  # 40 tokens a side: both are in one row
    found, _ = surveyed(tmp_path / "a.jsonl", tokenizer, given, pairs=True)
    told = findings(found)
    assert told == {
        "pairs of two equal sides": ["a.jsonl:2"],
        "pairs that occur again with their sides swapped": ["a.jsonl:1"],
        "empty answers": ["a.jsonl:4"],
        "both sides together longer than a row of 64 tokens": ["a.jsonl:5"],
    }
    assert found.figures()["chosen_is_shorter"] == 0.2
    assert any("the shorter one in 20.0%" in line for line in found.lines())


def test_items_of_benchmarks(tokenizer, tmp_path):
    question = "Which of these small green animals sleeps under the warm river stones during winter?"
    (tmp_path / "eval").mkdir()
    items = [
        {"question": question, "answer": "a frog"},
        {"question": "How many legs do nine old spiders have?", "answer": "72"},
    ]
    (tmp_path / "eval" / "zoo.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    prepare = config.resolve(config_files.load("base", ["data.path=x"])).prepare
    leaks = survey.leaks_of(str(tmp_path / "eval"), prepare)
    records = [ask(0), ask(1, prompt=question), ask(2, answer=f"You ask: {question}")]
    found, _ = surveyed(tmp_path / "a.jsonl", tokenizer, records, leaks=leaks, seq_len=256)
    assert findings(found) == {"items of benchmarks: zoo": ["a.jsonl:2", "a.jsonl:3"]}
    pairs = [
        {"prompt": "one", "chosen": "sun", "rejected": question},
        {"prompt": "two", "chosen": "a", "rejected": "b"},
    ]
    found, _ = surveyed(tmp_path / "b.jsonl", tokenizer, pairs, pairs=True, leaks=leaks, seq_len=256)
    assert findings(found) == {"items of benchmarks: zoo": ["b.jsonl:1"]}
    assert survey.leaks_of("", prepare) is None


def test_the_example_shows_what_counts(tokenizer, tmp_path):
    _, made = surveyed(tmp_path / "a.jsonl", tokenizer, [ask(7, "red sün")])
    parts = survey.shown(made.train, tokenizer)
    assert parts == [
        ("</s><|im_start|><|user|>\none two 7<|im_end|>\n<|im_start|><|assistant|>\n", False),
        ("red sün<|im_end|>", True),
        ("\n", False),
    ]
    assert survey.shown(made.train, tokenizer, most=10)[1] == ("red s ... end|>", True)
    pair = {"prompt": "one", "chosen": "sun", "rejected": "sea"}
    _, made = surveyed(tmp_path / "b.jsonl", tokenizer, [pair], pairs=True)
    assert [text for text, counts in survey.shown(made.train, tokenizer) if counts] == [
        "sun<|im_end|>",
        "sea<|im_end|>",
    ]
