"""Keys of records count, are refused or are named; and reading them as if they were not there gives what there was before."""

import json
import shlex

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_chats
import tiny_hf

from jaxlm.config import ConfigError, config_files
from jaxlm.data.batches import encoded
from jaxlm.data.chats import examples
from jaxlm.data.chats.records import Notes, Place
from jaxlm.data.tokenizer import coder
from jaxlm.run import workdir

ASK, SAY = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
AGAIN, ELSE = {"role": "user", "content": "And?"}, {"role": "assistant", "content": "No."}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {"at": 1}}}]}
ANSWER = {"role": "tool", "content": "5", "tool_call_id": "a", "name": "look"}
TOOLS = [{"type": "function", "function": {"name": "look"}}]
CHATML = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.reasoning_content or '') + (m.content or '') }}"
    "{{ m.tool_calls | tojson if m.tool_calls else '' }}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def read(tmp_path, *rows, pairs=False, ignore=(), name="a.jsonl"):
    """(the examples of these rows, what was met)."""
    path, notes = tmp_path / name, Notes(ignore)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(examples.read(str(path), "auto", pairs, notes=notes)), notes


# key -> (a row with it, its messages, which of them are learnt, from 0)
READ = {
    "system": ({"messages": [ASK, SAY], "system": "Be brief."}, (SYSTEM, ASK, SAY), {2}),
    "system, of a prompt": ({"prompt": "Why?", "response": "So.", "system": "Be brief."}, (SYSTEM, ASK, SAY), {2}),
    "system, twice": ({"messages": [SYSTEM, ASK, SAY], "system": "Be brief."}, (SYSTEM, ASK, SAY), {2}),
    "system, of a pair": ({"prompt": "Why?", "chosen": "So.", "rejected": "No.", "system": "Be brief."}, (SYSTEM, ASK,
     SAY), {2}),
    "history": ({"instruction": "And?", "output": "No.", "history": [["Why?", "So."]]}, (ASK, SAY, AGAIN, ELSE), {1,
     3}),
    "weight": ({"messages": [ASK, SAY | {"weight": 0}, AGAIN, ELSE]}, (ASK, SAY | {"weight": 0}, AGAIN, ELSE), {3}),
    "train": ({"messages": [ASK, SAY | {"train": False}, AGAIN, ELSE]}, (ASK, SAY | {"weight": 0}, AGAIN, ELSE), {3}),
    "loss": ({"messages": [ASK, SAY | {"loss": True}, AGAIN, ELSE]}, (ASK, SAY, AGAIN, ELSE), {1, 3}),
    "developer": ({"messages": [SYSTEM | {"role": "developer"}, ASK, SAY]}, (SYSTEM, ASK, SAY), {2}),
    "reasoning_content": ({"messages": [ASK, SAY | {"reasoning_content": "Hm."}]}, (ASK,
     SAY | {"reasoning_content": "Hm."}), {1}),
    "tool_calls": ({"messages": [ASK, CALL, ANSWER, SAY]}, (ASK, CALL, ANSWER, SAY), {1, 3}),
    "tool_calls, without content": ({"messages": [ASK, CALL | {"content": None}, ANSWER, SAY]}, (ASK, CALL, ANSWER,
     SAY), {1, 3}),
    "tool_call_id": ({"conversations": [{"from": "human", "value": "Why?"}, CALL, ANSWER | {"role": "observation"},
     SAY]}, (ASK, CALL, ANSWER, SAY), {1, 3}),
}  # fmt: skip


@pytest.mark.parametrize("kind", READ)
def test_keys_that_are_read(kind, tmp_path):
    row, messages, trained = READ[kind]
    (one,), notes = read(tmp_path, row)
    assert (one.messages, one.trained()) == (messages, trained)
    assert kind.partition(",")[0] in notes.of("read")
    assert notes.lines() == []


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_tools_are_json_or_its_text(tools, tmp_path):
    (one,), _ = read(tmp_path, {"messages": [ASK, SAY], "tools": tools})
    (pair,), _ = read(tmp_path, {"prompt": "Why?", "chosen": "So.", "rejected": "No.", "tools": tools}, pairs=True)
    assert one.tools == pair.tools == pair.sides()[1].tools == TOOLS


