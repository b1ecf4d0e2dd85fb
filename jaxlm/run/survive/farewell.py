"""Handles the end of a run: a cloud's notice of preemption, the mirror, messages, and the command that ends the rent.

The supervisor, if there is one, does all this, so it is done even after a crash; else the training process. Imports no JAX.
"""

import contextlib
import dataclasses
import datetime
import os
import pathlib
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence

from jaxlm.config import Config, ConfigError, RunError, milestones
from jaxlm.host.files import is_step
from jaxlm.run import ledger
from jaxlm.run.checkpoints.mirror import Mirror
from jaxlm.run.metrics import Scores
from jaxlm.run.survive import notify
from jaxlm.run.survive.children import within

READ_S = 10.0  # for each read of the run's folder; after that its content counts as unknown
_AROUND_COPY_S = 60.0  # for all reads before and after the copy to the mirror
_LOOK_S = 2.0  # between two looks into run.json for the first process's "mirrored"
_EVENTS = {0: "end", 3: "gate", 4: "end"}
_ASK_EVERY_S, _ANSWER_S = 5.0, 2.0  # of the cloud's own server


@dataclasses.dataclass(frozen=True)
class Start:
    """Identifies a start in run.json: its process id (None: any, on any host), and that it began at `since` or later."""

    pid: int | None
    since: float

    def ended(self, folder: pathlib.Path) -> dict:
        """Returns this start's ending in run.json; {} if it died before it wrote one, or nothing can be read."""
        starts = within(READ_S, lambda: ledger.read(folder)["starts"])
        with contextlib.suppress(LookupError, TypeError, ValueError):
            last = starts[-1]
            began = datetime.datetime.fromisoformat(last["time"]).timestamp()
            if began >= self.since and self.pid in (None, last.get("pid")):
                return last.get("ended") or {}
        return {}


def say_farewell(config: Config, code: int, start: Start, signalled: int | None = None) -> None:
    """Sends a message on how the last start ended. If `runs.on_exit` is set, completes the mirror and runs it. Never raises."""
    folder = pathlib.Path(config.workdir)
    ended = start.ended(folder)
    why, step = ended.get("why") or f"exit code {code}", ended.get("step")
    event = "budget" if ended.get("cause") == "budget" else _EVENTS.get(code, "crash")
    notify.tell(config.notify, event, f"{folder.name} ended with exit code {code}: {why}", folder, step)
    if any(dataclasses.astuple(config.runs.on_exit)):
        by_hand = notify.at_terminal(signalled)
        mirrored = by_hand or is_mirrored(config, folder, start)
        notify.at_exit(config.runs, code, why, mirrored, folder, step=step, by_hand=by_hand)
    notify.wait()


def open_mirror(
    config: Config, folder: pathlib.Path, scores: Scores, alive: Callable[[], None] = lambda: None
) -> Mirror | None:
    """Returns the mirror, after restoring the run from it if its folder was lost; None without a mirror. Raises as `Mirror`.

    Adds the scores in metrics.jsonl to `scores`. The mirror's rotation keeps milestones and the checkpoints best by `scores`.
    """
    c = config.checkpoint
    if not c.mirror:
        return None
    pinned = {phase.last for phase in milestones.planned(config.phases, config.train)}
    mirror = Mirror(c.mirror, c, folder, pinned=pinned, scores=scores)
    mirror.restore(alive)
    scores.read(folder)
    return mirror


def is_mirrored(config: Config, folder: pathlib.Path, start: Start) -> bool:
    """True if the mirror has the newest checkpoint (copied now if it was missing), or there is no mirror or no checkpoint."""
    if not config.checkpoint.mirror:
        return True
    checkpoints = within(READ_S, lambda: _checkpoints(folder))
    if not checkpoints:
        return checkpoints is not None
    seconds = config.checkpoint.mirror_timeout_s
    if config.distributed.process_id > 0:
        return _heard(folder, start, seconds)
    if start.ended(folder).get("mirrored"):
        return True
    # Tried with a short time-out first: the copy has a long one, and would wait for the same file.
    if within(READ_S, lambda: Scores(config.checkpoint).read(folder)) is None:
        return False
    return bool(within(seconds + _AROUND_COPY_S, lambda: _copied(config, folder, checkpoints)))


