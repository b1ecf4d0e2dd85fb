"""Pages as a browser shows them: none is wider than a phone, asks for anything, or is allowed to run a script."""

import contextlib
import json
import os
import pathlib
import select
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from tiny_pages import DATA, SUMMARY

from jaxlm.report import data, page, run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SMALLEST_PX = 11
PATIENCE_S = 60.0  # for a word of the browser; its start on a busy machine takes ten


class Browser:
    """A headless Chromium, asked through its debugging pipe: one JSON object to a NUL."""

    def __init__(self, write: int, read: int):
        self._write, self._read, self._number, self._left = write, read, 0, b""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.requests, self.said = [], []
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params):
        """Sends a command and returns its result; what happens meanwhile is noted."""
        self._number += 1
        session = {"sessionId": self._session} if hasattr(self, "_session") else {}
        message = {"id": self._number, "method": method, "params": params} | session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def show(self, path: pathlib.Path, width: int) -> None:
        """Opens a page at a width and waits until it is there."""
        metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", **metrics)
        self.requests, self.said, self._loaded = [], [], False
        self.ask("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._note(self._next())

    def value(self, expression: str):
        """Returns what an expression is in the page."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def _note(self, event: dict) -> None:
        method, params = event.get("method"), event.get("params", {})
        self._loaded = method == "Page.loadEventFired" or getattr(self, "_loaded", False)
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        if method == "Log.entryAdded":
            self.said.append(params["entry"]["text"])

    def _next(self) -> dict:
        while b"\0" not in self._left:
            if not select.select([self._read], [], [], PATIENCE_S)[0]:
                raise TimeoutError(f"the browser says nothing for {PATIENCE_S:g} seconds")
            part = os.read(self._read, 1 << 16)
            assert part, "the browser is gone"
            self._left += part
        message, _, self._left = self._left.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def browser(folder: pathlib.Path) -> Iterator[Browser]:
    """A browser of its own, ended at the end."""
    (its_in, write), (read, its_out) = os.pipe(), os.pipe()
    flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe"
    command = f'exec "$0" {flags} --user-data-dir="$1" 3<&{its_in} 4>&{its_out} 2>/dev/null'
    started = subprocess.Popen(["bash", "-c", command, CHROMIUM, str(folder)], pass_fds=(its_in, its_out))
    os.close(its_in), os.close(its_out)
    try:
        yield Browser(write, read)
    finally:
        os.close(write), os.close(read)
        started.kill()
        started.wait()


def test_a_browser_that_hangs_fails_a_test(monkeypatch):
    monkeypatch.setitem(globals(), "PATIENCE_S", 0.05)
    (its_in, write), (read, its_out) = os.pipe(), os.pipe()
    try:
        with pytest.raises(TimeoutError, match="says nothing"):
            Browser(write, read)
    finally:
        for end in (its_in, write, read, its_out):
            os.close(end)


def write_pages(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Writes a page of a run and one of data, with every section, and returns their files."""
    run.write(folder / "run/report.html", SUMMARY)
    data.write(folder / "data/report.html", DATA)
    return folder / "run/report.html", folder / "data/report.html"


def test_the_pages_that_the_browser_is_shown_can_be_written(tmp_path):
    """Without a browser: a summary that has changed is seen wherever tests run."""
    for path, section in zip(write_pages(tmp_path), ("Starts", "Junk"), strict=True):
        assert f"<h2>{section}</h2>" in path.read_text()


@pytest.mark.browser
@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: apt-get install chromium")
def test_on_paper_nothing_is_folded_or_cut_and_no_heading_ends_a_page(tmp_path):
    hidden = "[...document.querySelectorAll('details > :not(summary)')].filter(e => !e.checkVisibility()).length"
    cut = "[...document.querySelectorAll('pre')].filter(e => e.scrollHeight > e.clientHeight).length"
    loose = "[...document.querySelectorAll('h2')].filter(e => getComputedStyle(e).breakAfter != 'avoid').length"
    long = page.tag("pre", "a line\n" * 100)
    parts = [page.section("x", page.details("folded", page.tag("p", "on paper it is read"), long))]
    page.write(tmp_path / "report.html", "A page", page.Markup(""), parts)
    with browser(tmp_path / "profile") as shown:
        shown.show(tmp_path / "report.html", 1200)
        assert [shown.value(count) for count in (hidden, loose)] == [2, 1]  # on a screen
        shown.ask("Emulation.setEmulatedMedia", media="print")
        assert [shown.value(count) for count in (hidden, cut, loose)] == [0, 0, 0]


def test_options_of_a_command_in_a_sentence_are_marked_and_escaped():
    line = "a - b & c: jaxlm train x --config.a.b=1 --from='<r>', then"
    told = "a - b &amp; c: jaxlm train x OPTION--config.a.b=1</span> OPTION--from=&#x27;&lt;r&gt;&#x27;</span>, then"
    assert page.sentence(line) == told.replace("OPTION", '<span class="option">')
    assert page.sentence("no command") == "no command"


@pytest.mark.browser
@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: apt-get install chromium")
def test_no_line_of_a_headline_ends_inside_an_option(tmp_path):
    line = "step 7: " + "".join(f"{'jaxlm ' * n}--config.train.microbatch_size=4 " for n in range(1, 8))
    run.write(tmp_path / "run/report.html", SUMMARY | {"run": SUMMARY["run"] | {"ended": f"{line} --x={'y' * 200}"}})
    with browser(tmp_path / "profile") as shown:
        for width in (390, 1200):
            shown.show(tmp_path / "run/report.html", width)
            heights = shown.value("JSON.stringify([...document.querySelectorAll('.option')].map(e => e.clientHeight))")
            *one, long = json.loads(heights)
            assert (len(one), max(one) < 30) == (7, True)
            assert long > 45
            assert shown.value("document.documentElement.scrollWidth") <= width


@pytest.mark.browser
@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: apt-get install chromium")
def test_the_pages_fit_a_phone_and_a_desk_and_ask_for_nothing(tmp_path):
    pages = write_pages(tmp_path)
    hostile = page.section(
        "x", page.Markup('<img src="https://example.com/x.png"><script>document.title = "run"</script>')
    )
    page.write(tmp_path / "hostile.html", "asks", page.Markup(""), [hostile])
    (tmp_path / "wide.html").write_text(
        '<meta name="viewport" content="width=device-width"><pre style="width:900px">x</pre>'
    )
    with browser(tmp_path / "profile") as shown:
        for path in pages:
            for width in (390, 1200):
                shown.show(path, width)
                shown.value("document.querySelectorAll('details').forEach(d => d.open = true)")
                assert shown.value("document.documentElement.scrollWidth") <= width, (path, width)
                sizes = "[...document.querySelectorAll('body *')].filter(e => e.innerText?.trim())"
                assert (
                    shown.value(f"Math.min(...{sizes}.map(e => parseFloat(getComputedStyle(e).fontSize)))")
                    >= SMALLEST_PX
                )
                assert shown.requests == [path.as_uri()]
                assert shown.said == []
        # Each of these would be noticed.
        shown.show(tmp_path / "wide.html", 390)
        assert shown.value("document.documentElement.scrollWidth") > 390
        shown.show(tmp_path / "hostile.html", 390)
        assert shown.value("document.title") == "asks"
        assert any("Content Security Policy" in line for line in shown.said)
