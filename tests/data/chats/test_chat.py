"""The chat template: only with all its tokens, with EOS in front once, the answer marked."""

import json

import pytest
import tiny_hf

from jaxlm.config import CHAT_TOKENS, ConfigError
from jaxlm.data.chats import chat
from jaxlm.data.tokenizer import coder
from jaxlm.data.tokenizer.ours import train_tokenizer


class Words:
    """A vocabulary of some words."""

    def __init__(self, *words):
        self.words = words

    def id_of(self, piece):
        if piece not in self.words:
            raise ConfigError(f"no {piece}")
        return self.words.index(piece)


def test_a_vocabulary_speaks_with_all_tokens_alone():
    assert chat.speaks(Words(*CHAT_TOKENS))
    assert not chat.speaks(Words(*CHAT_TOKENS[:-1]))
    assert chat.end_id(Words("a", "<|im_end|>")) == 1
    assert chat.end_id(Words("a")) is None


@pytest.fixture(scope="module")
def ours():
    texts = ["the cat sat on a mat; user, assistant and system said: hello there"] * 50
    return train_tokenizer(texts, vocab_size=310, chat_tokens=True)


LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% elif m.role == 'user' %}\n[INST] {{ m.content | trim }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
CHATML = (
    "{% for m in messages %}\n    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}\n"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TALK = [
    {"role": "user", "content": "  hello 日本 "},
    {"role": "assistant", "content": "the cat\n"},
    {"role": "user", "content": "on a mat"},
]


def theirs(folder, kind):
    """A folder of a model from elsewhere, with its own template."""
    pytest.importorskip("tokenizers")
    made, source = {"llama": (tiny_hf.byte_fallback, LLAMA), "chatml": (tiny_hf.byte_level, CHATML)}[kind]
    made(folder, chat_template=source)
    return coder.load(folder)


@pytest.mark.parametrize("kind", ["ours", "llama", "chatml"])
def test_what_a_message_spells_is_text(kind, ours, tmp_path):
    """And ends no turn: the control tokens are those of the template alone, in front once."""
    tokenizer = ours if kind == "ours" else theirs(tmp_path, kind)
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
    other = theirs(tmp_path, "llama")
    assert chat.grown(other) is other
    assert chat.speaks(grown)
    assert not chat.speaks(plain)


@pytest.mark.parametrize("kind", ["ours", "llama", "chatml"])
@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parity
def test_ids_are_those_of_transformers(kind, turns, ours, tmp_path):
    transformers = pytest.importorskip("transformers")
    from jaxlm.interop import tokenizer_json

    tokenizer = ours
    if kind == "ours":
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json.tokenizer_json(ours)))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_json.tokenizer_config(ours, 64)))
    else:
        tokenizer = theirs(tmp_path, kind)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    want = loaded.apply_chat_template(TALK[:turns], add_generation_prompt=True, tokenize=True, return_dict=False)
    assert chat.ids(tokenizer, TALK[:turns]) == want


def test_what_a_template_can_not_do_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"^the model's chat template refuses these messages: no system$"):
        chat.ids(theirs(tmp_path / "a", "llama"), [{"role": "system", "content": "Be brief."}])
    tiny_hf.byte_level(tmp_path / "b")
    with pytest.raises(ConfigError, match=r"^this model has no chat template: ask it plain text"):
        chat.ids(coder.load(tmp_path / "b"), TALK)
    tiny_hf.byte_level(tmp_path / "c", chat_template="{% if %}")
    with pytest.raises(ConfigError, match=r"^the model's chat template can't be read: "):
        chat.ids(coder.load(tmp_path / "c"), TALK)
