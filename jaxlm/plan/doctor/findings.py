"""The findings of a check, and `examine`, which runs a check so that the doctor neither fails nor hangs with it."""

import dataclasses
from collections.abc import Callable

from jaxlm.config import ConfigError, RunError
from jaxlm.config.config_files import first_line
from jaxlm.host.files import NoAnswer, within

OK, WARN, FAIL = "ok", "warn", "FAIL"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
      verdict: OK; WARN = the run will start, but someone should know; FAIL = the run would fail or can't be trusted.
      text: the finding in words, and if the verdict is not OK, how to fix it.
      figures: the measured values by name, of types that JSON has; sizes are in bytes, times in seconds.
    """

    name: str
    verdict: str
    text: str
    figures: dict = dataclasses.field(default_factory=dict)

    @property
    def hung(self) -> bool:
        return self.figures.get("hung", False)

    def __str__(self) -> str:
        return f"{self.verdict:<4}  {self.name:<10}  {self.text}"


def examine(name: str, check: Callable[[], "Finding | list[Finding]"], seconds: float = 30.0) -> list[Finding]:
    """Returns the findings of a check; if it raises or takes over `seconds`, one finding with the verdict FAIL."""
    try:
        findings = within(seconds, check)
    except NoAnswer as late:
        return [Finding(name, FAIL, f"the check hangs: {late}", {"hung": True})]
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of a Rust library too
        return [Finding(name, FAIL, words(error))]
    return findings if isinstance(findings, list) else [findings]


def words(error: BaseException) -> str:
    """Returns an error in one line, with its class name unless it is a ConfigError, a RunError or an OSError."""
    line = first_line(error)[:300]
    return line if line and isinstance(error, OSError | ConfigError | RunError) else f"{type(error).__name__}: {line}"
