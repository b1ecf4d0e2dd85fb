"""Calls of tools: in the model's own template, held to the tools' schemas, as OpenAI's client sees them."""

import contextlib
import json
import pathlib
import random
import re

import httpx
import jsonschema
import numpy as np
import openai
import pytest
import tiny_hf
import tiny_serve
import tiny_tools
from tiny_tools import TOOLS

from jaxlm.data.chats import chat
from jaxlm.serve import http, tools
from jaxlm.serve.body import Fields, Refused
from jaxlm.serve.guide import Guides
from jaxlm.serve.requests import Reader

pytest.importorskip("tokenizers")
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
TALK = [{"role": "user", "content": "Hm?"}]
ONE = {"type": "function", "function": {"name": "add"}}
MARKED = ("<tool_call>", "</tool_call>", "<think>")


@pytest.fixture(scope="module", params=[(), MARKED], ids=["text", "control tokens"])
def coder(request, tmp_path_factory):
    return tiny_tools.tokenizer(tmp_path_factory.mktemp("coder"), controls=request.param)


def reader(coder) -> Reader:
    ends = chat.ends(coder)
    return Reader(coder, coder.vocab_size, 2000, ends, Guides(coder, coder.vocab_size, ends))


@pytest.fixture
def batcher(coder):
    return tiny_serve.Scripted(lambda ask: [])


