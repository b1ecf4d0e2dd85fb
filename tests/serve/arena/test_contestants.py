"""Who takes part in an arena, and what a server is asked."""

import json
import socket
import threading

import pytest

from jaxlm import config
from jaxlm.config import ConfigError, RunError, config_files
from jaxlm.serve.arena import contestants
from jaxlm.serve.arena.contestants import Contestant, names, parse


def settings(**keys):
    overrides = [f"sample.{key}={value}" for key, value in keys.items()]
    return config.resolve(config_files.load("quickstart", overrides)).sample


def test_a_word_names_a_run_a_server_or_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run/samples").mkdir(parents=True)
    (tmp_path / "run/samples/100.jsonl").touch()
    (tmp_path / "odd@7").mkdir()
    assert parse("run") == Contestant("run", "run", "latest")
    assert parse("run@100") == Contestant("run", "run", "100")
    assert parse("run@best").which == "best"
    assert parse("odd@7") == Contestant("run", "odd@7", "latest")
    assert parse("http://localhost:8000") == Contestant("server", "http://localhost:8000/v1")
    assert parse("https://host/v1/#some/model") == Contestant("server", "https://host/v1", "some/model")
    file = parse("run/samples/100.jsonl")
    assert (file.kind, file.name) == ("file", "run 100")
    assert [*names([parse("run@1"), parse("run@2")]).values()] == ["run@1", "run@2"]
    other = names([Contestant("run", "a/run", "1"), Contestant("run", "b/run", "1")])
    assert all(key == name for key, name in other.items())
    with pytest.raises(ConfigError, match="twice"):
        names([parse("run@1"), parse("./run@1")])


def test_files_of_prompts_and_samples(tmp_path):
    (tmp_path / "p.txt").write_text("one\n\ntwo\none\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two\\nlines"}\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "s.jsonl").write_text('{"prompt": "p", "text": "first"}\n{"prompt": "p", "text": "second"}\n')
    assert contestants.read_prompts(str(tmp_path / "p.txt")) == ["one", "two"]
    assert contestants.read_prompts(str(tmp_path / "p.jsonl")) == ["one", "two\nlines"]
    assert contestants.read_samples(str(tmp_path / "s.jsonl")) == {"p": "first"}
    for name in ("bad.jsonl", "none.txt"):
        with pytest.raises(ConfigError, match=name):
            contestants.read_prompts(str(tmp_path / name))


def test_a_server_is_asked_as_a_model_or_as_a_chat(httpserver):
    httpserver.expect_request("/v1/models").respond_with_json({"data": [{"id": "its-model"}]})
    httpserver.expect_request("/v1/completions").respond_with_json({"choices": [{"text": " goes on"}]})
    httpserver.expect_request("/v1/chat/completions").respond_with_json({"choices": [{"message": {"content": "hi"}}]})
    server = parse(httpserver.url_for(""))
    assert contestants.ask(server, "it", settings(max_new_tokens=7), 3) == " goes on"
    asked = json.loads(httpserver.log[-1][0].data)
    assert (asked["model"], asked["prompt"], asked["max_tokens"], asked["seed"]) == ("its-model", "it", 7, 3)
    assert asked["top_k"] == settings().top_k > 0  # as a run draws
    assert contestants.ask(parse(f"{httpserver.url_for('')}#m"), "it", settings(chat_template=True, top_k=0), 3) == "hi"
    asked = json.loads(httpserver.log[-1][0].data)
    assert (asked["model"], asked["messages"]) == ("m", [{"role": "user", "content": "it"}])
    assert "top_k" not in asked


def test_a_server_that_fails_is_one_line(httpserver):
    httpserver.expect_request("/v1/completions").respond_with_data("no template", status=400)
    with pytest.raises(RunError, match="answers 400: no template"):
        contestants.ask(parse(f"{httpserver.url_for('')}#m"), "it", settings(), 0)
    with socket.create_server(("127.0.0.1", 0)) as half:  # an answer that breaks off

        def answer() -> None:
            client, _ = half.accept()
            with client:
                client.recv(1000)
                client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")

        threading.Thread(target=answer).start()
        with pytest.raises(RunError, match="can't be asked"):
            contestants.ask(parse(f"http://127.0.0.1:{half.getsockname()[1]}#m"), "it", settings(), 0)
    with pytest.raises(RunError, match="can't be asked"):
        contestants.ask(parse("http://127.0.0.1:9#m"), "it", settings(), 0)
