"""`jaxlm chat` and `jaxlm sample` with a small model: of a run of ours and several at once; what they refuse."""

import io
import json
import re

import pytest
import tiny_chats

from jaxlm.cli import cli


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base of ours, whose tokenizer has no chat tokens."""
    return tiny_chats.base(tmp_path_factory.mktemp("base"), n_layers=1)


def test_piped_messages_are_answered_by_each_model(base, capsys, monkeypatch, tmp_path):
    saved = tmp_path / "chat.jsonl"
    piped = io.TextIOWrapper(io.BytesIO(f"the sun\n \n\xff moon\n/stats\n/save {saved}\n".encode("latin-1")), "utf-8")
    monkeypatch.setattr("sys.stdin", piped)
    code = cli.main(["chat", f"{base}@0", str(base), "--max-new-tokens=5", "--temperature=0"])
    out, err = capsys.readouterr()
    assert code == 0, err
    first, second = (base.name + "@" + step for step in ("0", "latest"))
    said = [json.loads(line)["messages"] for line in saved.read_text().splitlines()]
    assert said[0] == said[1]  # the same model, greedy
    answers = [message["content"] for message in said[0] if message["role"] == "assistant"]
    assert out == "".join(f"{first}:\n{answer}\n{second}:\n{answer}\n" for answer in answers)
    assert [m["content"] for m in said[0] if m["role"] == "user"] == ["the sun", "\ufffd moon"]
    assert err.count(" has no chat template: it goes on with what you type") == 2
    assert err.count("cut after 5 tokens (--max-new-tokens)") == 4


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["{base}", "{base}/data"], "{base}/data is no run (it has no config.json) and no Hugging Face model"),
        (["{base}", "{base}@77"], "no checkpoint '77'; there are 0, latest and best"),
        (["{base}", "{base}/nosuch@3"], "no config file, shipped config or folder '{base}/nosuch'"),
        (["{base}", "--temperature=hot"], "sample.temperature"),
    ],
)
def test_what_is_not_there_is_one_line(base, capsys, argv, says):
    assert cli.main(["chat", *(word.format(base=base) for word in argv)]) == 2
    assert says.format(base=base) in capsys.readouterr().err.splitlines()[-1]


def test_a_message_that_can_not_be_answered_is_exit_code_2(base, capsys):
    assert cli.main(["chat", str(base), "--message", "moon " * 500]) == 2
    assert "the message is too long: " in capsys.readouterr().err


@pytest.mark.parametrize(("asked", "says"), [("100", True), ("9", False)])
def test_sample_says_how_many_tokens_fit_in_the_context(base, capsys, asked, says):
    assert cli.main(["sample", str(base), "one two", "one", f"--max-new-tokens={asked}", "--json"]) == 0
    err = capsys.readouterr().err
    line = re.search(
        r"sample.max_new_tokens=100, but after the longest prompt (\d+) fit in the context of 64 tokens", err
    )
    assert bool(line) == says
    assert not says or 50 < int(line[1]) < 63