@pytest.fixture
def client(coder, batcher):
    with (
        tiny_serve.running(http.Server({"tiny": reader(coder)}, batcher).app()) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_the_form_is_the_templates(coder, tmp_path):
    middle, end = '", "arguments": ', "}\n</tool_call>"
    begin = '<tool_call>\n{"name": "'
    assert tools.form_of(coder) == (begin, middle, f"{end}\n{begin}", end)
    llama = tiny_tools.tokenizer(tmp_path / "llama", tiny_tools.LLAMA)
    assert tools.form_of(llama) == ('{"name": "', '", "parameters": ', "", "}")
    thinking = tiny_tools.TEMPLATE.replace(
        "(m.content or '')", "('<think>\\n\\n</think>\\n\\n' if m.tool_calls else m.content)"
    )
    assert tools.form_of(tiny_tools.tokenizer(tmp_path / "thinking", thinking)).begin == begin


@pytest.mark.parity
def test_every_template_of_trl_has_a_form_or_says_that_it_has_none(tmp_path):
    trl = pytest.importorskip("trl")
    read = set()
    for path in pathlib.Path(trl.__file__).parent.glob("chat_templates/*.jinja"):
        source = path.read_text()
        controls = {*re.findall(r"<\|[a-z_]+\|>", source)} - {*tiny_hf.CHATML}
        coder = tiny_tools.tokenizer(tmp_path / path.stem, source, tuple(sorted(controls)))
        with contextlib.suppress(Refused):
            assert "<|im_end|>" not in tools.form_of(coder).end
            read.add(path.stem)
    assert {"qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3_1", "llama3_2"} <= read


def spelled(coder, ids) -> str:
    """The text of ids, control tokens too."""
    pieces, named = coder.piece_bytes(), {i: piece.encode() for piece, i in coder.controls.items()}
    return b"".join(named.get(i, pieces[i]) for i in ids).decode()


def walk(guide, coder, seed: int, upto: int = 300) -> list[int]:
    """Ids drawn by chance among those that a guide allows; an end where it may."""
    rng, ids, ends = random.Random(seed), [], chat.ends(coder)
    while len(ids) < upto:
        allowed = np.flatnonzero(np.unpackbits(guide.mask().view(np.uint8), bitorder="little")).tolist()
        ids.append(
            next((end for end in ends if end in allowed), None) if ids and {*ends} & {*allowed} else rng.choice(allowed)
        )
        guide.accept(ids[-1])
        if ids[-1] in ends:
            return ids[:-1]
    raise AssertionError("it has no end")


def parsed(coder, form, ids: list[int], seed: int) -> tuple[str, list[dict]]:
    """The text and whole calls of ids that come in pieces of chance."""
    rng, calls = random.Random(seed), tools.Calls(form)
    text = spelled(coder, ids)
    said, deltas = "", []
    while text:
        size = rng.randint(1, 9)
        new, more = calls.feed(text[:size], size >= len(text))
        text, said, deltas = text[size:], said + new, deltas + more
    return said, tools.joined(deltas)


@pytest.mark.parametrize("choice", ["required", ONE, "auto"])
def test_a_walk_calls_tools_by_their_schemas(coder, choice):
    offered, ends = tools.Tools(Fields({"tools": TOOLS, "tool_choice": choice}), coder), chat.ends(coder)
    make = Guides(coder, coder.vocab_size, ends).of_grammar(offered.grammar(ends, None), "tools")
    names = set()
    for seed in range(12):
        guide, before = make(), []
        if choice == "auto":  # text, then what opens a call
            marked = coder.controls.get("<tool_call>")
            before = [*coder.encode("Well <tool"), *coder.encode(".\n")]
            before += [marked] if marked else coder.encode("<tool_call>")
            for token in before:
                guide.accept(token)
        text, calls = parsed(coder, offered.form, before + walk(guide, coder, seed), seed)
        assert text == ("Well <tool.\n" if before else "")
        for call in calls:
            names.add(call["function"]["name"])
            schema = tiny_tools.arguments_of(TOOLS, call["function"]["name"])
            jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
        assert calls
    assert names == ({"add"} if choice == ONE else {"add", "weather"})


def test_free_text_may_have_no_call_or_be_a_schemas(coder):
    ends = chat.ends(coder)
    guides, offered = Guides(coder, coder.vocab_size, ends), tools.Tools(Fields({"tools": TOOLS}), coder)
    guide = guides.of_grammar(offered.grammar(ends, None), "tools")()
    for token in [*coder.encode('No {"name": "call"} é🙂</tool_call>'), ends[0]]:
        guide.accept(token)
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    make = guides.of_grammar(offered.grammar(ends, schema), "tools")
    for text in ('{"x": 3}', CALL % ("add", '{"a": 1, "b": 2}')):
        guide = make()
        for token in [*chat.conversation(coder, text), ends[0]]:
            guide.accept(token)
    with pytest.raises(ValueError, match="refuses a token"):
        [make().accept(token) for token in coder.encode("No")]


def say(coder, text: str):
    return lambda ask: [*chat.conversation(coder, text), ask.stop_ids[0]]


def streamed(client, **body):
    """(content, calls, finish_reason) of a stream, put together as OpenAI's clients do."""
    content, calls, ended = "", {}, None
    for piece in client.chat.completions.create(model="x", stream=True, **body):
        choice = piece.choices[0]
        content, ended = content + (choice.delta.content or ""), choice.finish_reason or ended
        for delta in choice.delta.tool_calls or ():
            if delta.id:
                assert (delta.type, delta.function.arguments, delta.index) == ("function", "", len(calls))
                calls[delta.index] = [delta.function.name, ""]
            calls[delta.index][1] += delta.function.arguments
    return content, [tuple(call) for call in calls.values()], ended


@pytest.mark.parametrize("before", ["", "Let me see <tool.\n"])
def test_calls_whole_and_streamed(client, batcher, coder, before):
    args = ['{"city": "a \\"b\\\\ } é"}', '{"a": 1, "b": 2}']
    calls = [CALL % ("weather", args[0]), CALL % ("add", args[1])]
    batcher.say = say(coder, before + "\n".join(calls))
    body = {"messages": TALK, "tools": TOOLS}
    whole = client.chat.completions.create(model="x", **body).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", before or None)
    expected = [("weather", args[0]), ("add", args[1])]
    assert [(call.function.name, call.function.arguments) for call in whole.message.tool_calls] == expected
    assert len({call.id for call in whole.message.tool_calls}) == 2
    assert streamed(client, **body) == (before, expected, "tool_calls")
    assert batcher.asks[0].ids == tuple(chat.ids(coder, TALK, tools=TOOLS))
    cut = client.chat.completions.create(model="x", **body, max_tokens=len(coder.encode(before)) + 30).choices[0]
    assert cut.finish_reason == "length"
    with client.chat.completions.stream(model="x", **body) as stream:  # the client's own accumulation
        final = stream.get_final_completion().choices[0].message
    assert [(call.function.name, call.function.arguments) for call in final.tool_calls] == expected


def test_the_conversation_goes_on_after_a_call(client, batcher, coder):
    batcher.say = say(coder, CALL % ("add", '{"a": 1, "b": 2}'))
    message = client.chat.completions.create(model="x", messages=TALK, tools=TOOLS).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
    batcher.say = say(coder, "It is 3.")
    answer = client.chat.completions.create(model="x", messages=[*TALK, message, result], tools=TOOLS).choices[0]
    assert (answer.finish_reason, answer.message.content, answer.message.tool_calls) == ("stop", "It is 3.", None)
    said = CALL % ("add", '{"a": 1, "b": 2}')
    assert said in spelled(coder, batcher.asks[-1].ids)


def test_none_offers_no_tools(client, batcher, coder):
    batcher.say = say(coder, "No.")
    body = {"messages": TALK, "tools": TOOLS, "tool_choice": "none"}
    assert client.chat.completions.create(model="x", **body).choices[0].message.content == "No."
    assert batcher.asks[0].ids == tuple(chat.ids(coder, TALK))
    assert batcher.asks[0].guide is None


OTHER = {"type": "function", "function": {"name": "sub"}}
LIST = {"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}
WRONG = tiny_tools.tool("wrong", x={"type": "animal"})


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"tools": [*TOOLS, WRONG]}, "tools: wrong", "can't be followed"),
        ({"tools": TOOLS, "tool_choice": OTHER}, "tool_choice", "'sub', which is none of tools: weather, add"),
        ({"tool_choice": "required"}, "tool_choice", "need tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "not 'any'"),
        ({"tools": "x"}, "tools", "a list"),
        ({"tools": [{"type": "code"}]}, "tools[0]", '"function"'),
        ({"tools": [tiny_tools.tool("a b")]}, "tools[0]", "letters, digits"),
        ({"tools": [tiny_tools.tool("a")] * 2}, "tools", "a name of its own"),
        ({"tools": [LIST]}, "tools[0]", 'of "type": "object"'),
        ({"functions": [{}]}, "functions", "calls of tools"),
    ],
)
def test_what_is_wrong_is_refused(client, body, param, says):
    answer = httpx.post(f"{client.base_url}chat/completions", json={"messages": TALK} | body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert says in error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize("call", [{"id": "x"}, {"function": {"name": "add", "arguments": {"a": 1}}}])
def test_a_message_with_no_sound_call_is_refused(client, call):
    messages = [*TALK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    answer = httpx.post(f"{client.base_url}chat/completions", json={"messages": messages})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[1]")


FORMS = {
    "no tools": "{{ '<|im_start|>' + messages[-1].content }}",
    "no JSON": tiny_tools.TEMPLATE.replace("| tojson", "| length"),
}


@pytest.mark.parametrize("template", FORMS.values(), ids=FORMS)
def test_a_template_without_tools_is_refused(template, tmp_path):
    coder = tiny_tools.tokenizer(tmp_path, template)
    with tiny_serve.running(http.Server({"tiny": reader(coder)}, tiny_serve.Scripted(say(coder, "x"))).app()) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": TALK, "tools": TOOLS})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_tools"), answer.text
        assert httpx.post(f"{url}/v1/chat/completions", json={"messages": TALK}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_row(coder, stream):
    text = "x" * 200 + CALL % ("add", '{"a": 1, "b": 2}')
    batcher = tiny_serve.Scripted(say(coder, text), pause=0.05)
    body = {"messages": TALK, "tools": TOOLS, "frequency_penalty": 1, "stream": stream}
    with tiny_serve.running(http.Server({"tiny": reader(coder)}, batcher).app()) as url:
        with (
            contextlib.suppress(httpx.ReadTimeout),
            httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=0.5) as answer,
        ):
            assert next(answer.iter_lines()).startswith("data: ")
        assert batcher.asks
        tiny_serve.until(lambda: not batcher.stats().busy, 1)
