"""Asks NVIDIA's driver whether the GPUs are in good health: memory errors, throttling, power, PCIe, leftovers of the dead.

The functions take the module `pynvml` (package nvidia-ml-py) as an argument. What a card or driver does not know is left
out. Sources: NVML's reference, and "XID Errors" and "GPU Memory Error Management" in NVIDIA's documentation.
"""

import os
import pathlib
import re
import types
import typing
from collections.abc import Callable

from jaxlm.console import gigabytes
from jaxlm.train.doctor.findings import FAIL, OK, WARN, Finding

# Xid numbers of broken hardware or a broken driver, of which a program is not the cause: number -> (verdict, meaning).
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
HELD_BYTES = 1e9  # memory in use without a process that is seen; a driver alone takes less
_MEND = "restart the machine or take another"


def present(root: pathlib.Path = pathlib.Path("/")) -> bool:
    """Returns True if this machine, or container, has an NVIDIA device."""
    return (root / "dev/nvidia0").exists() or (root / "proc/driver/nvidia/gpus").is_dir()


def check(nvml: types.ModuleType | None, kernel_log: str, has_device: bool) -> list[Finding]:
    """Returns a finding for each problem of each card, and a line with its figures for each card without one.

    Call it before JAX takes the GPUs' memory.

    Args:
      nvml: the module pynvml; None if it is not installed.
      kernel_log: the kernel's messages, "" if they can't be read.
      has_device: True if there is an NVIDIA device (`present`).
    """
    if nvml is None:
        if not has_device:
            return [Finding("gpu", OK, "no NVIDIA device")]
        return [Finding("gpu", WARN, 'health not checked: pip install "jaxlm[gpu]" (nvidia-ml-py)')]
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        if not has_device:
            return [Finding("gpu", OK, "no NVIDIA device")]
        return [Finding("gpu", FAIL, f"NVIDIA's driver does not answer ({error}): {_MEND}")]
    try:
        cards = [_card(nvml, i) for i in range(count)]
    finally:
        nvml.nvmlShutdown()
    return [finding for found in cards for finding in found] + xids(kernel_log) or [
        Finding("gpu", OK, "no NVIDIA device")
    ]


def _card(nvml: types.ModuleType, index: int) -> list[Finding]:
    def ask(name: str, *args: typing.Any) -> typing.Any:
        """What NVML's function says of this card; None if the card or the driver does not know."""
        try:
            return getattr(nvml, name)(handle, *args)
        except (nvml.NVMLError, AttributeError):
            return None

    name = f"gpu {index}"
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        return [Finding(name, FAIL, f"does not answer ({error}): {_MEND}")]
    kind = ask("nvmlDeviceGetName") or "NVIDIA device"
    kind = kind.decode() if isinstance(kind, bytes) else kind
    figures: dict[str, typing.Any] = {"kind": kind}
    problems = [*_errors(nvml, ask, figures), *_slow(nvml, ask, figures), *_held(ask, figures)]
    if problems:
        return [Finding(name, verdict, f"{kind}: {text}", figures) for verdict, text in problems]
    shown = [f"{figures['free_bytes'] / 1e9:.1f} GB free"] if "free_bytes" in figures else []
    shown += [f"{figures['power_limit_w']:.0f} W"] if "power_limit_w" in figures else []
    shown += [f"up to {figures['max_sm_mhz']} MHz"] if "max_sm_mhz" in figures else []
    shown += [f"{figures['temperature_c']} C"] if "temperature_c" in figures else []
    return [Finding(name, OK, ", ".join([kind, *shown, "no errors"]), figures)]


Ask = Callable[..., typing.Any]
Problems = list[tuple[str, str]]


def _errors(nvml: types.ModuleType, ask: Ask, figures: dict) -> Problems:
    """Memory errors: uncorrected ones now and ever, rows that wait to be remapped or can't be."""
    problems = []
    uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    for key, counter in (("ecc_now", nvml.NVML_VOLATILE_ECC), ("ecc_ever", nvml.NVML_AGGREGATE_ECC)):
        found = ask("nvmlDeviceGetTotalEccErrors", uncorrected, counter)
        if found is not None:
            figures[key] = found
    if figures.get("ecc_now"):
        problems.append((FAIL, f"{figures['ecc_now']} uncorrectable memory errors since the driver started: {_MEND}"))
    elif figures.get("ecc_ever"):
        problems.append((WARN, f"{figures['ecc_ever']} uncorrectable memory errors in its life: watch it"))
    rows = ask("nvmlDeviceGetRemappedRows")
    if rows is not None:
        _, figures["remapped_rows"], pending, failed = rows
        if failed:
            problems.append((FAIL, "a bad row of memory could not be remapped: take another machine"))
        elif pending:
            problems.append((FAIL, f"a bad row of memory waits to be remapped: reset the GPU, {_MEND}"))
    return problems


