"""The two pages that training writes: what its data consists of, and how the run went. They link to each other."""

import dataclasses
import functools
import os
import pathlib
import threading
import time

from jaxlm.config import Config
from jaxlm.corpus import recipes
from jaxlm.host import console
from jaxlm.report import markup, run_page
from jaxlm.run import ledger
from jaxlm.run.checkpoints.mirror import Mirror
from jaxlm.train import outlook
from jaxlm.train.loop import Every, Hook, Moment

_LEFT_OUT = "audit and mismatch report: jaxlm prepare, with the same config, adds them"


def of_data(config: Config) -> None:
    """Writes DATA/report.html if `data.dir` holds prepared documents but no page, in a second. An error never ends the run."""
    root = pathlib.Path(config.data.dir)
    try:
        if (root / markup.NAME).exists() or not (root / recipes.MANIFEST).is_file():
            return
        from jaxlm.commands import data_report
        from jaxlm.corpus import prepare  # here, because the libraries of these two take a second to import

        written = data_report.write(config, prepare.open_prepared(root), {"left_out": _LEFT_OUT, "run": config.workdir})
        console.say(f"what the data is made of: {written}")
    except Exception as error:  # no page is worth losing a run
        console.say(f"{root / markup.NAME} is not written: {type(error).__name__}: {error}")


_PAUSE_S = 60  # between two pages for the mirror: each copies the logs too
_WRITING = threading.Lock()  # two threads must not write the page at once


def of_run(config: Config, folder: pathlib.Path, foretells: bool = True) -> None:
    """Writes RUN/report.html from all that the run's files say; the forecast is left out unless it `foretells`.

    An error never ends the run.
    """
    try:
        with _WRITING:
            if foretells:
                run_page.write(folder / markup.NAME, outlook.of_run(folder, config).summary(config.stop))
            elif "ended" not in (ledger.read(folder)["starts"] or [{}])[-1]:  # else the last page is written already
                run_page.write(folder / markup.NAME, outlook.gather(folder))
    except Exception as error:
        console.say(f"{folder / markup.NAME} is not written: {type(error).__name__}: {error}")


@dataclasses.dataclass(eq=False)
class Shown(Hook):
    """Has the run's page written and copied to its mirror, where others can watch it. The loop waits for neither.

    The forecast is left out: it would compile and run on the device that trains.

    Args:
      mirror: None without one, and on all processes but the first.
    """

    config: Config
    folder: pathlib.Path
    mirror: Mirror | None
    every: Every
    at: float = float("-inf")  # when it was last asked for
    name = "page"
    decoration = True

    def due(self, step: int, end: int) -> bool:
        return bool(self.config.checkpoint.mirror) and self.every.due(step, end)

    def done(self, step: int) -> bool:
        return True

    def __call__(self, moment: Moment) -> None:
        if self.mirror and time.monotonic() - self.at >= _PAUSE_S:
            self.at = time.monotonic()
            self.mirror.show(functools.partial(of_run, self.config, self.folder, foretells=False))


def to_open(folder: pathlib.Path) -> list[str]:
    """Returns a line with the path of the run's page; [] if there is no page."""
    path = folder / markup.NAME
    return [f"open {path}"] if os.path.isfile(path) else []
