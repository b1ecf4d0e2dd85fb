"""Where prompts come from: what is drawn follows from numbers, what is held out is never trained on."""

import dataclasses
import importlib.util
import json

import pytest
import tiny_chats

from jaxlm.config import ConfigError
from jaxlm.data.chats import chat
from jaxlm.data.chats.records import Notes
from jaxlm.train.rl import process, prompts, rewards
from jaxlm.train.rl.prompts import Made, Reader

WITH_GYM = pytest.mark.skipif(
    not importlib.util.find_spec("reasoning_gym"), reason="needs reasoning-gym: pip install -e '.[rl]'"
)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_chats.tokenizer()


@pytest.fixture
def said():
    return []


@pytest.fixture
def reader(tokenizer, said):
    def make(room: int = 400, seed: int = 0, val_fraction: float = 0.2, val_path: str = "") -> Reader:
        return Reader(tokenizer, room, seed, val_fraction, val_path, said.append, Notes())

    return make


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prompt_file(path, count: int = 40) -> str:
    return write(path, [{"prompt": f"{n} + 1 =", "answer": n + 1} for n in range(count)])


def test_forms_of_prompts(reader, tmp_path, tokenizer):
    chats = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    rows = [
        {"prompt": "sun", "level": 3},
        {"messages": chats, "level": None},
        {"prompt": chats, "messages": "not read"},
        {"prompt": "\n\nHuman: sea\n\nAssistant:"},
    ]
    found = reader(val_fraction=0.0).rows(write(tmp_path / "a.jsonl", rows), "data.path")
    items = {int(item.place.rpartition(":")[2]): item for item in (*found.train, *found.val)}
    assert [items[n].prompt for n in (1, 2, 3, 4)] == ["sun", "c", "c", "sea"]
    assert [dict(items[n].columns) for n in (1, 2, 3, 4)] == [
        {"level": 3},
        {"messages": chats, "level": None},
        {"messages": "not read"},
        {},
    ]
    assert items[2].messages == tuple(chats)
    assert found.columns == {"level", "messages"}
    for item in items.values():
        assert item.ids == chat.ids(tokenizer, item.messages)
        assert (item.ids[0], item.ids.count(tokenizer.eos_id)) == (tokenizer.eos_id, 1)
        assert item.judge is item.truth is None


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"question": "x"}, "a.jsonl:2: it has no prompt and no messages, only question"),
        ({"prompt": "x", "system": 5}, "a.jsonl:2: its system '5' is no text"),
    ],
)
def test_a_row_that_is_no_prompt(reader, tmp_path, row, why):
    """It is left out, told, and the end only where nothing else is there."""
    asked = reader(val_fraction=0.0)
    rows = asked.rows(write(tmp_path / "a.jsonl", [{"prompt": "x"}, row]), "data.path")
    assert len(rows.train) + len(rows.val) == 1
    (line,) = asked.notes.lines()
    assert f"1 row left out, since nothing can be learnt from them; the first: {tmp_path}/{why}" in line
    with pytest.raises(ConfigError) as error:
        reader().rows(write(tmp_path / "a.jsonl", [row]), "data.path")
    assert why.replace(":2:", ":1:") in str(error.value)


def test_prompts_take_the_path_of_examples(reader, tmp_path, tokenizer):
    """A system's message in front, the assistant's last turn left off, what is not read named."""
    say = {"role": "assistant", "content": "b"}
    rows = [{"prompt": "a", "system": "sun"}, {"messages": [{"role": "user", "content": "a"}, say], "id": 1}]
    asked = reader(val_fraction=0.0)
    found = asked.rows(write(tmp_path / "a.jsonl", rows), "data.path")
    items = {item.place.rpartition(":")[2]: item for item in (*found.train, *found.val)}
    assert [message["role"] for message in items["1"].messages] == ["system", "user"]
    assert items["2"].messages == ({"role": "user", "content": "a"},)
    assert asked.notes.lines(read=["system"]) == [
        "not read: id in 1 row",
        f"1 row asked without what the assistant says at the end; the first: {tmp_path}/a.jsonl:2",
    ]
    assert set(asked.notes.of("read")) == {"system"}


