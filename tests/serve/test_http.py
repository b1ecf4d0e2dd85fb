"""The server as OpenAI's own client sees it, over a batcher whose rows say what the test wants."""

import json
import math
import socket

import httpx
import openai
import pytest
import tiny_eval
import tiny_serve

from jaxlm.data.chats import chat
from jaxlm.data.tokenizer.ids import document
from jaxlm.serve import http
from jaxlm.serve.guide import Guides
from jaxlm.serve.requests import Reader

SAID = "the cat é🙂 sat on a mat"


@pytest.fixture(scope="module")
def coder():
    return tiny_eval.scorer(chats=True).tokenizer


def reader(coder, **changes) -> Reader:
    ends = chat.ends(coder)
    given = {"context": 256, "guides": Guides(coder, coder.vocab_size, ends)} | changes
    return Reader(coder, coder.vocab_size, ends=ends, **given)


def say(coder, text: str = SAID):
    """Rows that say a text and end."""
    return lambda ask: [*coder.encode(text), coder.eos_id]


@pytest.fixture
def batcher(coder):
    return tiny_serve.Scripted(say(coder))


@pytest.fixture
def url(coder, batcher):
    with tiny_serve.running(http.Server({"tiny": reader(coder)}, batcher).app()) as url:
        yield url


@pytest.fixture(scope="module")
def refusing(coder):
    """The address of a server whose model says nothing: what it is asked is refused."""

    def never(ask):
        raise AssertionError("it was asked")

    with tiny_serve.running(http.Server({"tiny": reader(coder)}, tiny_serve.Scripted(never)).app()) as url:
        yield url


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_completion_whole_and_in_pieces(client, batcher, coder):
    asked = {"model": "tiny", "prompt": "on a hill", "max_tokens": 99}
    whole = client.completions.create(**asked)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (SAID, "stop")
    assert batcher.asks[0].ids == tuple(document(coder, "on a hill"))
    read, written = len(document(coder, "on a hill")), len(coder.encode(SAID))
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (read, written)
    pieces = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].text for piece in pieces[:-1]) == SAID
    assert [piece.choices[0].finish_reason for piece in pieces[-3:-1]] == [None, "stop"]
    assert pieces[-1].choices == []
    assert pieces[-1].usage == whole.usage
    assert all(piece.usage is None for piece in pieces[:-1])


def test_an_answer_in_a_chat_whole_and_in_pieces(client, batcher, coder):
    messages = [
        {"role": "system", "content": "be old"},
        {"role": "user", "content": [{"type": "text", "text": "hill?"}]},
    ]
    whole = client.chat.completions.create(model="x", messages=messages)
    assert whole.choices[0].message.content == SAID
    plain = [messages[0], {"role": "user", "content": "hill?"}]
    assert batcher.asks[0].ids == tuple(chat.ids(coder, plain))
    assert batcher.asks[0].max_new_tokens == 256 - len(batcher.asks[0].ids)  # all the room
    pieces = list(client.chat.completions.create(model="x", messages=messages, stream=True))
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == SAID
    assert pieces[-1].choices[0].finish_reason == "stop"


def test_several_prompts_of_every_kind_and_several_answers(client, batcher, coder):
    for prompt in (["on a", "hill"], [coder.encode("on a"), document(coder, "hill")]):
        batcher.asks.clear()
        found = client.completions.create(model="tiny", prompt=prompt, n=2, seed=7)
        assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
        asked = sorted(
            (ask.ids, ask.seed) for ask in batcher.asks
        )  # what stands in front is put there where it is missing
        assert asked == sorted((tuple(document(coder, text)), seed) for text in ("on a", "hill") for seed in (7, 8))
    found = client.completions.create(model="tiny", prompt=coder.encode("hill"))
    assert batcher.asks[-1].ids == tuple(document(coder, "hill"))
    assert found.choices[0].finish_reason == "length"  # 16 tokens


def test_more_answers_than_rows_wait_for_one_another(coder):
    batcher = tiny_serve.Scripted(say(coder, "a mat"), room=2)
    with tiny_serve.running(http.Server({"tiny": reader(coder)}, batcher).app()) as url:
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": ["x"] * 9, "max_tokens": 50}, timeout=30).json()
    assert [choice["text"] for choice in answer["choices"]] == ["a mat"] * 9


