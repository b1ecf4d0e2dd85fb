"""Says what is about to happen when a run starts, and after a few steps how long it will take."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
from clu import parameter_overview
from jax.sharding import Mesh

from jaxlm.config import AdapterConfig, Config
from jaxlm.data.batches.document_rows import MOST_PASSES
from jaxlm.devices import tree
from jaxlm.host import console
from jaxlm.host.console import Say, dollars, duration, human, size
from jaxlm.models import quantized
from jaxlm.plan.flops import count_params
from jaxlm.plan.tune import machines
from jaxlm.plan.tune.tune import Program
from jaxlm.run.clock import DATA, EVALUATE, REPEATED, SAVE, STEP, Clock
from jaxlm.step import optim
from jaxlm.step.objectives.base import Variables
from jaxlm.step.parts import Parts
from jaxlm.train.loop import Hook, Watch, between_s

_SOURCES = 6  # named at most; there may be dozens
_FIRST_S, _FIRST_STEPS = 5.0, 2  # of training before its rate is known


def lines(
    made: Parts,
    tokens: Mapping[str, int],
    passes: Mapping[str, float],
    program: Program | None,
    done: int,
    trained: str = "",
) -> list[str]:
    """Returns the lines that a start says: model, data, memory, choices, length; then warnings, if any.

    With `log.parameters` the table of parameters comes first.

    Args:
      passes: source -> its epochs in the whole run; {} if unknown.
    """
    config, mesh, m, t = made.config, made.mesh, made.config.model, made.config.train
    split = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    devices = f"{mesh.size} x {mesh.devices.flat[0].device_kind}{split and f' ({split})'}"
    numbers = f"{tree.count(made.abstract.params):,} trained ({trained}), " if trained else ""
    most = max(passes, key=passes.get, default="")
    return [
        *([console.table(optim.table(config.optim, made.abstract.params), right=[1])] if config.optim.rates else []),
        *([table(made.abstract.params)] if config.log.parameters else []),
        f"model: {m.family}, {count_params(m):,} parameters, {numbers}{m.n_layers} layers of d {m.d_model}; {devices}",
        *([_data(tokens, passes)] if tokens else []),  # prompts may be generated without end
        *([_memory(program, mesh.size)] if program else []),
        f"chosen: attention {m.attention}, {m.dtype}, remat {m.remat}, microbatch {t.microbatch_size} of {t.batch_size}",
        _length(config, mesh, done),
        *([_too_often(most, passes[most])] if most and passes[most] > MOST_PASSES else []),
        *of_whole_kernels(made.frozen, config.adapter.quantize),
    ]


def of_adapter(adapter: AdapterConfig, row_ids: Collection[int]) -> str:
    """Returns what an adapter trains, in words: "LoRA r 16 + 5 rows"."""
    lora = f"LoRA r {adapter.rank}" if adapter.kind == "lora" else f"a prompt of {adapter.prompt_tokens} vectors"
    rows = f" + {len(row_ids)} rows" if row_ids else ""
    return lora + rows + (f", on {adapter.quantize}" if adapter.quantize != "none" else "")


def of_whole_kernels(frozen: Variables, kind: str) -> list[str]:
    """Returns a line on the kernels that `adapter.quantize` can't quantise; [] if there are none."""
    kernels = quantized.whole_kernels(frozen) if kind != "none" else {}
    short = ", ".join(dict.fromkeys(name.partition("/")[2].removesuffix("/kernel") for name in kernels))
    why = "no block of 32 to 64 divides their inputs"
    return [f"adapter.quantize={kind} leaves {len(kernels)} kernels ({short}) as they are: {why}"] if kernels else []


def _times(number: float) -> str:
    text = f"{number:.2g}" if number < 10 else f"{number:,.0f}"
    return "once" if text == "1" else f"{text} times"


def _too_often(source: str, times: float) -> str:
    less = f"beyond about {MOST_PASSES} times a token teaches less than a new one"
    return f"{source} is read {_times(times)}: {less}; get more text, or take fewer steps"


