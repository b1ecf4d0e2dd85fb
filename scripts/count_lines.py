"""Counts the sources' lines by room: code (lines that also have a comment included), docstrings, comments, blank lines.

python scripts/count_lines.py [--root=FOLDER]     # of another checkout, to compare
"""

import argparse
import ast
import collections
import io
import pathlib
import tokenize

KINDS = ("modules", "lines", "code", "docstrings", "comments", "blank")
_LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
_VAGUE = ("found", "result", "out", "res", "value", "items")


def count(text: str) -> collections.Counter[str]:
    """Returns how many lines of each of KINDS a source has. A line with code and a comment is code."""
    code, comments, docstrings = set(), set(), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            (comments if token.type == tokenize.COMMENT else code).update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines, code = len(text.splitlines()), code - docstrings
    rest = {"docstrings": len(docstrings), "comments": len(comments - code), "code": len(code)}
    return collections.Counter(rest | {"lines": lines, "blank": lines - sum(rest.values())})


def vague(text: str) -> collections.Counter[str]:
    """Returns name -> how many functions have a variable of this name, for vague names."""
    names: collections.Counter[str] = collections.Counter()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            names.update({*inner} & {*_VAGUE})
    return names


def main() -> int:
    """Prints a line for each room of jaxlm/, and one for each folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[1])
    root = parser.parse_args().root
    rooms: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    names: collections.Counter[str] = collections.Counter()
    for folder in ("jaxlm", "tests", "scripts", "configs"):
        for path in sorted((root / folder).rglob("*.py")):
            parts, text = path.relative_to(root).parts, path.read_text("utf-8")
            counts = count(text) + collections.Counter(modules=path.name != "__init__.py")
            for room in {folder, "/".join(parts[:2])} if folder == "jaxlm" and len(parts) > 2 else {folder}:
                rooms[room] += counts
            if folder == "jaxlm":
                names += vague(text)
    print(f"{'':24}" + "".join(f"{kind:>11}" for kind in KINDS))
    for room in sorted(rooms, key=lambda room: (not room.startswith("jaxlm"), room)):
        print(f"{room:24}" + "".join(f"{rooms[room][kind]:>11,}" for kind in KINDS))
    print("functions of jaxlm/ with a variable of this name:", ", ".join(f"{name} {names[name]}" for name in _VAGUE))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
