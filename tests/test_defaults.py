"""Defaults of the config live in configs/base.py only: no code has a second one for a key that it reads.

A name such as `config`, a value annotated with a section of the schema, and what is taken from either count as the
config's; sections and keys are those of the schema.
"""

import ast
import dataclasses
import pathlib
import textwrap
import typing

import pytest

from jaxlm.config import schema

ROOT = pathlib.Path(__file__).resolve().parents[1]
SECTIONS = {name: kind for name, kind in vars(schema).items() if dataclasses.is_dataclass(kind)}
BY_NAME = {name: kind for name, kind in typing.get_type_hints(schema.Config).items() if dataclasses.is_dataclass(kind)}
WHOLE = ("config", "_config", "cfg", "_cfg", "c")  # without an annotation: the config or a section of it
VALUE = object()  # what a key holds, or what was taken from that
ANY = object()  # the config, or a section that nobody named
CONVERT = ("int", "float", "str", "dict", "list", "tuple", "set", "sorted", "reversed", "asdict", "getattr")


def attribute(owner, name: str):
    """What `owner.name` is: a section's class, VALUE, or None if it is not the config's."""
    if owner is VALUE:
        return VALUE
    if owner is ANY:
        kinds = [schema.Config, *SECTIONS.values()]
    else:
        kinds = [owner] if isinstance(owner, type) else []
    for kind in kinds:
        hints = typing.get_type_hints(kind)
        if name in hints:
            return hints[name] if dataclasses.is_dataclass(hints[name]) else VALUE
    return None


def is_literal(node: ast.expr) -> bool:
    """True if the source spells the value out. None does not count: it says that there is no value."""
    if isinstance(node, ast.UnaryOp):
        return is_literal(node.operand)
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return all(map(is_literal, node.elts))
    if isinstance(node, ast.Dict):
        return all(map(is_literal, node.values))
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and node.value is not None)


class Reader(ast.NodeVisitor):
    """Follows what comes from the config through the names of a module, in the order of its lines."""

    def __init__(self):
        self.names, self.found = {}, []

    def kind(self, node: ast.AST | None):
        """A section's class, ANY or VALUE if the expression comes from the config; else None."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, ANY if node.id in WHOLE else None)
        if isinstance(node, ast.Attribute):
            known = self.names.get(ast.unparse(node)) or attribute(self.kind(node.value), node.attr)
            if known is None and isinstance(node.value, ast.Attribute):  # anything.optim.lr
                known = attribute(BY_NAME.get(node.value.attr), node.attr)
            return known or (ANY if node.attr in WHOLE else None)
        if isinstance(node, ast.Subscript):
            owner = self.kind(node.value)
            key = node.slice.value if isinstance(node.slice, ast.Constant) else ""
            return attribute(owner, str(key)) or (owner and VALUE)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and self.kind(node.func.value) is not None:
                return VALUE  # config.data.sources.items()
            name = ast.unparse(node.func).split(".")[-1]
            return VALUE if name in CONVERT and node.args and self.kind(node.args[0]) else None
        if isinstance(node, ast.NamedExpr):
            return self.kind(node.value)
        if isinstance(node, (ast.DictComp, ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            return self.kind(node.value if isinstance(node, ast.DictComp) else node.elt)
        parts = {ast.BoolOp: "values", ast.IfExp: "body orelse", ast.BinOp: "left right", ast.Tuple: "elts"}
        inner = [getattr(node, name) for name in parts.get(type(node), "").split()]
        values = [value for part in inner for value in (part if isinstance(part, list) else [part])]
        kinds = [kind for kind in map(self.kind, values) if kind is not None]
        return (kinds[0] if len(set(map(id, kinds))) == 1 else VALUE) if kinds else None

    def bind(self, target: ast.AST, value: ast.AST | None, kind) -> None:
        """Notes what a name holds from here on; a tuple's names one by one where both sides are tuples."""
        if isinstance(target, (ast.Tuple, ast.List)):
            pairs = value.elts if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts) else None
            for i, name in enumerate(target.elts):
                self.bind(name, pairs and pairs[i], self.kind(pairs[i]) if pairs else (kind and VALUE))
        elif isinstance(target, (ast.Name, ast.Attribute)):
            made = isinstance(value, ast.Call) and ast.unparse(target) in WHOLE  # config = resolve(...)
            self.names[ast.unparse(target)] = ANY if made and kind is None else kind

    def annotated(self, node: ast.AST | None):
        words = {part.split(".")[-1] for part in ast.unparse(node).split(" | ")} if node else set()
        return next((SECTIONS[word] for word in words if word in SECTIONS), None)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before = self.names.copy()
        for field in node.body:
            if isinstance(field, ast.AnnAssign):
                self.names[f"self.{ast.unparse(field.target)}"] = self.annotated(field.annotation)
        self.generic_visit(node)
        self.names = before

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before = self.names.copy()
        for arg in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
            self.names.pop(arg.arg, None)
            if arg.annotation:
                self.names[arg.arg] = self.annotated(arg.annotation)
        self.generic_visit(node)
        own = {name: kind for name, kind in self.names.items() if name.startswith("self.")}
        self.names = before | own

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self.bind(target, node.value, self.kind(node.value))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        self.bind(node.target, node.value, self.annotated(node.annotation) or self.kind(node.value))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.generic_visit(node)
        self.bind(node.target, node.value, self.kind(node.value))

    def visit_For(self, node: ast.For) -> None:
        self.bind(node.target, None, self.kind(node.iter) and VALUE)
        self.generic_visit(node)

    def comprehension(self, node) -> None:
        for loop in node.generators:
            self.bind(loop.target, None, self.kind(loop.iter) and VALUE)
        self.generic_visit(node)

    visit_DictComp = visit_ListComp = visit_SetComp = visit_GeneratorExp = comprehension

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        given = len(node.args) + len(node.keywords)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "get" and given > 1:
            self.check(node, self.kind(node.func.value))
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and given > 2:
            owner, key = node.args[0], getattr(node.args[1], "value", "")
            by_name = BY_NAME.get(owner.attr) if isinstance(owner, ast.Attribute) else None
            self.check(node, self.kind(owner) or attribute(by_name, str(key)))

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.generic_visit(node)
        for value, other in zip(node.values, node.values[1:], strict=False):
            if isinstance(node.op, ast.Or) and is_literal(other):
                self.check(node, self.kind(value))

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.generic_visit(node)
        if ast.dump(node.test) == ast.dump(node.body) and is_literal(node.orelse):
            self.check(node, self.kind(node.body))

    def check(self, node: ast.AST, kind) -> None:
        if kind is not None:
            self.found.append(f"{node.lineno}: {ast.unparse(node)}")


