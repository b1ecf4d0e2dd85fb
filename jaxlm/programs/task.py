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
from jaxlm.train import loop
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
    """Everything from which a task makes its batches and evaluations. `benchmarks`: those of `eval.tasks`; None without."""

    config: Config
    parts: parts_lib.Parts
    data: Data
    benchmarks: Benchmarks | None = None


@dataclasses.dataclass(frozen=True)
class Task:
    """One kind of training.

    Attributes:
      objective: (model, config) -> the objective to minimise.
      data: config -> the opened data. It makes the data first if there is none. Called on all processes.
      batches: (ready, done) -> the batches of the steps that follow after `done` steps.
      held_out: ready -> a function `variables -> metrics`; None if no text is held out.
      adapter: what to train instead of the model's parameters, if anything.
      origin: config -> the weights to begin from; None for new ones.
      passes: (data, steps) -> source -> how many times a run of so many steps goes through it, for the first lines.
      documents: (data, step) -> the ids of the documents in the batch of a step, for the log.
    """

    objective: base.Maker
    data: Callable[[Config], Data]
    batches: Callable[[Ready, int], loop.Batches]
    held_out: Callable[[Ready], Callable[[base.Variables], dict[str, float]] | None]
    adapter: parts_lib.Adapter | None = None
    origin: Callable[[Config], parts_lib.Weights | None] = lambda config: None
    passes: Callable[[Data, int], dict[str, float]] = lambda data, steps: {}
    documents: Callable[[Data, int], list[str]] = lambda data, step: []

    def parts(self, config: Config, mesh: Mesh | AbstractMesh) -> parts_lib.Parts:
        """Returns the parts of a config for this kind of training."""
        return parts_lib.make(config, mesh, self.objective, self.adapter)
