"""Reports a run to the outside: messages, a heartbeat, and the command that ends the rent of the machine.

https:// and http:// URLs are webhooks: they get JSON by POST, in the form that Slack, Discord and your own server can read.
All other schemes are sent by apprise (https://github.com/caronc/apprise), an extra. Nothing here raises into training or
holds it up, nor imports JAX.
"""

import atexit
import contextlib
import http.client
import importlib.util
import json
import logging
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable

from jaxlm.config import ConfigError, NotifyConfig, RunsConfig, pip_install
from jaxlm.host.console import say
from jaxlm.host.redact import redact, redact_url

TIMEOUT_S = 10.0  # of one try, and of the wait for messages under way when the program ends
TRIES = 3
PAUSE_S = 1.0  # before the second try; twice that before the third
MOST_CHARS = 1900  # Discord refuses more than 2000
COMMAND_S = 300.0  # of a command of runs.on_exit
CAUSES = {0: "done", 1: "failed", 2: "failed", 3: "gate", 4: "stopped"}  # exit code -> key of runs.on_exit
_HEADERS = {"User-Agent": "jaxlm", "Content-Type": "application/json"}  # Discord refuses urllib's own name

_senders: list[threading.Thread] = []
_told: set[str] = set()  # addresses whose failure was said
_lock = threading.Lock()


def check(notify: NotifyConfig) -> None:
    """Raises ConfigError if a URL is malformed, or needs apprise, which is not installed. Sends nothing."""
    for i, url in enumerate(notify.urls):
        _check_url(f"config.notify.urls[{i}]={_shown(url)}", url)
    if url := notify.heartbeat_url:
        shown = f"config.notify.heartbeat_url={_shown(url)}"
        if not _is_webhook(url):
            raise ConfigError(f"{shown} must begin with https:// or http://")
        _check_url(shown, url)


def _is_webhook(url: str) -> bool:
    return url.partition(":")[0].lower() in ("http", "https")


def _check_url(shown: str, url: str) -> None:
    if not re.fullmatch(r"[\w+]+://\S*", url):
        raise ConfigError(f"{shown} is no URL: write https://HOST/..., or as apprise does (mailto://, ntfy://, ...)")
    if _is_webhook(url):
        with contextlib.suppress(ValueError):
            parts = urllib.parse.urlsplit(url)
            if parts.hostname and parts.port != 0:  # `port` raises if it is no number
                return
        raise ConfigError(f"{shown} has no host, or no number as its port: write https://HOST[:PORT]/...")
    if not importlib.util.find_spec("apprise"):
        raise ConfigError(f"{shown} needs apprise: {pip_install('notify')}; https:// webhooks need nothing")
    if not _apprise(url):
        raise ConfigError(f"{shown} is refused by apprise: `apprise --help` and its wiki list the forms of URLs")


def tell(notify: NotifyConfig, event: str, text: str, workdir: str | os.PathLike, step: int | None = None) -> None:
    """Sends a message to all of `notify.urls` if `notify.events` names the event. Returns at once and never raises."""
    if event not in notify.events or not notify.urls:
        return
    run, host = pathlib.Path(workdir).name or str(workdir), socket.gethostname()
    message = f"jaxlm {event}: {run} on {host}{'' if step is None else f', step {step}'}: {text}"[:MOST_CHARS]
    body = {"text": message, "content": message, "event": event, "run": str(workdir), "host": host, "step": step}

    def send(url: str) -> str:
        if _is_webhook(url):
            return _request(url, json.dumps(body).encode())
        sender = _apprise(url)
        sent = sender and sender.notify(message, title=f"jaxlm {event}: {run}")
        return "" if sent else "apprise could not deliver it"

    for i, url in enumerate(notify.urls):
        _beside(f"notify.urls[{i}]", url, send)


class Heartbeat:
    """Requests `notify.heartbeat_url` (GET) at most every `heartbeat_minutes` while steps go on: silence is the alarm.

    A watch of the training loop (`train.loop.Watch`), which reads no metrics.
    """

    reads = ()

    def __init__(self, notify: NotifyConfig):
        self._url, self._every_s = notify.heartbeat_url, 60 * notify.heartbeat_minutes
        self._last: tuple[float, int] | None = None

    def __call__(self, step: int, record: dict[str, float]) -> None:
        """Notes that training has done `step` steps. Returns at once and never raises."""
        now = time.monotonic()
        if not self._url or (self._last and (now - self._last[0] < self._every_s or step == self._last[1])):
            return
        self._last = (now, step)
        _beside("notify.heartbeat_url", self._url, _request)