@pytest.mark.parametrize(
    ("stop", "before", "stream"), [(" sat", "the cat é🙂", False), (["x", "🙂 s"], "the cat é", True)]
)
def test_a_stop_string_ends_an_answer_and_its_row(client, batcher, coder, stop, before, stream):
    batcher.pause = 0.005
    batcher.say = lambda ask: coder.encode(SAID) * 5
    found = client.completions.create(model="tiny", prompt="x", max_tokens=100, stop=stop, stream=stream)
    choices = [piece.choices[0] for piece in found] if stream else found.choices
    assert "".join(choice.text for choice in choices) == before
    assert choices[-1].finish_reason == "stop"
    tiny_serve.until(lambda: not batcher.stats().busy, 1)


def test_log_probabilities_in_the_form_of_completions(client, batcher, coder):
    asked = {"model": "tiny", "prompt": "on é", "echo": True, "logprobs": 2}
    for tokens in (0, 1, 9):
        choice = client.completions.create(**asked, max_tokens=tokens).choices[0]
        ids = [*coder.encode("on é"), *coder.encode(SAID)[:tokens]]
        found = choice.logprobs
        assert len(found.tokens) == len(found.text_offset) == len(found.top_logprobs) == len(ids)
        assert found.token_logprobs == [None, *(-i / 100 for i in ids[1:])]
        assert found.top_logprobs[0] is None
        assert all(
            max(top.values()) == logp
            for top, logp in zip(found.top_logprobs[1:], found.token_logprobs[1:], strict=True)
        )
        assert found.tokens[-tokens - 2 :][:2] == ["bytes:\\xc3", "bytes:\\xa9"]
        if tokens < 9:  # no half character at the end
            text, places = choice.text, [*found.text_offset, len(choice.text)]
            for name, at, end in zip(found.tokens, places, places[1:], strict=False):
                assert name.startswith("bytes:") or text[at:end] == name


def test_log_probabilities_end_where_the_text_does(client, coder):
    found = client.completions.create(model="tiny", prompt="x", max_tokens=99, stop=" sat", logprobs=0).choices[0]
    assert "".join(name for name in found.logprobs.tokens if "bytes" not in name) == "the cat "
    pieces = list(
        client.completions.create(model="tiny", prompt="x", max_tokens=99, stop=" sat", logprobs=0, stream=True)
    )
    assert [name for piece in pieces for name in piece.choices[0].logprobs.tokens] == found.logprobs.tokens


def test_log_probabilities_in_the_form_of_chats(client, coder):
    messages = [{"role": "user", "content": "x"}]
    found = client.chat.completions.create(model="x", messages=messages, logprobs=True, top_logprobs=2, max_tokens=3)
    assert found.choices[0].finish_reason == "length"
    content = found.choices[0].logprobs.content
    assert b"".join(bytes(one.bytes) for one in content).decode() == found.choices[0].message.content
    assert [one.logprob for one in content] == [-i / 100 for i in coder.encode(SAID)[:3]]
    assert all(len(one.top_logprobs) == 2 for one in content)


def test_settings_reach_the_batcher(client, batcher, coder):
    client.completions.create(
        **{"model": "tiny", "prompt": "x", "temperature": 0.5, "top_p": 0.9, "seed": 3, "logit_bias": {"5": -100}},
        **{"user": "me", "presence_penalty": 0.5, "frequency_penalty": -2},
        extra_body={"top_k": 4, "stop_token_ids": [9], "min_p": 0.1, "repetition_penalty": 1.2},
    )
    ask = batcher.asks[0]
    assert ask.stop_ids == (*chat.ends(coder), 9)
    assert (ask.temperature, ask.top_p, ask.top_k, ask.seed, ask.bias) == (0.5, 0.9, 4, 3, {5: -100.0})
    assert (ask.min_p, ask.penalties) == (0.1, (0.5, -2.0, 1.2))
    assert (ask.max_new_tokens, ask.logprobs) == (16, None)


