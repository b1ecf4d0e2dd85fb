"""Traces steps A to B of a run (`profile.steps=A:B`), and shows where their time went.

Every process traces its own devices. It writes the trace to WORKDIR/profile (if there are several processes, to
WORKDIR/profile/process_N) in the format of TensorBoard's profile plugin, with a perfetto_trace.json.gz for
https://ui.perfetto.dev. The host waits for the device only before the first traced step and after the last.
"""

import collections
import dataclasses
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping

import jax
from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet
from jax.profiler import ProfileData, ProfileEvent

from jaxlm.config import ConfigError, ProfileConfig
from jaxlm.devices.processes import say
from jaxlm.train.loop import Ending, Hook, Moment

Message = Mapping[int, list]  # of a protobuf: number of a field -> its values
CLASSES = ("attention", "matmul", "elementwise", "communication", "idle")  # elementwise: all other computation

_COMMUNICATION = re.compile(r"all-?_?reduce|all-?_?gather|all-?_?to-?_?all|reduce-?_?scatter|collective|nccl", re.I)
_ATTENTION = re.compile(r"fmha|flash|mha_|cudnn.*(attention|sdpa)", re.I)
_MATMUL = re.compile(r"gemm|matmul|cublas|cutlass|nvjet|\bdot\b|^dot|convolution|xmma", re.I)
_NOT_A_PLACE = re.compile(r"^$|^[A-Z]|[(>]|^(while|body|closed_call|checkpoint|rematted_computation)$")
_CONTAINERS = ("while", "call", "conditional")  # their bodies have events of their own
_PRODUCTS = ("dot", "convolution")


def check(config: ProfileConfig, first: int) -> None:
    """Raises ConfigError if the steps to trace begin before `first`, the first step that this start will do."""
    if config.window and config.window[0] < first:
        raise ConfigError(f"config.profile.steps={config.steps} begins before step {first}, the next: name later steps")


class Trace(Hook):
    """Ends the trace and shows a summary; the hook `begin` starts it. Only the steps between the two are traced.

    As a context manager it also ends the trace if the loop fails. `window`: the first and the last step to trace.
    """

    name = "trace"
    decoration = True

    def __init__(self, window: tuple[int, int] | None, folder: pathlib.Path):
        self.first, self.last = window or (0, 0)
        self.folder = folder / f"process_{jax.process_index()}" if jax.process_count() > 1 else folder
        self.begin = _Begin(self)
        self.running = False

    def due(self, step: int, end: int) -> bool:
        return self.running and step == self.last

    def __call__(self, moment: Moment) -> None:
        jax.block_until_ready(moment.state)
        try:
            self._stop()
            if jax.process_index() == 0:
                self._show(moment)
        except Exception as error:  # no trace is worth losing a run
            moment.say(f"trace: {self.folder}; it can't be summarised: {type(error).__name__}: {error}")

    def _show(self, moment: Moment) -> None:
        newest = max((self.folder / "plugins" / "profile").iterdir(), key=lambda path: path.stat().st_mtime)
        (path,) = newest.glob("*.xplane.pb")
        profile = summarise(read(path), moment.step - self.first + 1)
        kind = jax.local_devices()[0].device_kind
        moment.say(f"steps {self.first} to {moment.step}: {1e3 * profile.seconds:.1f} ms a step on {kind}")
        for line in lines(profile):
            moment.say(line)
        moment.say(f"trace: {newest} (perfetto_trace.json.gz opens in ui.perfetto.dev)")

    def close(self, moment: Moment, ending: Ending) -> None:
        if self.running:
            self(moment)

    def _stop(self) -> None:
        self.running = False
        jax.profiler.stop_trace()

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, *exc) -> None:
        if self.running:
            try:
                self._stop()
            except Exception as error:
                say(f"trace: {self.folder} is not whole: {type(error).__name__}: {error}")


class _Begin(Hook):
    name = "trace"
    decoration = True

    def __init__(self, trace: Trace):
        self._trace = trace

    def due(self, step: int, end: int) -> bool:
        return step == self._trace.first - 1

    def __call__(self, moment: Moment) -> None:
        jax.block_until_ready(moment.state)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # the Python tracer's many events would slow down the host
        jax.profiler.start_trace(str(self._trace.folder), create_perfetto_trace=True, profiler_options=options)
        self._trace.running = True


