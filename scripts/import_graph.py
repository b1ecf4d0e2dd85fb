#!/usr/bin/env python3
"""Draws which folder of jaxlm imports which, and says what breaks the rules of the floors (CONTRIBUTING.md).

    python scripts/import_graph.py                    # a line a folder, then what is wrong; exit code 1 if anything is
    python scripts/import_graph.py --svg graph.svg    # a picture for the browser
    python scripts/import_graph.py --dot | dot -Tpdf  # for Graphviz

Needs Python alone. The sources are read, never run: imports inside functions and under TYPE_CHECKING count as well.
A path such as jaxlm/step/optim.py names a module; a unit is what stands directly in a package: a module or a folder.
"""

import argparse
import ast
import collections
import functools
import html
import itertools
import pathlib
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping

PACKAGE = "jaxlm"
# From the lowest floor up. A module imports from lower floors and from its own folder.
FLOORS = (
    (
        *("config", "config_files", "tree", "sharding", "processes", "xla_flags"),
        *("files", "redact", "screen", "transcript", "console", "interrupts", "child", "__init__"),
        "sandbox_child",
    ),
    ("corpus", "ops"),
    ("models", "data", "report"),
    ("step", "objectives"),
    ("train", "plan"),
    ("eval", "serve", "interop"),
    ("programs",),
    ("main", "cli", "usage", "verbs"),
)
SIDEWAYS = {
    ("train", "plan"),
    ("step", "objectives"),
    ("main", "cli"),
    ("cli", "usage"),
    ("cli", "verbs"),
    ("usage", "verbs"),
}  # (who imports, what); on floor 0 all may
LOWER_ROOMS = (f"{PACKAGE}/train/checkpoints/",)  # folders that import nothing of the folder around them
PROGRAM_LINES, TRAINING_LINES, FILE_LINES, FUNCTION_LINES = 150, 300, 600, 60  # fewer than these
TRAINING = {f"{PACKAGE}/programs/{name}.py" for name in ("training", "posttraining", "reinforcement")}
_BY_NAME = ("import_module", "__import__")  # calls that import what a string names
_CONFIGS = f"{PACKAGE}/configs/"  # what users write: it imports base alone

Graph = dict[str, set[str]]


def floor(unit: str) -> int | None:
    """The floor of a folder or module directly in the package; None if it stands on none."""
    return next((number for number, units in enumerate(FLOORS) if unit in units), None)


def read(root: pathlib.Path) -> dict[str, str]:
    """Path below `root` -> text of each module of the package, configs left out."""
    paths = ((path.relative_to(root).as_posix(), path) for path in sorted((root / PACKAGE).rglob("*.py")))
    return {name: path.read_text(encoding="utf-8") for name, path in paths if not name.startswith(_CONFIGS)}


def resolve(dotted: str, paths: Iterable[str]) -> str | None:
    """The path of a module or package by its dotted name; None if there is no such file."""
    stem = dotted.replace(".", "/")
    return next((path for path in (f"{stem}.py", f"{stem}/__init__.py") if path in paths), None)


@functools.cache
def parse(text: str) -> ast.Module:
    """The tree of a source; no caller changes it."""
    return ast.parse(text)


