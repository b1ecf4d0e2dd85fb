"""The accelerators of configs/prices.toml: memory, peak, price and the share of the peak that training reaches."""

import dataclasses
import pathlib
import re
import tomllib
import typing

from jaxlm import config_files
from jaxlm.config import ConfigError, nearest

SHIPPED = config_files.CONFIG_PACKAGE / "prices.toml"


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One device that can be rented.

    Attributes:
      memory: bytes that a program gets of it.
      tflops: dense bfloat16 peak in TFLOP/s.
      bandwidth_gb: 10^9 bytes a second of memory.
      usd, usd_spot: an hour of one, on demand and preemptible.
      mfu: share of the peak, 6N + 12LdT FLOPs a token.
      mfu_from: who measured it; "" = assumed.
    """

    name: str
    kind: str
    memory: float
    tflops: float
    bandwidth_gb: float
    usd: float
    usd_spot: float
    mfu: float
    mfu_from: str


@dataclasses.dataclass(frozen=True)
class Prices:
    """A prices file: `accelerators` in its order, `peaks` by words of the device kind, and when it was written."""

    accelerators: tuple[Accelerator, ...]
    peaks: dict[str, float]
    as_of: str

    def named(self, name: str) -> Accelerator:
        """The accelerator of that name, case and blanks ignored. Raises ConfigError with the nearest name."""
        plain = {_plain(a.name): a for a in self.accelerators}
        if _plain(name) in plain:
            return plain[_plain(name)]
        if longer := [a.name for a in self.accelerators if _plain(a.name).startswith(_plain(name))]:
            hint = f"there are {', '.join(longer)}"
        else:
            names = {a.name.lower(): a.name for a in self.accelerators}
            hint = nearest(name.lower(), names)
            for lower, proper in names.items():
                hint = hint.replace(f"'{lower}'", f"'{proper}'")
        raise ConfigError(f"config.plan.accelerator={name!r} is not in the prices file; {hint}")


def load(path: str = "") -> Prices:
    """Reads a prices file, the shipped one by default.

    Raises:
      ConfigError: no such file, not TOML, or an entry without what it needs.
    """
    file = pathlib.Path(path) if path else SHIPPED
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config.plan.prices={path}: {error.strerror}; copy {SHIPPED} and edit it") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error
    usable, assumed = (_number(file, found, key, (0, 1)) for key in ("usable_memory", "assumed_mfu"))
    table = found.get("accelerators")
    if not isinstance(table, dict) or not table:
        raise ConfigError(f'{file} has no [accelerators."NAME"]: copy {SHIPPED} and edit it')
    rows = tuple(_accelerator(file, name, entry, usable, assumed) for name, entry in table.items())
    others = found.get("peak_tflops", {})
    if not isinstance(others, dict):
        raise ConfigError(f"{file}: peak_tflops is not a table")
    peaks = {kind: _number(f"{file}, [peak_tflops]", others, kind) for kind in others}
    peaks |= {row.kind: row.tflops for row in rows}
    return Prices(rows, peaks, str(found.get("prices_as_of", "an unknown date")))


def _accelerator(file: pathlib.Path, name: str, entry: typing.Any, usable: float, assumed: float) -> Accelerator:
    where = f'{file}, [accelerators."{name}"]'
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is not a table")
    known = ("kind", "memory_gb", "tflops", "bandwidth_gb", "usd", "usd_spot", "mfu", "mfu_from")
    for key in entry:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key}; {nearest(key, known)}")
    has_mfu = "mfu" in entry
    if has_mfu and not entry.get("mfu_from"):
        raise ConfigError(f"{where}: say in mfu_from who measured its mfu")
    return Accelerator(
        name=name,
        kind=str(entry.get("kind", name)),
        memory=1e9 * usable * _number(where, entry, "memory_gb"),
        tflops=_number(where, entry, "tflops"),
        bandwidth_gb=_number(where, entry, "bandwidth_gb"),
        usd=_number(where, entry, "usd"),
        usd_spot=_number(where, entry, "usd_spot"),
        mfu=_number(where, entry, "mfu", (0, 1)) if has_mfu else assumed,
        mfu_from=str(entry.get("mfu_from", "")) if has_mfu else "",
    )


def _number(where: typing.Any, table: dict, key: str, bounds: tuple[float, float] = (0, 1e12)) -> float:
    if key not in table:
        raise ConfigError(f"{where}: {key} is missing")
    value, (low, high) = table[key], bounds
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value <= high:
        raise ConfigError(f"{where}: {key} = {value!r} must be a number above {low:g}, at most {high:g}")
    return float(value)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