@dataclasses.dataclass(frozen=True)
class Instruction:
    opcode: str  # in HLO, such as `fusion`
    scope: str  # its place in the program, such as `jit(train_step)/jvp(Llama)/LlamaBlock/attn/dot_general`, or ""
    target: str = ""  # the function that a custom call calls
    product: bool = False  # a matrix product, or a fusion that holds one


_UNKNOWN = Instruction("", "")
Programs = dict[tuple[str, str], Instruction]  # (program, instruction's name) -> instruction


@dataclasses.dataclass(frozen=True)
class Event:
    """One run of an operation on a device. Times are in nanoseconds."""

    device: str
    name: str
    start: float
    end: float
    instruction: Instruction = _UNKNOWN


@dataclasses.dataclass(frozen=True)
class Row:
    """All operations with the same name and place: their total time and number of runs, in a step on one device."""

    name: str  # without their numbers
    place: str  # in the model, such as `attn/attention/exp (backward)`
    kind: str  # one of CLASSES
    seconds: float
    runs: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """How the time of a step was spent."""

    seconds: float  # from the first traced operation to the last, divided by the number of steps
    shares: dict[str, float]  # class (one of CLASSES) -> its share of `seconds`
    rows: list[Row]  # the row with the most time first


def classify(event: Event) -> str:
    """Returns the class of an operation from its name and its instruction: one of CLASSES, never idle."""
    instruction = event.instruction
    names = f"{event.name} {instruction.target}"
    if _COMMUNICATION.search(names):
        return "communication"
    if "/attention/" in instruction.scope or _ATTENTION.search(names):
        return "attention"
    if instruction.product or instruction.opcode in _PRODUCTS or _MATMUL.search(names):
        return "matmul"
    return "elementwise"


def summarise(events: Iterable[Event], steps: int) -> Profile:
    """Returns the mean profile of a step, over `steps` steps and all devices. Raises ValueError if `events` is empty.

    Each instant belongs to the operation that runs then. If several run at once, they share the instant equally.
    Communication gets only the instants without computation: it costs nothing while computation runs. Instants without
    an operation are idle. So the shares of all classes add up to 1.
    """
    by_device: dict[str, list[Event]] = collections.defaultdict(list)
    for event in events:
        by_device[event.device].append(event)
    if not by_device:
        raise ValueError("the trace holds no operation of a device")
    span, spent, runs = 0.0, collections.Counter(), collections.Counter()
    for mine in by_device.values():
        span += max(e.end for e in mine) - min(e.start for e in mine)
        keys = [(_base(e.name), place(e.instruction.scope), classify(e)) for e in mine]
        times = _attribute(mine, [kind == "communication" for *_, kind in keys])
        for key, time in zip(keys, times, strict=True):
            spent[key] += time
            runs[key] += 1
    shares = dict.fromkeys(CLASSES, 0.0)
    for (*_, kind), time in spent.items():
        shares[kind] += time / span
    shares["idle"] = 1.0 - sum(shares.values())
    per_step = steps * len(by_device)
    rows = [Row(*key, time / 1e9 / per_step, runs[key] / per_step) for key, time in spent.most_common()]
    return Profile(span / 1e9 / per_step, shares, rows)


def _attribute(events: list[Event], background: list[bool]) -> list[float]:
    """Returns nanoseconds for each event. Simultaneous events share their time; `background` ones count only when alone."""
    edges = sorted([(e.start, 1, i) for i, e in enumerate(events)] + [(e.end, 0, i) for i, e in enumerate(events)])
    spent, before = [0.0] * len(events), 0.0
    running: tuple[set[int], set[int]] = (set(), set())  # computation, background
    for time, begins, i in edges:
        if active := running[0] or running[1]:
            for j in active:
                spent[j] += (time - before) / len(active)
        before = time
        (running[background[i]].add if begins else running[background[i]].discard)(i)
    return spent


def _base(name: str) -> str:
    """Returns the name without its number, which differs by layer: add_select_fusion.12 -> add_select_fusion."""
    return re.sub(r"(\.\d+|\.clone|\.remat\d*)+$", "", name)


def place(scope: str) -> str:
    """Returns a scope without the names of modules' classes and JAX's wrappers, such as `attn/attention/exp (backward)`."""
    parts = [re.sub(r"^(?:(?:transpose|jvp|vmap|remat)\()*([^()]*)\)*$", r"\1", part) for part in scope.split("/")]
    parts = [part for part in parts if not _NOT_A_PLACE.search(part)]
    passes = [word for word, mark in (("backward", "transpose("), ("recomputed", "rematted")) if mark in scope]
    return "/".join(parts) + (f" ({', '.join(passes)})" if passes else "")


