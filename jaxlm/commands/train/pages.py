"""The two pages that training writes: what its data consists of, and how the run went. They link to each other."""

import os
import pathlib

from jaxlm.config import Config
from jaxlm.corpus import recipes
from jaxlm.host import console
from jaxlm.report import markup
from jaxlm.train import outlook

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


def of_run(config: Config, folder: pathlib.Path) -> None:
    """Writes RUN/report.html from all that the run's files say. An error never ends the run."""
    try:
        outlook.write(folder, outlook.of_run(folder, config).summary(config.stop))
    except Exception as error:
        console.say(f"{folder / markup.NAME} is not written: {type(error).__name__}: {error}")


def to_open(folder: pathlib.Path) -> list[str]:
    """Returns a line with the path of the run's page; [] if there is no page."""
    path = folder / markup.NAME
    return [f"open {path}"] if os.path.isfile(path) else []
