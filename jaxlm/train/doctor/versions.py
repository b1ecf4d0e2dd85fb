"""Checks Python and the installed packages: what jaxlm requires, and pairs that are known not to work together."""

import importlib.metadata
import re
import sys
from collections.abc import Mapping

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from jaxlm.train.doctor.findings import FAIL, OK, WARN, Finding

# (package, versions of it, verdict, what goes wrong and how to mend it)
KNOWN_BAD = (
    ("orbax-checkpoint", "<0.12", FAIL, "loses saves in silence: pip install -U orbax-checkpoint"),
    ("grain", "<0.2.15", FAIL, "is older than what the loader is tested with: pip install -U grain"),
    ("numpy", "<2", FAIL, "is too old for jax and pyarrow built for 2: pip install -U numpy"),
)
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")
_SHOWN = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
PYTHON = (3, 11)


def installed() -> dict[str, str]:
    """Returns the version of every installed package, by its name in lower case with dashes."""
    return {_plain(d.metadata["Name"]): d.version for d in importlib.metadata.distributions() if d.metadata["Name"]}


def required() -> list[str]:
    """Returns what jaxlm requires, as in pyproject.toml, extras left out; [] if jaxlm runs without being installed."""
    try:
        lines = importlib.metadata.requires("jaxlm") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [line for line in lines if "extra ==" not in line]


def check(
    packages: Mapping[str, str], requirements: list[str], python: tuple[int, ...] = sys.version_info[:3]
) -> list[Finding]:
    """Returns a finding for each thing that is wrong, or one line with the versions.

    Args:
      packages: name -> version, as `installed` returns them.
      requirements: lines such as "jax>=0.10,<0.12".
      python: the version of Python.
    """
    problems = list(_python(python)) + list(_unmet(packages, requirements)) + list(_known(packages))
    problems += list(_jax(packages))
    figures = {"python": ".".join(map(str, python)), **{name: packages.get(name) for name in _SHOWN}}
    if problems:
        return [Finding("versions", verdict, text, figures) for verdict, text in dict.fromkeys(problems)]
    shown = ", ".join(f"{name} {packages[name]}" for name in _SHOWN if name in packages)
    return [Finding("versions", OK, f"Python {figures['python']}, {shown}", figures)]


def _python(python: tuple[int, ...]):
    if python[:2] < PYTHON:
        yield FAIL, f"Python {'.'.join(map(str, python))}: jaxlm needs {'.'.join(map(str, PYTHON))} or newer"


def _unmet(packages: Mapping[str, str], requirements: list[str]):
    known = {name for name, versions, _, _ in KNOWN_BAD if _within(packages.get(name), versions)}
    for line in requirements:
        try:
            need = Requirement(line)
        except InvalidRequirement:
            continue
        name = _plain(need.name)
        if name in known or (need.marker and not need.marker.evaluate()):
            continue
        if name not in packages:
            yield FAIL, f"{name} is not installed: pip install '{need.name}{need.specifier}'"
        elif not need.specifier.contains(packages[name], prereleases=True):
            yield FAIL, f"{name} {packages[name]} is not {need.specifier}: pip install '{need.name}{need.specifier}'"


def _known(packages: Mapping[str, str]):
    for name, versions, verdict, text in KNOWN_BAD:
        if _within(packages.get(name), versions):
            yield verdict, f"{name} {packages[name]} {text}"


def _jax(packages: Mapping[str, str]):
    """jax, jaxlib and the CUDA plugins are released together. With another plugin JAX trains on the CPU, and only warns."""
    jax, jaxlib = packages.get("jax"), packages.get("jaxlib")
    if jax and jaxlib and _release(jax) != _release(jaxlib):
        apart = _release(jax)[:2] != _release(jaxlib)[:2]
        yield FAIL if apart else WARN, f"jax {jax} with jaxlib {jaxlib}: pip install jaxlib=={jax}"
    plugins = [name for name in _PLUGINS if name in packages]
    for name in plugins:
        if jaxlib and _release(packages[name]) != _release(jaxlib):
            mend = f"pip install -U 'jax[{name.split('-')[1]}]=={jax}'"
            yield FAIL, f"{name} {packages[name]} with jaxlib {jaxlib}: JAX would leave the GPU out; {mend}"
    if len({name.split("-")[1] for name in plugins}) > 1:
        yield WARN, "plugins for CUDA 12 and for CUDA 13 are both installed: uninstall the older two"


def _within(version: str | None, versions: str) -> bool:
    return version is not None and SpecifierSet(versions).contains(version, prereleases=True)


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version: 0.10.2.dev1 -> (0, 10, 2)."""
    return tuple(int(part) for part in re.match(r"[\d.]*", version)[0].strip(".").split(".") if part)[:3]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
