"""A talk in the terminal: what the models read, what is shown, what the commands do."""

import json
import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
import tiny_chats
import tiny_models
import tiny_serve

from jaxlm.data.chats import chat, examples
from jaxlm.data.tokenizer.ids import document
from jaxlm.serve import talk as terminal
from jaxlm.serve.talk import Conversation, Talk, Voice

CODER = tiny_chats.tokenizer()


def voice(says="sun and sea", name="one", context=256, plain=False, pause=0.0):
    """A voice that says the same to each message, and ends; `says` may be a function of the request."""
    found = says if callable(says) else lambda _: [*CODER.encode(says), CODER.eos_id]
    return Voice(name, tiny_serve.Scripted(found, pause), Conversation(CODER, chat.ends(CODER), context, plain))


@pytest.fixture
def talk(capsys):
    """Makes a talk from voices; it answers a line with what stands on (standard output, standard error)."""

    def make(*voices, new=40):
        made = Talk(voices, tiny_models.sample_config(max_new_tokens=new), 0, terminal.Terminal())

        def say(line):
            assert made.line(line)
            return tuple(capsys.readouterr())

        say.talk = made
        return say

    return make


def test_a_model_reads_all_turns_in_its_template(talk):
    one = voice()
    say = talk(one)
    assert say("/system be brief")[1] == "the system says this from the next message on\n"
    assert say("hello there") == ("sun and sea\n", "")
    assert say("//more é 日本") == ("sun and sea\n", "")
    said = [("system", "be brief"), ("user", "hello there"), ("assistant", "sun and sea"), ("user", "/more é 日本")]
    messages = [{"role": role, "content": content} for role, content in said]
    assert one.batcher.asks[1].ids == tuple(chat.ids(CODER, messages))
    assert say("\udcff sea")[1] == ""  # a byte of the command line that is no UTF-8
    assert one.talk.turns[-1].asked == "\ufffd sea"
    assert one.batcher.asks[1].seed != one.batcher.asks[0].seed  # said twice, it may be answered in another way


def test_plain_text_goes_on(talk):
    one = voice(" sea", plain=True)
    say = talk(one)
    say("the sun")
    say("the moon")
    assert one.batcher.asks[-1].ids == tuple(document(CODER, "the sun sea\nthe moon"))
    assert say("/system be brief")[1] == "plain text has no system message\n"


def test_the_oldest_turns_go_where_the_context_is_full(talk):
    one = voice(context=128)
    say, forgot = talk(one, new=16), []
    for number in range(12):
        forgot += ["oldest turn" in say(f"message {number} of the moon")[1]]
        ids = one.batcher.asks[-1].ids
        assert len(ids) + 16 <= 128
    assert not forgot[0]
    assert forgot[-1]
    talk_of = one.talk
    kept = [
        *talk_of.messages(talk_of.turns[:-1][talk_of.forgotten :]),
        {"role": "user", "content": talk_of.turns[-1].asked},
    ]
    assert ids == tuple(chat.ids(CODER, kept))  # whole turns, and the latest
    assert len(talk_of.turns) == 12  # to save all of it
    with_one_more = talk_of.messages(talk_of.turns[:-1][talk_of.forgotten - 1 :])
    assert len(chat.ids(CODER, [*with_one_more, kept[-1]])) + 16 > 128  # no turn goes without need


def test_a_message_longer_than_the_context_is_one_line_and_changes_nothing(talk):
    one = voice(context=64)
    say = talk(one)
    say("sun")
    out, err = say("moon " * 200)
    assert out == ""
    assert "the message is too long: " in err
    assert "the model's context is 64; shorten it\n" in err
    assert err.count("\n") == 1
    assert (len(one.talk.turns), one.talk.forgotten) == (1, 0)
    assert say.talk.refused == 1


def test_what_ends_an_answer_is_said(talk):
    assert talk(voice(), new=2)("sun")[1] == "cut after 2 tokens (--max-new-tokens)\n"
    assert talk(voice(lambda _: [CODER.eos_id]))("sun")[1] == "the answer is empty\n"


