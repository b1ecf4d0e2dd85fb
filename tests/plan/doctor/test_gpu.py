"""GPU health from a driver that is made up: each thing that can be wrong with a card, and cards that know little."""

import os
import types

import pytest

from jaxlm.config import pip_install
from jaxlm.plan.doctor import gpu
from jaxlm.plan.doctor.findings import FAIL, OK, WARN

GB = 10**9
HELD = types.SimpleNamespace(total=150 * GB, free=80 * GB, used=70 * GB)


class NVMLError(Exception):
    pass


def process(pid: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(pid=pid, usedGpuMemory=5 * GB)


def card(**changes) -> dict:
    """What a healthy H200 answers, by the end of NVML's function names."""
    healthy = {
        "Name": "NVIDIA H200",
        "TotalEccErrors": lambda kind, counter: 0,
        "RemappedRows": (0, 0, 0, 0),
        "CurrentClocksEventReasons": 1,
        "PowerManagementLimit": 700_000,
        "PowerManagementDefaultLimit": 700_000,
        "MaxClockInfo": lambda clock: 1980,
        "ClockInfo": lambda clock: 345,
        "Temperature": lambda sensor: 31,
        "CurrPcieLinkWidth": 16,
        "MaxPcieLinkWidth": 16,
        "MemoryInfo": types.SimpleNamespace(total=150 * GB, free=149 * GB, used=GB // 2),
        "ComputeRunningProcesses": [],
    }
    return healthy | changes


def driver(*cards: dict) -> types.SimpleNamespace:
    """A module like pynvml. A function whose answer is None is not supported."""

    def function(name: str):
        def ask(index: int, *args):
            answer = cards[index][name]
            if answer is None:
                raise NVMLError("Not Supported")
            return answer(*args) if callable(answer) else answer

        return ask

    constants = {"NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1, "NVML_VOLATILE_ECC": 0, "NVML_AGGREGATE_ECC": 1}
    constants |= {"NVML_CLOCK_SM": 1, "NVML_TEMPERATURE_GPU": 0, "NVMLError": NVMLError}
    functions = {f"nvmlDeviceGet{name}": function(name) for name in card()}
    functions["nvmlDeviceGetCurrentClocksThrottleReasons"] = functions["nvmlDeviceGetCurrentClocksEventReasons"]
    basic = {"nvmlInit": lambda: None, "nvmlShutdown": lambda: None, "nvmlDeviceGetCount": lambda: len(cards)}
    return types.SimpleNamespace(**constants, **functions, **basic, nvmlDeviceGetHandleByIndex=lambda i: i)


def check(log: str = "", **changes):
    return gpu.check(driver(card(**changes)), log, True)


def test_a_healthy_card_is_one_line_with_its_figures():
    (found,) = check()
    assert (found.name, found.verdict) == ("gpu 0", OK)
    assert found.text == "NVIDIA H200, 149.0 GB free, 700 W, up to 1980 MHz, 31 C, no errors"
    assert found.figures["pcie_lanes"] == 16
    assert found.figures["ecc_ever"] == 0


@pytest.mark.parametrize(
    ("changes", "verdict", "words"),
    [
        ({"TotalEccErrors": lambda kind, counter: 3}, FAIL, "3 uncorrectable memory errors since the driver started"),
        ({"TotalEccErrors": lambda kind, counter: 2 * counter}, WARN, "2 uncorrectable memory errors in its life"),
        ({"RemappedRows": (0, 1, 1, 0)}, FAIL, "waits to be remapped: reset the GPU"),
        ({"RemappedRows": (0, 1, 0, 1)}, FAIL, "could not be remapped: take another machine"),
        ({"CurrentClocksEventReasons": 0x40 | 0x1}, WARN, "slowed down: too hot (hardware)"),
        ({"CurrentClocksEventReasons": 0x88}, WARN, "hardware slowdown (heat or power), power brake"),
        ({"PowerManagementLimit": 500_000}, WARN, "power is limited to 500 of 700 W"),
        ({"CurrPcieLinkWidth": 4}, WARN, "PCIe runs on 4 of 16 lanes"),
        ({"ComputeRunningProcesses": [process(1)]}, WARN, "process 1 uses it"),
        ({"ComputeRunningProcesses": [process(2**22 + 1)]}, WARN, "held by process 4194305, which is dead or outside"),
        ({"MemoryInfo": HELD}, WARN, "70.0 GB are held by a process that is dead or outside of this container"),
    ],
)
def test_each_fault_is_named(changes, verdict, words):
    (found,) = check(**changes)
    assert found.verdict == verdict
    assert words in found.text


def test_a_card_that_works_or_idles_is_not_slowed_down():
    for reasons in (0x1, 0x2, 0x4):  # idle, application clocks, at its power limit
        assert [f.verdict for f in check(CurrentClocksEventReasons=reasons)] == [OK]


def test_our_own_process_is_no_other():
    assert [f.verdict for f in check(ComputeRunningProcesses=[process(os.getpid())])] == [OK]


def test_what_a_card_does_not_know_is_left_out():
    (found,) = check(**dict.fromkeys(set(card()) - {"Name"}))
    assert (found.verdict, found.text) == (OK, "NVIDIA H200, no errors")


def test_each_card_has_its_lines():
    found = gpu.check(driver(card(), card(RemappedRows=(0, 0, 1, 0), CurrPcieLinkWidth=8), card()), "", True)
    assert [(f.name, f.verdict) for f in found] == [("gpu 0", OK), ("gpu 1", FAIL), ("gpu 1", WARN), ("gpu 2", OK)]


def test_a_driver_that_does_not_answer():
    broken = driver()

    def fail():
        raise NVMLError("Driver/library version mismatch")

    broken.nvmlInit = fail
    (found,) = gpu.check(broken, "", True)
    assert found.verdict == FAIL
    assert "Driver/library version mismatch" in found.text
    assert [(f.verdict, f.text) for f in gpu.check(broken, "", False)] == [(OK, "no NVIDIA device")]


def test_without_a_card_or_the_package():
    assert [(f.verdict, f.text) for f in gpu.check(driver(), "", False)] == [(OK, "no NVIDIA device")]
    assert [(f.verdict, f.text) for f in gpu.check(None, "", False)] == [(OK, "no NVIDIA device")]
    (found,) = gpu.check(None, "", True)
    assert found.verdict == WARN
    assert pip_install("gpu") in found.text


def test_xids_of_the_hardware_are_told_and_those_of_programs_are_not():
    log = (
        "6,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=12, GPU has fallen off the bus.\n"
        "6,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n"
        "6,1,2,-;NVRM: Xid (PCI:0000:af:00): 31, pid=9, name=python, MMU Fault\n"
        "6,1,2,-;NVRM: Xid (PCI:0000:af:00): 63, pid=9, Row Remapper\n"
    )
    assert [(f.name, f.verdict) for f in gpu.xids(log)] == [("gpu 0000:3b:00", FAIL), ("gpu 0000:af:00", WARN)]
    assert "Xid 79 in the kernel's log (2 times): the GPU has fallen off the bus" in gpu.xids(log)[0].text
    assert [f.verdict for f in check(log)] == [OK, FAIL, WARN]


def test_the_kernels_log_may_be_out_of_reach(tmp_path):
    assert gpu.kernel_log(str(tmp_path / "none")) == ""
    (tmp_path / "kmsg").write_text("6,1,2,-;NVRM: Xid (PCI:1): 79, x\n")
    assert "Xid" in gpu.kernel_log(str(tmp_path / "kmsg"))


def test_who_is_alive(tmp_path):
    assert gpu.alive_pid(os.getpid())
    assert not gpu.alive_pid(2**22 + 1)
    (tmp_path / "7").mkdir()
    (tmp_path / "7/stat").write_text("7 (a (b) Z) Z 1 7")
    assert not gpu.alive_pid(7, tmp_path)


def test_where_a_card_is_seen(tmp_path):
    assert not gpu.present(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert gpu.present(tmp_path)


def test_the_real_package_has_every_function_that_is_asked():
    pynvml = pytest.importorskip("pynvml")
    fake = vars(driver())
    assert [name for name in fake if not hasattr(pynvml, name)] == []
