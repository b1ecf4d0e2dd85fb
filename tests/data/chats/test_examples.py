"""All formats of examples become the same messages, and what can't be trained on is one line with its file and line."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxlm.config import ConfigError
from jaxlm.data.chats import examples
from jaxlm.data.chats.records import Notes, Place

ASK, SAY = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
AGAIN, ELSE = {"role": "user", "content": "And?"}, {"role": "assistant", "content": "No."}
SYSTEM = {"role": "system", "content": "Be brief."}
WRAPPED = (
    "Below is an instruction that describes a task{more}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{asked}\n\n### Response:\n"
)
WITH_INPUT = ", paired with an input that provides further context"
HH = "\n\nHuman: Why?\n\nAssistant: So."

# format -> (a record, its messages, how many of them are given)
CHATS = {
    "messages": ({"messages": [SYSTEM, ASK, SAY, AGAIN, ELSE]}, (SYSTEM, ASK, SAY, AGAIN, ELSE), 0),
    "messages of parts": (
        {
            "messages": [
                {"role": "User", "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]},
                SAY,
            ]
        },
        (ASK, SAY),
        0,
    ),
    "an end that nobody answers": ({"messages": [ASK, SAY, AGAIN]}, (ASK, SAY), 0),
    "prompt": ({"prompt": "Why?", "response": "So."}, (ASK, SAY), 1),
    "completion": ({"prompt": [ASK, SAY, AGAIN], "completion": [ELSE]}, (ASK, SAY, AGAIN, ELSE), 3),
    "wrapped": ({"prompt": WRAPPED.format(more="", asked="Why?"), "response": "So."}, (ASK, SAY), 1),
    "wrapped with an input": (
        {"prompt": WRAPPED.format(more=WITH_INPUT, asked="Why?\n\n### Input:\nthis"), "response": "So."},
        ({"role": "user", "content": "Why?\n\nthis"}, SAY),
        1,
    ),
    "a prompt that begins as wrapped": (
        {"prompt": "Below is an instruction that describes a task.", "response": "So."},
        ({"role": "user", "content": "Below is an instruction that describes a task."}, SAY),
        1,
    ),
    "alpaca": ({"instruction": "Why?", "input": "", "output": "So."}, (ASK, SAY), 0),
    "dolly": (
        {"instruction": "Why?", "context": "This.", "response": "So.", "category": "qa"},
        ({"role": "user", "content": "Why?\n\nThis."}, SAY),
        0,
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}], "id": "x"},
        (ASK, SAY),
        0,
    ),
    "hh": ({"chosen": HH}, (ASK, SAY), 0),
    "hh, its chosen side": ({"chosen": HH, "rejected": HH + " Well."}, (ASK, SAY), 1),
}
# format -> (a record, prompt, chosen, rejected, margin)
PAIRS = {
    "texts": ({"prompt": "Why?", "chosen": "So.", "rejected": "No."}, (ASK,), (SAY,), (ELSE,), 0),
    "a margin": ({"prompt": "Why?", "chosen": "So.", "rejected": "No.", "margin": 2}, (ASK,), (SAY,), (ELSE,), 2.0),
    "messages": ({"prompt": [SYSTEM, ASK], "chosen": [SAY], "rejected": [ELSE]}, (SYSTEM, ASK), (SAY,), (ELSE,), 0),
    "whole conversations": ({"chosen": [ASK, SAY], "rejected": [ASK, ELSE]}, (ASK,), (SAY,), (ELSE,), 0),
    "the prompt twice": ({"prompt": "Why?", "chosen": [ASK, SAY], "rejected": [ASK, ELSE], "score": 1.0}, (ASK, ), (SAY,
     ), (ELSE, ), 0),
    "transcripts": ({"chosen": f"{HH}\n\nHuman: And?\n\nAssistant: So.",
     "rejected": f"{HH}\n\nHuman: And?\n\nAssistant:"}, (ASK, SAY, AGAIN), (SAY, ), ({"role": "assistant",
     "content": ""}, ), 0),
    "transcripts that part early": ({"chosen": f"{HH}\n\nHuman: And?\n\nAssistant: So.",
     "rejected": "\n\nHuman: Why?\n\nAssistant: No."}, (ASK, ), (SAY, AGAIN, SAY), (ELSE, ), 0),
    "a transcript as prompt": ({"prompt": f"{HH}\n\nHuman: And?\n\nAssistant:", "chosen": "So.", "rejected": "No."},
     (ASK, SAY, AGAIN), (SAY, ), (ELSE, ), 0),
}  # fmt: skip


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize("kind", CHATS)
def test_chats(kind, tmp_path):
    record, messages, given = CHATS[kind]
    (found,) = examples.read(write(tmp_path / "a.jsonl", record), "auto", pairs=False)
    assert found == examples.Chat(messages, Place(str(tmp_path / "a.jsonl"), 1), given)


@pytest.mark.parametrize("kind", PAIRS)
def test_pairs(kind, tmp_path):
    record, prompt, chosen, rejected, margin = PAIRS[kind]
    path = write(tmp_path / "a.jsonl", record)
    (found,) = examples.read(path, "auto", pairs=True)
    assert found == examples.Pair(prompt, chosen, rejected, margin, Place(path, 1))
    (chat,) = examples.read(path, "auto", pairs=False)
    assert chat == found.sides()[0]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json", ".parquet"])
def test_files(suffix, tmp_path):
    """The same from each kind of file, alone, in a folder and by a glob; the number is the line of a .jsonl."""
    records, path = [{"prompt": f"{i}", "response": "So."} for i in range(3)], tmp_path / f"a{suffix}"
    lines = "".join(json.dumps(record) + "\n" for record in records)
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    elif suffix == ".json":
        path.write_text(json.dumps(records))
    else:
        path.write_bytes(gzip.compress(lines.encode()) if suffix.endswith("gz") else lines.encode())
    for asked in (path, tmp_path, f"{tmp_path}/a*"):
        found = list(examples.read(str(asked), "auto", pairs=False))
        assert [one.messages[0]["content"] for one in found] == ["0", "1", "2"]
        assert [str(one.place) for one in found] == [f"{path}:{i}" for i in (1, 2, 3)]


def test_records_of_parquet_have_all_columns(tmp_path):
    """Those that a record does not have are None, and say nothing of its format."""
    made = pa.Table.from_pylist([{"prompt": "Why?", "response": "So.", "messages": None}, {"messages": [ASK, SAY]}])
    pq.write_table(made, tmp_path / "a.parquet")
    assert [one.messages for one in examples.read(str(tmp_path), "auto", pairs=False)] == [(ASK, SAY)] * 2


WRONG = {
    "no format": ({"text": "x"}, False, "no known format has the keys text: known are messages;"),
    "nobody answers": ({"messages": [ASK]}, False, "the assistant says nothing here"),
    "no pair": ({"prompt": "Why?", "response": "So."}, True, "this is no pair"),
    "an end that is asked": ({"chosen": [ASK, SAY, AGAIN], "rejected": [ASK, ELSE]}, True, "chosen does not end with"),
    "an end of the other side": ({"chosen": [ASK, SAY], "rejected": [ASK]}, True, "rejected does not end with"),
    "texts alone": ({"chosen": "So.", "rejected": "No."}, True, "a pair of texts needs a prompt"),
    "a margin of words": ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "2"}, True, "the margin '2' is no"),
    "no text": ({"prompt": "Why?", "response": 3}, False, "there is no list of messages"),
    "a content of None": ({"messages": [ASK, {"role": "assistant", "content": None}]}, False, "'None' is no text"),
    "a picture": ({"messages": [{"role": "user", "content": [{"type": "image"}]}, SAY]}, False, "is not only text"),
    "no role": ({"messages": [{"content": "x"}, SAY]}, False, "a message has no role"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_is_one_line_with_its_place(kind, tmp_path):
    record, pairs, said = WRONG[kind]
    fine = PAIRS["texts"][0] if pairs else CHATS["prompt"][0]
    path, notes = write(tmp_path / "a.jsonl", fine, record, fine, record), Notes()
    assert [one.place.number for one in examples.read(path, "auto", pairs, notes=notes)] == [1, 3]
    (line,) = notes.lines()
    assert line.startswith(f"2 rows left out, since nothing can be learnt from them; the first: {path}:2: ")
    assert said in line
    assert "\n" not in line
    with pytest.raises(ConfigError) as error:  # nothing is left
        list(examples.read(write(tmp_path / "a.jsonl", record), "auto", pairs))
    assert str(error.value).startswith(f"{path}:1: ")
    assert said in str(error.value)


def test_a_line_that_is_no_json_is_left_out(tmp_path):
    """Also one that is not UTF-8; the lines around it are read."""
    fine = json.dumps(CHATS["prompt"][0]).encode()
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([fine, b'{"prompt": ', b"[]", fine, b'{"prompt": "\xff"}', fine]))
    notes = Notes()
    read = examples.read(str(tmp_path / "a.jsonl"), "auto", False, notes=notes)
    assert [one.place.number for one in read] == [1, 4, 6]
    (line,) = notes.lines()
    assert line.startswith("3 rows left out")
    assert line.endswith("a.jsonl:2: it is no JSON object")


def test_a_format_that_is_named_is_the_only_one(tmp_path):
    path = write(tmp_path / "a.jsonl", CHATS["prompt"][0])
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: it has no messages, which the format needs"):
        list(examples.read(path, "messages", pairs=False))


def test_no_files(tmp_path):
    with pytest.raises(ConfigError, match=r"examples\.val_path.*has no file"):
        list(examples.read(str(tmp_path), "auto", False, "examples.val_path"))
    with pytest.raises(ConfigError, match=r"data\.path is empty"):
        list(examples.read("", "auto", False))


_TALK = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: "


@pytest.mark.parametrize(
    ("record", "asked", "columns"),
    [
        ({"prompt": "a", "level": 3}, ["a"], {"level"}),
        ({"messages": [{"role": "user", "content": "a"}]}, ["a"], {"messages"}),
        ({side: f"{_TALK}{end}" for side, end in (("chosen", "d"), ("rejected", "e"))}, ["a", "b", "c"], {"chosen",
         "rejected"}),
        ({"instruction": "a", "output": "b"}, ["a"], {"instruction", "output"}),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, ["a"], {"conversations"}),
        ({"conversations": [{"from": "human", "value": "a"}]}, ["a"], {"conversations"}),
        ({"conversations": [{"from": who, "value": who} for who in ("human", "gpt", "user")]}, ["human", "gpt", "user"],
         {"conversations"}),
    ],
)  # fmt: skip
def test_what_a_record_asks(tmp_path, record, asked, columns):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(record) + "\n")
    ((messages, rest, place, tools),) = examples.read_prompts(str(path))
    assert tools is None
    assert [message["content"] for message in messages] == asked
    assert rest.keys() == columns
    assert str(place) == f"{path}:1"


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"text": "a"}, "no prompt and no messages, only text"),
        ({"messages": [{"role": "assistant", "content": "b"}]}, "nothing to answer"),
    ],
)
def test_a_record_that_asks_nothing_is_refused(tmp_path, record, said):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(ConfigError, match=said) as error:
        list(examples.read_prompts(str(path)))
    assert f"{path}:1" in str(error.value)
