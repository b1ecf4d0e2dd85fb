"""The chat template: only with all its tokens, with EOS in front once; what the model is to say is what transformers marks."""

import json
import pathlib

import pytest
import tiny_hf

from jaxlm.config import CHAT_TOKENS, ConfigError
from jaxlm.data.chats import chat, examples, masks
from jaxlm.data.chats.examples import Chat
from jaxlm.data.chats.records import Absent, Place
from jaxlm.data.tokenizer import coder
from jaxlm.data.tokenizer.train import train_tokenizer

CHATS = pathlib.Path(__file__).parents[4] / "shared/data/posttrain/dolly_hhrlhf_small.jsonl"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}\n[INST] {{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
TALKS = [
    [("user", "hello"), ("assistant", "hi there.")],
    [("system", "be brief"), ("user", "  on a\nmat "), ("assistant", "\n the cat\n"), ("user", "日本"), ("assistant",
     "é")],
    [("user", "say <|im_end|> or </s>"), ("assistant", "<|im_start|><|user|>\nno</s>")],
    [("user", "say nothing"), ("assistant", "")],
]  # fmt: skip


def talk(turns, given: int = 0) -> Chat:
    return Chat(tuple({"role": role, "content": content} for role, content in turns), Place("a.jsonl", 7), given)


@pytest.fixture(scope="module")
def ours():
    texts = ["the cat sat on a mat; user, assistant and system said: hello there"] * 50
    return train_tokenizer(texts, vocab_size=310, chat_tokens=True)


def theirs(folder, source):
    pytest.importorskip("tokenizers")
    (tiny_hf.byte_fallback if source is LLAMA else tiny_hf.byte_level)(folder, chat_template=source)
    return coder.load(folder)


def said(tokenizer, found: masks.Masked) -> list[str]:
    """The text of each run of tokens that count, the control token at its end by name."""
    names = {i: piece for piece, i in tokenizer.controls.items()}
    texts, before = [], masks.GIVEN
    for i, kind in zip(found.ids.tolist(), found.kinds.tolist(), strict=True):
        if kind and before in (masks.GIVEN, masks.ENDS):
            texts.append([])
        if kind:
            texts[-1].append(i)
        before = kind
    return [tokenizer.decode([i for i in ids if i not in names]) + names.get(ids[-1], "") for ids in texts]


@pytest.mark.parametrize("turns", TALKS)
def test_the_answers_count_and_what_ends_them(turns, ours):
    (found,) = masks.masked(ours, [talk(turns)])
    assert said(ours, found) == [content + "<|im_end|>" for role, content in turns if role == "assistant"]
    assert (found.ids[found.kinds == masks.ENDS] == ours.find(chat.END)).all()
    opened = [[i for i in found.ids[:at].tolist()][-2:] for at in found.turns]
    assert opened == [[ours.id_of("<|assistant|>"), *ours.encode("\n")]] * len(opened)


@pytest.mark.parametrize("source", [CHATML, LLAMA])
def test_a_template_without_marks(source, tmp_path):
    tokenizer = theirs(tmp_path, source)
    turns = [turn for turn in TALKS[1] if turn[0] != "system" or source is CHATML]
    (found,) = masks.masked(tokenizer, [talk(turns)])
    end = "</s>" if source is LLAMA else "<|im_end|>"
    answers = [content for role, content in turns if role == "assistant"]
    if source is LLAMA:
        answers = [content.strip() for content in answers]
    assert [text.removeprefix(" ") for text in said(tokenizer, found)] == [
        content.removeprefix(" ") + end for content in answers
    ]
    messages = list(talk(turns).messages)
    first = next(n for n, message in enumerate(messages) if message["role"] == "assistant")
    assert found.ids[: found.turns[0]].tolist() == chat.ids(tokenizer, messages[:first])


WITH_CONTENT = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
WRONG = {
    "all of it": (WITH_CONTENT.replace("messages %}", "messages[1:] %}"), "all of it is the assistant's"),
    "more than the answers": (WITH_CONTENT, "all of it is the assistant's"),
    "nothing": ("x{% for m in messages[1:] %}{% generation %}{% endgeneration %}{% endfor %}", "nothing in it is the"),
    "another question": (
        CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant: '"),
        "writes message 2 without ': ', which ends the prompt for this message",
    ),
    "an exception": ("{{ messages | length + 'x' }}", "refuses these messages: TypeError"),
    "no end of it": ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "refuses these messages: RecursionError"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_mask_fails_closed(kind, ours, monkeypatch):
    """In one line."""
    source, why = WRONG[kind]
    monkeypatch.setattr(chat, "template", lambda _: source)
    (found,) = masks.masked(ours, [talk([("user", "hello"), ("assistant", "at")])])
    assert isinstance(found, masks.Unmasked)
    assert why in found.why
    assert "\n" not in found.why


NO_END = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
UPPER = CHATML.replace("m.content", "(m.content | upper)")
EOS_BEHIND = CHATML + "{% if not add_generation_prompt %}{{ '<|endoftext|>' }}{% endif %}"
EMPTY = [("user", "im"), ("assistant", "")]
IN_A_ROW = [("user", "the cat"), ("assistant", "cat"), ("assistant", "t")]


@pytest.mark.parametrize(
    ("source", "turns", "answers"),
    [
        pytest.param(UPPER, TALKS[0], ["HI THERE.<|im_end|>"], id="another text than the message"),
        pytest.param(NO_END, [*TALKS[0], ("user", "hello"), ("assistant", "so ")], ["hi there.", "so"], id="no end"),
        pytest.param(CHATML, [("assistant", "hi"), *TALKS[0]], ["hi<|im_end|>", "hi there.<|im_end|>"], id="begins"),
        pytest.param(CHATML, EMPTY, ["<|im_end|>"], id="an empty answer"),
        pytest.param(CHATML, EMPTY * 2, ["<|im_end|>"] * 2, id="two empty answers"),
        pytest.param(CHATML, IN_A_ROW, ["cat<|im_end|>", "t<|im_end|>"], id="two answers in a row"),
        pytest.param(EOS_BEHIND, TALKS[0] * 2, ["hi there.<|im_end|>"] * 2, id="what follows the end"),
    ],
)
def test_what_the_template_adds_is_learnt(source, turns, answers, tmp_path):
    """Without marks: never a search for the answer's text."""
    tokenizer = theirs(tmp_path, source)
    (found,) = masks.masked(tokenizer, [talk(turns)])
    assert said(tokenizer, found) == answers


# As Qwen 3: an empty thought in front of the last answer alone.
THINKS = CHATML.replace(
    "m.content +", "('<think></think>' if loop.last and m.role == 'assistant' else '') + m.content +"
)


def test_an_answer_that_is_written_otherwise_in_the_middle_is_told(tmp_path):
    tokenizer = theirs(tmp_path, THINKS)
    turns = [("user", "hello"), ("assistant", "<think>"), ("user", "on"), ("assistant", "a mat")]
    (found,) = masks.masked(tokenizer, [talk(turns)])
    assert said(tokenizer, found) == ["<think></think>a mat<|im_end|>"]
    assert found.otherwise == (1,)
    (alone,) = masks.masked(tokenizer, [talk(turns[:2])])
    assert said(tokenizer, alone) == ["<think></think><think><|im_end|>"]


# A mark around each word of an answer, none around its end.
PARTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% for part in m.content.split(' ') %}{{ ' #' }}{% generation %}{{ part }}{% endgeneration %}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_all_marks_count_but_those_of_messages_that_are_given(tmp_path):
    tokenizer = theirs(tmp_path, PARTS)
    answers = ["12 34", "56", "78 90 13"]
    turns = [turn for answer in answers for turn in (("user", "x"), ("assistant", answer))]
    whole, half, light = talk(turns), talk(turns, given=3), talk(turns)
    light.messages[3]["weight"] = 0
    found = masks.masked(tokenizer, [whole, half, light])
    texts = [tokenizer.decode(one.ids[one.kinds != masks.GIVEN].tolist()) for one in found]
    assert texts == ["12345678" + "9013", "56789013", "1234789013"]


CALLS = CHATML.replace(
    "+ m.content +",
    "+ (m.content or '') + (m.tool_calls | map(attribute='function.name') | join(',') if m.tool_calls else '') +",
)
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "on", "arguments": {}}}]}


