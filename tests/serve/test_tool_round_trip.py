"""A tiny model from elsewhere learns two tools from made chats, and calls the right one over HTTP, by OpenAI's client."""

import concurrent.futures
import json
import random

import jax
import jsonschema
import openai
import pytest
import tiny_hf
import tiny_serve
import tiny_tools
from tiny_tools import ADD, TOOLS, WEATHER

from jaxlm.cli import cli
from jaxlm.config import resolve
from jaxlm.data.chats import chat
from jaxlm.eval import model
from jaxlm.interop import inherit
from jaxlm.serve import http
from jaxlm.serve.batcher import Batcher
from jaxlm.serve.guide import Guides
from jaxlm.serve.requests import Reader

pytestmark = pytest.mark.recipe
CITIES = [
    a + b
    for a in ("Ber", "Lis", "Par", "Os", "Ro", "Wie", "Tal", "Vil")
    for b in ("lin", "bon", "lo", "na", "nus", "tu")
]
SMALL = [
    *("train.steps=200", "train.batch_size=8", "train.seq_len=256", "train.eval_every_steps=200", "eval.max_examples=8"),
    *("sample.prompts=()", "runs.supervise=off", "log.tensorboard=False", "data.val_fraction=0.05", "replay.share=0"),
    *("model.dtype=float32", "optim.lr=3e-3"),
]  # fmt: skip


def question(rng: random.Random) -> tuple[str, str, dict]:
    """(a question, the tool that answers it, its arguments)"""
    if rng.random() < 0.5:
        city = rng.choice(CITIES)
        return (
            rng.choice(["how warm is it in {}?", "does it rain in {} now?", "is {} sunny?"]).format(city),
            "weather",
            {"city": city},
        )
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    return (
        rng.choice(["what is {} and {}?", "add {} to {}.", "give me {} plus {}."]).format(a, b),
        "add",
        {"a": a, "b": b},
    )


@pytest.fixture(scope="module")
def asked():
    rng = random.Random(0)
    every = {text: (name, arguments) for text, name, arguments in (question(rng) for _ in range(400))}
    assert len(every) >= 250
    return list(every.items())[:250]


@pytest.fixture(scope="module")
def run(asked, tmp_path_factory):
    """A run of SFT from a folder of Hugging Face on 200 chats."""
    folder = tmp_path_factory.mktemp("tools")
    with (folder / "chats.jsonl").open("w") as file:
        for text, (name, arguments) in asked[:200]:
            call = {
                "id": "call00001",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            said = {"role": "assistant", "content": "", "tool_calls": [call]}
            file.write(json.dumps({"messages": [{"role": "user", "content": text}, said], "tools": TOOLS}) + "\n")
    texts = [*tiny_hf.TEXTS, (folder / "chats.jsonl").read_text(), *map(json.dumps, TOOLS * 9)]
    tokenizer = tiny_tools.tokenizer(folder / "base", vocab_size=700, texts=texts)
    sizes = {"vocab_size": tokenizer.vocab_size, "d_model": 64, "d_ff": 128, "max_seq_len": 512}
    tiny_hf.weights(folder / "base", tie_embeddings=False, **sizes)
    keys = [*SMALL, f"origin={folder / 'base'}", f"data.path={folder / 'chats.jsonl'}", f"workdir={folder / 'run'}"]
    assert cli.main(["train", "sft", *(f"--config.{key}" for key in keys)]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def client(run):
    restored = model.restore(resolve(inherit.of_folder(str(run), [])), "latest")
    tokenizer, size, ends = restored.tokenizer, restored.model.config.vocab_size, chat.ends(restored.tokenizer)
    reader = Reader(tokenizer, size, restored.model.config.max_seq_len, ends, Guides(tokenizer, size, ends))
    with jax.set_mesh(restored.mesh):
        batcher = Batcher(restored.model, restored.variables, rows=8)
    with (
        tiny_serve.running(http.Server({"tiny": reader}, batcher).app()) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client
    batcher.close()


def test_the_right_tool_is_called(client, asked):
    body = {"model": "tiny", "tools": TOOLS, "temperature": 0, "max_tokens": 60}

    def called(one: tuple) -> tuple[bool, bool]:
        """(the right tool, the right arguments too), of an answer that OpenAI's client has streamed."""
        text, (name, arguments) = one
        with client.chat.completions.stream(messages=[{"role": "user", "content": text}], **body) as stream:
            choice = stream.get_final_completion().choices[0]
        if choice.finish_reason != "tool_calls":
            return False, False
        function = choice.message.tool_calls[0].function
        jsonschema.validate(got := json.loads(function.arguments), tiny_tools.arguments_of(TOOLS, function.name))
        return function.name == name, (function.name, got) == (name, arguments)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        right, exact = zip(*pool.map(called, asked[200:]), strict=True)
    print(f"{sum(right)} of {len(right)} right, {sum(exact)} with the right arguments")
    assert len(right) == 50
    assert sum(right) >= 45


def test_the_answer_to_a_call_is_read(client, asked):
    body = {"model": "tiny", "tools": TOOLS, "temperature": 0, "max_tokens": 60, "tool_choice": "required"}
    messages = [{"role": "user", "content": asked[200][0]}]
    message = client.chat.completions.create(messages=messages, **body).choices[0].message
    messages += [message, *({"role": "tool", "tool_call_id": c.id, "content": "7"} for c in message.tool_calls)]
    assert (
        client.chat.completions.create(messages=messages, **body | {"tool_choice": "none"}).choices[0].message.content
    )


def test_a_function_that_is_named_is_called(client):
    for tool in (ADD, WEATHER):
        choice = {"type": "function", "function": {"name": tool["function"]["name"]}}
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hm"}], "tools": TOOLS, "tool_choice": choice}
        (call,) = client.chat.completions.create(**body).choices[0].message.tool_calls
        assert call.function.name == tool["function"]["name"]
        jsonschema.validate(json.loads(call.function.arguments), tool["function"]["parameters"])