def wait(seconds: float = TIMEOUT_S) -> None:
    """Waits until all messages under way are sent or given up, at most for `seconds`."""
    end = time.monotonic() + seconds
    for thread in list(_senders):
        thread.join(max(0.0, end - time.monotonic()))


atexit.register(wait)


def _beside(key: str, url: str, send: Callable[[str], str]) -> None:
    """Calls `send` in a thread until it returns "" (sent) or has failed TRIES times."""

    def work() -> None:
        for attempt in range(TRIES):
            time.sleep(PAUSE_S * attempt)
            if not (problem := _attempt(send, url)):
                return
        with _lock:
            first = url not in _told
            _told.add(url)
        if first:
            reason = f"can't be reached: {problem}"
            say(f"config.{key} ({_shown(url)}) {reason}; the run goes on, and this is not said again")

    thread = threading.Thread(target=work, name="notify", daemon=True)
    with contextlib.suppress(RuntimeError):  # no more threads, or Python is ending
        thread.start()
        _senders[:] = [*filter(threading.Thread.is_alive, _senders), thread]


def _attempt(send: Callable[[str], str], url: str) -> str:
    """Returns why one try failed; "" if it succeeded. No library's error, whatever its class, may end training."""
    try:
        return send(url)
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}"
    except urllib.error.URLError as error:
        return str(error.reason)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"{type(error).__name__}: {error}"[:200]
    except Exception as error:
        return type(error).__name__


def _request(url: str, body: bytes | None = None) -> str:
    request = urllib.request.Request(url, data=body, headers=_HEADERS)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
        reply.read(1)
    return ""


def _apprise(url: str):  # the class is apprise's, which may not be installed
    """Returns apprise's sender for one URL; None if apprise knows no such URL. Silences apprise's log, which shows URLs."""
    import apprise

    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)
    return apprise.Apprise.instantiate(url, suppress_exceptions=True)


def at_exit(
    runs: RunsConfig,
    code: int,
    why: str,
    mirrored: bool,
    workdir: str | os.PathLike,
    *,
    step: int | None = None,
    by_hand: bool = False,
) -> None:
    """Runs the command of `runs.on_exit` for this exit code, in a shell. Returns after it ended, and never raises.

    The command sees JAXLM_CODE, JAXLM_WHY and JAXLM_WORKDIR, has COMMAND_S seconds, and runs after messages under way, because
    it may end the machine. It does not run if a person stopped the run `by_hand` (`at_terminal`), nor before the newest
    checkpoint is mirrored, unless `runs.on_exit_unmirrored` allows it.
    """
    cause = CAUSES.get(code, "failed")
    key, command = f"runs.on_exit.{cause}", getattr(runs.on_exit, cause)
    if not command:
        return None
    if by_hand:
        return say(f"{key} not run: ctrl-C at a terminal leaves the machine to you")
    if not mirrored and not runs.on_exit_unmirrored:
        what = "the last checkpoint" if step is None else f"step {step}"
        return say(f"{key} not run: {what} is not in the mirror yet")
    wait()
    say(f"{key}: {redact(command)}")
    with contextlib.suppress(OSError):  # a relative path, and the folder in which the command was given is gone
        workdir = os.path.abspath(workdir)
    facts = {"JAXLM_CODE": str(code), "JAXLM_WHY": why.replace("\0", ""), "JAXLM_WORKDIR": str(workdir)}
    try:
        _shell(command, os.environ | facts, key)
    except (OSError, ValueError) as error:
        say(f"{key} can't be run: {error}")


def at_terminal(number: int | None) -> bool:
    """Returns True if signal `number` is SIGINT and a terminal is at standard input: a person pressed ctrl-C."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # there is no standard input, or it is closed
        return number == signal.SIGINT and os.isatty(sys.__stdin__.fileno())
    return False


def _shell(command: str, environment: dict[str, str], key: str) -> None:
    """Runs the command in a session of its own, so that no ctrl-C or hang-up of this process ends it."""
    process = subprocess.Popen(
        command,
        shell=True,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=2,
        start_new_session=True,
        restore_signals=False,  # SIGPIPE stays ignored: a line that nobody reads does not end the command
    )
    try:
        if code := process.wait(COMMAND_S):
            say(f"{key} failed with exit code {code}; the machine may still run")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        say(f"{key} was ended: it took more than {COMMAND_S:g} s; the machine may still run")


def _shown(url: str) -> str:
    return redact_url(url, webhook=True)
