"""What the model is to say: the same tokens that transformers marks, and nothing at all rather than something wrong."""

import json
import pathlib

import numpy as np
import pytest
import tiny_hf

from jaxlm.config import ConfigError
from jaxlm.data import chat, coder, examples, masks
from jaxlm.data.examples import Chat, Place
from jaxlm.data.tokenizer import train_tokenizer

CHATS = pathlib.Path(__file__).parents[3] / "shared/data/posttrain/dolly_hhrlhf_small.jsonl"
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
    [
        ("system", "be brief"),
        ("user", "  on a\nmat "),
        ("assistant", "\n the cat\n"),
        ("user", "日本"),
        ("assistant", "é"),
    ],
    [("user", "say <|im_end|> or </s>"), ("assistant", "<|im_start|><|user|>\nno</s>")],
    [("user", "say nothing"), ("assistant", "")],
]


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
    (found,) = masks.masked(ours, [talk(turns)], 1)
    assert said(ours, found) == [content + "<|im_end|>" for role, content in turns if role == "assistant"]
    assert (found.ids[found.kinds == masks.ENDS] == chat.end_id(ours)).all()
    opened = [[i for i in found.ids[:at].tolist()][-2:] for at in found.turns]
    assert opened == [[ours.id_of("<|assistant|>"), *ours.encode("\n")]] * len(opened)


def test_the_ids_are_those_that_are_asked_with(ours):
    """Up to an answer: what the model gets when it is sampled."""
    (found,) = masks.masked(ours, [talk(TALKS[1])], 1)
    messages = list(talk(TALKS[1]).messages)
    assert [found.ids[:at].tolist() for at in found.turns] == [chat.ids(ours, messages[:n]) for n in (2, 4)]


@pytest.mark.parametrize("source", [CHATML, LLAMA])
def test_a_template_without_marks(source, tmp_path):
    tokenizer = theirs(tmp_path, source)
    turns = [turn for turn in TALKS[1] if turn[0] != "system" or source is CHATML]
    (found,) = masks.masked(tokenizer, [talk(turns)], 1)
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


def test_what_is_given_does_not_count(ours):
    turns = TALKS[1]
    whole, half = masks.masked(ours, [talk(turns), talk(turns, given=3)], 1)
    assert said(ours, half) == said(ours, whole)[1:]
    np.testing.assert_array_equal(half.ids, whole.ids)


WITH_CONTENT = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
WRONG = {
    "all of it": (WITH_CONTENT.replace("messages %}", "messages[1:] %}"), "all of it is the assistant's"),
    "nothing": ("x{% for m in messages[1:] %}{% generation %}{% endgeneration %}{% endfor %}", "nothing in it is the"),
    "more than the answers": (WITH_CONTENT, "marks 2 answers of 1"),
    "another answer": (CHATML.replace("m.content", "(m.content | upper)"), "writes message 2 in another way"),
    "no end": (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}",
        "ends message 2 by no control",
    ),
    "another question": (
        CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant: '"),
        "writes message 2 in another way",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_mask_fails_closed(kind, ours, monkeypatch):
    """In one line that names the file and the line."""
    source, why = WRONG[kind]
    monkeypatch.setattr(chat, "template", lambda _: source)
    chats = [talk([("user", "hello"), ("assistant", "at")])]
    with pytest.raises(ConfigError) as error:
        masks.masked(ours, chats, 1)
    assert str(error.value).startswith("a.jsonl:7: ")
    assert why in str(error.value)
    assert "\n" not in str(error.value)


def test_an_answer_that_begins_inside_a_token_has_no_mask(tmp_path):
    """The model is asked with a line's end; together with spaces behind it that is one token."""
    tokenizer = theirs(tmp_path, CHATML)
    chats = [talk([("user", "hello"), ("assistant", answer)]) for answer in ("hi", "    return x")]
    first, second = masks.masked(tokenizer, chats, 1)
    assert (said(tokenizer, first), second) == (["hi<|im_end|>"], None)


def test_nobody_answers(ours):
    with pytest.raises(ConfigError, match=r"a\.jsonl:7: nothing in it is the assistant's"):
        masks.masked(ours, [talk(TALKS[0][:1])], 1)


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
    for one, found in zip(talks, masks.masked(ours, talks, 1), strict=True):
        settings = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        want = loaded.apply_chat_template(list(one.messages), **settings)
        assert found.ids.tolist() == want["input_ids"]
        assert (found.kinds != masks.GIVEN).astype(int).tolist() == want["assistant_masks"]