def hidden_defaults(source: str) -> list[str]:
    """`line: expression` of each default that the source has for a key of the config."""
    reader = Reader()
    reader.visit(ast.parse(textwrap.dedent(source)))
    return reader.found


def test_defaults_live_in_base_only():
    files = [path for folder in ("jaxlm", "scripts") for path in (ROOT / folder).rglob("*.py")]
    found = [f"{path.relative_to(ROOT)}:{line}" for path in files for line in hidden_defaults(path.read_text())]
    assert len(files) > 100
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        'config.get("steps", 100)',
        'config.data.sources.get("web", None)',
        'self.config.prepare.stages.get("html", {})',
        'getattr(config.train, "steps", 100)',
        'getattr(run.optim, "lr", 1e-3)',
        'config["optim"].get("lr", 1e-3)',
        "config.train.steps or 100",
        "self._config.optim.lr or 1e-3",
        "run.optim.lr or 1e-3",
        "config.sample.prompts or ('once upon a time',)",
        "config.data.sources or {}",
        "config.model.rope.theta or -1",
        "config['model']['d_ff'] or 4",
        "config.workdir or f'run{1}'",
        "int(config.train.steps) or 100",
        "config.train.steps // 10 or 1",
        "config.data.path or config.data.dir or 'data'",
        "config.train.steps if config.train.steps else 100",
        "[source.weight or 1.0 for source in config.data.sources.values()]",
        "{name: w for name in names for w in [config.data.sources.get(name, 1.0)]}",
        "def f(m: ModelConfig): return m.d_ff or 4096",
        "def f(o: config.OptimConfig | None): return o.eps or 1e-8",
        "def f(): m, t = config.model, config.train; return t.seq_len or 512",
        "def f():\n  if steps := config.train.steps:\n    return 0\n  return steps or 100",
        "def f():\n  for source in config.prepare.sources.values():\n    yield source.weight or 1.0",
        "def f(args):\n  config = resolve(args)\n  return f'--workdir={config.workdir or 3}'",
        "class A:\n  optim: OptimConfig\n  def f(self): return self.optim.lr or 1e-3",
        "class A:\n  def __init__(self, c: Config): self._t = c.train\n  def f(self): return self._t.steps or 9",
        # Both stood in the code: a source without a weight had 1.0.
        """
        def f(config, names):
            weights = {n: s.weight for n, s in (config.data.sources or config.prepare.sources).items()}
            return {name: weights.get(name, 1.0) for name in names}
        """,
    ],
)
def test_a_hidden_default_is_caught(line):
    assert hidden_defaults(line)


@pytest.mark.parametrize(
    "line",
    [
        "config.data.max_bytes or None",  # 0 = all
        "m.n_kv_heads or m.n_heads",
        "config.prepare.sources or config.data.sources",
        "config.prepare.workers or os.cpu_count() or 1",  # of the machine, not of the config
        "config.train.steps == 1 or True",
        "manifest.get('config', {})",
        "metrics.get('loss', 0.0) + config.train.steps",
        "text.strip() or 'nothing'",
        "def f(config, c): return [c or ' ' for c in 'text']",
        "def f():\n  train = data.entry('a', 'train')\n  return train.get('bytes', 0)",
        "def f(c: Counter): return c.get('a', 0)",
        "getattr(config.train, name)",
    ],
)
def test_what_is_no_default_of_the_config_passes(line):
    assert not hidden_defaults(line)
