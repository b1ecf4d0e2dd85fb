"""The server with a real model behind it: what it says is what the model says, and follows its schema."""

import contextlib
import functools
import json
import random
import re

import httpx
import jax
import jsonschema
import numpy as np
import openai
import pytest
import tiny_chats
import tiny_eval
import tiny_hf
import tiny_models
import tiny_serve

from jaxlm.data.chats import chat
from jaxlm.data.tokenizer import coder
from jaxlm.data.tokenizer.ids import document
from jaxlm.models.decode.generate import generate
from jaxlm.serve import http
from jaxlm.serve.batcher import Batcher
from jaxlm.serve.guide import Guides
from jaxlm.serve.requests import Reader


@pytest.fixture(scope="module")
def scorer():
    return tiny_eval.scorer()


@pytest.fixture(scope="module")
def url(scorer):
    vocab_size, ends = scorer.model.config.vocab_size, chat.ends(scorer.tokenizer)
    guides = Guides(scorer.tokenizer, vocab_size, ends)
    reader = Reader(scorer.tokenizer, vocab_size, scorer.model.config.max_seq_len, ends, guides)
    batcher = Batcher(scorer.model, scorer.variables, rows=4, chunk=16, shortest=128)
    with tiny_serve.running(http.Server({"tiny": reader}, batcher).app()) as url:
        yield url
    batcher.close()


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_likeliest_text_is_that_of_the_generator(client, scorer):
    prompts, coder = ["the cat", "old river slept", "on"], scorer.tokenizer
    found = client.completions.create(model="tiny", prompt=prompts, temperature=0, max_tokens=12)
    settings = tiny_models.sample_config(max_new_tokens=12)
    ids = [document(coder, prompt) for prompt in prompts]
    new = generate(scorer.model, scorer.variables, ids, settings, stop_ids=chat.ends(coder))
    assert [choice.text for choice in found.choices] == [
        coder.decode([i for i in row if i not in chat.ends(coder)]) for row in new
    ]


def test_a_seed_gives_the_same_text_whatever_else_runs(client):
    asked = {"model": "tiny", "prompt": "the cat", "temperature": 1.5, "max_tokens": 12, "seed": 5}
    alone = client.completions.create(**asked).choices[0].text
    beside = [choice.text for choice in client.completions.create(**asked, n=4).choices]
    assert beside[0] == alone
    assert len({*beside}) > 1


def full(scorer, ids) -> np.ndarray:
    """log p of every id of the vocabulary behind each id, (T, V)."""
    size = scorer.model.config.vocab_size
    forward = tiny_models.jit(lambda params, ids: tiny_models.logits(scorer.model, params, ids)[0, :, :size])
    return np.asarray(jax.nn.log_softmax(forward(scorer.variables["params"], np.asarray([ids], np.int32))))


def test_log_probabilities_are_those_of_a_full_forward(client, scorer):
    asked = {"model": "tiny", "prompt": "seven green hills", "echo": True, "logprobs": 3, "temperature": 0.7, "seed": 1}
    found = client.completions.create(**asked, max_tokens=5).choices[0].logprobs
    ids = httpx.post(str(client.base_url).replace("v1/", "tokenize"), json={"prompt": asked["prompt"]}).json()["tokens"]
    given = len(ids) - 1  # without EOS, which the client did not give
    names = http.answers.Names(scorer.tokenizer)
    by_name = {names[i]: i for i in range(scorer.tokenizer.vocab_size)}
    ids += [by_name[name] for name in found.tokens[given:]]
    logp_TxV = full(scorer, ids)
    assert found.token_logprobs[0] is None
    expected = [logp_TxV[at, i] for at, i in enumerate(ids[2:], 1)]
    np.testing.assert_allclose(found.token_logprobs[1:], expected, atol=1e-4)
    for at, top in enumerate(found.top_logprobs[1:], 1):
        likeliest = np.sort(logp_TxV[at])[::-1][:3]
        np.testing.assert_allclose(sorted(top.values(), reverse=True)[:3], likeliest, atol=1e-4)


def test_an_answer_follows_its_schema(client):
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": tiny_serve.SCHEMA}}
    asked = {
        "model": "tiny", "prompt": "the", "max_tokens": 120, "temperature": 1.2,
        "extra_body": {"response_format": form},
    }  # fmt: skip
    found = client.completions.create(**asked, n=6, seed=0)
    assert len({choice.text for choice in found.choices}) == 6
    for choice in found.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.text), tiny_serve.SCHEMA)


