"""The errors that end a command with one line; `cli` prints it."""

import importlib
import pathlib
import types


class ConfigError(ValueError):
    """Bad input from the user: the message is one line that says what is wrong and how to fix it (exit code 2)."""


class RunError(RuntimeError):
    """A run can't go on for a reason outside the program: one line that says why and how to fix it (exit code 1)."""


def pip_install(extra: str) -> str:
    """Returns the command that installs an extra of jaxlm. It names the checkout, since no package index has jaxlm."""
    place = pathlib.Path(__file__).resolve().parents[2]
    here = (place / "pyproject.toml").is_file()
    return f'pip install -e "{place if here else "."}[{extra}]"' + " in a checkout of jaxlm" * (not here)


def optional(module: str, needs: str, extra: str, otherwise: str = "") -> types.ModuleType:
    """Returns the module of an optional package. Raises ConfigError, `needs` with the command that installs `extra`."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"{needs}: {pip_install(extra)}{otherwise}") from None