REFUSED = {
    "function_call": {"messages": [ASK, {"role": "assistant", "content": None, "function_call": {"name": "look"}}]},
    "label": {"prompt": "Why?", "response": "So.", "label": False},
    "weight": {"messages": [ASK, SAY, AGAIN, ELSE | {"weight": 0.5}]},
    "loss": {"messages": [ASK, SAY, AGAIN, ELSE | {"loss": "no"}]},
    "ipython": {"messages": [ASK, SAY, {"role": "ipython", "content": "5"}, ELSE]},
}


@pytest.mark.parametrize("key", REFUSED)
def test_keys_that_are_refused(key, tmp_path):
    """With their count over the whole file, the first row and the way out, which reads the rows as if it were not there."""
    fine = {"prompt": "Why?", "response": "So."}
    with pytest.raises(ConfigError) as error:
        read(tmp_path, fine, REFUSED[key], fine, REFUSED[key])
    assert str(error.value).startswith(f"{key} in 2 rows, the first {tmp_path}/a.jsonl:2: ")
    assert str(error.value).endswith(f"""'--config.examples.ignore=("{key}",)'""")
    found, notes = read(tmp_path, fine, REFUSED[key], ignore=(key,))
    messages = REFUSED[key].get("messages", (ASK, SAY))
    plain = tuple({name: value for name, value in message.items() if name != key} for message in messages)
    assert len(found) == 1 if key == "function_call" else found[1].messages == plain
    assert [line[:18] for line in notes.lines()] == (["1 row left out, si"] if key == "function_call" else [])


def test_the_flag_is_one_that_a_shell_takes_and_keeps_what_is_ignored(tmp_path):
    row = {"prompt": "Why?", "response": "So.", "label": False, "tools": TOOLS, "a'b": 1}
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row) + "\n")
    given, ignored = [], set()
    for _ in range(2):
        with pytest.raises(ConfigError) as error:
            tiny_chats.make(str(path), tiny_chats.tokenizer(), overrides=given)
        (flag,) = shlex.split(str(error.value).partition("such keys: ")[2])
        given = [flag.removeprefix("--config.")]
        ignored |= {"tools" if ignored else "label"}
        assert set(config_files.load("base", given).examples.ignore) == ignored
    assert len(tiny_chats.make(str(path), tiny_chats.tokenizer(), overrides=given).train) == 1
    notes = Notes(("a'b",))
    notes.note("read", "system", Place("a", 1))
    (flag,) = shlex.split(notes.as_before().partition("not read: ")[2].partition(" gives")[0])
    assert set(config_files.load("base", [flag.removeprefix("--config.")]).examples.ignore) == {"a'b", "system"}


