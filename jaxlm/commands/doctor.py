"""`jaxlm doctor`: checks this machine before a run starts on it, and prints each verdict on a line."""

import argparse
import dataclasses
import importlib
import json
import os
import sys
import time
import types
from collections.abc import Callable

from jaxlm.config import Config
from jaxlm.data.batches import which_data
from jaxlm.host import files
from jaxlm.host.console import say
from jaxlm.plan.doctor import findings, gpu, storage, versions
from jaxlm.plan.doctor.findings import FAIL, OK, WARN, Finding
from jaxlm.run.checkpoints import keep
from jaxlm.run.survive import notify

START_S = 120.0  # for JAX to have its devices
COMPILE_S = 240.0  # for a check that compiles
UNKNOWN_BYTES = int(256e6)  # tried on the disk if the size of a checkpoint is not known


class Report:
    """Runs checks, prints each finding at once, and remembers them all."""

    def __init__(self, as_json: bool):
        # `who` stands in front of later findings: if there are several processes, all print.
        self._as_json, self.who = as_json, ""
        self.findings: list[Finding] = []

    @property
    def hung(self) -> bool:
        return any(finding.hung for finding in self.findings)

    def check(self, name: str, ask: Callable[[], Finding | list[Finding]], seconds: float = 30.0) -> None:
        """Runs one check, at most for `seconds`, and prints its findings."""
        for finding in findings.examine(name, ask, seconds):
            finding = dataclasses.replace(finding, name=self.who + finding.name)
            print(json.dumps(dataclasses.asdict(finding)) if self._as_json else finding, flush=True)
            self.findings.append(finding)

    def count(self, verdict: str) -> int:
        return sum(finding.verdict == verdict for finding in self.findings)


def run(config: Config, args: argparse.Namespace) -> int:
    """Prints the findings; returns 1 if one of them would make the run fail, else 0."""
    began, report = (time.time(), time.monotonic()), Report(args.json)
    report.check("versions", lambda: versions.check(versions.installed(), versions.required()))
    has_gpu = gpu.present()
    report.check("gpu", lambda: gpu.check(_nvml(), gpu.kernel_log(), has_gpu))
    if config.notify.urls or config.notify.heartbeat_url:
        report.check("notify", lambda: _notify(config))
    # JAX only now, and in a check: a broken installation or driver is a finding, and the GPUs were looked at while free.
    machine = None

    def start() -> Finding:
        nonlocal machine
        checks = importlib.import_module("jaxlm.plan.doctor.machine")
        machine = checks.start(config)
        return checks.present(has_gpu)

    several = config.distributed.start_timeout_s if config.distributed.coordinator else 0
    report.check("devices", start, START_S + several)
    if machine:
        report.who = machine.who
        report.check("memory", machine.memory)
    _storage(report, config, args, _checkpoint_bytes(machine))
    if machine and not report.hung:  # what hangs once would hang the next checks
        report.check("checkpoint", machine.checkpoint, 60)
        report.check("config", machine.fits_the_run, COMPILE_S)
        report.check("links", machine.links, 60)
        report.check("forward", machine.forward, COMPILE_S)
        report.check("speed", machine.speed, COMPILE_S)
    if machine:
        report.check("clock", lambda: machine.clock(began))
    failed, warned = report.count(FAIL), report.count(WARN)
    say(f"{failed or 'nothing'} failed, {warned or 'nothing'} to watch, in {time.monotonic() - began[1]:.0f} s")
    if report.hung:  # a thread that waits for ever would keep Python from ending
        sys.stdout.flush()
        os._exit(1)
    return 1 if failed else 0


def _checkpoint_bytes(machine: object) -> int:
    """Returns the bytes of one checkpoint; UNKNOWN_BYTES if the plan fails, which another finding reports."""
    try:
        return files.within(START_S, lambda: machine.need.checkpoint)
    except Exception:
        return UNKNOWN_BYTES


def _storage(report: Report, config: Config, args: argparse.Namespace, checkpoint_bytes: int) -> None:
    workdir, c, seconds = config.workdir, config.checkpoint, storage.ANSWER_S
    if not workdir:
        say("no --config.workdir=DIR: the disk of the current folder is tried")
    kept = keep.most(c, config.train.steps, len(config.phases.plan))
    report.check("disk", lambda: storage.disk(workdir, checkpoint_bytes, c, kept, seconds), seconds + 5)
    if c.mirror:
        timeout_s = c.mirror_timeout_s
        report.check("mirror", lambda: storage.mirror(c.mirror, checkpoint_bytes, timeout_s, seconds), seconds + 5)
    if config.data.dir:
        report.check("data", lambda: _data(config, args, seconds), seconds + 5)


def _data(config: Config, args: argparse.Namespace, seconds: float) -> Finding:
    which_data.check(config, args.config, args.overrides, lambda line: None)
    return storage.data(config.data.dir, seconds)


def _notify(config: Config) -> Finding:
    notify.check(config.notify)
    return Finding("notify", OK, f"{len(config.notify.urls)} addresses are well formed; nothing was sent")


def _nvml() -> types.ModuleType | None:
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None
