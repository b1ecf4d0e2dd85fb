"""A check that raises or hangs is a finding."""

import subprocess
import sys
import threading
import time

import pytest

from jaxlm.config import ConfigError
from jaxlm.plan.doctor import findings
from jaxlm.plan.doctor.findings import FAIL, OK, Finding


def test_what_a_check_returns_is_passed_on():
    one, two = Finding("a", OK, "fine"), Finding("b", FAIL, "not")
    assert findings.examine("x", lambda: one) == [one]
    assert findings.examine("x", lambda: [one, two]) == [one, two]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConfigError("the batch is odd"), "the batch is odd"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (KeyError("x"), "KeyError: 'x'"),
        (RuntimeError(""), "RuntimeError: "),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_an_error_is_a_finding(error, words):
    def check():
        raise error

    (found,) = findings.examine("loader", check)
    assert (found.name, found.verdict, found.text, found.hung) == ("loader", FAIL, words, False)


def test_a_check_that_hangs_is_left_behind():
    release, began = threading.Event(), time.monotonic()
    (found,) = findings.examine("disk", lambda: release.wait(30), seconds=0.05)
    assert time.monotonic() - began < 5
    assert (found.verdict, found.hung) == (FAIL, True)
    assert "no answer in 0.05 s" in found.text
    release.set()


def test_checks_that_answer_without_jax_import_none():
    code = (
        "import sys\nfrom jaxlm.commands import doctor\nfrom jaxlm.plan.doctor import gpu, storage, versions\n"
        "assert 'jax' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