def test_what_parquet_holds_as_text_stays_whole(tmp_path):
    tools = [{"name": "f", "parameters": {"x": {"default": None}}}]
    rows = [{"messages": [ASK, SAY], "tools": json.dumps(tools)}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (one,) = examples.read(str(tmp_path / "a.parquet"), "auto", False)
    assert one.tools == read(tmp_path, *rows)[0][0].tools == tools


def test_an_error_of_a_file_is_of_its_own_rows(tmp_path):
    _, notes = read(tmp_path, {"prompt": "Why?", "response": "So."}, {"prompt": 5})
    assert "a.jsonl:2" in notes.left_out
    (tmp_path / "b.jsonl").write_text("")
    assert [*examples.read(str(tmp_path / "b.jsonl"), "auto", False, notes=notes)] == []
    assert notes.left_out == ""
    assert [line[:18] for line in notes.lines()] == ["1 row left out, si"]


def test_what_is_not_read_is_named_once_with_its_counts(tmp_path):
    rows = [{"messages": [ASK | {"name": "x"}, SAY], "id": n, "source": None} for n in range(3)]
    _, notes = read(tmp_path, *rows, {"prompt": "Why?", "response": "So.", "id": 4, "weight": 0.3})
    assert notes.lines() == ["not read: id in 4 rows, name of messages in 3 rows, weight in 1 row"]
    _, notes = read(tmp_path, rows[0], ignore=("id", "name", "weigth"))
    assert notes.lines() == ["examples.ignore: no row has weigth"]


@pytest.mark.parametrize("key", ["weight", "train", "loss"])
def test_a_row_that_is_not_to_be_learnt_is_left_out(tmp_path, key):
    """Older versions trained on it: that it is read now, and how it is not, is told at a resume."""
    rows = [{"prompt": "Why?", "response": "So.", key: value} for value in (0, False, 1, True)]
    chats, notes = read(tmp_path, *rows)
    assert [one.place.number for one in chats] == [3, 4]
    assert any(line.startswith("2 rows left out, since nothing can be learnt from them") for line in notes.lines())
    assert key in notes.of("read")
    assert len(read(tmp_path, *rows, ignore=(key,))[0]) == 4


def test_scores_that_contradict_are_counted(tmp_path):
    row = {"prompt": "Why?", "chosen": "So.", "rejected": "No."}
    scores = [{"score_chosen": 1, "score_rejected": 2}, {"chosen_score": 2.0, "rejected_score": 1}]
    found, notes = read(tmp_path, *(row | more for more in scores), pairs=True)
    assert len(found) == 2
    (line,) = notes.lines()
    assert line.startswith("1 row trained on unchanged, though their scores say that the rejected side is better")


WHOLE = [SYSTEM, ASK, SAY, AGAIN]
SIDES = {
    "the whole conversation": {"prompt": WHOLE, "chosen": [*WHOLE, SAY], "rejected": [*WHOLE, ELSE]},
    "a system's message first": {"prompt": [ASK, SAY, AGAIN], "chosen": [*WHOLE, SAY], "rejected": [*WHOLE, ELSE]},
    "without the system's message": {"prompt": WHOLE, "chosen": [*WHOLE[1:], SAY], "rejected": [*WHOLE[1:], ELSE]},
    "the last question alone": {"prompt": "And?", "chosen": [*WHOLE, SAY], "rejected": [*WHOLE, ELSE]},
    "blanks": {"prompt": WHOLE, "chosen": [*WHOLE[:3], {"role": "user", "content": "And? \n"}, SAY], "rejected": "No."},
    "a transcript": {
        "prompt": WHOLE,
        "chosen": "Human: Why?\n\nAssistant: So.\n\nHuman: And?\n\nAssistant: So.",
        "rejected": "No.",
    },
    "one side": {"prompt": "And?", "chosen": [*WHOLE, SAY], "rejected": "No."},
    "a system's key": {"prompt": [ASK, SAY, AGAIN], "chosen": [SAY], "rejected": [ELSE], "system": "Be brief."},
}


@pytest.mark.parametrize("kind", SIDES)
def test_the_question_never_stands_twice(kind, tmp_path):
    (one,), _ = read(tmp_path, SIDES[kind], pairs=True)
    assert (one.prompt, one.chosen, one.rejected) == (tuple(WHOLE), (SAY,), (ELSE,))


def test_an_answer_that_is_a_dialogue_is_one_answer(tmp_path):
    dialogue = "Human: hi\n\nAssistant: yo"
    (one,), _ = read(tmp_path, {"prompt": "Write a dialogue.", "chosen": dialogue, "rejected": "no"}, pairs=True)
    assert one.chosen == ({"role": "assistant", "content": dialogue},)


def test_a_wrapped_question_never_stands_twice(tmp_path):
    wrapped = (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nWhy?\n\n### Response:\n"
    )
    sides = ([{"role": "user", "content": wrapped}, answer] for answer in (SAY, ELSE))
    (one,), _ = read(tmp_path, dict(zip(("prompt", "chosen", "rejected"), (wrapped, *sides), strict=True)), pairs=True)
    assert (one.prompt, one.chosen, one.rejected) == ((ASK,), (SAY,), (ELSE,))


# What the base commit (5a4cd7b3) made of these rows, from which it read no key of `ignore`. (Of the first, with the tokenizer
# of data recipe version 4.)
KEYS = (
    "system", "history", "weight", "developer", "reasoning_content", "tools", "tool_calls", "label", "function_call",
)  # fmt: skip
BEFORE = [
    {"messages": [ASK, SAY], "system": "Be brief."},
    {"instruction": "the sun", "output": "No.", "history": [["Why?", "So."]]},
    {"messages": [ASK, SAY | {"weight": 0}, AGAIN, ELSE], "tools": TOOLS, "id": 7},
    {"messages": [ASK, SAY | {"reasoning_content": "Hm."}]},
    {"messages": [AGAIN, SAY | {"tool_calls": CALL["tool_calls"], "function_call": {"name": "x"}}]},
    {"prompt": "sea", "response": "sky", "label": False, "system": "x"},
    {"messages": [SYSTEM | {"role": "developer"}, AGAIN, ELSE]},
]


@pytest.mark.parametrize(
    ("rows", "sha256"),
    [
        (6, "44a95302592f9a4373f01da23ea9ea0c56ecd916998dd28d28675bf298f30247"),
        (7, "d6671fa887f31f2fb4b07043cd635c5844a98f54821f89670a42b50f0d939195"),
    ],
)
def test_ignoring_gives_the_batches_of_before(rows, sha256, tmp_path):
    tokenizer = tiny_chats.tokenizer()
    if rows == 7:  # ours refuses the role
        tiny_hf.byte_level(tmp_path / "model", chat_template=CHATML)
        tokenizer = coder.load(tmp_path / "model")
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in BEFORE[:rows]))
    found = tiny_chats.make(str(path), tokenizer, overrides=[f"examples.ignore={KEYS!r}"])
    assert found.fingerprint()["sha256"] == sha256
    assert found.data.as_before == ""


