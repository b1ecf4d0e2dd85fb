"""Reads a trace of JAX's profiler (`.xplane.pb`): which operations and classes of operations the time of a step went to.

A trace holds one event for each operation that a device ran, and the compiled programs that the operations belong to. The
class of an operation follows from its place in the model (`jax.named_scope`) and from what its program says about it.

Each instant of the traced time is given to the operation that runs then, or in equal parts to those that run at once.
Communication gets only the instants at which no computation runs: what hides behind computation costs nothing. Instants
at which nothing runs are idle. So the shares of all classes add up to 1.

Understood are CPUs ("/host:CPU", one event for each thunk on the executor's threads) and GPUs ("/device:GPU:n", a line for
each stream). The format is XLA's xplane.proto: `jax.profiler.ProfileData` reads the events, `_fields` the programs.
"""

import collections
import dataclasses
import pathlib
import re
import typing

from jax.profiler import ProfileData

Message = bytes | memoryview  # of a protobuf
CLASSES = ("attention", "matmul", "elementwise", "communication", "idle")  # elementwise: all other computation

_COMMUNICATION = re.compile(r"all-?_?reduce|all-?_?gather|all-?_?to-?_?all|reduce-?_?scatter|collective|nccl", re.I)
_ATTENTION = re.compile(r"fmha|flash|mha_|cudnn.*(attention|sdpa)", re.I)
_MATMUL = re.compile(r"gemm|matmul|cublas|cutlass|nvjet|\bdot\b|^dot|convolution|xmma", re.I)
_NOT_A_PLACE = re.compile(r"^$|^[A-Z]|[(>]|^(while|body|closed_call|checkpoint|rematted_computation)$")
_CONTAINERS = ("while", "call", "conditional")  # their bodies have events of their own
_PRODUCTS = ("dot", "convolution")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """What a compiled program says about one of its instructions.

    Attributes:
      opcode: HLO's, such as `fusion`.
      scope: `jit(train_step)/jvp(Llama)/LlamaBlock/attn/dot_general`, or "".
      target: of a custom call, or "".
      product: True for a matrix product, or a fusion that holds one.
    """

    opcode: str
    scope: str
    target: str = ""
    product: bool = False


@dataclasses.dataclass(frozen=True)
class Event:
    """One run of an operation on a device; times in nanoseconds."""

    device: str
    name: str
    start: float
    end: float
    instruction: Instruction | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """All runs of the operations with this name and place. Seconds and runs are those of one step on one device."""

    name: str
    place: str
    kind: str
    seconds: float
    runs: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """Where the time went.

    Attributes:
      seconds: of one step, from its first operation to its last.
      shares: of that time, for each of CLASSES.
      rows: of all operations, the longest first.
    """

    seconds: float
    shares: dict[str, float]
    rows: list[Row]


def classify(event: Event) -> str:
    """The class of an operation, by its name and its instruction: one of CLASSES, never idle."""
    found = event.instruction or Instruction("", "")
    names = f"{event.name} {found.target}"
    if _COMMUNICATION.search(names):
        return "communication"
    if "/attention/" in found.scope or _ATTENTION.search(names):
        return "attention"
    if found.product or found.opcode in _PRODUCTS or _MATMUL.search(names):
        return "matmul"
    return "elementwise"


def summarise(events: typing.Iterable[Event], steps: int) -> Profile:
    """Adds the events of `steps` steps up; the result is the mean over steps and devices.

    Raises:
      ValueError: there is no event.
    """
    by_device: dict[str, list[Event]] = collections.defaultdict(list)
    for event in events:
        by_device[event.device].append(event)
    if not by_device:
        raise ValueError("the trace holds no operation of a device")
    span, spent, runs = 0.0, collections.Counter(), collections.Counter()
    for mine in by_device.values():
        span += max(e.end for e in mine) - min(e.start for e in mine)
        keys = [(_base(e.name), place(e.instruction.scope if e.instruction else ""), classify(e)) for e in mine]
        runs.update(keys)
        for key, time in zip(keys, _attribute(mine, [kind == "communication" for *_, kind in keys]), strict=True):
            spent[key] += time
    shares = dict.fromkeys(CLASSES, 0.0)
    for (*_, kind), time in spent.items():
        shares[kind] += time / span
    shares["idle"] = 1.0 - sum(shares.values())
    per_step = steps * len(by_device)
    rows = [Row(*key, time / 1e9 / per_step, runs[key] / per_step) for key, time in spent.most_common()]
    return Profile(span / 1e9 / per_step, shares, rows)


def _attribute(events: list[Event], background: list[bool]) -> list[float]:
    """Nanoseconds of each event. What runs at once shares the time; events in `background` get it only when alone."""
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
    """The name without its number, which differs from layer to layer: add_select_fusion.12 -> add_select_fusion."""
    return re.sub(r"(\.\d+|\.clone|\.remat\d*)+$", "", name)