def test_each_pass_has_all_prompts_once_in_another_order(reader, tmp_path):
    path = prompt_file(tmp_path / "a.jsonl")
    found, other = (reader(seed=seed).rows(path, "data.path") for seed in (0, 1))
    size = len(found.train)
    passes = [[item.place for item in found.draw(range(n * size, (n + 1) * size))] for n in (0, 1)]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(item.place for item in found.train)
    assert passes[0] != passes[1] != sorted(passes[1])
    assert [item.place for item in other.draw(range(size))] != passes[0]
    assert [item.place for item in found.draw([size + 3, 2])] == [passes[1][3], passes[0][2]]


def test_what_is_held_out_of_a_file_is_not_trained_on(reader, tmp_path):
    path = prompt_file(tmp_path / "a.jsonl")
    rows = [*map(json.loads, open(path)), *map(json.loads, open(path))]  # each is asked twice
    found = reader().rows(write(tmp_path / "b.jsonl", rows), "data.path")
    train, val = ({item.prompt for item in part} for part in (found.train, found.held_out(100)))
    assert (len(train | val), len(train & val), len(found.train) + len(found.val)) == (40, 0, 80)
    assert 2 <= len(val) <= 16
    assert found.held_out(3) == found.held_out(100)[:3]
    named = reader(val_path=prompt_file(tmp_path / "v.jsonl", 3)).rows(path, "data.path")
    assert (len(named.train), [item.prompt for item in named.held_out(9)]) == (40, ["0 + 1 =", "1 + 1 =", "2 + 1 ="])


def test_nothing_to_hold_out(reader, tmp_path, said):
    found = reader().rows(prompt_file(tmp_path / "a.jsonl", 1), "data.path")
    assert (len(found.train), found.held_out(5)) == (1, [])
    assert said == [f"none of the prompts of {tmp_path}/a.jsonl is held out, since all are the same: name others by "
                    "examples.val_path"]  # fmt: skip


def test_prompts_that_are_too_long_are_left_out_and_counted(reader, tmp_path, said):
    rows = [{"prompt": "sun " * (50 if n % 4 == 0 else 1) + str(n)} for n in range(40)]
    path = write(tmp_path / "a.jsonl", rows)
    room = max(len(item.ids) for item in reader().rows(path, "data.path").train if int(item.prompt.split()[-1]) % 4)
    for spare, left in ((0, 30), (-1, 29)):
        said.clear()
        found = reader(room + spare).rows(path, "data.path")
        assert len(found.train) + len(found.val) <= left
        assert said == [
            f"{40 - len(found.train) - len(found.val)} of 40 prompts of {path} are left out: they are longer than the "
            f"{room + spare} tokens that train.seq_len leaves besides rollout.max_new_tokens; raise train.seq_len or "
            "train.batch_size"
        ]
    with pytest.raises(ConfigError, match=r"a.jsonl: all its prompts are longer than the 4 tokens"):
        reader(4).rows(path, "data.path")
    with pytest.raises(ConfigError, match=r"e.jsonl: it has no prompts$"):
        reader().rows(write(tmp_path / "e.jsonl", []), "data.path")


def test_the_hash_of_a_file_knows_its_prompts_and_columns(reader, tmp_path):
    def sha256(rows, room=400):
        return reader(room).rows(write(tmp_path / "a.jsonl", rows), "data.path").sha256

    rows = [{"prompt": "sun " * n, "a": n} for n in range(1, 30)]
    first = sha256(rows)
    others = [sha256(rows[:-1]), sha256([*rows[:-1], rows[-1] | {"a": 5}]), sha256(rows, 60), sha256(rows[::-1])]
    assert sha256(rows) == first
    assert len({first, *others}) == 5


def test_questions_as_gsm8ks(reader, tmp_path):
    rows = [{"question": f"{n}?", "answer": f"So <<{n}>> it is.\n#### {n},000 "} for n in range(20)]
    found = reader().rows(write(tmp_path / "a.jsonl", rows), "data.path", task=2)
    item = next(item for item in found.train if item.place.endswith(":4"))
    assert item.messages == ({"role": "user", "content": "3?"},)
    assert (item.judge, item.truth) == ((2, "3,000"), "3,000")
    assert item.columns == {"task": "gsm8k", "answer": "3,000"}
    for row, why in (
        ({"question": "x"}, "gsm8k needs a question and an answer, both texts"),
        ({"question": "x", "answer": "18"}, "the answer does not end with ####"),
        ({"question": "x", "answer": "18 ####"}, "the answer does not end with ####"),
    ):
        with pytest.raises(ConfigError, match=rf"a.jsonl:1: {why}"):
            reader().rows(write(tmp_path / "a.jsonl", [row]), "data.path", task=0)
    with pytest.raises(ConfigError, match="gsm8k needs its file"):
        reader().rows("", "data.path", task=0)


