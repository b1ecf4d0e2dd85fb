"""A program run where only some packages are installed."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterable
from importlib import metadata

from documented import ROOT
from packaging.requirements import Requirement

HIDE = """
import sys
class Absent:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent)
"""


def plain(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


# Module -> the packages that it may come from.
HOMES = {module: {*map(plain, names)} for module, names in metadata.packages_distributions().items()}


def needed(requirements: Iterable[str], extras: Collection[str] = (), seen: set | None = None) -> set[str]:
    """The packages that these requirements bring."""
    seen = set() if seen is None else seen
    for one in map(Requirement, requirements):
        key = (plain(one.name), frozenset(one.extras))
        used = one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras))
        if used and key not in seen:
            seen.add(key)
            with contextlib.suppress(metadata.PackageNotFoundError):
                needed(metadata.requires(one.name) or [], one.extras, seen)
    return {name for name, _ in seen}


def run(program: str, packages: Collection[str]) -> str:
    """What a program prints that finds our scripts, these packages and no others."""
    absent = {module for module, homes in HOMES.items() if not homes & {*packages}} - {"jaxlm"}
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "tests", "scripts"))
    command = [sys.executable, "-c", HIDE.format(absent=absent) + program]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
