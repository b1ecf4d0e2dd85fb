"""The arena's page as a browser shows it: votes by click and by key, once each; no name before a vote; fits a phone."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
import tiny_serve
from chromium import Browser, browser, needs_chromium

from jaxlm.cli import cli
from jaxlm.config import pip_install
from jaxlm.serve import guard
from jaxlm.serve.arena.store import Store

NAMES = ("zebrafish", "wolverine")
PROMPTS = [f"Question {n}: " + "why is that so? " * (1 + 12 * n) for n in range(6)]
AGAIN_MS = 700  # after it a click is no second half of a double click
PRESS = {"ArrowLeft": 37, "ArrowRight": 39, "t": 84, "b": 66, "s": 83, "Enter": 13}


def write_samples(folder: pathlib.Path) -> None:
    for name, words in zip(NAMES, ("short and sweet", "x" * 300 + " a longer answer " * 30), strict=True):
        lines = [json.dumps({"prompt": prompt, "text": f"{words} {n}"}) + "\n" for n, prompt in enumerate(PROMPTS)]
        (folder / f"{name}.jsonl").write_text("".join(lines))


@contextlib.contextmanager
def arena(folder: pathlib.Path, *options: str) -> Iterator[str]:
    """The URL of an arena that runs as users run it; it is ended by a ctrl-C, and must end well."""
    files = [f"{name}.jsonl" for name in NAMES]
    command = [sys.executable, "-m", "jaxlm.cli.cli", "arena", *files, "--port=0", *options]
    started = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        said = started.stderr.readline()
        found = re.match(r"vote at (http://127\.0\.0\.1:\d+) ", said)
        assert found, said + started.stderr.read()
        yield found[1]
        os.kill(started.pid, signal.SIGINT)
        rest = started.stderr.read()
        assert started.wait(60) == 0, rest
        assert re.fullmatch(r"\d+ votes? in arena.sqlite: jaxlm arena --results --store=arena.sqlite\n", rest), rest
    finally:
        started.kill()
        started.wait()


def press(shown: Browser, key: str) -> None:
    code = {"key": key, "code": f"Key{key.upper()}" if len(key) == 1 else key, "windowsVirtualKeyCode": PRESS[key]}
    for kind in ("keyDown", "keyUp"):
        shown.ask("Input.dispatchKeyEvent", type=kind, **code)


def wait(shown: Browser, milliseconds: int) -> None:
    promise = f"new Promise(done => setTimeout(done, {milliseconds}))"
    shown.ask("Runtime.evaluate", expression=promise, awaitPromise=True)


def button(words: str) -> str:
    return f"[...document.querySelectorAll('button')].find(b => b.innerText.includes('{words}'))"


def begin(shown: Browser, url: str, width: int, name: str) -> None:
    shown.show(url, width)
    shown.until("document.querySelector('input')")
    shown.value("document.querySelector('input').focus()")
    shown.ask("Input.insertText", text=name)
    wait(shown, 300)
    press(shown, "Enter")
    shown.until(button("Both good"))


def hidden(shown: Browser) -> None:
    """Nothing that the browser has been given tells a name, or which file an answer is from."""
    html = shown.value("document.documentElement.outerHTML + document.title + document.cookie + location.href")
    for text in (html, *shown.frames, *shown.requests):
        assert not any(name in text for name in (*NAMES, "jsonl", "contestant"))
    assert any("sweet" in text for text in (html, *shown.frames))  # it was looked for where it would be


def judged(shown: Browser) -> str:
    return shown.value("document.querySelector('.top').innerText.split(' judged')[0]")


@pytest.mark.browser
@needs_chromium
def test_votes_by_click_and_key_count_once_and_tell_no_name_before(tmp_path):
    write_samples(tmp_path)
    with arena(tmp_path) as url, browser(tmp_path / "profile") as shown:
        begin(shown, url, 1200, "Ann")
        hidden(shown)
        assert shown.value("document.title") == "Arena"
        assert {request.split("/")[2] for request in shown.requests if "//" in request} == {url.split("/")[2]}
        before = shown.value("document.querySelector('.sides').innerText")
        shown.show(url, 1200)  # a reload: the same ballot, the same sides
        shown.until(button("Both good"))
        assert shown.value("document.querySelector('.sides').innerText") == before
        assert judged(shown) == "0 of 6"

        wait(shown, AGAIN_MS)
        shown.value(f"b = {button('Left')}; b.click(); b.click(); b.click()")
        shown.until(button("Next"))
        assert sorted(
            shown.value("document.querySelector('.sides').innerText.match(/zebrafish|wolverine/g)")
        ) == sorted(NAMES)
        assert judged(shown) == "1 of 6"
        wait(shown, AGAIN_MS)
        press(shown, "Enter")
        for done, key in enumerate(("ArrowRight", "t", "b"), 1):
            shown.until(button("Both good"))
            wait(shown, AGAIN_MS)
            press(shown, key)
            press(shown, key)
            shown.until(button("Next"))
            assert judged(shown) == f"{done + 1} of 6"
            wait(shown, AGAIN_MS)
            press(shown, "Enter")
        shown.until(button("Both good"))
        assert judged(shown) == "4 of 6"
    store = Store(tmp_path / "arena.sqlite")
    store.enter_all()
    assert len(store.votes()) == 4
    assert sum(vote.winner == "tie" for vote in store.votes()) == 2
    assert {vote.rater for vote in store.votes()} == {"Ann"}


@pytest.mark.browser
@needs_chromium
def test_it_fits_a_phone_and_a_desk_by_day_and_by_night(tmp_path):
    write_samples(tmp_path)
    pictures = pathlib.Path(os.environ.get("ARENA_PICTURES", tmp_path))
    with arena(tmp_path, "--no-reveal") as url, browser(tmp_path / "profile") as shown:
        begin(shown, url, 390, "Ben")
        backs = set()
        for theme in ("light", "dark"):
            shown.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
            for width in (390, 1200):
                shown.show(url, width)
                shown.until(button("Both good"))
                wait(shown, 300)
                assert shown.value("document.documentElement.scrollWidth") <= width
                assert shown.value("Math.max(...[...document.querySelectorAll('button')].map(b => b.offsetTop))") < 800
                backs.add((theme, shown.value("getComputedStyle(document.body).backgroundColor")))
                shown.picture(pictures / f"arena_{theme}_{width}.png")
        assert len(backs) == 2
        for _ in range(6):  # no names after a vote either; at the end, thanks
            wait(shown, AGAIN_MS)
            hidden(shown)
            press(shown, "s")
            wait(shown, AGAIN_MS)
        shown.until("document.body.innerText.includes('that was all')")
        assert judged(shown) == "6 of 6"


def test_without_nicegui_there_is_one_clear_line(tmp_path, monkeypatch, capsys):
    write_samples(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "nicegui", None)
    assert cli.main(["arena", "zebrafish.jsonl", "wolverine.jsonl"]) == 2
    assert capsys.readouterr().err == f"jaxlm: the page needs NiceGUI: {pip_install('arena')}\n"


@pytest.mark.faults
def test_the_arena_is_guarded(tmp_path):
    write_samples(tmp_path)
    with arena(tmp_path) as url:
        connections = tiny_serve.half_sent(url, 1000, "GET / HTTP/1.1\r\n")
        assert httpx.get(url, timeout=60).status_code == 200
        assert tiny_serve.still_open(connections) <= guard.HALF_SENT
        for connection in connections:
            connection.close()
        for headers in ({"Host": "example.org"}, {"Origin": "https://example.org"}, {"Sec-Fetch-Site": "cross-site"}):
            assert httpx.get(url, headers=headers, timeout=60).status_code == 403