def named(path: str, text: str) -> Iterator[tuple[str, str]]:
    """(module, name in it or "") of each import statement of the package in a file, relative ones made absolute."""
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            here = path.split("/")[: -node.level] if node.level else []
            module = ".".join([*here, *filter(None, [node.module])])
            found = [(module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in _BY_NAME:
            found = [(arg.value, "") for arg in node.args[:1] if isinstance(arg, ast.Constant)]
        else:
            continue
        yield from ((m, name) for m, name in found if f"{m}.{name}.".startswith(f"{PACKAGE}."))


def imports(sources: Mapping[str, str]) -> tuple[Graph, list[str]]:
    """Path -> paths that it imports, and a line for each import of what is not there.

    `from package import module` imports the module, `from package import name` the package's __init__.
    """
    graph, absent = {}, []
    for path, text in sources.items():
        graph[path] = set()
        for module, name in named(path, text):
            found = (name and resolve(f"{module}.{name}", sources)) or resolve(module, sources)
            if found:
                graph[path].add(found)
            elif not f"{module}.{name}".replace(".", "/").startswith(_CONFIGS.rstrip("/")):
                absent.append(f"{path} imports {module}, which is not there")
        graph[path].discard(path)
    return graph, absent


def unit(path: str) -> str:
    """The folder or module directly in the package that a path belongs to."""
    return path.split("/")[1].removesuffix(".py")


def levels(graph: Graph) -> dict[str, Graph]:
    """Package -> graph of its units: an import is a line in the innermost package that holds both ends."""
    found: dict[str, Graph] = collections.defaultdict(lambda: collections.defaultdict(set))
    for path, others in graph.items():
        for other in others:
            one, two = path.split("/"), other.split("/")
            depth = next(i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
            found["/".join(one[:depth])][one[depth]].add(two[depth])
    return found


def way(graph: Mapping[str, set[str]], start: str, end: str) -> list[str] | None:
    """A shortest way of one or more imports from `start` to `end`, both included; None if there is none."""
    before, queue = {}, collections.deque([start])
    while queue:
        node = queue.popleft()
        for other in sorted(graph.get(node, ())):
            if other == end:
                steps = [end, node]
                while steps[-1] != start:
                    steps.append(before[steps[-1]])
                return steps[::-1]
            if other not in before:
                before[other] = node
                queue.append(other)
    return None


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Shortest circles, first node = last, no node in two of them; [] if there is no circle at all."""
    found, seen = [], set()
    for node in sorted(graph):
        if node not in seen and (circle := way(graph, node, node)):
            found.append(circle)
            seen |= set(circle)
    return found


def all_circles(graph: Graph) -> list[str]:
    """A line for each circle of modules, then for each circle that only shows between folders."""
    lines = [f"circle of modules: {' -> '.join(circle)}" for circle in circles(graph)]
    for package, inner in sorted(levels(graph).items()):
        for circle in circles(inner):
            if not all(name.endswith(".py") for name in circle):
                lines.append(f"circle of folders in {package}: {' -> '.join(circle)}")
    return lines


def directions(graph: Graph) -> list[str]:
    """A line for each import that goes up, or sideways where that is not allowed."""
    lines = [f"{path} stands on no floor: add {unit(path)} to FLOORS" for path in graph if floor(unit(path)) is None]
    for path, other in ((path, other) for path, others in graph.items() for other in sorted(others)):
        one, two = unit(path), unit(other)
        here, there = floor(one), floor(two)
        if None in (here, there) or one == two or there < here:
            continue
        if there > here:
            lines.append(f"{path} (floor {here}) imports {other} (floor {there}): up")
        elif here != 0 and (one, two) not in SIDEWAYS:
            lines.append(f"{path} imports {other}, both on floor {here}: sideways")
    for room in LOWER_ROOMS:
        around = room.rstrip("/").rpartition("/")[0] + "/"
        for path in filter(lambda path: path.startswith(room), graph):
            out = (other for other in sorted(graph[path]) if other.startswith(around) and not other.startswith(room))
            lines += [f"{path} imports {other}: up, into the folder around it" for other in out]
    return lines


def sizes(sources: Mapping[str, str]) -> list[str]:
    """A line for each program, file and function that is too long."""
    lines = []
    for path, text in sources.items():
        count, most = text.count("\n"), PROGRAM_LINES if unit(path) == "programs" else FILE_LINES
        most = TRAINING_LINES if path in TRAINING else most
        if count >= most:
            lines.append(f"{path} has {count} lines; it must have fewer than {most}")
        for node in ast.walk(parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                count = node.end_lineno - node.lineno + 1
                if count >= FUNCTION_LINES:
                    where = f"{path}:{node.lineno} {node.name}"
                    lines.append(f"{where} has {count} lines; a function must have fewer than {FUNCTION_LINES}")
    return lines


def violations(sources: Mapping[str, str]) -> list[str]:
    """A line for everything that breaks a rule: directions, circles, lengths, imports of what is not there."""
    graph, absent = imports(sources)
    return [*absent, *directions(graph), *all_circles(graph), *sizes(sources)]


def folders(graph: Graph) -> Graph:
    """Unit -> the units that it imports. The package's own __init__, which all may import, is left out."""
    found: Graph = {unit(path): set() for path in graph}
    for path, others in graph.items():
        found[unit(path)] |= {unit(other) for other in others} - {unit(path), "__init__"}
    return {name: others for name, others in found.items() if name != "__init__"}


def by_floor(units: Iterable[str]) -> list[list[str]]:
    """The units of each floor, the highest floor first; what stands on none comes last."""
    rows = [[name for name in names if name in set(units)] for names in reversed(FLOORS)]
    return [*rows, sorted(name for name in units if floor(name) is None)]


def as_text(graph: Graph) -> str:
    """A line a folder: floor, name, number of modules, what it imports."""
    units, count = folders(graph), collections.Counter(map(unit, graph))
    width = max(map(len, units))
    lines = []
    for name in itertools.chain.from_iterable(by_floor(units)):
        where = "?" if floor(name) is None else floor(name)
        used = [other for other in itertools.chain.from_iterable(by_floor(units)) if other in units[name]]
        modules = f"{count[name]:3} module{'s' if count[name] > 1 else ' '}"
        lines.append(f"{where}  {name:{width}} {modules}  {'-> ' if used else ''}{' '.join(used)}".rstrip())
    return "\n".join(lines)


def as_dot(graph: Graph) -> str:
    """The folders for Graphviz, a rank a floor."""
    units = folders(graph)
    lines = ["digraph jaxlm {", "  node [shape=box, fontname=sans];"]
    lines += [f"  {{ rank=same; {' '.join(row)} }}" for row in by_floor(units) if row]
    lines += [f"  {name} -> {other};" for name in sorted(units) for other in sorted(units[name])]
    return "\n".join([*lines, "}"])


def without_shortcuts(graph: Graph) -> Graph:
    """The graph without imports that a longer way makes as well (its transitive reduction); whole if it has a circle."""
    if circles(graph):
        return graph

    def longer(name: str, other: str) -> bool:
        return any(way(graph, middle, other) for middle in graph[name] - {other})

    return {name: {other for other in others if not longer(name, other)} for name, others in graph.items()}


WIDTH, ROW, BOX = 1180, 104, 44  # of the picture, from floor to floor, of a box's height
STYLE = """
  svg { background: #fff } text { font: 15px system-ui, sans-serif; fill: #1c2430; text-anchor: middle }
  .note, .floor, .count { font-size: 12px; fill: #5b6675 } .note { text-anchor: start }
  .box { fill: #eef3fb; stroke: #7b93b8 } .line { fill: none; stroke: #93a1b5; stroke-width: 1.4 }
  .bad { stroke: #d0342c; stroke-width: 2.2 } .band { fill: #f7f8fa } #tip path { fill: #93a1b5 } #badtip path { fill: #d0342c }
  @media (prefers-color-scheme: dark) {
    svg { background: #14181f } text { fill: #e4e9f0 } .note, .floor, .count { fill: #9aa7b8 }
    .box { fill: #22304a; stroke: #6f8fc4 } .line { stroke: #77859a } .band { fill: #1a1f28 } #tip path { fill: #77859a }
    .bad { stroke: #ff6b61 } #badtip path { fill: #ff6b61 }
  }"""


def routes(units: Graph, rows: list[list[str]]) -> list[tuple[list[str], bool]]:
    """(nodes from importer to imported, is allowed) of each line; `a>b@i` stands for line a>b where it crosses row i."""
    row_of = {name: i for i, row in enumerate(rows) for name in row}
    found = []
    for name, others in units.items():
        for other in sorted(others):
            one, two = row_of[name], row_of[other]
            between = [f"{name}>{other}@{i}" for i in range(one + 1, two)]
            allowed = one < two or (one == two and (floor(name) == 0 or (name, other) in SIDEWAYS))
            found.append(([name, *between, other], allowed))
    return found


def ordered(rows: list[list[str]], lines: list[list[str]]) -> list[list[str]]:
    """Each row with the lines that cross it, put in the order that bends them least: the mean place of neighbours."""
    crossing = [[node for line in lines for node in line if node.endswith(f"@{i}")] for i in range(len(rows))]
    rows = [row + more for row, more in zip(rows, crossing, strict=True)]
    near = collections.defaultdict(set)
    for line in lines:
        for one, two in itertools.pairwise(line):
            near[one].add(two)
            near[two].add(one)
    for turn in range(40):
        place = {node: (i + 0.5) / len(row) for row in rows for i, node in enumerate(row)}
        for row in rows[:: 1 if turn % 2 else -1]:
            wish = {
                node: sum(place[other] for other in near[node]) / len(near[node]) if near[node] else place[node]
                for node in row
            }
            row.sort(key=wish.__getitem__)
            place |= {node: (i + 0.5) / len(row) for i, node in enumerate(row)}
    return rows


def places(rows: list[list[str]]) -> dict[str, tuple[float, float]]:
    """Node -> middle of its box, or where its line crosses the row (half as much room)."""
    found = {}
    for i, row in enumerate(rows):
        shares = [0.3 if "@" in node else 1.0 for node in row]
        scale = (WIDTH - 70) / max(sum(shares), 1e-9)
        for node, end, share in zip(row, itertools.accumulate(shares), shares, strict=True):
            found[node] = (50 + scale * (end - share / 2), 62 + ROW * i + BOX / 2)
    return found


def path_of(line: list[str], at: dict[str, tuple[float, float]], half: float) -> str:
    """The path of a line: down through the rows that it crosses; along the row as a bow where both ends stand on one."""
    (x0, y0), (x1, y1) = at[line[0]], at[line[-1]]
    if y0 == y1:
        bow, aside = y0 + BOX / 2 + min(38, 14 + abs(x1 - x0) / 16), 16 if x1 > x0 else -16
        x0, x1 = x0 + aside, x1 - aside  # beside the lines that go down from the middle
        return f"M{x0:.0f},{y0 + BOX / 2:.0f} C{x0:.0f},{bow:.0f} {x1:.0f},{bow:.0f} {x1:.0f},{y1 + BOX / 2 + 6:.0f}"
    if y1 < y0:
        return f"M{x0:.0f},{y0 - BOX / 2:.0f} L{x1:.0f},{y1 + BOX / 2 + 6:.0f}"
    slide = max(-half + 12, min(half - 12, (at[line[-2]][0] - x1) * 0.25))  # where it meets the box
    stops = [(x0, y0 + BOX / 2), *(at[node] for node in line[1:-1]), (x1 + slide, y1 - BOX / 2 - 6)]
    parts = [f"M{stops[0][0]:.0f},{stops[0][1]:.0f}"]
    for (xa, ya), (xb, yb) in itertools.pairwise(stops):
        parts.append(f"C{xa:.0f},{(ya + yb) / 2:.0f} {xb:.0f},{(ya + yb) / 2:.0f} {xb:.0f},{yb:.0f}")
    return " ".join(parts)


def as_svg(graph: Graph) -> str:
    """A picture by floors, light or dark as the reader's; lines that follow from longer ways are left out."""
    units, count = folders(graph), collections.Counter(map(unit, graph))
    floors = [row for row in by_floor(units) if row]
    lines = routes(without_shortcuts(units), floors)
    rows = ordered(floors, [line for line, _ in lines])
    at, height = places(rows), 62 + ROW * len(rows)
    half = {name: max(44, 5 * len(name) + 12) for name in units}
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Imports of jaxlm">'
    out = [head, f"<style>{STYLE}</style>", "<defs>"]
    for tip in ("tip", "badtip"):
        shape = '<path d="M0,0 L8,4 L0,8 z"/>'
        out.append(
            f'<marker id="{tip}" markerWidth="8" markerHeight="8" refX="4" refY="4" orient="auto">{shape}</marker>'
        )
    note = "An arrow: imports. Arrows that follow from a way of several are left out; red ones break a rule."
    out += ["</defs>", f'<text class="note" x="12" y="28">{note}</text>']
    for i, row in enumerate(floors):
        y = 62 + ROW * i
        label = "?" if floor(row[0]) is None else floor(row[0])
        out.append(f'<rect class="band" x="0" y="{y - 10}" width="{WIDTH}" height="{BOX + 20}"/>')
        out.append(f'<text class="floor" x="20" y="{y + BOX / 2 + 4}">{label}</text>')
    for line, allowed in lines:
        style, tip = ("line", "tip") if allowed else ("line bad", "badtip")
        shape = path_of(line, at, half[line[-1]])
        out.append(
            f'<path class="{style}" marker-end="url(#{tip})" d="{shape}"><title>{line[0]} → {line[-1]}</title></path>'
        )
    for name in units:
        x, y = at[name]
        box = f'x="{x - half[name]:.0f}" y="{y - BOX / 2:.0f}" width="{2 * half[name]}" height="{BOX}" rx="6"'
        modules = f"{count[name]} module{'s' if count[name] > 1 else ''}"
        out += [f'<rect class="box" {box}/>', f'<text x="{x:.0f}" y="{y - 2:.0f}">{html.escape(name)}</text>']
        out.append(f'<text class="count" x="{x:.0f}" y="{y + 14:.0f}">{modules}</text>')
    return "\n".join([*out, "</svg>"])


def main(argv: list[str] | None = None) -> int:
    """Prints the graph; 1 if a rule is broken."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dot", action="store_true", help="print it for Graphviz")
    parser.add_argument("--svg", type=pathlib.Path, metavar="FILE", help="write a picture")
    here = pathlib.Path(__file__).resolve().parents[1]
    parser.add_argument("--root", type=pathlib.Path, default=here, help="the checkout to read; default: this one")
    args = parser.parse_args(argv)
    sources = read(args.root)
    graph, _ = imports(sources)
    if args.svg:
        args.svg.write_text(as_svg(graph) + "\n", encoding="utf-8")
    print(as_dot(graph) if args.dot else as_text(graph))
    out = sys.stderr if args.dot else sys.stdout
    print("\n".join(all_circles(graph)) or "no circle", file=out)
    wrong = violations(sources)
    for line in wrong:
        if not line.startswith("circle"):
            print(line, file=out)
    return 1 if wrong else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` has what it wanted
    sys.exit(main())