def place(scope: str) -> str:
    """A scope as a person reads it, without classes and wrappers: `attn/attention/exp (backward)`."""
    parts = [re.sub(r"^(?:(?:transpose|jvp|vmap|remat)\()*([^()]*)\)*$", r"\1", part) for part in scope.split("/")]
    parts = [part for part in parts if not _NOT_A_PLACE.search(part)]
    passes = [word for word, mark in (("backward", "transpose("), ("recomputed", "rematted")) if mark in scope]
    return "/".join(parts) + (f" ({', '.join(passes)})" if passes else "")


def read(path: pathlib.Path) -> list[Event]:
    """The operations in an `.xplane.pb`: those of its GPUs, or of the CPU if it has none."""
    programs = instructions(path.read_bytes())
    planes = list(ProfileData.from_file(str(path)).planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    events = []
    for plane in devices or [plane for plane in planes if plane.name == "/host:CPU"]:
        for line in plane.lines:
            if devices and not line.name.startswith(("Stream", "XLA Ops")):
                continue  # derived from the streams' events
            events += _operations(plane.name, line, programs, is_host=not devices)
    return events


def _operations(plane: str, line: typing.Any, programs: dict, *, is_host: bool) -> list[Event]:
    events = []
    for event in line.events:
        stats = dict(event.stats)
        op = stats.get("hlo_op", "")
        if is_host and not op:
            continue
        found = programs.get((str(stats.get("hlo_module", "")), str(op)))
        if found and found.opcode in _CONTAINERS:
            continue
        device = f"{plane}:{stats.get('device_ordinal', 0)}" if is_host else plane
        events.append(Event(device, event.name, event.start_ns, event.start_ns + event.duration_ns, found))
    return events


def instructions(xspace: bytes) -> dict[tuple[str, str], Instruction]:
    """All instructions of all programs in a trace, by the names of program and instruction."""
    table = {}
    for plane in _all(xspace, 1):  # XSpace.planes
        if bytes(_first(plane, 2)) != b"/host:metadata":
            continue
        for entry in _all(plane, 4):  # XPlane.event_metadata: an event for each program
            for stat in _all(_first(entry, 2), 5):
                for hlo in _all(stat, 6):  # XStat.bytes_value: an HloProto
                    table |= _module(_first(hlo, 1))
    return table


def _module(module: Message) -> dict[tuple[str, str], Instruction]:
    """The instructions of an HloModuleProto, those of all its computations."""
    name = bytes(_first(module, 1)).decode()
    computations = {_first(c, 5): [_instruction(i) for i in _all(c, 2)] for c in _all(module, 3)}
    table = {}
    for body in computations.values():
        for op, found, called in body:
            if found.opcode == "fusion":
                inner = [other for c in called for _, other, _ in computations.get(c, ())]
                inner.sort(key=lambda other: (other.opcode not in _PRODUCTS, not other.scope))
                if inner:  # a product comes first, then what has a scope: XLA often gives the fusion itself none
                    product, scope = inner[0].opcode in _PRODUCTS, found.scope or inner[0].scope
                    found = dataclasses.replace(found, product=product, scope=scope)
            table[name, op] = found
    return table


def _instruction(proto: Message) -> tuple[str, Instruction, list[int]]:
    """(name, instruction, ids of the computations that it calls) of an HloInstructionProto."""
    fields = dict(_fields(proto))
    scope = bytes(_first(fields.get(7, b""), 2)).decode()
    called = fields.get(38, b"")
    found = Instruction(bytes(fields.get(2, b"")).decode(), scope, bytes(fields.get(28, b"")).decode())
    return bytes(fields.get(1, b"")).decode(), found, [called] if isinstance(called, int) else list(_varints(called))


def _all(message: Message, number: int) -> list[int | memoryview]:
    return [value for field, value in _fields(message) if field == number]


def _first(message: Message, number: int) -> int | memoryview | bytes:
    return next(iter(_all(message, number)), b"")


def _fields(message: Message) -> typing.Iterator[tuple[int, int | memoryview]]:
    """(field number, value) of a message in protobuf's wire format: numbers as int, the rest as memoryview."""
    view, at = memoryview(message), 0
    while at < len(view):
        key, at = _varint(view, at)
        if key & 7 == 0:
            value, at = _varint(view, at)
        else:
            size = {1: 8, 5: 4}.get(key & 7)
            if size is None:
                size, at = _varint(view, at)
            value, at = view[at : at + size], at + size
        yield key >> 3, value


def _varints(view: memoryview) -> typing.Iterator[int]:
    at = 0
    while at < len(view):
        value, at = _varint(view, at)
        yield value


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = view[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


def lines(profile: Profile, top: int = 10) -> list[str]:
    """A table for people: the longest operations, then the share of each class."""
    out = ["  share   ms/step   runs/step  class          operation"]
    for row in profile.rows[:top]:
        share = row.seconds / profile.seconds
        what = " ".join(filter(None, (row.name[:48], row.place)))
        out.append(f"  {100 * share:4.1f}%  {1e3 * row.seconds:8.2f}  {row.runs:10.1f}  {row.kind:<13}  {what}")
    out.append("  ".join(f"{kind} {100 * share:.1f}%" for kind, share in profile.shares.items()))
    return out