def _checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the folders of all checkpoints, whole or not."""
    try:
        return [path for path in (folder / "checkpoints").iterdir() if path.name[:1].isdecimal()]
    except FileNotFoundError:
        return []


def _copied(config: Config, folder: pathlib.Path, checkpoints: list[pathlib.Path]) -> bool:
    """Copies the newest verified checkpoint; returns True if the mirror then holds the newest of all."""
    with contextlib.suppress(ConfigError, RunError):
        mirror = open_mirror(config, folder, Scores(config.checkpoint))
        verified = [path.name for path in checkpoints if (path / "checksums.json").exists()]
        if steps := [int(name) for name in verified if is_step(name)]:
            mirror.begin(max(steps))
        return mirror.close(config.checkpoint.mirror_timeout_s)
    return False


def _heard(folder: pathlib.Path, start: Start, seconds: float) -> bool:
    """Waits until the first process, on another host, writes "mirrored" into run.json; returns whether it did."""
    end = time.monotonic() + seconds
    while not (mirrored := bool(start.ended(folder).get("mirrored"))) and time.monotonic() < end:
        time.sleep(_LOOK_S)
    return mirrored


def watch_for_notices(
    clouds: Sequence[str], act: Callable[[], None], say: Callable[[str], None], every_s: float = _ASK_EVERY_S
) -> Callable[[], None]:
    """Asks each of `clouds` (`runs.notices`) in its own thread, and calls `act` if a cloud takes this machine away.

    GCE says so 30 seconds before, AWS two minutes before. Returns a function that ends the threads. The environment variables
    GCE_METADATA_HOST and AWS_EC2_METADATA_SERVICE_ENDPOINT name other servers, as for the clouds' own libraries.
    """
    over = threading.Event()

    def ask(key: str) -> None:
        cloud, failed = CLOUDS[key](), False
        while not over.is_set():
            try:
                if words := cloud.notice():
                    say(f"{cloud.name} takes this machine away ({words}): the run stops, and its state is saved")
                    over.set()
                    return act()
            except (OSError, ValueError) as error:
                if not failed:
                    line = f"no answer from {cloud.server} ({error}); no notice is seen until it answers"
                    say(f"runs.notices={key}: {line}")
                failed = True
            over.wait(every_s)

    for key in clouds:
        threading.Thread(target=ask, args=(key,), daemon=True).start()
    return over.set


class Gce:
    """GCE's notice: https://cloud.google.com/compute/docs/instances/create-use-spot#detect-preemption"""

    name = "Google Compute Engine"

    def __init__(self):
        self.server = f"http://{os.environ.get('GCE_METADATA_HOST', 'metadata.google.internal')}"

    def notice(self) -> str:
        """Returns the cloud's notice that it takes this machine away; "" if there is none. Raises OSError."""
        url = f"{self.server}/computeMetadata/v1/instance/preempted"
        return "preempted" if _ask(url, headers={"Metadata-Flavor": "Google"}).upper() == "TRUE" else ""


class Aws:
    """AWS's notice: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html, by IMDSv2"""

    name = "AWS"

    def __init__(self):
        self.server = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")
        self._token = ""

    def notice(self) -> str:
        if not self._token:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
            self._token = _ask(f"{self.server}/latest/api/token", headers=ttl, method="PUT")
        url = f"{self.server}/latest/meta-data/spot/instance-action"
        try:
            return _ask(url, headers={"X-aws-ec2-metadata-token": self._token})
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return ""  # nothing is planned
            if error.code == 401:
                self._token = ""  # the token has expired
            raise


CLOUDS = {"gce": Gce, "aws": Aws}

# The clouds' servers are on the machine's own link: never through a proxy.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _ask(url: str, **request: object) -> str:
    with _opener.open(urllib.request.Request(url, **request), timeout=_ANSWER_S) as answer:
        return " ".join(answer.read(10_000).decode("utf-8", "replace").split())
