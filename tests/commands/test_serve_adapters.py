"""Adapters beside one base: a server of three answers as three servers of the merged models do; chat likewise."""

import argparse
import concurrent.futures
import contextlib

import httpx
import jax
import numpy as np
import openai
import pytest
import tiny_hf
import tiny_peft
import tiny_serve

from jaxlm.cli import cli
from jaxlm.commands import serve
from jaxlm.config import resolve
from jaxlm.data.tokenizer import coder
from jaxlm.eval import model
from jaxlm.interop import inherit, peft
from jaxlm.serve.batcher import Batcher

pytest.importorskip("tokenizers")
KINDS = {"thin": {"rank": 2}, "wide": {"rank": 6, "alpha": 12.0}, "part": {"targets": (r"attn/[qv]", "mlp/down")}}
TEMPLATE = "{% for m in messages %}{{ m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a base from elsewhere, three adapters for it in PEFT's form, and what is none of them."""
    home = tmp_path_factory.mktemp("adapters")
    for name in ("base", "other"):
        config, params = tiny_hf.weights(home / name, vocab_size=400, n_layers=1 if name == "base" else 2)
        tiny_hf.byte_level(home / name, chat_template=TEMPLATE)
        tokenizer = coder.load(home / name)
        kinds = KINDS | {"rows": {}} if name == "base" else {"strange": {}}
        for seed, (kind, own) in enumerate(kinds.items()):
            adapted = tiny_peft.adapted(params, (5, 42) if kind == "rows" else (), seed=seed, **own)
            (home / kind).mkdir()
            made = peft.PeftFolder(home / kind, config, "f32", adapted, (str(home / name), None))
            made.write(lambda leaf, params=params: np.asarray(params["embed"]["embedding"]), tokenizer, lambda *_: None)
    return home


@contextlib.contextmanager
def served(folder, *words: str):
    """A client of a server of a folder's model, with adapters beside it."""
    restored = model.restore(resolve(inherit.of_folder(str(folder), [])), "latest", peft.READERS, words)
    args = argparse.Namespace(config=str(folder), max_prompt=0, rows=4, host="127.0.0.1")
    with jax.set_mesh(restored.mesh):
        batcher = Batcher(restored.model, restored.variables, rows=4)
        app = serve._server(args, restored, batcher, "").app()
        with (
            contextlib.closing(batcher),
            tiny_serve.running(app) as url,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            yield client


def said(client, name: str) -> list:
    """[(token, log-probability of each of the likeliest)] of a greedy answer, and a vector."""
    body = {"model": name, "messages": [{"role": "user", "content": "the cat sat"}], "temperature": 0, "max_tokens": 9}
    whole = client.chat.completions.create(**body, logprobs=True, top_logprobs=5)
    assert whole.model == name
    pieces = client.chat.completions.create(**body, stream=True)
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == whole.choices[0].message.content
    top = [sorted(other.logprob for other in one.top_logprobs) for one in whole.choices[0].logprobs.content]
    return [*top, client.embeddings.create(model=name, input="a mat").data[0].embedding]


def test_three_adapters_in_one_batch_are_three_servers(home):
    with served(home / "base", *(f"{name}={home / name}" for name in KINDS)) as client:
        names = [each.id for each in client.models.list()]
        assert names == ["base", *KINDS]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:  # rows of all share steps
            together = dict(zip(names, pool.map(lambda name: said(client, name), names), strict=True))
        for path, body in (("chat/completions", {"messages": []}), ("embeddings", {"input": "x"})):
            answer = httpx.post(f"{client.base_url}{path}", json=body | {"model": "nobody"})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (404, "model", "model_not_found")
            assert error["message"] == "no model 'nobody': here is base, thin, wide, part"
    for name in names:
        with served(home / name) as client:
            for one, other in zip(together[name], said(client, name), strict=True):
                np.testing.assert_allclose(one, other, atol=1e-5)
    firsts = [together[name][0][0] for name in names]
    assert np.diff(sorted(firsts)).min() > 1e-4


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["strange"], "strange is an adapter of another base than"),
        (["rows"], "rows is not LoRA alone, without rows of the embedding"),
        (["other"], "other is a whole model, not an adapter"),
        (["thin"] * 9, "9 adapters: at most 8 can be beside a model"),
        (["thin", "thin"], "each name once"),
        (["nosuch"], "no folder"),
    ],
)
def test_what_is_no_adapter_of_the_base_is_one_line(home, words, says, capsys):
    named = [f"a={home / word}" for word in words]
    for verb in (["serve", "--port=0"], ["chat"]):
        assert cli.main([*verb, str(home / "base"), *named]) == 2
        assert says in capsys.readouterr().err.splitlines()[-1], verb
    for word in ("=x", f"base={home / 'thin'}"):
        assert cli.main(["serve", "--port=0", str(home / "base"), word]) == 2
        assert f"{word!r} is no adapter" in capsys.readouterr().err


def test_what_is_refused_takes_no_port(home, monkeypatch, capsys):
    monkeypatch.setattr(serve.address, "listen", lambda *given: pytest.fail("the port is taken"))
    for words in ([f"a={home / 'other'}"], [f"a={home / 'nosuch'}"], ["--checkpoint=77"]):
        assert cli.main(["serve", "--port=0", str(home / "base"), *words]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_chat_talks_to_a_base_and_its_adapters(home, capsys):
    words = [f"{name}={home / name}" for name in KINDS]
    flags = ["--message=the cat sat", "--temperature=0", "--max-new-tokens=6"]
    assert cli.main(["chat", str(home / "base"), *words, *flags]) == 0
    together = capsys.readouterr().out.split("\n")
    alone = []
    for name in ("base", *KINDS):
        assert cli.main(["chat", str(home / name), *flags]) == 0
        alone += [f"{name}:", *capsys.readouterr().out.split("\n")[:-1]]
    assert together == [*alone, ""]
