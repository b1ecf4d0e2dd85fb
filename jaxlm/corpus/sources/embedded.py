"""The embedded corpus: text that every installation has on its disk, so that a first run needs no network.

Files are parsed, not imported. Documents come in the order of a hash of their names, so any first ones are a sample of all.
"""

import ast
import contextlib
import gc
import hashlib
import importlib.util
import inspect
import os
import pathlib
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator

from jaxlm.config import ConfigError
from jaxlm.corpus.sources.base import Part, SourceSpec, SourceStats
from jaxlm.corpus.stage import Document

NAMES = ("prose", "math", "code")
DEFAULT_MAX_BYTES = {"prose": 6_000_000, "math": 1_500_000, "code": 1_500_000}
MATH_PACKAGES = ("numpy", "scipy", "jax")
PROSE_PACKAGES = (
    "absl",
    "clu",
    "etils",
    "flax",
    "grain",
    "ml_collections",
    "optax",
    "orbax",
    "pyarrow",
    "tensorflow_datasets",
)
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "tests", "test", "idle_test", "testing", "_vendor"}
MIN_DOCSTRING = 200
MIN_SOURCE = 500
_MATHEMATICAL = re.compile(
    r":math:|\.\. math::|\b(matri(x|ces)|eigen\w+|polynomials?|integra(l|te|tion)|derivatives?|gradients?|logarithm\w*|"
    r"exponential|probability|distribution|variance|fourier|trigonometric|(co)?sine|tangent|determinant|inverse|"
    r"interpolat\w+|orthogonal|convolution|linear (algebra|system|equations?)|vectors?|jacobian|hessian|coefficients?|"
    r"floating.point|norm)\b",
    re.IGNORECASE,
)


def parts(spec: SourceSpec, task_bytes: int) -> list[Part]:
    """Returns one part for the whole source: duplicates, `max_bytes` concern all of it. Raises ConfigError for a wrong name."""
    name = _known(spec.path.removeprefix("embedded:"))
    return [Part("embedded", name, name, size=spec.max_bytes or DEFAULT_MAX_BYTES[name])]


def read(part: Part, spec: SourceSpec, stats: SourceStats) -> Iterator[Document]:
    """Yields the documents of a corpus that is on this machine already, such as Python's own documentation."""
    about = {"format": "code", "language": "python"} if part.name == "code" else {"format": "text"}
    for doc_id, text in iterate_embedded(part.name, spec.max_bytes or None):
        yield Document(text=text, id=doc_id, metadata=about.copy())


def _known(name: str) -> str:
    if name not in NAMES:
        raise ConfigError(f"no embedded source '{name}'; there are {', '.join('embedded:' + n for n in NAMES)}")
    return name


def iterate_embedded(name: str, max_bytes: int | None = None) -> Iterator[tuple[str, str]]:
    """Yields (doc_id, text) of an embedded source, up to `max_bytes` (None: DEFAULT_MAX_BYTES). Else ConfigError."""
    documents = {"prose": _prose, "math": _math, "code": _code}[_known(name)]()
    yield from _without_copies(documents, DEFAULT_MAX_BYTES[name] if max_bytes is None else max_bytes)


def _without_copies(documents: Iterable[tuple[str, str]], max_bytes: int) -> Iterator[tuple[str, str]]:
    """Yields documents until `max_bytes` are full; each text once, whatever its spacing (JAX copies NumPy's docstrings)."""
    seen: set[bytes] = set()
    left = max_bytes
    for doc_id, text in documents:
        body = " ".join(text.removeprefix(doc_id).split())
        digest = hashlib.blake2b(body.encode("utf-8", "replace"), digest_size=16).digest()
        if digest in seen:
            continue
        seen.add(digest)
        left -= len(text.encode("utf-8", "replace"))
        if left < 0:
            return
        yield doc_id, text


def _prose() -> Iterator[tuple[str, str]]:
    yield from _topics()
    yield from _docstrings(_files("", _stdlib()) + _package_files(PROSE_PACKAGES))


