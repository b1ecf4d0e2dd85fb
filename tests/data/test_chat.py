"""The chat template: only with all its tokens, with EOS in front once, the answer marked."""

import jinja2
import jinja2.ext
import pytest

from jaxlm.config import CHAT_TOKENS, ConfigError
from jaxlm.data import chat


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


class Generation(jinja2.ext.Extension):
    """What transformers makes of {% generation %}: here, brackets."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller):
        return f"[{caller()}]"


def test_what_the_template_writes():
    def refuse(why):
        raise ValueError(why)

    template = jinja2.Environment(extensions=[Generation]).from_string(chat.TEMPLATE)
    talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi there."}]
    text = template.render(messages=talk, bos_token="</s>", raise_exception=refuse)
    asked = "</s><|im_start|><|user|>\nHello<|im_end|>\n"
    assert text == asked + "<|im_start|><|assistant|>\n[Hi there.<|im_end|>]\n"
    asks = template.render(messages=talk[:1], bos_token="</s>", add_generation_prompt=True, raise_exception=refuse)
    assert asks == asked + "<|im_start|><|assistant|>\n"
    with pytest.raises(ValueError, match="not tool"):
        template.render(messages=[{"role": "tool", "content": ""}], bos_token="</s>", raise_exception=refuse)
