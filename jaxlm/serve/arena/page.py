"""The page on which people vote, by NiceGUI. Before a vote it holds only the prompt and the two answers."""

import importlib.util
import pathlib
import socket
import time

from jaxlm.config import ConfigError, RunError, pip_install
from jaxlm.host.console import say
from jaxlm.serve.arena.store import BOTH_BAD, BOTH_GOOD, LEFT, RIGHT, SKIP, Store

_TITLE = "Arena"
_STYLE = pathlib.Path(__file__).with_suffix(".css")
_AGAIN_S = 0.6  # a click this soon after a ballot appeared is the second half of a double click: nobody reads so fast
_LONGEST_NAME = 40
_CHOICES = (  # label, choice, keys
    ("← Left", LEFT, ("ArrowLeft",)),
    ("Both good", BOTH_GOOD, ("t",)),
    ("Both bad", BOTH_BAD, ("b",)),
    ("Skip", SKIP, ("s",)),
    ("Right →", RIGHT, ("ArrowRight",)),
)
_NEXT_KEYS = ("Enter", " ", "n")


def check() -> None:
    if importlib.util.find_spec("nicegui") is None:
        raise ConfigError(f"the page needs NiceGUI: {pip_install('arena')}")


def serve(store: Store, listening: socket.socket, reveal: bool) -> None:
    """Shows the page until ctrl-C, which raises KeyboardInterrupt. `reveal`: after each vote it names the answers' authors."""
    import fastapi
    import uvicorn
    from nicegui import app, ui

    from jaxlm.serve.guard import Arriving, Guard, is_loopback

    @ui.page("/")
    def page() -> None:
        ui.add_css(_STYLE)
        _Page(store, app.storage.browser["id"], reveal).show()

    site = fastapi.FastAPI(openapi_url=None)
    ui.run_with(
        site, title=_TITLE, dark=None, tailwind=False, storage_secret=store.secret(), show_welcome_message=False
    )
    guarded = Guard(site, is_loopback(listening.getsockname()[0]), "start the arena with --host=ADDRESS")
    config = uvicorn.Config(guarded, http=Arriving, log_level="error", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listening])


class _Page:
    """The page in one tab."""

    def __init__(self, store: Store, browser: str, reveal: bool):
        from nicegui import ui

        self._ui, self._store, self._browser, self._reveal = ui, store, browser, reveal
        self._rater, self._ballot, self._voted, self._since = store.rater(browser), None, "", 0.0
        self._body = ui.element("main")
        ui.keyboard(on_key=self._key, repeating=False)

    def show(self) -> None:
        """Shows the next view: the question for a name, a ballot, or thanks."""
        self._voted, self._ballot = "", self._store.ballot(self._rater) if self._rater else None
        self._since = time.monotonic()
        self._body.clear()
        with self._body:
            if not self._rater:
                self._ask()
            elif self._ballot:
                self._battle()
            else:
                self._top()
                self._ui.html("<h1>Thank you: that was all</h1><p>You have judged every pair.</p>", sanitize=False)

    def _ask(self) -> None:
        with self._ui.element("div").classes("ask"):
            self._ui.html(
                "<h1>Which answer is better?</h1><p>You see a prompt with two answers, and say which is better. "
                "Who wrote them is hidden. Your name keeps your votes together.</p>",
                sanitize=False,
            )
            name = self._ui.input("Your name").props("outlined autofocus maxlength=40")

            def go() -> None:
                if rater := " ".join((name.value or "").split())[:_LONGEST_NAME]:
                    self._store.welcome(self._browser, rater)
                    self._rater = rater
                    self.show()

            name.on("keydown.enter", go)
            self._button("Begin", go, "main")

    def _top(self) -> None:
        done, total = self._store.progress(self._rater)
        with self._ui.element("div").classes("top"):
            self._ui.label(f"{done:,} of {total:,} judged")
            self._ui.label(self._rater)

    def _battle(self) -> None:
        self._top()
        self._ui.label(self._ballot.prompt).classes("said prompt")
        names = (self._voted and self._reveal and self._store.revealed(self._ballot.token)) or ("Left", "Right")
        with self._ui.element("div").classes("sides"):
            sides = ((self._ballot.left, LEFT), (self._ballot.right, RIGHT))
            for title, (text, side) in zip(names, sides, strict=True):
                with self._ui.element("section").classes("side won" if self._voted == side else "side"):
                    with self._ui.element("h2"):
                        self._ui.label(title)
                    self._ui.label(text or "(no text)").classes("said")
        with self._ui.element("div").classes("bar"):
            with self._ui.element("div").classes("buttons"):
                if self._voted:
                    self._button("Next", self._next, "main alone")
                else:
                    for words, choice, _ in _CHOICES:
                        main = "main" if choice in (LEFT, RIGHT) else ""
                        self._button(words, lambda choice=choice: self._vote(choice), main)
            keys = "Enter: next" if self._voted else "keys: ← left, → right, t both good, b both bad, s skip"
            self._ui.label(keys).classes("keys")

    def _button(self, words: str, does, classes: str = "") -> None:
        with self._ui.element("button").classes(classes).on("click", lambda: does(), args=[]):
            self._ui.label(words)

    def _key(self, event) -> None:
        if not event.action.keydown or any((event.modifiers.ctrl, event.modifiers.alt, event.modifiers.meta)):
            return
        key = str(event.key.name)
        if self._voted and key in _NEXT_KEYS:
            self._next()
        for _, choice, keys in _CHOICES:
            if key in keys:
                self._vote(choice)

    # The choice and the ballot are known on the server only: the page holds neither a button's value nor the ballot's token.
    def _vote(self, choice: str) -> None:
        if not self._ballot or self._voted or self._too_soon():
            return
        try:
            counted = self._store.vote(self._ballot.token, self._rater, choice)
        except RunError as error:
            say(f"a vote was lost: {error}")
            return self._ui.notify(
                "Your vote could not be kept: tell whoever runs this page, then vote again", type="negative"
            )
        if not (counted and self._reveal):  # or another tab has voted: on to the next
            return self.show()
        self._voted, self._since = choice, time.monotonic()
        self._body.clear()
        with self._body:
            self._battle()

    def _next(self) -> None:
        if not self._too_soon():
            self.show()

    def _too_soon(self) -> bool:
        return time.monotonic() - self._since < _AGAIN_S