FEW = "reasoning_gym:chain_sum?max_terms=2&max_digits=1"  # has 200 questions
SETS = "reasoning_gym:isomorphic_strings"  # makes them from the order of a set
MATH = "gsm8k"


@pytest.fixture(scope="module")
def judging():
    """The process, with three tasks; it takes seconds to import reasoning-gym."""
    specs = prompts.parse_tasks(f"{FEW},{SETS},{MATH}")
    found = process.Processes([(spec.kind, spec.name, dict(spec.options)) for spec in specs], "", "", 60.0)
    found.start()
    yield found
    found.close()


@pytest.fixture
def made(judging, reader):
    def make(task: str = FEW, **options) -> Made:
        (spec,) = prompts.parse_tasks(task)
        return Made(spec, [FEW, SETS].index(task), judging, reader(**options))

    return make


@WITH_GYM
def test_a_question_that_is_held_out_is_never_trained_on(made):
    """However few questions a task has; and the same are held out for all seeds."""
    found = made()
    val, drawn = found.held_out(40), found.draw(range(300))
    train = {item.prompt for item in drawn}
    assert not train & {item.prompt for item in val}
    assert len(train) > 100
    assert [item.place for item in made(seed=1).held_out(40)] == [item.place for item in val]
    assert found.held_out(7) == val[:7]
    assert max(item.judge[1] for item in drawn) < 2**31 <= min(item.judge[1] for item in val)
    item = drawn[0]
    assert item.columns == {"task": "reasoning_gym:chain_sum", "answer": item.truth}
    assert item.judge == (0, int(item.place.removeprefix("reasoning_gym:chain_sum ")))
    assert made(seed=1).draw([0]) != drawn[:1]


@WITH_GYM
def test_questions_that_are_too_long_are_made_anew(made, said):
    lengths = [len(item.ids) for item in made(SETS, room=10_000).draw(range(16))]
    assert said == []
    room = sorted(lengths)[8]
    found = made(SETS, room=room).draw(range(16))
    assert max(len(item.ids) for item in found) <= room
    assert len({item.place for item in found}) == 16
    (line,) = said
    assert (
        "of the first 16 questions of reasoning_gym:isomorphic_strings are left out, and others generated: they" in line
    )
    assert f"they are longer than the {room} tokens" in line
    with pytest.raises(ConfigError, match=r"isomorphic_strings: its questions are longer than the 9 tokens"):
        made(SETS, room=9)


@WITH_GYM
def test_answers_are_judged(judging, made):
    rewarder = rewards.Rewarder(_Section(f"{FEW},{SETS},{MATH}"), judging)
    items = made().draw(range(4))
    assert rewarder.exact(items, [f"... <answer>{item.truth}</answer>" for item in items]).tolist() == [1] * 4
    assert rewarder.exact(items, [f"{item.truth} or 5" for item in items]).tolist() == [0] * 4
    ours = prompts.Item(items[0].messages, [], {}, "a:1", (2, "1,200"))
    right = [
        "1200",
        "The answer is $1,200.",
        "<answer>1200.0</answer>",
        r"\boxed{1200}",
        "600 * 2",
        "1,200",
        "so " * 900 + "1200",
    ]
    wrong = ["", "1", "120", "1200 or 7", "<answer>7</answer> 1200", "twelve", "(" * 500, "nan"]
    assert rewarder.exact([ours] * len(right), right).tolist() == [1] * len(right)
    assert rewarder.exact([ours] * len(wrong), wrong).tolist() == [0] * len(wrong)
    word = dataclasses.replace(ours, judge=(2, "to the north"))
    assert rewarder.exact([word] * 2, ["to the north", "to the south"]).tolist() == [1, 0]


class _Section:
    """Of `reward`: tasks alone."""

    def __init__(self, tasks: str, timeout_s: float = 60.0):
        self.tasks, self.timeout_s = tasks, timeout_s


@WITH_GYM
def test_another_process_makes_the_same_questions(made, judging):
    """In another order, and although Python orders sets otherwise in each process."""
    numbers = [5, 0, 9]
    before = made(SETS).draw(numbers), made().draw(numbers)
    first = judging.questions.pid
    judging.close()
    after = made().draw(numbers[::-1]), made(SETS).draw(numbers[::-1])
    assert judging.questions.pid != first
    assert (after[1][::-1], after[0][::-1]) == before