FINE = {"prompt": "x"}
TALK = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("completions", FINE | {"temprature": 1}, "temprature", "unknown key 'temprature'; did you mean temperature?"),
        ("completions", {}, "prompt", "missing"),
        ("completions", {"prompt": 3}, "prompt", "must be a string"),
        ("completions", {"prompt": []}, "prompt", "must be a string"),
        ("completions", {"prompt": ["a", 3]}, "prompt", "must be a string"),
        ("completions", {"prompt": [999_999]}, "prompt", "no id"),
        ("completions", FINE | {"max_tokens": -1}, "max_tokens", "at least 0"),
        ("completions", FINE | {"max_tokens": "9"}, "max_tokens", "a whole number, not '9'"),
        ("completions", FINE | {"temperature": math.nan}, "temperature", "at least 0 and at most 2"),
        ("completions", FINE | {"n": 0}, "n", "at least 1"),
        ("completions", FINE | {"n": 9999}, "n", "at most 256"),
        ("completions", FINE | {"stop": [""]}, "stop", "empty"),
        ("completions", FINE | {"stop": 5}, "stop", "a string or a list"),
        ("completions", FINE | {"stream": "yes"}, "stream", "true or false"),
        ("completions", FINE | {"logprobs": 21}, "logprobs", "at most 20"),
        ("completions", FINE | {"logprobs": True}, "logprobs", "a whole number"),
        ("completions", FINE | {"logit_bias": {"x": 1}}, "logit_bias", "no id"),
        ("completions", FINE | {"temperature": 10**400}, "temperature", "at most 2"),
        ("completions", FINE | {"logit_bias": {"3" * 5000: 1}}, "logit_bias", "no id"),
        ("completions", FINE | {"logit_bias": {"3": 101}}, "logit_bias", "from -100 to 100"),
        ("completions", FINE | {"stop_token_ids": [-1]}, "stop_token_ids", "no id"),
        ("completions", FINE | {"presence_penalty": 3}, "presence_penalty", "at least -2 and at most 2"),
        ("completions", FINE | {"repetition_penalty": 0}, "repetition_penalty", "at least 0.01"),
        ("completions", FINE | {"min_p": 2}, "min_p", "at least 0 and at most 1"),
        ("completions", FINE | {"best_of": 3}, "best_of", "not supported"),
        ("completions", FINE | {"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ("chat/completions", {}, "messages", "at least one"),
        ("completions", {"promt": "x"}, "prompt", "prompt is missing: the text to continue; 'promt' is no key"),
        ("chat/completions", {"messages": [3]}, "messages[0]", "role and content"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0]", "must be a string"),
        ("chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, "messages", "refuses"),
        ("chat/completions", TALK | {"tools": [{"type": "function"}]}, "tools[0]", "must be"),
        ("chat/completions", TALK | {"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ("chat/completions", TALK | {"max_tokens": 0}, "max_tokens", "at least 1"),
        ("chat/completions", TALK | {"prompt": "x"}, "prompt", "unknown key"),
    ],
)  # fmt: skip
def test_a_bad_request_is_told_what_is_wrong(refusing, path, body, param, says):
    answer = httpx.post(f"{refusing}/v1/{path}", content=json.dumps(body))
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert says in error["message"]


def test_what_is_too_long_is_refused_with_the_numbers_and_never_cut(url, batcher, coder):
    for body, numbers in (
        ({"prompt": [7] * 300}, "300 tokens|301 tokens"),
        ({"prompt": [7] * 200, "max_tokens": 100}, "201 and 100|301 in all|256"),
    ):
        answer = httpx.post(f"{url}/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert any(number in answer.json()["error"]["message"] for number in numbers.split("|"))
    assert not batcher.asks
    httpx.post(f"{url}/v1/completions", json={"prompt": [7] * 250})  # no max_tokens: what there is room for
    assert batcher.asks[0].max_new_tokens == 256 - 251


LARGE = "the cat sat on a mat. " * 150_000
ENUM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [f"value {n}" for n in range(100_000)]}}}
UNREAD = {
    "prompt": ("v1/completions", {"prompt": LARGE}, "more than the 256 tokens"),
    "prompts": ("v1/completions", {"prompt": ["x"] * 500_000}, "at most 256"),
    "messages": ("v1/chat/completions", {"messages": [{"role": "user", "content": LARGE}]}, "more than the 256 tokens"),
    "turns": (
        "v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}] * 1000},
        "more than the 256 tokens",
    ),
    "tokenize": ("tokenize", {"prompt": LARGE}, "more than the 256 tokens"),
    "detokenize": ("detokenize", {"tokens": [7] * 500_000}, "at most 256"),
    "schema": ("v1/completions", {"prompt": [7], "response_format": ENUM}, "at most 65,536 are read"),
}


@pytest.mark.parametrize(("path", "body", "says"), UNREAD.values(), ids=UNREAD)
def test_what_is_far_too_large_never_reaches_the_tokenizer(refusing, coder, monkeypatch, path, body, says):
    def encode(*args):
        raise AssertionError("it was tokenised")

    for name in ("encode", "decode"):
        monkeypatch.setattr(type(coder), name, encode)
    answer = httpx.post(f"{refusing}/{path}", json=body, timeout=60)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


HALF = [b'{"prompt": "\\ud800"}', b'{"prompt": "x", "\\ud800": 1}', b'{"prompt": "x", "n": ' + b"1" * 5000 + b"}"]


@pytest.mark.parametrize("raw", [b"{", b"[1]", b"\xff", b"", b"[" * 100_000, *HALF])
def test_a_body_that_is_no_object_of_json(refusing, raw):
    answer = httpx.post(f"{refusing}/v1/completions", content=raw)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


def test_a_large_body_is_refused_before_it_is_read(refusing):
    url = refusing
    answer = httpx.post(f"{url}/v1/completions", content=b"x" * 10_000_000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    answer = httpx.post(f"{url}/v1/completions", content=(b"x" * 100_000 for _ in range(100)))  # its length is not said
    assert answer.status_code == 413
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 5) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n")
        assert raw.recv(1000).startswith(b"HTTP/1.1 413")


def test_unknown_paths_and_methods(refusing):
    url = refusing
    for method, path, status in (("GET", "/v2", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405)):
        answer = httpx.request(method, url + path)
        assert answer.status_code == status
        assert path in answer.json()["error"]["message"]
    assert httpx.get(f"{url}/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_a_full_server_says_when_to_come_again(coder):
    batcher = tiny_serve.Scripted(say(coder), room=0)
    with tiny_serve.running(http.Server({"tiny": reader(coder)}, batcher).app()) as url:
        for stream in (False, True):
            answer = httpx.post(f"{url}/v1/completions", json=FINE | {"stream": stream})
            assert (answer.status_code, answer.headers["Retry-After"]) == (429, "7")
            assert answer.json()["error"]["type"] == "rate_limit_error"


def test_a_request_ends_in_time(coder):
    batcher = tiny_serve.Scripted(lambda ask: [7] * 200, pause=0.05)
    server = http.Server({"tiny": reader(coder)}, batcher, http.Limits(seconds=0.3))
    with tiny_serve.running(server.app()) as url:
        answer = httpx.post(f"{url}/v1/completions", json=FINE | {"max_tokens": 100})
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timeout")
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(model="tiny", prompt="x", max_tokens=100, stream=True)
            with pytest.raises(openai.APIError, match=r"longer than 0\.3 s"):
                list(stream)
        tiny_serve.until(lambda: not batcher.stats().busy, 1)


def test_what_nobody_foresaw_is_said_and_counted(coder, batcher, capfd):
    class Broken(Reader):
        def completion(self, body):
            raise ZeroDivisionError("no such luck")

    ends = chat.ends(coder)
    broken = Broken(coder, coder.vocab_size, context=256, ends=ends, guides=Guides(coder, coder.vocab_size, ends))
    with tiny_serve.running(http.Server({"tiny": broken}, batcher).app()) as url:
        answer = httpx.post(f"{url}/v1/completions", json=FINE)
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        assert "ZeroDivisionError: no such luck" in answer.json()["error"]["message"]
        assert 'route="/v1/completions",status="500"} 1' in httpx.get(f"{url}/metrics").text
    assert "Traceback" in (said := capfd.readouterr().err)
    assert said.endswith("ZeroDivisionError: no such luck\n")


def test_a_server_whose_model_ended_is_not_healthy(coder, batcher):
    with tiny_serve.running(http.Server({"tiny": reader(coder)}, batcher).app()) as url:
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        batcher.down = "MemoryError: no room"
        answer = httpx.get(f"{url}/health")
        assert (answer.status_code, answer.json()["why"]) == (503, "MemoryError: no room")


def test_a_row_that_fails_is_an_error_of_the_server(coder):
    def fail(ask):
        raise ValueError

    class Failing(tiny_serve.Scripted):
        def submit(self, ask, tell):
            tell(tiny_serve.Update((), ended="failed", why="the logits are not finite"))
            return tiny_serve.Row(self, ask, tell)

    with tiny_serve.running(http.Server({"tiny": reader(coder)}, Failing(fail)).app()) as url:
        answer = httpx.post(f"{url}/v1/completions", json=FINE)
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        with httpx.stream("POST", f"{url}/v1/completions", json=FINE | {"stream": True}) as stream:
            lines = [line for line in stream.iter_lines() if line]
    assert "not finite" in lines[0]
    assert lines[-1] == "data: [DONE]"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_row(coder, stream):
    batcher = tiny_serve.Scripted(lambda ask: [7] * 200, pause=0.05)
    with tiny_serve.running(http.Server({"tiny": reader(coder)}, batcher).app()) as url:
        host, port = url.removeprefix("http://").split(":")
        body = json.dumps(FINE | {"max_tokens": 200, "stream": stream, "n": 3}).encode()
        with socket.create_connection((host, int(port)), 5) as raw:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            raw.sendall(head.encode() + body)
            tiny_serve.until(lambda: batcher.stats().busy == 3, 2)
            if stream:
                assert b"200 OK" in raw.recv(100)
        tiny_serve.until(lambda: not batcher.stats().busy, 1)


def test_a_key_is_asked_for(coder, batcher):
    with tiny_serve.running(http.Server({"tiny": reader(coder)}, batcher, key="sésame").app()) as url:
        for header in ({}, {"Authorization": "Bearer sesame"}, {"Authorization": "sésame".encode()}):
            answer = httpx.post(f"{url}/v1/completions", json=FINE, headers=header)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert httpx.get(f"{url}/metrics").status_code == 401
        assert httpx.get(f"{url}/health").status_code == httpx.get(url).status_code == 200
        right = {"Authorization": "Bearer sésame".encode()}
        assert httpx.post(f"{url}/v1/completions", json=FINE, headers=right).status_code == 200


def test_a_model_without_a_template_says_what_to_do():
    coder = tiny_eval.scorer().tokenizer
    with tiny_serve.running(http.Server({"tiny": reader(coder)}, tiny_serve.Scripted(say(coder))).app()) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json=TALK)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_chat_template")
        assert "/v1/completions" in answer.json()["error"]["message"]
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["chat_template"] is False


def test_texts_and_ids(url, coder):
    def post(path, **body):
        return httpx.post(f"{url}/{path}", json=body).json()

    assert post("tokenize", prompt="on é </s>")["tokens"] == document(coder, "on é </s>")
    assert post("tokenize", prompt="on é", add_special_tokens=False)["tokens"] == coder.encode("on é")
    assert post("tokenize", prompt="</s>", add_special_tokens=False)["tokens"] == [coder.eos_id]
    assert post("tokenize", messages=TALK["messages"])["tokens"] == chat.ids(coder, TALK["messages"])
    assert post("detokenize", tokens=document(coder, "on é"))["prompt"] == "on é"
    assert post("detokenize", tokens=["x"])["error"]["param"] == "tokens"
    assert httpx.get(f"{url}/tokenizer_info").json()["eos_token"] == "</s>"


def test_models_and_metrics(url, client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    client.completions.create(model="tiny", prompt="x", n=2)
    httpx.post(f"{url}/v1/completions", json={})
    answer = httpx.get(f"{url}/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    assert 'jaxlm_requests_total{route="/v1/completions",status="200"} 1' in lines
    assert 'jaxlm_requests_total{route="/v1/completions",status="400"} 1' in lines
    assert "jaxlm_time_to_first_token_seconds_count 2" in lines
    assert "jaxlm_rows 8" in lines


def test_no_other_page_may_read_answers(url, coder, batcher):
    answer = httpx.get(f"{url}/v1/models", headers={"Origin": "https://example.org"})
    assert "access-control-allow-origin" not in answer.headers
    server = http.Server({"tiny": reader(coder)}, batcher, http.Limits(here=True))
    with tiny_serve.running(server.app()) as url:
        for host in ("localhost:80", "LOCALHOST", "127.0.0.1:8000", "127.0.0.2", "[::1]:8000", "[::1]"):
            assert httpx.get(f"{url}/v1/models", headers={"Host": host}).status_code == 200, host
        for host in ("example.org", "localhost.example.org:8000", "127.0.0.1.example.org", "x@localhost"):
            answer = httpx.get(f"{url}/v1/models", headers={"Host": host})
            assert answer.status_code == 403, host
            assert "--api-key" in answer.json()["error"]["message"]
