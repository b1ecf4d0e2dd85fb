"""A profile's classes, shares and rows, on made-up operations and on what a traced program leaves behind."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxlm.train import profile
from jaxlm.train.profile import Event, Instruction


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


def test_a_traced_program_is_read_back_with_its_scopes(tmp_path):
    """Products in a scope `attention` are attention, others matmul; a loop counts once, by what runs in it."""

    @jax.jit
    def f(x):
        with jax.named_scope("layer/attention"):
            x = x @ x
        with jax.named_scope("layer"):
            x = jax.lax.fori_loop(0, 3, lambda i, y: jnp.tanh(y @ x), x)
        return jnp.sort(x)

    x = jnp.full((200, 200), 1e-3)
    jax.block_until_ready(f(x))
    jax.profiler.start_trace(str(tmp_path))
    jax.block_until_ready(f(x))
    jax.profiler.stop_trace()
    (path,) = tmp_path.rglob("*.xplane.pb")
    events = profile.read(path)
    assert "while" not in {e.instruction.opcode for e in events}
    found = profile.summarise(events, 1)
    runs = {kind: sum(r.runs for r in found.rows if r.kind == kind and "dot" in r.place) for kind in profile.CLASSES}
    assert runs["attention"] == 1
    assert runs["matmul"] == 3
    assert found.shares["elementwise"] > 0
    assert sum(found.shares.values()) == pytest.approx(1)
