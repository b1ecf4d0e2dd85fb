"""Checks the installed packages: what jaxlm requires, and JAX with its plugins."""

import contextlib
import importlib.metadata
import platform
from collections.abc import Iterator, Mapping

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from jaxlm.plan.doctor.findings import FAIL, OK, WARN, Finding

_PLUGINS = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")
_SHOWN = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def installed() -> dict[str, str]:
    """Returns the version of every installed package, by its name in lower case with dashes."""
    distributions = importlib.metadata.distributions()
    return {canonicalize_name(d.metadata["Name"]): d.version for d in distributions if d.metadata["Name"]}


def required() -> list[str]:
    """Returns jaxlm's requirements, as in pyproject.toml, without extras; [] if jaxlm runs without being installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return [line for line in importlib.metadata.requires("jaxlm") or [] if "extra ==" not in line]
    return []


def check(packages: Mapping[str, str], requirements: list[str]) -> list[Finding]:
    """Returns a finding for each problem, or one finding with the versions."""
    problems = [*_packages(packages, requirements), *_jax(packages)]
    figures = {"python": platform.python_version(), **{name: packages.get(name) for name in _SHOWN}}
    if problems:
        return [Finding("versions", verdict, text, figures) for verdict, text in dict.fromkeys(problems)]
    shown = ", ".join(f"{name} {packages[name]}" for name in _SHOWN if name in packages)
    return [Finding("versions", OK, f"Python {figures['python']}, {shown}", figures)]


def _packages(packages: Mapping[str, str], requirements: list[str]) -> Iterator[tuple[str, str]]:
    """Yields (verdict, text) for each package that is missing or of an unsupported version."""
    for need in map(Requirement, requirements):
        name, mend = canonicalize_name(need.name), f"pip install '{need.name}{need.specifier}'"
        if need.marker and not need.marker.evaluate():
            continue
        if name not in packages:
            yield FAIL, f"{name} is not installed: {mend}"
        elif not need.specifier.contains(packages[name], prereleases=True):
            yield FAIL, f"{name} {packages[name]} is not {need.specifier}: {mend}"


def _jax(packages: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields (verdict, text) where jax, jaxlib and CUDA plugins differ: with an older plugin JAX warns and takes the CPU."""
    jax, jaxlib = packages.get("jax"), packages.get("jaxlib")
    if not (jax and jaxlib):
        return
    if _release(jax) != _release(jaxlib):
        apart = _release(jax)[:2] != _release(jaxlib)[:2]
        yield FAIL if apart else WARN, f"jax {jax} with jaxlib {jaxlib}: pip install jaxlib=={jax}"
    plugins = [name for name in _PLUGINS if name in packages]
    for name in plugins:
        if _release(packages[name]) != _release(jaxlib):
            mend = f"pip install -U 'jax[{name.split('-')[1]}]=={jax}'"
            yield FAIL, f"{name} {packages[name]} with jaxlib {jaxlib}: JAX would leave the GPU out; {mend}"
    if len({name.split("-")[1] for name in plugins}) > 1:
        yield WARN, "plugins for CUDA 12 and for CUDA 13 are both installed: uninstall the older two"


def _release(version: str) -> tuple[int, ...]:
    return Version(version).release[:3]
