"""The hooks and the watches of a run, in their order."""

import contextlib
import dataclasses
import functools
import pathlib

import jax

from jaxlm.commands.train.kind import Kind, Ready
from jaxlm.devices.processes import from_first, say, together
from jaxlm.eval import harness, samples
from jaxlm.host.redact import redact
from jaxlm.run import ledger, metrics, signals
from jaxlm.run.checkpoints.mirror import Mirror
from jaxlm.run.checkpoints.store import Checkpointer
from jaxlm.run.clock import SAVE, Clock
from jaxlm.run.scores import Scores
from jaxlm.run.survive import notify
from jaxlm.train import announcement, hooks, outlook, phases, profile, stability, watches
from jaxlm.train.loop import Every, Hook, Watch


@dataclasses.dataclass(frozen=True)
class Between:
    """Makes what runs between the steps of an attempt.

    Attributes:
      checkpointer: the run's checkpoints.
      bill: the phases, with what earlier starts spent.
      scores: the held-out losses, and by what the best checkpoints are chosen; shared with the checkpointer.
      stop: how a signal, or one of several processes, ends the run.
      clock: the time of this attempt.
    """

    kind: Kind
    ready: Ready
    folder: pathlib.Path
    checkpointer: Checkpointer
    bill: phases.Phases
    scores: Scores
    stop: signals.StopSignal
    clock: Clock

    def make(self, stack: contextlib.ExitStack) -> tuple[list[Hook], list[Watch]]:
        """Returns the hooks and the watches. What they open is closed with `stack`."""
        hooks = self._hooks(stack)
        return hooks, self._watches(hooks)

    def _hooks(self, stack: contextlib.ExitStack) -> list[Hook]:
        """Returns the hooks. Saving comes first, so that nothing is lost if a later one fails; the bill after what it reads."""
        c, folder, ends = self.ready.config, self.folder, self.bill.milestones
        model, data, mesh = self.ready.parts.model, self.ready.data.data, self.ready.parts.mesh
        sample = together(lambda: samples.make(c.sample, c.seed, model, data, folder))
        held_out = self.bill.checked(self.kind.held_out(self.ready))
        remark = self.kind.remark(self.ready)
        trace = stack.enter_context(profile.Trace(c.profile.window, folder / "profile"))
        asked = harness.make(self.ready.benchmarks, c, model, data, mesh, folder)
        rows = folder / "metrics.jsonl"
        measured = from_first(lambda: list(metrics.benchmarked(rows, ledger.read(folder)["rollbacks"])))
        look, chooses = outlook.of_run(folder, c), c.checkpoint.best_metric.startswith("samples/")
        alive = functools.partial(self.clock.begin, SAVE, "room on the disk")
        save = hooks.Save(
            self.checkpointer, c.checkpoint, c.plan.preemptions_per_day, self._meta(), ends, self.scores.missing, alive
        )
        every, on_loss = c.train.eval_every_steps, (self.scores.losses, self.overfit.evaluated)
        made = [
            trace,
            save,
            hooks.HeldOut(held_out, Every(every, ends | {0} if c.eval.at_start else ends), *on_loss, remark),
            hooks.Benchmarks(asked, Every(c.eval.tasks_every_steps, ends), measured),
            hooks.Sample(sample, c.sample, folder, ends, remark, chooses),
            outlook.StopByForecast(c.stop, look.losses, look.rate, look.prices, every, str(folder)),
            outlook.Report(look, c.stop, ends),
            self.bill,
            trace.begin,
        ]
        return [hooks.Here(self.checkpointer.moved, made), *made]

    def _watches(self, between: list[Hook]) -> list[Watch]:
        """Returns the watches, of which the first that ends the run counts."""
        c, data = self.ready.config, self.ready.data
        usd_per_hour = c.hardware.usd_per_hour
        documents = functools.partial(self.kind.documents, data)
        tell = stability.teller(self.folder / "spikes.jsonl", documents, data.batch_number, say)
        alive = [watches.Alive(notify.Heartbeat(c.notify).beat)] if jax.process_index() == 0 else []
        return [
            watches.SaveInFlight(self.checkpointer, c.checkpoint, usd_per_hour, self.stop.ask),
            stability.NonFinite(c.train.max_nonfinite_steps, c.stability, self.checkpointer.hold),
            stability.Spikes(c.stability, tell, self.checkpointer.hold, self.kind.switch(data)),
            self.overfit,
            *self.kind.watches(self.ready),
            *alive,
            announcement.FirstRate(self.clock, between, c.train.steps, self.bill.spent, usd_per_hour, say),
        ]

    @functools.cached_property
    def overfit(self) -> stability.Overfit:
        """Sees the training loss as a watch, and the held-out loss by its hook."""
        return stability.Overfit(self.ready.config.stability.overfit_evals, self.kind.switch(self.ready.data))

    def _meta(self) -> dict:
        """What goes into each checkpoint beside the arrays. A checkpoint is given to others: it holds no secrets."""
        data, base = self.ready.data, self.ready.base
        return {
            "config": redact(dataclasses.asdict(self.ready.config)),
            "fingerprint": data.fingerprint(),
            "passed_over": [list(window) for window in data.passed_over],
        } | ({"base": base} if base else {})


def follow(checkpointer: Checkpointer, mirror: Mirror, done: int) -> None:
    """Copies each checkpoint to the mirror once it is verified, and now the one of step `done`, from which the run goes on."""
    checkpointer.on_verified.append(lambda step, folder: mirror.begin(step))
    checkpointer.spared = mirror.wanted
    if mirror.latest() != done and (done == 0 or checkpointer.verified(done)):
        mirror.roll_back(done)
