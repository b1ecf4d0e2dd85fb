"""Reads from the HLO text of a compiled step what devices send each other.

collectives.read(lowered.compile().as_text())
"""

import dataclasses
import math
import re

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "c64": 8, "c128": 16, "bf16": 2}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*(?:/\*.*)?$")
_COLLECTIVE = re.compile(rf" = (?P<shape>.*?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:body|condition|calls|to_apply)=%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation, as one device sees it.

    Attributes:
      kind: one of KINDS.
      bytes: the bytes of its input or its result on one device, whichever is larger: a gather's result, a
        reduce-scatter's input.
      group: the number of devices that take part together.
      shapes: the shapes of the results, such as "bf16[64,128]".
      in_loop: True if it is in the body of a loop.
      name: the model's operation that it comes from (`op_name`).
      turns: the number of times that it runs in one step; a loop of unknown length counts as one turn.
    """

    kind: str
    bytes: int
    group: int
    shapes: tuple[str, ...]
    in_loop: bool
    name: str
    turns: int = 1


def read(compiled_text: str) -> list[Collective]:
    """Returns the collectives of an optimised HLO module, in the order of the text. Leaves out those within one device.

    Raises:
      ValueError: the text lists the devices of a collective in an unknown format.
    """
    devices = _devices(compiled_text)
    turns = _turns(compiled_text)
    collectives, computation = [], ""
    for line in compiled_text.splitlines():
        if head := _COMPUTATION.match(line):
            computation = head["name"]
        if not (match := _COLLECTIVE.search(line)):
            continue
        group = _group(line, match["kind"], devices)
        arrays = _ARRAY.findall(match["shape"])
        if match["start"] and match["kind"] == "all-gather":
            arrays = arrays[len(arrays) // 2 :]  # an asynchronous one returns (inputs, results)
        elif match["start"] and match["kind"] == "collective-permute":
            arrays = arrays[1:2]  # (input, result), and two counters before jaxlib 0.5
        size = sum(_size(*array) for array in arrays) * (group if match["kind"] == "reduce-scatter" else 1)
        shapes = tuple(f"{dtype}[{shape}]" for dtype, shape in arrays)
        name = re.search(r'op_name="([^"]*)"', line)
        if group > 1:
            times, in_loop = turns.get(computation, (1, False))
            collectives.append(
                Collective(match["kind"], int(size), group, shapes, in_loop, name[1] if name else "", times)
            )
    return collectives


def by_kind(compiled_text: str) -> list[dict[str, str | int]]:
    """Returns kind, times and bytes of the collectives of a step, added up by kind."""
    by: dict[str, list[Collective]] = {kind: [] for kind in KINDS}
    for collective in read(compiled_text):
        by[collective.kind].append(collective)
    return [
        {"kind": kind, "times": sum(c.turns for c in same), "bytes": sum(c.turns * c.bytes for c in same)}
        for kind, same in by.items()
        if same
    ]


def _size(dtype: str, shape: str) -> float:
    bits = re.search(r"\d+", dtype)
    width = _BYTES.get(dtype) or (int(bits[0]) / 8 if bits else 0)
    return width * math.prod(int(n) for n in shape.split(",") if n)


def _devices(text: str) -> int:
    header = text.partition("\n")[0]
    counts = [int(n) for n in re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)]
    return math.prod(counts)


def _group(line: str, kind: str, devices: int) -> int:
    """Returns the number of devices in a group.

    HLO writes replica_groups={{0,1},{2,3}}, [groups,size]<=[...] or mesh['a'=4,'b'=2] {'b'}; {} means all devices.
    """
    if kind == "collective-permute":
        return 2 if re.search(r"source_target_pairs=\{\{", line) else 1
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]", line):
        return int(iota[2])
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(.*?\))? ?\{([^}]*)\}", line):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", named[1]))
        used = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", named[2])  # 'b':(2)4 is a part of axis b, of size 4
        return math.prod(int(part or sizes[axis]) for axis, part in used)
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return len(listed[1].split(","))
    if "replica_groups={}" in line or "replica_groups=" not in line:
        return devices
    raise ValueError(f"unknown groups of devices in {line.strip()[:200]}")


def _turns(text: str) -> dict[str, tuple[int, bool]]:
    """Returns computation -> (how often it runs, True if it is in a loop).

    It runs as often as the lengths of the loops around it multiply to, as far as XLA knows them.
    """
    calls: dict[str, list[tuple[str, int, bool]]] = {}
    entry, computation = "", ""
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            computation = head["name"]
            entry = computation if line.startswith("ENTRY") else entry
        length = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line) if " while(" in line else None
        for name in _CALLED.findall(line):
            calls.setdefault(computation, []).append((name, int(length[1]) if length else 1, " while(" in line))
    reached: dict[str, tuple[int, bool]] = {}
    ahead = [(entry, 1, False)]
    while ahead:
        name, times, looped = ahead.pop()
        before = reached.get(name, (0, False))
        reached[name] = (before[0] + times, before[1] or looped)
        ahead += [(called, times * n, looped or loop) for called, n, loop in calls.get(name, ())]
    return reached