def test_the_same_message_goes_to_each(talk):
    one, two = voice("sea"), voice("moon", name="two", context=64)
    say = talk(one, two)
    assert say("sun")[0] == "one:\nsea\ntwo:\nmoon\n"
    out, err = say("moon " * 30)  # too long for the second one alone
    assert out == "one:\nsea\n"
    assert err.startswith("two: the message is too long: ")
    assert say("/undo")[1].startswith("taken back: moon moon")
    assert [turn.asked for turn in one.talk.turns + two.talk.turns] == ["sun", "sun"]
    assert say("/undo")[1] == "taken back: sun\n"
    assert say("/undo")[1].startswith("nothing to take back")


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(talk, monkeypatch):
    one, two = voice(lambda _: CODER.encode("sun ") * 500, pause=0.01), voice(name="two")
    say = talk(one, two)
    shown = terminal.Terminal.piece

    def piece(self, text):
        if text and not one.talk.turns and len(one.batcher.asks) == 1:
            os.kill(os.getpid(), signal.SIGINT)
            monkeypatch.setattr(terminal.Terminal, "piece", shown)
        shown(self, text)

    monkeypatch.setattr(terminal.Terminal, "piece", piece)
    out, err = say("sun")
    assert out in {"one:\ns\n", "one:\nsu\n"}
    assert err == "one: stopped\n"
    assert not two.batcher.asks
    assert len(one.talk.turns) == 1
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("   ", "nothing was said: type a message, or /help"),
        ("/rest", "no command /rest; did you mean /reset?"),
        ("/usr/bin is what?", "no command /usr/bin; /help lists all, and // begins a message with /"),
        ("/temperature hot", "a temperature is a number, 0 or more, not 'hot'"),
        ("/temperature -1", "a temperature is a number, 0 or more, not '-1'"),
        ("/temperature 0.5", "temperature 0.5"),
        ("/stats", "no answer yet"),
        ("/save", "save where? /save FILE.jsonl"),
        ("/save x.jsonl", "nothing to save: no message was answered"),
        ("/reset", "a new conversation"),
    ],
)
def test_each_command_is_one_clear_line(talk, line, says):
    assert talk(voice())(line) == ("", f"{says}\n")


def test_the_temperature_is_that_of_the_next_answer(talk):
    one = voice()
    say = talk(one)
    say("/temperature 0.5")
    say("sun")
    assert one.batcher.asks[-1].temperature == 0.5
    shown = say("/stats")[1]
    assert re.fullmatch(
        r"\d+ tokens, [\d,.]+ tokens/s; first one after [\d.]+ s; read \d+ tokens \(0 .*\) of 256\n", shown
    )


def test_sft_reads_what_is_saved(talk, tmp_path):
    say, path = talk(voice(), voice("é 日本", name="two")), tmp_path / "a b.jsonl"
    say("/system be brief")
    say("one")
    say("two")
    assert say(f"/save {path}")[1] == f"2 conversations appended to {path}\n"
    say(f"/save {path}")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 4
    assert [m["content"] for m in lines[1]["messages"]] == ["be brief", "one", "é 日本", "two", "é 日本"]
    read = [*examples.read(str(path), "auto", pairs=False)]
    assert [message["content"] for message in read[1].messages] == ["be brief", "one", "é 日本", "two", "é 日本"]
    assert "can't be written: " in say(f"/save {tmp_path}")[1]


