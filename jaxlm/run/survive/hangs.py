"""Tells a run that hangs from one that is busy, by budgets that it learns from the run's own times.

Signs of life go in, a verdict comes out. A false alarm costs a restart. A missed hang costs rent. So budgets are long.
"""

import collections
import dataclasses
import statistics

from jaxlm.run import clock

MINUTE = 60.0
_FIRST = 60 * MINUTE  # until the run's own times are known
_FIRST_STEP = 30 * MINUTE
_MEETS = 30.0  # from the end of the wait for other processes to that of this process
_STEPS_TO_LEARN = 20
_STEPS_KEPT = 200
_BUSY = 0.05  # seconds of processor time in a second: more than the threads of an idle JAX take
_STEPS = (clock.STEP, clock.REPEATED)
# Data is made at the start, and XLA compiles, for as long as it takes: then the processor says that they are alive.
BY_PROCESSOR = (clock.START, clock.COMPILE)
_WORDS = {
    clock.START: "the start",
    clock.RESTORE: "the restored checkpoint",
    clock.COMPILE: "the compiler",
    clock.DATA: "a batch",
    clock.ROLLOUT: "answers or their rewards",
    clock.EVALUATE: "an evaluation",
    clock.SAVE: "a save",
    clock.MIRROR: "the mirror",
}


@dataclasses.dataclass(frozen=True)
class Sign:
    """A sign of life: after `step` the run began, at `when` (`time.monotonic()`), the `activity`; see `clock.Pulse`."""

    step: int = 0
    when: float = 0.0
    activity: str = clock.START
    detail: str = ""

    def waits_for(self) -> str:
        """Returns what the run waits for, for the user: "a save (RUN/checkpoints/200)"."""
        words = _WORDS.get(self.activity, f"the device, in step {self.step + 1}")
        return f"{words} ({self.detail})" if self.detail else words


@dataclasses.dataclass
class Watch:
    """Learns how long each activity takes, and says when one takes too long.

    `hang_s` is one budget for all (of a start or a compilation: without use of the processor); 0 = learned. The other times are
    those after which loader, mirror, the wait for other processes (0 without any) and a reward give up by themselves.
    """

    hang_s: float
    data_timeout_s: float
    mirror_timeout_s: float
    meeting_s: float
    reward_timeout_s: float = 0.0

    def __post_init__(self):
        self._longest: dict[str, float] = {}
        self._steps: collections.deque[float] = collections.deque(maxlen=_STEPS_KEPT)
        self.begin(0.0)

    def begin(self, now: float) -> None:
        """Forgets the process that was watched, but not what was learned: a new one begins now."""
        self._sign: Sign | None = None
        self._busy_at, self._used_s = now, 0.0  # when it was last seen busy, and the processor time used by then
        self._looked = self._not_before = now

    def look(self, sign: Sign, now: float, processor_s: float = 0.0) -> float:
        """Returns for how many seconds too many the run has been silent; below 0 while it is alive."""
        if now - self._looked > MINUTE:
            self._not_before = now  # this process itself did not run: nobody knows what happened meanwhile
        self._looked = now
        if self._sign and sign.when > self._sign.when:
            self._learn(self._sign, sign.when - max(self._sign.when, self._not_before))
        self._sign = sign
        self._used_s = min(self._used_s, processor_s)  # a worker that ended takes its time with it
        if processor_s - self._used_s > _BUSY * (now - self._busy_at) or sign.activity not in BY_PROCESSOR:
            self._busy_at, self._used_s = now, processor_s
        alive = max(sign.when, self._not_before)
        if sign.activity in BY_PROCESSOR:
            alive = max(alive, self._busy_at)
        return now - alive - self.budget(sign)

    def budget(self, sign: Sign) -> float:
        """Returns for how many seconds a run may be silent after this sign of life."""
        activity, longest = sign.activity, self._longest.get(_kind(sign), 0.0)
        if activity == clock.MIRROR:  # it ends by itself
            return max(self.hang_s or _FIRST, self.mirror_timeout_s + 2 * MINUTE)
        if self.hang_s:
            meets = self.meeting_s and activity == clock.START
            return max(self.hang_s, self.meeting_s + _MEETS) if meets else self.hang_s
        if activity == clock.DATA:
            return 2 * self.data_timeout_s + 2 * MINUTE
        if activity in _STEPS:
            known = len(self._steps) >= _STEPS_TO_LEARN
            return max(2 * MINUTE, 20 * statistics.median(self._steps), 3 * longest) if known else _FIRST_STEP
        # A start may make data or not, and compile from a cache or not: what such ones took says too little.
        known = longest and activity in (clock.ROLLOUT, clock.EVALUATE, clock.SAVE)
        rewards = 3 * self.reward_timeout_s if activity == clock.ROLLOUT else 0.0  # one that fails is tried three times
        return rewards + max(10 * MINUTE if known else _FIRST, 10 * longest)

    def _learn(self, sign: Sign, seconds: float) -> None:
        kind = _kind(sign)
        self._longest[kind] = max(self._longest.get(kind, 0.0), seconds)
        if sign.activity in _STEPS:
            self._steps.append(seconds)


def _kind(sign: Sign) -> str:
    """The name under which durations are learned: an evaluation's detail tells them apart, unless it holds a number."""
    if sign.activity in _STEPS:
        return clock.STEP
    same = sign.activity == clock.EVALUATE and not any(c.isdigit() for c in sign.detail)
    return f"{sign.activity} {sign.detail}" if same else sign.activity
