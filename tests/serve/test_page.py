"""The server's page as a browser shows it: an answer streams, is stopped, is text and nothing else; fits a phone."""

import itertools
import json
import os
import pathlib

import pytest
import tiny_eval
import tiny_serve
from chromium import Browser, browser, needs_chromium

from jaxlm.data.chats import chat
from jaxlm.serve import http
from jaxlm.serve.guide import Guides
from jaxlm.serve.requests import Reader

pytestmark = [pytest.mark.browser, needs_chromium]
CONTEXT = 60  # far less than the page's limit of tokens
SAID = "<b>the</b> cat é🙂 " + "sat " * 40


def server(says: str, pause: float = 0.0, chats: bool = True, key: str = ""):
    """(an application whose model says the same to everything, its batcher)."""
    coder = tiny_eval.scorer(chats=chats).tokenizer
    ends = chat.ends(coder)
    reader = Reader(coder, coder.vocab_size, 1024, ends, Guides(coder, coder.vocab_size, ends))
    batcher = tiny_serve.Scripted(lambda ask: [*coder.encode(says), coder.eos_id], pause)
    return http.Server({"tiny": reader}, batcher, key=key).app(), batcher


def say(shown: Browser, words: str) -> None:
    shown.value(f"document.querySelector('#text').value = {json.dumps(words)}; document.querySelector('#send').click()")


def boxes(shown: Browser) -> list[str]:
    return shown.value("[...document.querySelectorAll('#talk > div')].map(box => box.textContent)")


def test_a_talk_on_a_phone(tmp_path):
    pictures = pathlib.Path(os.environ.get("SERVE_PICTURES", tmp_path))
    app, batcher = server(SAID)
    with tiny_serve.running(app) as url, browser(tmp_path / "profile") as shown:
        for width in (390, 1200):
            shown.show(url, width)
            shown.until("document.title == 'tiny'")
            for count in (1, 2):
                say(shown, f"message {count} " + "x" * 200)
                shown.until("document.querySelector('#send').textContent == 'Send'")
            assert [text.strip() for text in boxes(shown)[1::2]] == [SAID.strip()] * 2  # tags are text
            assert shown.value("document.documentElement.scrollWidth <= window.innerWidth")
            assert shown.value("document.querySelector('#talk').scrollWidth <= window.innerWidth")
            shown.picture(pictures / f"serve_{width}.png")
        assert len(batcher.asks[1].ids) > len(batcher.asks[0].ids) + 100  # the second message follows the first
        shown.value("document.querySelector('#new').click()")
        assert boxes(shown) == []
        assert not [text for text in shown.said if not text.startswith("[DOM]")]  # those are hints
        assert {request.split("/")[2] for request in shown.requests if "//" in request} == {url.split("/")[2]}


def test_an_answer_is_stopped_and_its_row_is_free(tmp_path):
    app, batcher = server("sat " * 200, pause=0.05)
    with tiny_serve.running(app) as url, browser(tmp_path / "profile") as shown:
        shown.show(url, 390)
        shown.until("document.title == 'tiny'")
        say(shown, "hello")
        shown.until("document.querySelectorAll('#talk > div')[1]?.textContent.includes('sat sat')")
        shown.value("document.querySelector('#send').click()")
        tiny_serve.until(lambda: not batcher.stats().busy, 2)
        shown.until("document.querySelector('#send').textContent == 'Send'")
        assert boxes(shown)[1].startswith("sat sat")


def test_a_model_without_a_template_continues_and_a_key_is_asked_for(tmp_path):
    app, _ = server("cat sat", chats=False, key="secret")
    with tiny_serve.running(app) as url, browser(tmp_path / "profile") as shown:
        shown.show(url, 390)
        shown.until("document.body.innerText.includes('asks for a key')")
        shown.value("k = document.querySelector('#key'); k.value = 'secret'; k.dispatchEvent(new Event('change'))")
        shown.until("document.querySelector('#send').textContent == 'Continue'")
        assert "no chat template" in boxes(shown)[0]
        say(shown, "the ")
        shown.until("document.querySelector('#talk').lastChild.textContent == 'the cat sat'")


@pytest.mark.parametrize("chats", [True, False])
def test_the_page_asks_for_no_more_than_there_is_room_for(tmp_path, chats):
    coder = tiny_eval.scorer(chats=chats).tokenizer
    ends = (coder.eos_id,)
    reader = Reader(coder, coder.vocab_size, CONTEXT, ends, Guides(coder, coder.vocab_size, ends))
    batcher = tiny_serve.Scripted(lambda ask: itertools.repeat(coder.encode("sun")[0]))
    with tiny_serve.running(http.Server({"tiny": reader}, batcher).app()) as url, browser(tmp_path) as shown:
        shown.show(url, 390)
        shown.until("document.title == 'tiny'")
        shown.value("text.value = 'the cat'; at('ask').requestSubmit()")
        shown.until("!going && document.querySelector('.note:last-child')")
        assert f"room for {CONTEXT} tokens in all" in shown.value("document.body.innerText")
        assert [len(ask.ids) + ask.max_new_tokens for ask in batcher.asks] == [CONTEXT]
        if chats:  # the conversation has filled the context
            shown.value("text.value = 'on'; at('ask').requestSubmit()")
            shown.until("!going && document.querySelector('.bad')")
            assert "begin a new conversation" in shown.value("document.querySelector('.bad').textContent")
            assert len(batcher.asks) == 1