def test_embeddings_are_the_normalised_mean_of_the_last_hidden_states(client, scorer):
    """In texts of one chunk and of several, also where a prefix of the text is cached; as numbers and as base64."""
    texts = ["the cat", "on a mat", "seven green hills and " * 5]
    client.completions.create(model="tiny", prompt=texts[2], max_tokens=1)
    ids = [document(scorer.tokenizer, text) for text in texts]
    model, variables = scorer.model, scorer.variables
    forward = tiny_models.jit(lambda row: model.apply(variables, row)[0])
    for asked in (texts, [scorer.tokenizer.encode(text) for text in texts]):
        plain = client.embeddings.create(model="tiny", input=asked, encoding_format="float")
        coded = client.embeddings.create(model="tiny", input=asked)  # the client asks for base64
        for number, (one, other) in enumerate(zip(plain.data, coded.data, strict=True)):
            hidden_TxD = np.asarray(forward(np.asarray([ids[number]], np.int32)), np.float32)
            mean_D = hidden_TxD.mean(axis=0)
            np.testing.assert_allclose(one.embedding, mean_D / np.linalg.norm(mean_D), atol=1e-5)
            assert np.abs(hidden_TxD[-1] / np.linalg.norm(hidden_TxD[-1]) - one.embedding).max() > 1e-3
            assert other.embedding == one.embedding
            assert (one.index, one.object) == (number, "embedding")
        assert plain.usage.prompt_tokens == plain.usage.total_tokens == sum(map(len, ids))
    assert client.embeddings.create(model="tiny", input="the cat").data[0].embedding == coded.data[0].embedding


def test_a_client_that_leaves_ends_its_embeddings(url):
    def busy() -> bool:
        return "jaxlm_rows_busy 0" not in (text := httpx.get(f"{url}/metrics").text) or "jaxlm_queue 0" not in text

    with contextlib.suppress(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/embeddings", json={"input": ["seven green hills and " * 5] * 2048}, timeout=0.5)
    tiny_serve.until(lambda: not busy(), 1)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"input": ""}, "none of them empty"),
        ({"input": ["a", ""]}, "none of them empty"),
        ({"input": [[3], []]}, "none of them empty"),
        ({"input": []}, "input must be a string"),
        ({"input": ["a"] * 2049}, "at most 2048"),
        ({"input": "the " * 200}, "the model's context is|tokens can hold|are read"),
        ({"input": "a", "encoding_format": "int8"}, "float or base64"),
        ({"input": "a", "dimensions": 8}, "the model's width"),
        ({}, "input is missing"),
    ],
)
def test_what_cannot_be_embedded_is_refused(url, body, says):
    error = httpx.post(f"{url}/v1/embeddings", json=body).json()["error"]
    assert re.search(says, error["message"]), error
    assert error["type"] == "invalid_request_error"


def test_penalties_and_a_bias_beside_a_schema(client, scorer):
    """Greedy: letters of a string differ as far as they can; a bias forbids an id; the schema holds for all of them."""
    schema = {"type": "string", "minLength": 10, "maxLength": 10, "pattern": "^[a-e]+$"}
    form = {"type": "json_schema", "json_schema": {"name": "letters", "schema": schema}}
    asked = {"model": "tiny", "prompt": "the", "max_tokens": 40, "temperature": 0}

    def text(bias=(), **body) -> str:
        body = {"extra_body": {"response_format": form} | body, "logit_bias": {str(i): -100 for i in bias}}
        whole = client.completions.create(**asked, **body)
        pieces = client.completions.create(**asked, **body, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
        return json.loads(whole.choices[0].text)

    plain, letters = text(), {letter: scorer.tokenizer.encode(letter)[-1] for letter in "abcde"}
    assert max(map(text(frequency_penalty=2).count, "abcde")) < max(map(plain.count, "abcde"))
    assert len({*text(presence_penalty=2)}) > len({*plain})
    often = max("abcde", key=plain.count)
    every = [i for i, raw in enumerate(scorer.tokenizer.piece_bytes()) if often.encode() in raw]
    assert letters[often] in every
    assert often not in text(every)
    assert len({*text(every, repetition_penalty=2)}) >= len({*text(every)})


def test_an_answer_is_an_object_of_json_as_far_as_it_goes(client):
    asked = {
        "model": "tiny",
        "prompt": "the",
        "max_tokens": 60,
        "extra_body": {"response_format": {"type": "json_object"}},
    }
    for choice in client.completions.create(**asked, n=4, seed=0).choices:
        assert choice.text.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.text), dict)