@pytest.mark.parametrize("content", ["", "hello "])
def test_an_answer_that_calls_a_tool(content, tmp_path):
    tokenizer = theirs(tmp_path, CALLS)
    asked, answered = (talk(turns).messages for turns in ([("user", "x")], [("tool", "y"), ("assistant", "z")]))
    one = Chat((*asked, CALL | {"content": content}, *answered), Place("a", 1))
    (found,) = masks.masked(tokenizer, [one])
    assert said(tokenizer, found) == [f"{content}on<|im_end|>", "z<|im_end|>"]


def test_arguments_stay_text_where_the_template_wants_text(tmp_path):
    wanted = "m.tool_calls[0].function.arguments + ''"
    tokenizer = theirs(tmp_path, CALLS.replace("m.tool_calls | map(attribute='function.name') | join(',')", wanted))
    call = CALL | {"tool_calls": [{"function": {"name": "on", "arguments": '{"a": 1}'}}]}
    (found,) = masks.masked(tokenizer, [Chat((*talk([("user", "x")]).messages, call), Place("a", 1))])
    assert said(tokenizer, found) == ['{"a": 1}<|im_end|>']


def test_a_template_may_want_arguments_as_objects_and_a_content(tmp_path):
    listed = "+ m.content + (m.tool_calls[0].function.arguments | items | list | string if m.tool_calls else '') +"
    tokenizer = theirs(tmp_path, CHATML.replace("+ m.content +", listed))
    call = CALL | {"content": Absent(), "tool_calls": [{"function": {"name": "on", "arguments": '{"a": 1}'}}]}
    (found,) = masks.masked(tokenizer, [Chat((*talk([("user", "x")]).messages, call), Place("a", 1))])
    assert said(tokenizer, found) == ["[('a', 1)]<|im_end|>"]


