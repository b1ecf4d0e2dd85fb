"""The page of `jaxlm serve` in a browser."""

import itertools

import pytest
import tiny_eval
import tiny_serve
from chromium import CHROMIUM, browser

from jaxlm.serve import http
from jaxlm.serve.guide import Guides
from jaxlm.serve.requests import Reader

CONTEXT = 60  # far less than the page's limit of tokens


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: apt-get install chromium")
@pytest.mark.parametrize("chats", [True, False])
def test_the_page_asks_for_no_more_than_there_is_room_for(tmp_path, chats):
    coder = tiny_eval.scorer(chats=chats).tokenizer
    ends = (coder.eos_id,)
    reader = Reader(coder, coder.vocab_size, CONTEXT, ends, Guides(coder, coder.vocab_size, ends))
    batcher = tiny_serve.Scripted(lambda ask: itertools.repeat(coder.encode("sun")[0]))
    with tiny_serve.running(http.Server("tiny", batcher, reader).app()) as url, browser(tmp_path) as shown:
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