def _slow(nvml: types.ModuleType, ask: Ask, figures: dict) -> Problems:
    """What makes a card slower than it was sold: throttling, a lowered power limit or clock, missing PCIe lanes."""
    problems = []
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons") if reasons is None else reasons
    if reasons is not None:
        figures["clock_reasons"] = reasons
        if said := [meaning for bit, meaning in SLOWED.items() if reasons & bit]:
            problems.append((WARN, f"slowed down: {', '.join(said)}; its cooling or power is at fault"))
    limit, usual = ask("nvmlDeviceGetPowerManagementLimit"), ask("nvmlDeviceGetPowerManagementDefaultLimit")
    if limit:
        figures["power_limit_w"] = limit / 1000
        if usual and limit < 0.98 * usual:
            problems.append(
                (WARN, f"power is limited to {limit / 1000:.0f} of {usual / 1000:.0f} W: it will be slower")
            )
    most = ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM)
    if most:
        figures["max_sm_mhz"] = most
    now = ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM)
    if now is not None:
        figures["sm_mhz"] = now
    heat = ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU)
    if heat is not None:
        figures["temperature_c"] = heat
    lanes, all_lanes = ask("nvmlDeviceGetCurrPcieLinkWidth"), ask("nvmlDeviceGetMaxPcieLinkWidth")
    if lanes:
        figures["pcie_lanes"] = lanes
        if all_lanes and lanes < all_lanes:
            problems.append((WARN, f"PCIe runs on {lanes} of {all_lanes} lanes: loading and saving will be slower"))
    return problems


def _held(ask: Ask, figures: dict) -> Problems:
    """Memory that others hold. In a container the driver names processes by numbers of the host, or none at all."""
    memory, processes = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetComputeRunningProcesses")
    if memory is None:
        return []
    figures |= {"memory_bytes": memory.total, "free_bytes": memory.free, "used_bytes": memory.used}
    if processes is None:
        return []
    others = [process for process in processes if process.pid != os.getpid()]
    alive = [process.pid for process in others if alive_pid(process.pid)]
    gone = [process.pid for process in others if process.pid not in alive]
    figures |= {"pids": alive, "pids_unseen": gone}
    if alive:
        who = f"process {', '.join(map(str, alive))}"
        return [(WARN, f"{who} uses it: {gigabytes(memory.used)} GB are taken; end it first")]
    if gone or memory.used > HELD_BYTES:
        who = f"process {', '.join(map(str, gone))}, which is" if gone else "a process that is"
        held = f"{gigabytes(memory.used)} GB are held by {who}"
        return [(WARN, f"{held} dead or outside of this container: restart the machine")]
    return []


def alive_pid(pid: int, root: pathlib.Path = pathlib.Path("/proc")) -> bool:
    """Returns True if a process has this number and is no zombie."""
    try:
        return (root / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def xids(kernel_log: str) -> list[Finding]:
    """Returns a finding for each (card, Xid of XIDS) in the kernel's messages since the machine started."""
    seen: dict[tuple[str, int], int] = {}
    for card, number in re.findall(r"NVRM: Xid \((?:PCI:)?([^)]*)\): (\d+)", kernel_log):
        if int(number) in XIDS:
            seen[card, int(number)] = seen.get((card, int(number)), 0) + 1
    found = []
    for (card, number), times in seen.items():
        verdict, meaning = XIDS[number]
        text = f"Xid {number} in the kernel's log ({times} times): {meaning}; {_MEND}"
        found.append(Finding(f"gpu {card}", verdict, text, {"xid": number, "times": times}))
    return found


def kernel_log(path: str = "/dev/kmsg") -> str:
    """Returns the kernel's messages; "" if they can't be read, as in most containers."""
    lines = []
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        while len(lines) < 100_000:
            try:
                line = os.read(log, 8192)  # one message a read; EPIPE: it was overwritten meanwhile, the next follows
            except BrokenPipeError:
                continue
            if not line:
                break
            lines.append(line)
    except OSError:  # EAGAIN: that was the last one
        pass
    finally:
        os.close(log)
    return b"\n".join(lines).decode("utf-8", "replace")