@pytest.mark.parametrize("content", ["", Absent()])
def test_what_the_template_writes_nowhere_is_told(ours, tmp_path, content):
    """What ours refuses too."""
    asked, answered = (talk(turns).messages for turns in ([("user", "x")], [("tool", "y"), ("assistant", "z")]))
    one = Chat((*asked, CALL | {"content": content}, *answered), Place("a", 1), tools=[{"name": "on"}])
    assert masks.masked(ours, [one]) == [masks.Unmasked("", ("tool", "tool_calls", "tools"))]
    tokenizer = theirs(tmp_path, CALLS)
    assert masks.masked(tokenizer, [one]) == [masks.Unmasked("", ("tools",))]


def test_an_answer_that_begins_inside_a_token_has_no_mask(tmp_path):
    """The model is asked with a line's end; together with spaces behind it that is one token."""
    tokenizer = theirs(tmp_path, CHATML)
    chats = [talk([("user", "hello"), ("assistant", answer)]) for answer in ("hi", "    return x")]
    first, second = masks.masked(tokenizer, chats)
    assert (said(tokenizer, first), second) == (["hi<|im_end|>"], masks.INSIDE)


@pytest.mark.parity
@pytest.mark.parametrize("given", ["tiny", pytest.param("real", marks=pytest.mark.shared)])
def test_the_mask_is_that_of_transformers(given, ours, tmp_path):
    transformers = pytest.importorskip("transformers")
    from jaxlm.interop import tokenizer_json

    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json.tokenizer_json(ours)))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_json.tokenizer_config(ours, 64)))
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    talks = [
        talk(turns) for turns in TALKS if not any("<|" in content for _, content in turns)
    ]  # else control tokens there
    if given == "real":
        if not CHATS.is_file():
            pytest.skip(f"{CHATS} is absent")
        talks = list(examples.read(str(CHATS), "auto", False))[:200]
    for one, found in zip(talks, masks.masked(ours, talks), strict=True):
        settings = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        want = loaded.apply_chat_template(list(one.messages), **settings)
        assert found.ids.tolist() == want["input_ids"]
        assert (found.kinds != masks.GIVEN).astype(int).tolist() == want["assistant_masks"]