@pytest.mark.parametrize("system", ["", "be brief"])
def test_an_answer_that_was_cut_is_saved_with_weight_0(talk, tmp_path, system):
    says = {"short": "sun", "long": "sun and sea and sun and sea"}
    answers = (*CODER.encode(says["short"]), CODER.eos_id), (*CODER.encode(says["long"]), CODER.eos_id)
    texts = iter([answers[0], answers[1], answers[0]])
    say, path = talk(voice(lambda _: [*next(texts)]), new=len(answers[0])), tmp_path / "a.jsonl"
    say(f"/system {system}")
    assert "cut after" not in say("one")[1]
    assert "cut after" in say("two")[1]
    assert "cut after" not in say("three")[1]
    say(f"/save {path}")
    messages = json.loads(path.read_text())["messages"]
    assert [m["content"] for m in messages if "weight" in m and m["weight"] == 0] == [messages[-3]["content"]]
    assert [m["role"] for m in messages if "weight" in m] == ["assistant"]
    assert set(messages[-1]) == {"role", "content"}


def test_lines_are_as_wide_as_they_may_be():
    text = "the sun  rose é\n\n日本語 " + "x" * 12 + " end "
    lines = terminal.wrapped(text, 8)
    assert lines == ["the sun ", "rose é", "", "日本語", "xxxxxxxx", "xxxx end", ""]
    assert max(map(terminal.width, lines)) <= 8
    for at in range(len(text)):  # what is shown stays: more text changes the last line alone
        before = terminal.wrapped(text[:at], 8)
        assert lines[: len(before) - 1] == before[:-1]


def test_answers_side_by_side(capsys):
    one, two, ended = "sun " * 20, "moon\x1b[2J\r 日本", set()

    def pieces():
        for at in range(0, len(one), 3):
            yield 0, one[at : at + 3]
            if at == 30:
                assert capsys.readouterr().out.count("\n") == 1  # nothing is known of the second one yet
        ended.add(0)
        yield 0, ""
        ended.add(1)
        yield 1, two

    terminal.Terminal().beside(["one", "two"], 12, pieces(), ended.__contains__)
    rows = capsys.readouterr().out.splitlines()
    assert rows[0] == "sun sun sun   │  moon[2J 日本"
    assert [row.partition("│")[2].strip() for row in rows[1:]] == [""] * (len(rows) - 1)
    assert " ".join(row.partition("│")[0] for row in rows).split() == one.split()


TALK = """
import itertools, sys
sys.path[:0] = {path!r}
import test_conversation as t
from jaxlm.serve import talk as terminal
from jaxlm.serve.talk import Talk
import tiny_models
ids = t.CODER.encode("sun ")
voice = t.voice(lambda _: ids * 500, pause=0.02)
screen = terminal.Terminal()
talk = Talk([voice], tiny_models.sample_config(max_new_tokens=2000), 0, screen)
all(talk.line(line) for line in screen.lines())
print("left", len(voice.talk.turns))
"""


def test_ctrl_c_in_a_terminal(tmp_path):
    here = pathlib.Path(__file__).parent
    ours, theirs = pty.openpty()
    code = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n" + TALK.format(
        path=[str(here), str(here.parent)]
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        **{"stdin": theirs, "stdout": theirs, "stderr": theirs},
        env=os.environ | {"TERM": "xterm", "NO_COLOR": "1"},
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""

    def until(text: bytes) -> bytes:
        nonlocal shown
        end = time.monotonic() + 60
        while text not in shown:
            assert time.monotonic() < end, shown
            if select.select([ours], [], [], 0.1)[0]:
                shown += os.read(ours, 4096)
        before, _, shown = shown.partition(text)
        return before

    try:
        until(b"ctrl-D leaves\r\n")
        until(b"> ")
        os.write(ours, "é 日本\n".encode())
        until(b"sun sun")
        os.write(ours, b"\x03")
        assert b"> " not in until(b"stopped\r\n")
        until(b"> ")
        time.sleep(0.5)  # Python loses a ctrl-C that comes between the prompt and its wait for a key
        os.write(ours, b"half a mess\x03")
        until(b"ctrl-C again or ctrl-D leaves")
        until(b"> ")
        time.sleep(0.5)
        os.write(ours, b"\x03")
        until(b"left 1")
        assert process.wait(30) == 0
    finally:
        process.kill()
        os.close(ours)
