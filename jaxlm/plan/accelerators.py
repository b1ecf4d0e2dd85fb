"""Reads configs/prices.toml: each accelerator's memory, peak, price, and the share of the peak that training reaches."""

import dataclasses
import pathlib
import re
import tomllib

from jaxlm.config import Config, ConfigError, config_files, nearest
from jaxlm.host import files

SHIPPED = config_files.CONFIG_PACKAGE / "prices.toml"


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One accelerator that can be rented.

    Attributes:
      kind: the words of JAX's `device_kind` that identify it.
      memory: the bytes that a program can use.
      tflops, bandwidth_gb: the dense bfloat16 peak in TFLOP/s; the memory's bandwidth in 10^9 bytes a second.
      usd, usd_spot: dollars for an hour of one device, on demand and preemptible.
      mfu: the share of the peak that training a 1.04B model reaches, at 6N + 12LdT FLOPs a token; mfu_from: who measured it.
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
    """The content of a prices file. `peaks`: words of JAX's `device_kind` -> dense bfloat16 peak in TFLOP/s."""

    accelerators: tuple[Accelerator, ...]
    peaks: dict[str, float]
    as_of: str

    def named(self, name: str) -> Accelerator:
        """Returns the accelerator of this name, whatever its case and punctuation. Raises ConfigError if there is none."""
        plain = {_plain(a.name): a for a in self.accelerators}
        if _plain(name) in plain:
            return plain[_plain(name)]
        longer = [a.name for a in self.accelerators if _plain(a.name).startswith(_plain(name))]
        hint = f"there are {', '.join(longer)}" if longer else nearest(name, [a.name for a in self.accelerators])
        raise ConfigError(f"config.plan.accelerator={name!r} is not in the prices file; {hint}")

    def kind(self, device_kind: str) -> str | None:
        fitting = [kind for kind in self.peaks if re.search(rf"\b{re.escape(kind)}\b", device_kind, re.IGNORECASE)]
        return max(fitting, key=len, default=None)  # "H200 NVL" before "H200"


def load(path: str = "") -> Prices:
    """Reads a prices file, the shipped one by default. Raises ConfigError if it is absent or wrong."""
    file = pathlib.Path(path) if path else SHIPPED
    try:
        prices = {"peak_tflops": {}} | tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config.plan.prices={path}: {error.strerror}; copy {SHIPPED} and edit it") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error
    usable, assumed = (_number(file, prices, key, (0, 1)) for key in ("usable_memory", "assumed_mfu"))
    problem = files.problem(prices, {"accelerators": {str: {}}, "peak_tflops": {}})
    if problem := problem or ("" if prices["accelerators"] else "it has no accelerator"):
        raise ConfigError(f"{file}: {problem}; copy {SHIPPED} and edit it")
    rows = tuple(_accelerator(file, name, entry, usable, assumed) for name, entry in prices["accelerators"].items())
    others = prices["peak_tflops"]
    peaks = {kind: _number(f"{file}, [peak_tflops]", others, kind) for kind in others}
    peaks |= {row.kind: row.tflops for row in rows}
    return Prices(rows, peaks, str(prices.get("prices_as_of", "an unknown date")))


def _accelerator(file: pathlib.Path, name: str, entry: dict, usable: float, assumed: float) -> Accelerator:
    place = f'{file}, [accelerators."{name}"]'
    known = ("kind", "memory_gb", "tflops", "bandwidth_gb", "usd", "usd_spot", "mfu", "mfu_from")
    for key in entry:
        if key not in known:
            raise ConfigError(f"{place}: unknown key {key}; {nearest(key, known)}")
    has_mfu = "mfu" in entry
    if has_mfu and not entry.get("mfu_from"):
        raise ConfigError(f"{place}: say in mfu_from who measured its mfu")
    return Accelerator(
        name=name,
        kind=str(entry.get("kind", name)),
        memory=1e9 * usable * _number(place, entry, "memory_gb"),
        **{key: _number(place, entry, key) for key in ("tflops", "bandwidth_gb", "usd", "usd_spot")},
        mfu=_number(place, entry, "mfu", (0, 1)) if has_mfu else assumed,
        mfu_from=str(entry.get("mfu_from", "")) if has_mfu else "",
    )


def _number(place: str | pathlib.Path, table: dict, key: str, bounds: tuple[float, float] = (0, 1e12)) -> float:
    if key not in table:
        raise ConfigError(f"{place}: {key} is missing")
    value, (low, high) = table[key], bounds
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value <= high:
        raise ConfigError(f"{place}: {key} = {value!r} must be a number above {low:g}, at most {high:g}")
    return float(value)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def check_price(config: Config, device_kind: str, devices: int) -> None:
    """Raises ConfigError, with prices to choose from, if a budget is in dollars and `hardware.usd_per_hour` is 0."""
    budgets = {f"phases.plan.{name}.usd": phase.usd for name, phase in config.phases.plan.items()}
    budgets |= {f"stop.{key}": getattr(config.stop, key) for key in ("usd", "usd_per_centinat")}
    budgets["checkpoint.max_unprotected_usd"] = config.checkpoint.max_unprotected_usd
    limited = [f"config.{key}={usd:g}" for key, usd in budgets.items() if usd]
    if config.hardware.usd_per_hour or not limited:
        return
    times, known = f"{devices} x " * (devices > 1), load(config.plan.prices)
    cards = [a for a in known.accelerators if a.kind == known.kind(device_kind)]  # two for an A100, none for a CPU
    prices = [f"{devices * card.usd:g} ({times}{card.name})" for card in cards] or [f"PRICE ({times}{device_kind})"]
    raise ConfigError(
        f"{limited[0]} is a limit in dollars, which needs the machine's price: give "
        f"{' or '.join(f'--config.hardware.usd_per_hour={price}' for price in prices)}, or what an hour of this machine "
        "costs you"
    )