def read(path: pathlib.Path) -> list[Event]:
    """Returns the operations in an `.xplane.pb`: those of the GPUs, or those of the CPU if there is no GPU.

    The format is XLA's xplane.proto: `jax.profiler.ProfileData` reads the events, protobuf the compiled programs.
    """
    programs = instructions(path.read_bytes())
    planes = list(ProfileData.from_file(str(path)).planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    events = []
    for plane in devices or [plane for plane in planes if plane.name == "/host:CPU"]:
        for line in plane.lines:
            if devices and not line.name.startswith(("Stream", "XLA Ops")):
                continue  # derived from the streams' events
            events += _operations(plane.name, line.events, programs, is_host=not devices)
    return events


def _operations(plane: str, timeline: Iterable[ProfileEvent], programs: Programs, *, is_host: bool) -> Iterator[Event]:
    for event in timeline:
        stats = dict(event.stats)
        op = str(stats.get("hlo_op", ""))
        instruction = programs.get((str(stats.get("hlo_module", "")), op), _UNKNOWN)
        if (op or not is_host) and instruction.opcode not in _CONTAINERS:
            device = f"{plane}:{stats.get('device_ordinal', 0)}" if is_host else plane
            yield Event(device, event.name, event.start_ns, event.start_ns + event.duration_ns, instruction)


def instructions(xspace: bytes) -> Programs:
    """Returns the instructions of all programs in a trace."""
    programs: Programs = {}
    for plane in map(_fields, _fields(xspace)[1]):  # XSpace.planes
        if _text(plane, 2) == "/host:metadata":
            for entry in map(_fields, plane[4]):  # XPlane.event_metadata: an event for each program
                for stat in map(_fields, _fields(entry[2][0])[5]):
                    for hlo in map(_fields, stat[6]):  # XStat.bytes_value: an HloProto
                        programs |= _module(_fields(hlo[1][0]))
    return programs


def _module(module: Message) -> Programs:
    name, programs = _text(module, 1), {}
    computations = {c[5][0]: [_instruction(_fields(proto)) for proto in c[2]] for c in map(_fields, module[3])}
    for body in computations.values():
        for op, instruction, called in body:
            if instruction.opcode == "fusion":
                inner = [other for _, other, _ in computations.get(called, ())]
                inner.sort(key=lambda other: (other.opcode not in _PRODUCTS, not other.scope))
                if inner:  # a product first, then one with a scope: XLA often gives the fusion no scope
                    product, scope = inner[0].opcode in _PRODUCTS, instruction.scope or inner[0].scope
                    instruction = dataclasses.replace(instruction, product=product, scope=scope)
            programs[name, op] = instruction
    return programs


def _instruction(proto: Message) -> tuple[str, Instruction, int]:
    """Returns (name, instruction, id of the computation that a fusion calls), of an HloInstructionProto."""
    scope = _text(_fields(b"".join(proto[7])), 2)  # OpMetadata.op_name
    # A list of varints: seven bits a byte, the lowest first. A fusion calls one computation.
    called = sum((byte & 127) << 7 * i for i, byte in enumerate(b"".join(proto[38])))
    return _text(proto, 1), Instruction(_text(proto, 2), scope, _text(proto, 28)), called


def _fields(message: bytes) -> Message:
    """Returns field number -> values of a message whose schema protobuf does not know: texts and messages are bytes."""
    fields = collections.defaultdict(list)
    for field in UnknownFieldSet(Empty.FromString(message)):
        fields[field.field_number].append(field.data)
    return fields


def _text(message: Message, number: int) -> str:
    return b"".join(message[number]).decode()


def lines(profile: Profile, top: int = 10) -> list[str]:
    """Returns the lines of a table: the `top` operations with the most time, then the share of each class."""
    table = ["  share   ms/step   runs/step  class          operation"]
    for row in profile.rows[:top]:
        share = row.seconds / profile.seconds
        what = " ".join(filter(None, (row.name[:48], row.place)))
        table.append(f"  {100 * share:4.1f}%  {1e3 * row.seconds:8.2f}  {row.runs:10.1f}  {row.kind:<13}  {what}")
    return [*table, "  ".join(f"{kind} {100 * share:.1f}%" for kind, share in profile.shares.items())]
