"""The window of traced steps; a profile's classes, shares and rows, of made-up operations and of what a trace holds."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxlm import config
from jaxlm.config import ConfigError, ProfileConfig, config_files
from jaxlm.train import profile
from jaxlm.train.loop import DONE, Ending, Moment
from jaxlm.train.profile import Event, Instruction


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("5", "first and the last step to trace as A:B"),
        ("a:b", "first and the last step to trace as A:B"),
        ("9:3", "must be A:B with 1 <= A <= B"),
        ("0:3", "must be A:B with 1 <= A <= B"),
        ("5:11", "<= train.steps=10"),
    ],
)
def test_a_bad_window_is_refused(steps, message):
    keys = ["data.path=x", "optim.warmup_steps=0", "train.steps=10", f"profile.steps={steps}"]
    with pytest.raises(ConfigError, match=message):
        config.resolve(config_files.load("base", keys))


def test_a_window_in_the_past_is_refused():
    profile.check(ProfileConfig("5:9"), first=5)
    profile.check(ProfileConfig(""), first=5)
    with pytest.raises(ConfigError, match="begins before step 6"):
        profile.check(ProfileConfig("5:9"), first=6)


def moment(step, said, state=()):
    return Moment(step, state, {}, said.append)


ENDING = Ending(DONE)


@pytest.fixture
def stops(monkeypatch):
    """JAX traces nothing; how often it was told to end. A real trace holds all programs of this process: seconds."""
    found = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *args, **kwargs: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: found.append("stop"))
    return found


def test_the_window_is_between_the_other_hooks_of_its_ends(tmp_path, stops):
    """What else is due at the step before it is over when it begins, and it ends before what is due at its last step."""
    trace = profile.Trace((4, 6), tmp_path)
    assert [step for step in range(9) if trace.begin.due(step, 9)] == [3]
    assert not trace.due(6, 9)  # it was never begun, as in a run that resumed after its start
    trace.begin(moment(3, []))
    assert [step for step in range(9) if trace.due(step, 9)] == [6]
    never = profile.Trace(None, tmp_path)
    assert not any(hook.due(step, 9) for hook in (never, never.begin) for step in range(10))


def test_a_trace_that_cannot_be_written_does_not_end_the_run(tmp_path, stops, monkeypatch):
    def full():
        raise OSError(28, "No space left on device")

    said = []
    monkeypatch.setattr(jax.profiler, "stop_trace", full)
    with profile.Trace((1, 1), tmp_path) as trace:
        trace.begin(moment(0, said))
        trace(moment(1, said))
    assert "No space left on device" in said[0]


def test_a_loop_that_fails_leaves_no_trace_running(tmp_path, stops):
    with contextlib.suppress(KeyError), profile.Trace((1, 9), tmp_path) as trace:
        trace.begin(moment(0, []))
        raise KeyError
    assert stops == ["stop"]


def event(start, end, name="fusion.1", device="gpu", scope="", **kwargs):
    return Event(device, name, start, end, Instruction(kwargs.pop("opcode", "fusion"), scope, **kwargs))


@pytest.mark.parametrize(
    ("kind", "one"),
    [
        ("matmul", event(0, 1, "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT")),
        ("matmul", event(0, 1, "cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>")),
        ("matmul", event(0, 1, "dot.7", opcode="dot")),
        ("matmul", event(0, 1, "ynn_fusion.7", product=True)),
        ("matmul", event(0, 1, "custom-call.3", target="__cublas$lt$matmul")),
        ("matmul", event(0, 1, "ynn_fusion.7", scope="jit(f)/jvp(Llama)/LlamaBlock/attn/dot_general", product=True)),
        ("attention", event(0, 1, "ynn_fusion.7", scope="jit(f)/LlamaBlock/attn/attention/dot_general", product=True)),
        ("attention", event(0, 1, "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7")),
        ("attention", event(0, 1, "custom-call.4", target="__cudnn$fmhaSoftmaxF8")),
        ("communication", event(0, 1, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)")),
        ("communication", event(0, 1, "all-gather-start.2", scope="jit(f)/LlamaBlock/attn/attention/x")),
        ("communication", event(0, 1, "reduce_scatter.1")),
        ("elementwise", event(0, 1, "loop_add_select_fusion_3", scope="jit(f)/jit(_where)/select_n")),
        ("elementwise", Event("gpu", "MemcpyD2D", 0, 1)),
    ],
)
def test_classes(kind, one):
    assert profile.classify(one) == kind


def test_shares_are_of_the_whole_time_and_add_up_to_one():
    events = [
        event(0, 40, "nvjet.1"),
        event(50, 60, "loop_fusion.1"),
        event(50, 70, "fmha.1"),  # 10 of its 20 ns shared with the fusion
        event(30, 90, "ncclDevKernel_AllGather"),  # hidden but for 40 to 50 and 70 to 90
        event(95, 100, "loop_fusion.2"),
    ]
    found = profile.summarise(events, steps=2)
    assert found.shares == pytest.approx(
        {"attention": 0.15, "matmul": 0.40, "elementwise": 0.10, "communication": 0.30, "idle": 0.05}
    )
    assert found.seconds == pytest.approx(50e-9)
    by_name = {row.name: row for row in found.rows}
    assert [row.name for row in found.rows] == ["nvjet", "ncclDevKernel_AllGather", "fmha", "loop_fusion"]
    assert (by_name["loop_fusion"].seconds, by_name["loop_fusion"].runs) == (pytest.approx(5e-9), 1.0)
    text = profile.lines(found, top=2)
    assert len(text) == 4
    assert text[-1] == "attention 15.0%  matmul 40.0%  elementwise 10.0%  communication 30.0%  idle 5.0%"


def test_devices_are_averaged_not_added():
    one = [event(0, 30, "nvjet.1"), event(50, 100, "loop.1")]
    two = [dataclasses.replace(e, device="gpu:1", start=e.start + 7, end=e.end + 7) for e in one]
    (a, b) = (profile.summarise(events, 1) for events in (one, one + two))
    assert a.shares == pytest.approx(b.shares)
    assert a.seconds == pytest.approx(b.seconds)
    assert {r.name: r.runs for r in a.rows} == {r.name: r.runs for r in b.rows}


def test_an_empty_trace_is_an_error():
    with pytest.raises(ValueError, match="no operation"):
        profile.summarise([], 1)


@pytest.mark.parametrize(
    ("scope", "place"),
    [
        ("jit(train_step)/jvp(Llama)/Llama.run_layers/LlamaBlock/attn/attention/exp", "attn/attention/exp"),
        ("jit(train_step)/transpose(jvp(Llama))/Llama.run_layers/LlamaBlock/mlp/mul", "mlp/mul (backward)"),
        ("jit(train_step)/jvp(loss)/while/body/closed_call/dot_general", "loss/dot_general"),
        ("jit(f)/transpose(jvp(Llama))/checkpoint/rematted_computation/mlp/mul", "mlp/mul (backward, recomputed)"),
        ("jit(train_step)/optimizer/div", "optimizer/div"),
        ("", ""),
    ],
)
def test_places(scope, place):
    assert profile.place(scope) == place


def test_a_run_that_ends_within_the_window_shows_the_steps_it_made_with_their_scopes(tmp_path):
    """Products in a scope `attention` are attention, others matmul; a loop counts once, by what runs in it."""

    @jax.jit
    def f(x):
        with jax.named_scope("layer/attention"):
            x = x @ x
        with jax.named_scope("layer"):
            x = jax.lax.fori_loop(0, 3, lambda i, y: jnp.tanh(y @ x), x)
        return jnp.sort(x)

    jax.clear_caches()  # the trace holds all programs of this process
    said, state = [], f(jnp.full((200, 200), 1e-3))
    with profile.Trace((2, 9), tmp_path) as trace:
        for step in (1, 2, 3):
            state = f(state)
            for hook in (trace, trace.begin):
                if hook.due(step, 20):
                    hook(moment(step, said, state))
        trace.close(moment(3, said, state), ENDING)
    assert said[0].startswith("steps 2 to 3: ")
    assert said[-1].startswith(f"trace: {tmp_path}")
    assert list(tmp_path.rglob("perfetto_trace.json.gz"))
    (path,) = tmp_path.rglob("*.xplane.pb")
    events = profile.read(path)
    assert "while" not in {e.instruction.opcode for e in events}
    found = profile.summarise(events, 2)
    runs = {kind: sum(r.runs for r in found.rows if r.kind == kind and "dot" in r.place) for kind in profile.CLASSES}
    assert (runs["attention"], runs["matmul"]) == (1, 3)
    assert found.shares["elementwise"] > 0
    assert sum(found.shares.values()) == pytest.approx(1)
