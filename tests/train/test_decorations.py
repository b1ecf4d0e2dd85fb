"""What only decorates a run never ends it: each place says a line, and the run goes on. (Hooks: `test_loop.py`.)"""

import pathlib
import types

import jax
import pytest

from jaxlm import config
from jaxlm.commands.train import pages, run
from jaxlm.config import config_files
from jaxlm.host import console
from jaxlm.run import metrics
from jaxlm.train import outlook, profile
from jaxlm.train.rl import rollouts


def writer(folder: pathlib.Path) -> metrics.Writer:
    return metrics.Writer(folder, types.SimpleNamespace(tensorboard=True, wandb=""), {})


def tensorboard_that_does_not_start(folder, patch):
    patch.setattr(metrics.platform, "node", fails)
    made = writer(folder)
    made.write({"step": 1, "loss": 1.0})
    made.close()
    assert (folder / "metrics.jsonl").read_text().count("loss") == 1
    return "TensorBoard can't be used: no luck; training goes on"


def tensorboard_that_can_not_write(folder, patch):
    patch.setattr("tensorboardX.summary.scalar", fails)
    made = writer(folder)
    made.write({"step": 1, "loss": 1.0})
    made.close()
    assert (folder / "metrics.jsonl").read_text().count("loss") == 1
    return "TensorBoard can't be written to: no luck; training goes on"


def page_of_the_data(folder, patch):
    (folder / "prepared.json").write_text("{")
    patch.setattr(pathlib.Path, "exists", fails)
    pages.of_data(resolved(folder, f"data.dir={folder}"))
    return "report.html is not written: OSError: no luck"


def page_of_the_run(folder, patch):
    patch.setattr(outlook, "of_run", fails)
    pages.of_run(resolved(folder), folder)
    return "report.html is not written: OSError: no luck"


def link_to_the_page(folder, patch):
    patch.setattr(pathlib.Path, "is_file", fails)
    assert pages.to_open(folder) == []
    return ""


def answers_of_a_policy(folder, patch):
    (folder / rollouts.FOLDER).write_text("a file")
    rollouts.Rollouts._write(types.SimpleNamespace(folder=folder), 3, [], [], [], {})
    return "the answers of step 3 are not written: [Errno 17] File exists"


def speed_for_the_doctor(folder, patch):
    (folder / "metrics.jsonl").mkdir()
    run._record_speed(resolved(folder), jax.make_mesh((1,), ("x",)), folder)
    return ""


def end_of_a_trace(folder, patch):
    patch.setattr(jax.profiler, "stop_trace", fails)
    with profile.Trace((1, 2), folder) as trace:
        trace.running = True
    return "is not whole: OSError: no luck"


def log(folder, patch):
    (folder / console.LOG).mkdir()
    console.keep(folder / console.LOG)
    console.say("a line")
    console.settle()
    return "a line"


def fails(*args, **kwargs):
    raise OSError("no luck")


def resolved(folder: pathlib.Path, *overrides: str) -> config.Config:
    return config.resolve(config_files.load("quickstart", [f"workdir={folder}", *overrides]))


PLACES = [
    tensorboard_that_does_not_start,
    tensorboard_that_can_not_write,
    page_of_the_data,
    page_of_the_run,
    link_to_the_page,
    answers_of_a_policy,
    speed_for_the_doctor,
    end_of_a_trace,
    log,
]


@pytest.mark.parametrize("place", PLACES)
def test_a_decoration_that_fails_is_a_line(tmp_path, capfd, place):
    with pytest.MonkeyPatch.context() as patch:
        said = place(tmp_path, patch)
    assert said in capfd.readouterr().err


def test_the_hooks_that_decorate():
    trace = profile.Trace(None, pathlib.Path())
    assert all(hook.decoration for hook in (trace, trace.begin, outlook.Report))
