"""The hooks and the watches of an attempt, in their order."""

import contextlib
import functools

import jax

from jaxlm.commands.train import pages
from jaxlm.commands.train.kind import Opened, Ready
from jaxlm.devices.processes import from_first, say, together
from jaxlm.eval import harness, samples
from jaxlm.run import ledger, metrics, signals
from jaxlm.run.checkpoints import meta
from jaxlm.run.checkpoints.store import Checkpointer
from jaxlm.run.clock import SAVE, Clock
from jaxlm.run.survive import notify
from jaxlm.train import announcement, hooks, outlook, phases, profile, stability, watches
from jaxlm.train.loop import Every, Hook, Watch


def make(
    opened: Opened,
    ready: Ready,
    checkpointer: Checkpointer,
    bill: phases.Phases,
    stop: signals.StopSignal,
    clock: Clock,
    stack: contextlib.ExitStack,
) -> tuple[list[Hook], list[Watch]]:
    """Returns the hooks and the watches. `stack` closes the files that they open."""
    c, kind, folder, scores, ends = ready.config, opened.kind, opened.folder, opened.scores, bill.milestones
    model, data, mesh, order = ready.parts.model, ready.data.data, ready.parts.mesh, ready.data
    # Overfit gets the training loss as a watch, and the held-out loss from the hook HeldOut.
    overfit = stability.Overfit(c.stability.overfit_evals, order.switch())
    sample = together(lambda: samples.make(c.sample, c.seed, model, data, folder))
    held_out, remark = bill.checked(kind.held_out(ready)), kind.remark(ready)
    trace = stack.enter_context(profile.Trace(c.profile.window, folder / "profile"))
    ask = harness.make(ready.benchmarks, c, model, data, mesh, folder)
    rows = folder / "metrics.jsonl"
    measured = from_first(lambda: list(metrics.benchmarked(rows, ledger.read(folder)["rollbacks"])))
    look, chooses = outlook.of_run(folder, c), c.checkpoint.best_metric.startswith("samples/")
    alive = functools.partial(clock.begin, SAVE, "room on the disk")
    often, failures, usd_per_hour = c.train.eval_every_steps, c.plan.preemptions_per_day, c.hardware.usd_per_hour
    at_start = {0} if c.eval.at_start else set()
    # Saving comes first, so that nothing is lost if a later hook fails; the bill after the hooks whose figures it reads.
    between = [
        trace,
        hooks.Save(
            checkpointer,
            c.checkpoint,
            failures,
            meta.of_run(ready.config, ready.data, ready.base),
            ends,
            scores.missing,
            alive,
        ),
        hooks.HeldOut(held_out, Every(often, ends | at_start), scores.losses, overfit.evaluated, remark),
        hooks.Benchmarks(ask, Every(c.eval.tasks_every_steps, ends), measured),
        hooks.Sample(sample, c.sample, folder, ends, remark, chooses),
        outlook.StopByForecast(look, c.stop, often),
        outlook.Report(look, c.stop, ends),
        bill,
        pages.Shown(c, folder, opened.mirror, Every(often, ends, end=False)),
        trace.begin,
    ]
    between = [hooks.Here(checkpointer.moved, between), *between]
    tell = stability.teller(folder / "spikes.jsonl", order.places, order.batch_number, say)
    beats = [notify.Heartbeat(c.notify)] if jax.process_index() == 0 else []
    return between, [  # the first one that ends the run counts
        watches.SaveInFlight(checkpointer, c.checkpoint, usd_per_hour, stop.ask),
        stability.NonFinite(c.train.max_nonfinite_steps, c.stability, checkpointer.hold),
        stability.Spikes(c.stability, tell, checkpointer.hold, order.switch()),
        overfit,
        *kind.watches(ready),
        *beats,
        announcement.FirstRate(clock, between, c.train.steps, bill.spent, usd_per_hour, say),
    ]