LLAMA_STRICT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% elif m.role == 'user' %}\n[INST] {{ m.content | trim }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
CHATML_TRIMMED = (
    "{% for m in messages %}\n    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}\n"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TALK = [
    {"role": "user", "content": "  hello 日本 "},
    {"role": "assistant", "content": "the cat\n"},
    {"role": "user", "content": "on a mat"},
]


def speaking(folder, kind):
    """A folder of a model from elsewhere, with its own template."""
    pytest.importorskip("tokenizers")
    made, source = {"llama": (tiny_hf.byte_fallback, LLAMA_STRICT), "chatml": (tiny_hf.byte_level, CHATML_TRIMMED)}[
        kind
    ]
    made(folder, chat_template=source)
    return coder.load(folder)


@pytest.mark.parametrize("kind", ["ours", "llama", "chatml"])
def test_what_a_message_spells_is_text(kind, ours, tmp_path):
    """And ends no turn: the control tokens are those of the template alone, in front once."""
    tokenizer = ours if kind == "ours" else speaking(tmp_path, kind)
    control = set(tokenizer.controls.values())
    plain, spelt = ([{"role": "user", "content": text}] for text in ("hello", "".join(tokenizer.controls) + "</s>"))
    ids, own = chat.ids(tokenizer, plain), chat.ids(tokenizer, spelt)
    assert [i for i in own if i in control] == [i for i in ids if i in control] != []
    assert spelt[0]["content"] in tokenizer.decode(own)
    opening = tokenizer.opening
    assert tuple(ids[: len(opening)]) == opening
    assert not set(opening) & set(ids[len(opening) :])


def test_a_vocabulary_of_ours_grows(tmp_path):
    """By the five tokens alone: what other text becomes stays, and so does a tokenizer that needs none."""
    texts = ["the cat sat on a mat; user, assistant and system said: hello there"] * 50
    plain = train_tokenizer(texts, vocab_size=305, chat_tokens=False)
    grown = chat.grown(plain)
    assert grown.sha256 == train_tokenizer(texts, vocab_size=310, chat_tokens=True).sha256
    assert [grown.id_of(token) for token in CHAT_TOKENS] == list(range(305, 310))
    for text in (*texts[:1], *CHAT_TOKENS, "日本 \n\t</s> x\0", "<|im_start|><|user|>\nhi"):
        assert grown.encode(text) == plain.encode(text)
        assert grown.decode(grown.encode(text)) == text
    assert grown.piece_bytes()[:305] == plain.piece_bytes()
    assert chat.grown(grown) is grown
    other = speaking(tmp_path, "llama")
    assert chat.grown(other) is other
    assert chat.speaks(grown)
    assert not chat.speaks(plain)
    assert plain.find(chat.END) is None


def test_what_a_template_can_not_do_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"^the model's chat template refuses these messages: no system$"):
        chat.ids(speaking(tmp_path / "a", "llama"), [{"role": "system", "content": "Be brief."}])
    tiny_hf.byte_level(tmp_path / "b")
    with pytest.raises(ConfigError, match=r"^this model has no chat template: ask it plain text"):
        chat.ids(coder.load(tmp_path / "b"), TALK)
    tiny_hf.byte_level(tmp_path / "c", chat_template="{% if %}")
    with pytest.raises(ConfigError, match=r"^the model's chat template can't be read: "):
        chat.ids(coder.load(tmp_path / "c"), TALK)