def _data(tokens: Mapping[str, int], passes: Mapping[str, float]) -> str:
    if not passes:
        return f"data: {human(sum(tokens.values()))} tokens"
    order = sorted(passes, key=lambda name: -passes[name] * tokens[name])
    named = [f"{name} {human(tokens[name])} tokens, read {_times(passes[name])}" for name in order[:_SOURCES]]
    rest = [f"{len(order) - _SOURCES} more sources"] if len(order) > _SOURCES else []
    return f"data: {'; '.join(named + rest)}"


def _memory(program: Program, devices: int) -> str:
    parts = f"{size(program.state)} for state and batch, {size(program.temporaries)} for temporaries"
    line = f"memory: a step needs {size(program.need)}{' a device' * (devices > 1)} ({parts})"
    return line if program.room is None else f"{line}; there are {size(program.room.bytes)} {program.room.of}"


def _length(config: Config, mesh: Mesh, done: int) -> str:
    t = config.train
    batch = t.batch_size * t.seq_len
    resuming = f"resuming at step {done}, " if done else ""
    line = f"length: {resuming}to step {t.steps:,}, {human(t.steps * batch)} tokens, {batch:,} a step"
    known = machines.known(mesh.devices.flat[0].device_kind, mesh.size, machines.key(config, mesh.shape))
    if known and done < t.steps:
        seconds = (t.steps - done) * batch / known["tokens_per_second"]
        price = config.hardware.usd_per_hour
        usd = f", {dollars(seconds / 3600 * price)}" if price else ""
        speed = f"{human(known['tokens_per_second'])} tokens/s, as measured here before"
        line += f"; about {duration(seconds)}{usd} at {speed}"
    return line


def table(params: dict) -> str:
    """Returns the table of the parameters, with all layers stacked into one, `layers`, so that it is short."""
    merged = tree.merge(params)
    shapes = {name: part for name, part in merged.items() if tree.layer_of(name) is None}
    layers = [part for name, part in merged.items() if name not in shapes]
    if layers:
        shapes["layers"] = jax.tree.map(lambda x: jax.ShapeDtypeStruct((len(layers), *x.shape), x.dtype), layers[0])
    return parameter_overview.get_parameter_overview(shapes, include_stats=False)


@dataclasses.dataclass(eq=False)
class FirstRate(Watch):
    """Says once, after a few steps, how long the run will take and what it will cost.

    Evaluations, samples and saves are estimated by their time so far in this start, or else in earlier starts. Before the
    first evaluation, sample or save, the estimate leaves them out.
    """

    clock: Clock
    hooks: Sequence[Hook]
    steps: int
    spent: Callable[[], tuple[float, float]]
    usd_per_hour: float
    say: Say
    _mark: tuple[int, float] | None = None
    _between: float = 0.0  # seconds of evaluations and saves per step of earlier starts
    _said: bool = False

    def __call__(self, step: int, record: dict[str, float]) -> None:
        if self._said:
            return
        seconds = self.clock.seconds()
        training = sum(seconds[name] for name in (DATA, STEP, REPEATED))
        if self._mark is None:
            self._mark = (step, training)
            self._between = (seconds[EVALUATE] + seconds[SAVE]) / (step - 1) if step > 1 else 0.0
            return
        steps, took = step - self._mark[0], training - self._mark[1]
        left = self.steps - step
        if steps < _FIRST_STEPS or took < _FIRST_S or not left:
            return
        self._said = True
        between = between_s(self.hooks, self.clock, step, self.steps) or left * self._between
        remaining = left * took / steps + between
        usd = self.spent()[1] + remaining / 3600 * self.usd_per_hour
        cost = f", {dollars(usd)} for the whole run" if self.usd_per_hour else ""
        without = "" if between else ", without evaluations and saves"
        self.say(f"{_seconds(took / steps)} a step: {duration(remaining)} to step {self.steps:,}{cost}{without}")


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s" if seconds < 100 else duration(seconds)