def test_a_schema_that_cannot_be_followed_is_refused(url):
    for schema in ({"type": "animal"}, {"$ref": "#/nowhere"}, {"type": "string", "pattern": "("}):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "response_format": form})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format"), answer.text


@functools.cache
def spoken(url: str):
    """lm-eval's own client of the server, which asks it for ids too."""
    pytest.importorskip("tenacity", reason="lm-eval's clients need it")
    openai_completions = pytest.importorskip("lm_eval.models.openai_completions")
    return openai_completions.LocalCompletionsAPI(
        **{"model": "tiny", "base_url": f"{url}/v1/completions", "tokenizer_backend": "remote"},
        **{"max_length": 127, "batch_size": 3},
    )


def test_lm_eval_over_http_is_lm_eval_in_process(url, scorer):
    from lm_eval.api.instance import Instance

    from jaxlm.eval.lm_harness import ScorerLM

    texts = [
        ("the cat sat", " on a mat"),
        ("", "two small dogs"),
        ("Question: seven é?\nAnswer:", " old"),
        ("over", " hills."),
    ]

    def asked(kind, every):
        return [Instance(kind, {}, args, number) for number, args in enumerate(every)]

    here, there = ScorerLM(scorer, "x"), spoken(url)
    own, theirs = (model.loglikelihood(asked("loglikelihood", texts)) for model in (here, there))
    np.testing.assert_allclose([logp for logp, _ in theirs], [logp for logp, _ in own], atol=1e-3)
    assert [greedy for _, greedy in theirs] == [greedy for _, greedy in own]
    whole = [(before + after,) for before, after in texts]
    rolling = [model.loglikelihood_rolling(asked("loglikelihood_rolling", whole)) for model in (here, there)]
    np.testing.assert_allclose(rolling[1], rolling[0], atol=1e-3)
    until = [("the cat", {"until": ["e"], "max_gen_toks": 9}), ("two", {"until": ["zz"], "max_gen_toks": 5})]
    assert there.generate_until(asked("generate_until", until)) == here.generate_until(asked("generate_until", until))


@pytest.fixture(scope="module", params=["ours", "byte_level", "byte_fallback"])
def tokenizer(request, tmp_path_factory):
    if request.param == "ours":
        return tiny_chats.tokenizer()
    folder = tmp_path_factory.mktemp("tokenizer")
    getattr(tiny_hf, request.param)(folder)
    return coder.load(folder)


def walk(guide, tokenizer, vocab_size: int, seed: int) -> str:
    """A text of ids drawn by chance among those that a guide allows."""
    rng, ids, ends = random.Random(seed), [], chat.ends(tokenizer)
    while not ids or ids[-1] not in ends:
        mask = guide.mask()
        assert (mask.dtype, len(mask)) == (np.uint32, -(-vocab_size // 32))
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        assert allowed
        assert max(allowed) < tokenizer.vocab_size
        ids.append(rng.choice(allowed))
        guide.accept(ids[-1])
    pieces = tokenizer.piece_bytes()
    return b"".join(pieces[i] for i in ids if i not in ends).decode()


@pytest.mark.parametrize("padded_to", [32, 33])  # the size of most models' vocabularies has no rest by 32
def test_a_walk_is_json_of_the_schema(tokenizer, padded_to):
    vocab_size = -(-tokenizer.vocab_size // 32) * 32 + padded_to - 32
    make = Guides(tokenizer, vocab_size, chat.ends(tokenizer)).of_schema(tiny_serve.SCHEMA)
    texts = [walk(make(), tokenizer, vocab_size, seed) for seed in range(20)]
    for text in texts:
        jsonschema.validate(json.loads(text), tiny_serve.SCHEMA)
    assert len({*texts}) > 10


def test_what_is_not_allowed_is_not_taken(tokenizer):
    guide = Guides(tokenizer, tokenizer.vocab_size, chat.ends(tokenizer)).of_schema(tiny_serve.SCHEMA)()
    with pytest.raises(ValueError, match="refuses a token"):
        guide.accept(chat.ends(tokenizer)[0])
