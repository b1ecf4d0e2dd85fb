"""Asks a cloud whether it is about to take this machine away.

GCE sets a flag 30 seconds before, AWS two minutes before. Others, such as RunPod, say nothing, or SIGTERM 5 seconds
before: there only what is already saved counts.
"""

import os
import threading
import typing
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence

_EVERY_S = 5.0
_TIMEOUT_S = 2.0
_NAMES = {"gce": "Google Compute Engine", "aws": "AWS"}
# These servers are on the machine's own link: never through a proxy.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def watch(
    clouds: Sequence[str], act: Callable[[], None], say: Callable[[str], None], every_s: float = _EVERY_S
) -> Callable[[], None]:
    """Asks each of `clouds` (`runs.notices`) in a thread of its own, and calls `act` once if one says yes.

    Returns a function that ends the threads. The environment variables GCE_METADATA_HOST and
    AWS_EC2_METADATA_SERVICE_ENDPOINT name other servers than the usual ones, as the clouds' own libraries take them.
    """
    over = threading.Event()

    def ask(cloud: str) -> None:
        told, asker = False, {"gce": Gce, "aws": Aws}[cloud]()
        while not over.is_set():
            try:
                if words := asker.notice():
                    say(f"{_NAMES[cloud]} takes this machine away ({words}): the run stops, and its state is saved")
                    over.set()
                    act()
                    return
            except (OSError, ValueError) as error:
                if not told:
                    say(
                        f"runs.notices={cloud}: no answer from {asker.server} ({error}); no notice is seen until it answers"
                    )
                told = True
            over.wait(every_s)

    for cloud in clouds:
        threading.Thread(target=ask, args=(cloud,), daemon=True).start()
    return over.set


class Gce:
    """https://cloud.google.com/compute/docs/instances/create-use-spot#detect-preemption"""

    def __init__(self):
        self.server = f"http://{os.environ.get('GCE_METADATA_HOST', 'metadata.google.internal')}"

    def notice(self) -> str:
        """Returns what the cloud says of the end of this machine; "" if it says nothing. Raises OSError."""
        url = f"{self.server}/computeMetadata/v1/instance/preempted"
        said = _ask(url, headers={"Metadata-Flavor": "Google"})
        return "preempted" if said.strip().upper() == "TRUE" else ""


class Aws:
    """https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html, by IMDSv2"""

    def __init__(self):
        self.server = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")
        self._token = ""

    def notice(self) -> str:
        """Returns what the cloud says of the end of this machine; "" if it says nothing. Raises OSError."""
        if not self._token:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
            self._token = _ask(f"{self.server}/latest/api/token", headers=ttl, method="PUT")
        url = f"{self.server}/latest/meta-data/spot/instance-action"
        try:
            return " ".join(_ask(url, headers={"X-aws-ec2-metadata-token": self._token}).split())
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return ""  # nothing is planned
            if error.code == 401:
                self._token = ""  # it has run out
            raise


def _ask(url: str, **request: typing.Any) -> str:
    with _opener.open(urllib.request.Request(url, **request), timeout=_TIMEOUT_S) as answer:
        return answer.read(10_000).decode("utf-8", "replace")