ROLES_ALL = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ROLES_TWO = ROLES_ALL.replace("in messages", "in messages if m.role in ('user', 'assistant')")


@pytest.mark.parametrize(
    ("role", "template", "sha256"),
    [
        ("observation", ROLES_ALL, "26e2816476d8a7710e82cd161dcd0f2377ac6e4e741cb3dfda818ce823b10f8f"),
        ("ipython", ROLES_ALL, "351dcac4e9b0e7e10317a644b3bfbbf00fc3d197bf1bb12075f3d3ca5b23930b"),
        ("ipython", ROLES_TWO, "501901b18e5245ba3d8ec5b4bf223e2463c5bb366b13c87838e21981173fcabe"),
        ("tool", ROLES_TWO, "bd1f0634b7301d73d861cefa7ae17d7be62ac72dc855707edd4890d5cfc54033"),
    ],
)
def test_a_role_that_is_ignored_passes_as_it_did_before(role, template, sha256, tmp_path):
    """What the base commit made of the same rows; without the flag they are refused, or the flag is told."""
    tiny_hf.byte_level(tmp_path / "model", chat_template=template)
    tokenizer, path = coder.load(tmp_path / "model"), tmp_path / "a.jsonl"
    result = {"role": role, "content": "5"}
    rows = [{"messages": [{"role": "user", "content": f"{n}"}, SAY, result, ELSE]} for n in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        told = tiny_chats.make(str(path), tokenizer).data.as_before
    except ConfigError as error:
        told = str(error)
    assert f'ignore=("{role}",)' in told
    found = tiny_chats.make(str(path), tokenizer, overrides=[f"examples.ignore=('{role}',)"])
    assert found.fingerprint()["sha256"] == sha256


def test_calls_without_words_are_not_promised(tmp_path):
    """Their answer is empty without the key: they were trained on so, and are left out."""
    _, notes = read(tmp_path, {"messages": [ASK, CALL, ANSWER, SAY]})
    assert notes.as_before().endswith(" gives the run its batches back, except rows whose answer is empty without it")
    found, notes = read(tmp_path, {"messages": [ASK, CALL]}, {"messages": [ASK, SAY]}, ignore=("tool_calls",))
    assert (len(found), notes.as_before()) == (1, "")


def test_a_run_that_began_before_is_refused_with_the_keys(tmp_path, monkeypatch):
    """Not one whose config knows of `ignore`: then the key was read."""
    monkeypatch.setattr(workdir.keep, "begun", lambda _: True)
    monkeypatch.setattr(workdir.store, "read_metas", lambda *_: {1: {"fingerprint": {"data": "x"}}})
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    for saved, more in (({}, True), ({"ignore": []}, False)):
        (tmp_path / "config.json").write_text(json.dumps({"examples": saved}))
        with pytest.raises(ConfigError, match="batches would differ") as error:
            workdir.check_same_batches(tmp_path, {"data": "y"}, "history was not read: FLAG")
        assert str(error.value).endswith(". When it began, history was not read: FLAG") == more
    workdir.check_same_batches(tmp_path, {"data": "x"}, "history was not read: FLAG")


def test_what_a_template_does_not_write_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"messages": [ASK, SAY]}, *[{"messages": [ASK, CALL, ANSWER, SAY], "tools": TOOLS}] * 2]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError) as error:
        tiny_chats.make(str(path), tiny_chats.tokenizer())
    assert str(error.value).startswith(f"tool in 2 rows, the first {path}:2: ")
    assert str(error.value).endswith("""'--config.examples.ignore=("tool","tool_calls","tools",)'""")
    said = []
    found = tiny_chats.make(
        str(path), tiny_chats.tokenizer(), overrides=["examples.ignore=('tool','tool_calls','tools')"], say=said.append
    )
    assert len(found.train) + len(found.val) == 1
    assert any(line.startswith("2 rows left out, since without the ignored keys an answer is empty") for line in said)
    tiny_hf.byte_level(tmp_path / "model", chat_template=CHATML)
    found = tiny_chats.make(str(path), coder.load(tmp_path / "model"))
    assert len(found.train) + len(found.val) == 3
    assert found.data.as_before.startswith("name, tool_call_id, tool_calls, tools was not read: ")