def _math() -> Iterator[tuple[str, str]]:
    documents = _docstrings(_package_files(MATH_PACKAGES))
    yield from ((doc_id, text) for doc_id, text in documents if len(_MATHEMATICAL.findall(text)) >= 2)


def _code() -> Iterator[tuple[str, str]]:
    for module, path in _by_hash(_files("", _stdlib())):
        # Tables of constants (code pages, Unicode, the topics of prose) are data, not code.
        if module.startswith(("encodings.", "pydoc_data.")):
            continue
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if len(text := path.read_text("utf-8")) >= MIN_SOURCE:
                yield f"{module.replace('.', '/')}.py", text


def _stdlib() -> pathlib.Path:
    return pathlib.Path(sysconfig.get_paths()["stdlib"])


def _package_files(packages: Iterable[str]) -> list[tuple[str, pathlib.Path]]:
    """Returns the files of the packages that are installed. Finding a top-level package does not import it."""
    specs = [(package, spec) for package in packages if (spec := importlib.util.find_spec(package))]
    roots = [(package, root) for package, spec in specs for root in spec.submodule_search_locations or ()]
    return [file for package, root in roots for file in _files(package, pathlib.Path(root))]


def _files(package: str, root: pathlib.Path) -> list[tuple[str, pathlib.Path]]:
    """Returns (dotted module name, path) of the Python files under `root`."""
    modules = []
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith("config-")]
        for name in names:
            if name.endswith(".py") and not name.endswith("_test.py") and not name.startswith("test_"):
                path = pathlib.Path(folder, name)
                parts = [*filter(None, [package]), *path.relative_to(root).with_suffix("").parts]
                modules.append((".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts), path))
    return modules


def _by_hash(files: Iterable[tuple[str, pathlib.Path]]) -> list[tuple[str, pathlib.Path]]:
    return sorted(files, key=lambda file: (hashlib.blake2b(file[0].encode(), digest_size=8).digest(), file[0]))


def _parse(path: pathlib.Path) -> ast.Module:
    """Returns a file's syntax tree; an empty one if it can't be read or parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            return ast.parse(path.read_text("utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.parse("")


def _topics() -> Iterator[tuple[str, str]]:
    """Yields the texts of `help('TOPIC')`: chapters of the language reference that the interpreter carries."""
    for node in _parse(_stdlib() / "pydoc_data" / "topics.py").body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            try:
                topics = ast.literal_eval(node.value)
            except ValueError:
                continue
            for topic, text in sorted(topics.items()):
                if isinstance(text, str) and len(text) >= MIN_DOCSTRING:
                    yield f"python-topic.{topic}", text


def _docstrings(files: Iterable[tuple[str, pathlib.Path]]) -> Iterator[tuple[str, str]]:
    gc.freeze()  # with JAX loaded, looking through its objects took a third of the parsing time
    try:
        for module, path in _by_hash(files):
            for name, doc in _named_docstrings(module, _parse(path)):
                doc = inspect.cleandoc(doc)
                if len(doc) >= MIN_DOCSTRING:
                    yield name, f"{name}\n\n{doc}\n"
    finally:
        gc.unfreeze()


def _named_docstrings(name: str, node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yields (dotted name, docstring) of a module, of all that it defines, and of `add_newdoc` calls (as in NumPy)."""
    if doc := ast.get_docstring(node, clean=False):
        yield name, doc
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _named_docstrings(f"{name}.{child.name}", child)
        elif isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):
            yield from _added_docstrings(child.value)


def _added_docstrings(call: ast.Call) -> Iterator[tuple[str, str]]:
    if getattr(call.func, "id", getattr(call.func, "attr", "")) != "add_newdoc" or len(call.args) < 3:
        return
    try:
        place, name, doc = (ast.literal_eval(argument) for argument in call.args[:3])
    except ValueError:
        return
    if isinstance(doc, tuple) and len(doc) == 2:
        name, doc = f"{name}.{doc[0]}", doc[1]
    if isinstance(doc, str):
        yield f"{place}.{name}", doc
