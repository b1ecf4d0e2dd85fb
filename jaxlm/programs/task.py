"""What a kind of training gives to the one loop: its objective, data, batches and evaluation."""

import dataclasses
import typing
from collections.abc import Callable, Sequence

from jax.sharding import AbstractMesh, Mesh

from jaxlm.config import Config
from jaxlm.data.coder import Encoded
from jaxlm.eval.harness import Benchmarks
from jaxlm.objectives import base
from jaxlm.step import parts as parts_lib
from jaxlm.step.state import TrainState
from jaxlm.train import hooks, loop
from jaxlm.train.origin import Origin
from jaxlm.train.stability import Window


class Data(typing.Protocol):
    """The data that a run trains on; `data` holds the tokenizer."""

    data: Encoded
    passed_over: Sequence[Window]

    def fingerprint(self) -> dict[str, str]:
        """Returns everything that decides the batches. A run resumes only if its fingerprint is the same."""

    def passing_over(self, windows: Sequence[Window]) -> "Data":
        """Returns the same data without some batches. A window is the numbers of its first and last batch."""

    def batch_number(self, step: int) -> int:
        """Returns the number, from 1, of the batch of `step`: `step`, unless batches are passed over; 0 for step 0."""


@dataclasses.dataclass(frozen=True)
class Ready:
    """Everything from which a task makes its batches and evaluations.

    Attributes:
      benchmarks: those of `eval.tasks`; None without.
      base: what identifies the origin of the frozen variables (`Origin.identity`); {} if nothing is frozen.
    """

    config: Config
    parts: parts_lib.Parts
    data: Data
    benchmarks: Benchmarks | None = None
    base: dict[str, str | int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Task:
    """One kind of training.

    Attributes:
      objective: (model, config) -> the objective to minimise.
      data: config -> the opened data. It makes the data first if there is none. Called on all processes.
      batches: (ready, done) -> the batches of the steps that follow after `done` steps.
      held_out: ready -> a function `variables -> metrics`; None if no text is held out.
      adapter: what to train instead of the model's parameters, if anything.
      rows: ids whose rows of embedding and head learn at `optim.rows_lr_ratio` times the rate.
      origin: config -> the weights to begin from; None for new ones.
      keeps_origin: True if each start reads the origin again, so that it must stay what it was. Always so if the model's
        parameters are frozen.
      passes: (data, steps) -> source -> how many times a run of so many steps goes through it, for the first lines.
      switch: data -> the last step before it draws by another mixture, so that losses before and after can't be compared;
        None if it keeps one.
      documents: (data, step) -> the ids of the documents in the batch of a step, for the log.
      begin: (ready, state, frozen variables) -> ready with what must be known of the model before its first step; called at
        each start, with the state that it goes on from.
      watches: ready -> watches of this kind of training, beside those of all.
      remark: ready -> (step, figures of an evaluation or of samples) -> (more figures, lines for the user).
      trained: what is trained in place of all parameters, in words for the first lines; "" if all are.
      next_command: the command to try on what comes out, for the last line; {} stands for the run.
    """

    objective: base.Maker
    data: Callable[[Config], Data]
    batches: Callable[[Ready, int], loop.Batches]
    held_out: Callable[[Ready], Callable[[base.Variables], dict[str, float]] | None]
    adapter: parts_lib.Adapter | None = None
    rows: tuple[int, ...] = ()
    origin: Callable[[Config], Origin | None] = lambda config: None
    keeps_origin: bool = False
    passes: Callable[[Data, int], dict[str, float]] = lambda data, steps: {}
    switch: Callable[[Data], int | None] = lambda data: None
    documents: Callable[[Data, int], list[str]] = lambda data, step: []
    begin: Callable[[Ready, TrainState, base.Variables], Ready] = lambda ready, state, frozen: ready
    watches: Callable[[Ready], Sequence[loop.Watch]] = lambda ready: ()
    remark: Callable[[Ready], hooks.Remark] = lambda ready: hooks.nothing
    trained: str = ""
    next_command: str = 'jaxlm sample {} "Once upon a time"'

    def parts(self, config: Config, mesh: Mesh | AbstractMesh) -> parts_lib.Parts:
        """Returns the parts of a config for this kind of training."""
        return parts_lib.make(config, mesh, self.objective, self.adapter, self.rows)