VALUES = (
    None, "", "x", 0, 1, 2.5, True, False, [], [1], {}, {"a": 1}, [["q", "a"]], [{"name": "f"}], '[{"name": "f"}]',
)  # fmt: skip
ROW_KEYS = ("system", "tools", "history", "label", "weight", "id", "margin", "score_chosen", "context", "input", "a\nb")
MESSAGE_KEYS = (
    "weight", "train", "loss", "tool_calls", "function_call", "reasoning_content", "thinking", "name", "id", "value",
)  # fmt: skip
ROLES = ("user", "assistant", "system", "tool", "developer", "Human", "gpt", "observation", "function", "", 3, None)
FORMS = (
    {"messages": [ASK, SAY, AGAIN, ELSE]},
    {"prompt": "Why?", "response": "So."},
    {"instruction": "Why?", "output": "So."},
    {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]},
    {"prompt": "Why?", "chosen": "So.", "rejected": "No."},
)
DEFAULTS = {"weight": (1, True), "train": (1, True), "loss": (1, True)}


def outcome(tmp_path, row, tokenizer):
    """(a hash of the ids, masks and margins that a row gives, all that is told of it)."""
    try:
        found, notes = read(tmp_path, row, pairs="chosen" in row)
        made, counts = encoded.build(found, tokenizer, seq_len=512, notes=notes)
    except ConfigError as error:
        return None, str(error)
    return made.sha256(), " ".join(notes.lines() + counts.lines("rows", 512))


@pytest.mark.parametrize("template", ["", CHATML, ROLES_TWO.replace("('user'", "('system', 'user'")])
def test_each_key_changes_the_rows_or_is_named(template, tmp_path, draw, trials):
    """Odd keys, types and roles, of templates that write them and that do not ("": ours).

    What is empty, the margin 0 and the weight 1 say what is so without them.
    """
    tokenizer = tiny_chats.tokenizer()
    if template:
        tiny_hf.byte_level(tmp_path / "model", chat_template=template)
        tokenizer = coder.load(tmp_path / "model")
    for _ in range(trials(100)):
        plain = json.loads(json.dumps(draw.choice(FORMS)))
        row, value = json.loads(json.dumps(plain)), draw.choice(VALUES)
        messages = row.get("messages") or row.get("conversations")
        if messages and draw.random() < 0.6:
            message = draw.choice(messages)
            key = draw.choice((*MESSAGE_KEYS, "role"))
            value = draw.choice(ROLES) if key == "role" else value
            key = "from" if key == "role" and "from" in message else key
            if message.get(key) == value or (key == "value" and key in message):
                continue
            message[key] = value
            spoken = value in DEFAULTS.get(key, ()) and message.get("role", "") != "user"
        else:
            key, spoken = draw.choice(ROW_KEYS), False
            row[key] = value
        (before, _), (after, told) = outcome(tmp_path, plain, tokenizer), outcome(tmp_path, row, tokenizer)
        same_role = key in ("role", "from") and after == before
        empty = value in (None, "", []) or (key == "margin" and value == 0)
        assert after != before or repr(key)[1:-1] in told or spoken or same_role or empty, (row, told)
