"""Defines what each kind of training gives to the training loop: its objective, data, batches and evaluation."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

from jax.sharding import AbstractMesh, Mesh

from jaxlm.config import Config
from jaxlm.data.batches.order import Order
from jaxlm.eval.harness import Benchmarks
from jaxlm.eval.held_out import Evaluator
from jaxlm.models.adapters import Adapter
from jaxlm.models.transformer import Transformer
from jaxlm.plan.settle import Settled
from jaxlm.plan.tune import tune
from jaxlm.run.checkpoints.mirror import Mirror
from jaxlm.run.metrics import Scores
from jaxlm.step.objectives import base
from jaxlm.step.parts import Parts, make
from jaxlm.step.state import TrainState
from jaxlm.train import hooks, loop
from jaxlm.train.origin import Origin


@dataclasses.dataclass(frozen=True)
class Ready:
    """Everything that a kind of training needs for its batches and evaluations.

    `base` identifies the origin of the frozen variables (`Origin.identity`); {} if nothing is frozen.
    """

    config: Config
    parts: Parts
    data: Order
    benchmarks: Benchmarks | None = None
    base: dict[str, str | int] = dataclasses.field(default_factory=dict)


class Kind:
    """One kind of training, made once for a run.

    Attributes:
      rows: ids whose rows of embedding and head learn at `optim.rows_lr_ratio` times the rate.
      keeps_origin: True if each start reads the origin again, so that the origin must not change.
      trained: what is trained in place of all parameters, in words for the first lines; "" if all are trained.
    """

    adapter: Adapter | None = None
    rows: tuple[int, ...] = ()
    keeps_origin = False
    trained = ""

    def objective(self, model: Transformer, config: Config) -> base.Objective:
        """Returns the objective to minimise."""

    def parts(self, config: Config, mesh: Mesh | AbstractMesh) -> Parts:
        return make(config, mesh, self.objective, self.adapter, self.rows)

    def data(self, config: Config) -> Order:
        """Returns the opened data, after building it if it is missing. Called on all processes."""

    def origin(self, config: Config) -> Origin | None:
        """Returns the weights to begin from; None for new ones."""

    def begin(self, ready: Ready, state: TrainState, frozen: base.Variables) -> Ready:
        """Returns `ready` with data or rollouts that need the model (`state`, `frozen`), before the first step of a start."""
        return ready

    def batches(self, ready: Ready, done: int, failed: Callable[[Exception], object]) -> loop.Batches:
        """Returns the batches of the steps after `done`. `failed`: see `batches.LoaderBatches`."""

    def held_out(self, ready: Ready) -> Evaluator | None:
        """Returns a function that measures the model on held-out text; None if no text is held out."""

    def watches(self, ready: Ready) -> Sequence[loop.Watch]:
        """Returns the watches that only this kind has."""
        return ()

    def remark(self, ready: Ready) -> hooks.Remark:
        """Returns a function that comments on the figures of evaluations and of samples."""
        return hooks.nothing


@dataclasses.dataclass(frozen=True)
class Opened:
    """A run whose folder is locked, with all that its attempts have in common; `ready` skips no batches yet.

    `mirror` is None without one, and on all processes but the first.
    """

    kind: Kind
    settled: Settled
    folder: pathlib.Path
    ready: Ready
    program: tune.Once
    scores: Scores
    mirror: Mirror | None
