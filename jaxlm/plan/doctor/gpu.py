"""Asks NVIDIA's driver whether the GPUs are in good health: memory errors, throttling, power, PCIe, memory of dead processes.

`nvml` is the module pynvml (nvidia-ml-py). Figures that a card does not report are left out. Sources: NVML's reference, and
"XID Errors" and "GPU Memory Error Management" in NVIDIA's documentation.
"""

import collections
import contextlib
import os
import pathlib
import re
import types
from collections.abc import Callable, Iterator

from jaxlm.config import pip_install
from jaxlm.host.console import gigabytes
from jaxlm.plan.doctor.findings import FAIL, OK, WARN, Finding

# Xid numbers of broken hardware or a broken driver, which no program causes: number -> (verdict, meaning).
XIDS = {
    48: (FAIL, "uncorrectable memory error"),
    62: (WARN, "the card's controller halted"),
    63: (WARN, "a row of memory was remapped"),
    64: (FAIL, "a row of memory could not be remapped"),
    74: (WARN, "NVLink error"),
    79: (FAIL, "the GPU has fallen off the bus"),
    92: (WARN, "many corrected memory errors"),
    94: (WARN, "contained memory error"),
    95: (FAIL, "uncontained memory error"),
    119: (WARN, "the card's firmware (GSP) does not answer"),
    120: (WARN, "error in the card's firmware (GSP)"),
}
# NVML's bits of "clocks event reasons" that slow a card down though it has work and power: bit -> meaning.
SLOWED = {
    0x08: "hardware slowdown (heat or power)",
    0x20: "too hot (driver)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}
HELD_BYTES = 1e9  # memory in use without a visible process; a driver alone takes less
_MEND = "restart the machine or take another"
_NONE = Finding("gpu", OK, "no NVIDIA device")
_MOST_LINES = 100_000  # of the kernel's log

Ask = Callable  # (the end of an NVML function's name, its arguments) -> its result, or None


def present(root: pathlib.Path = pathlib.Path("/")) -> bool:
    return (root / "dev/nvidia0").exists() or (root / "proc/driver/nvidia/gpus").is_dir()


def check(nvml: types.ModuleType | None, kernel_log: str, has_device: bool) -> list[Finding]:
    """Returns a finding for each problem of a card; for a sound card one with its figures. Call it before JAX takes memory."""
    if nvml is None:
        missing = Finding("gpu", WARN, f"health not checked: {pip_install('gpu')} (nvidia-ml-py)")
        return [missing if has_device else _NONE]
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        silent = Finding("gpu", FAIL, f"NVIDIA's driver does not answer ({error}): {_MEND}")
        return [silent if has_device else _NONE]
    cards = [finding for index in range(count) for finding in _card(nvml, index)]
    nvml.nvmlShutdown()
    return [*cards, *xids(kernel_log)] or [_NONE]


def _card(nvml: types.ModuleType, index: int) -> list[Finding]:
    def ask(question: str, *args: object) -> object:
        try:
            return getattr(nvml, f"nvmlDeviceGet{question}")(handle, *args)
        except (nvml.NVMLError, AttributeError):
            return None

    name = f"gpu {index}"
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        return [Finding(name, FAIL, f"does not answer ({error}): {_MEND}")]
    figures = _figures(nvml, ask)
    kind = figures["kind"]
    if problems := list(_problems(ask, figures)):
        return [Finding(name, verdict, f"{kind}: {text}", figures) for verdict, text in problems]
    words = {
        "free_bytes": lambda free: f"{gigabytes(free, 1)} GB free",
        "power_limit_w": "{:.0f} W".format,
        "max_sm_mhz": "up to {} MHz".format,
        "temperature_c": "{} C".format,
    }
    shown = [say(figures[key]) for key, say in words.items() if key in figures]
    return [Finding(name, OK, ", ".join([kind, *shown, "no errors"]), figures)]


def _figures(nvml: types.ModuleType, ask: Ask) -> dict:
    """Returns the figures that the card reports."""
    kind = ask("Name") or "NVIDIA device"
    uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    rows, limit, memory = ask("RemappedRows"), ask("PowerManagementLimit"), ask("MemoryInfo")
    reasons = ask("CurrentClocksEventReasons")
    figures = {
        "kind": kind.decode() if isinstance(kind, bytes) else kind,
        "ecc_now": ask("TotalEccErrors", uncorrected, nvml.NVML_VOLATILE_ECC),
        "ecc_ever": ask("TotalEccErrors", uncorrected, nvml.NVML_AGGREGATE_ECC),
        "remapped_rows": rows and rows[1],
        "clock_reasons": ask("CurrentClocksThrottleReasons") if reasons is None else reasons,  # older drivers
        "power_limit_w": limit / 1000 if limit else None,
        "max_sm_mhz": ask("MaxClockInfo", nvml.NVML_CLOCK_SM) or None,
        "sm_mhz": ask("ClockInfo", nvml.NVML_CLOCK_SM),
        "temperature_c": ask("Temperature", nvml.NVML_TEMPERATURE_GPU),
        "pcie_lanes": ask("CurrPcieLinkWidth") or None,
    }
    if memory is not None:
        figures |= {"memory_bytes": memory.total, "free_bytes": memory.free, "used_bytes": memory.used}
        if (processes := ask("ComputeRunningProcesses")) is not None:
            others = [process.pid for process in processes if process.pid != os.getpid()]
            figures["pids"] = [pid for pid in others if alive_pid(pid)]
            figures["pids_unseen"] = [pid for pid in others if pid not in figures["pids"]]
    return {name: figure for name, figure in figures.items() if figure is not None}


def _problems(ask: Ask, figures: dict) -> Iterator[tuple[str, str]]:
    """Yields (verdict, text) for each fault of a card, and for each cause that makes it slower than specified."""
    if figures.get("ecc_now"):
        yield FAIL, f"{figures['ecc_now']} uncorrectable memory errors since the driver started: {_MEND}"
    elif figures.get("ecc_ever"):
        yield WARN, f"{figures['ecc_ever']} uncorrectable memory errors in its life: watch it"
    _, _, pending, failed = ask("RemappedRows") or (0, 0, 0, 0)
    if failed:
        yield FAIL, "a bad row of memory could not be remapped: take another machine"
    elif pending:
        yield FAIL, f"a bad row of memory waits to be remapped: reset the GPU, {_MEND}"
    if slowed := [meaning for bit, meaning in SLOWED.items() if figures.get("clock_reasons", 0) & bit]:
        yield WARN, f"slowed down: {', '.join(slowed)}; its cooling or power is at fault"
    limit_w, usual_w = figures.get("power_limit_w"), (ask("PowerManagementDefaultLimit") or 0) / 1000
    if limit_w and limit_w < 0.98 * usual_w:
        yield WARN, f"power is limited to {limit_w:.0f} of {usual_w:.0f} W: it will be slower"
    lanes, all_lanes = figures.get("pcie_lanes"), ask("MaxPcieLinkWidth") or 0
    if lanes and lanes < all_lanes:
        yield WARN, f"PCIe runs on {lanes} of {all_lanes} lanes: loading and saving will be slower"
    if "pids" not in figures:
        return
    # In a container the driver names processes by the host's pids, or not at all.
    alive, gone, held = figures["pids"], figures["pids_unseen"], f"{gigabytes(figures['used_bytes'])} GB are"
    if alive:
        yield WARN, f"process {', '.join(map(str, alive))} uses it: {held} taken; end it first"
    elif gone or figures["used_bytes"] > HELD_BYTES:
        who = f"process {', '.join(map(str, gone))}, which is" if gone else "a process that is"
        yield WARN, f"{held} held by {who} dead or outside of this container: restart the machine"


def alive_pid(pid: int, root: pathlib.Path = pathlib.Path("/proc")) -> bool:
    """Returns True if a process has this pid and is no zombie."""
    with contextlib.suppress(OSError, IndexError):
        return (root / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def xids(kernel_log: str) -> list[Finding]:
    """Returns a finding for each (card, Xid of XIDS) in the kernel's messages since the machine started."""
    seen = collections.Counter(re.findall(r"NVRM: Xid \((?:PCI:)?([^)]*)\): (\d+)", kernel_log))
    words = "Xid {} in the kernel's log ({} times): {}; " + _MEND
    return [
        Finding(f"gpu {card}", known[0], words.format(xid, times, known[1]), {"xid": int(xid), "times": times})
        for (card, xid), times in seen.items()
        if (known := XIDS.get(int(xid)))
    ]


def kernel_log(path: str = "/dev/kmsg") -> str:
    """Returns the kernel's messages; "" if they can't be read, as in most containers."""

    lines: list[bytes] = []
    with contextlib.suppress(OSError), open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as log:
        while len(lines) < _MOST_LINES:
            with contextlib.suppress(BrokenPipeError):  # a message was overwritten meanwhile: the next follows
                if not (line := log.read(8192)):  # one message a read; None: that was the last one
                    break
                lines.append(line)
    return b"\n".join(lines).decode("utf-8", "replace")
