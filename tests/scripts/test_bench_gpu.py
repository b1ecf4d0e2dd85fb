"""scripts/bench_gpu.py on small shapes of this machine: its parts end to end, and that a failure costs one row."""

import json
import pathlib
import subprocess
import sys

import bench_gpu
import numpy as np
import pytest
import tiny_models as tiny

from jaxlm.plan.params import count_params

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(tmp_path: pathlib.Path, *args: str) -> tuple[int, dict, str]:
    out = tmp_path / "bench.json"
    command = [sys.executable, str(ROOT / "scripts/bench_gpu.py"), "--device=cpu", "--tiny", "--eager", "--steps=4"]
    done = subprocess.run([*command, f"--out={out}", *args], capture_output=True, text=True, check=False)
    return done.returncode, json.loads(out.read_text()), done.stdout


@pytest.mark.parity
def test_the_main_parts_end_to_end(tmp_path):
    code, state, said = run(tmp_path, "--sections", "attention", "jaxlm", "torch")
    assert code == 0, said
    assert [row["backend"] for row in state["attention"]] == ["xla", "blocked"]
    assert all(row["ok"] for row in state["attention"])
    (ours,), (peer,) = state["jaxlm"], state["torch"]
    assert ours["tokens/s"] > 0 < peer["tokens/s"]
    assert ours["p50_ms"] <= ours["p95_ms"]
    assert f"ratio {round(ours['tokens/s'] / peer['tokens/s'], 3)}" in said


def test_a_part_that_fails_is_a_row_and_an_exit_code(tmp_path):
    code, state, said = run(tmp_path, "--sections", "fp8", "--set=model.n_heads=7")
    assert code == 1
    assert "n_heads=7" in state["fp8"][0]["failed"]
    assert "jaxlm 1.04B fp8: FAILED" in said


def test_the_fastest_that_passed_is_taken(tmp_path):
    out = tmp_path / "bench.json"
    rows = [{"backend": "a", "ok": False, "ms": 1.0}, {"backend": "b", "ok": True, "ms": 3.0}]
    rows += [{"backend": "c", "ok": True, "ms": 2.0}, {"backend": "d", "ok": None, "not run": "absent"}]
    sweep = [{"what": "x", "failed": "no"}, {"what": "y", "tokens/s": 5, "keys": {"k": 1}}]
    args = ["--device=cpu", f"--out={out}"]
    bench = bench_gpu.Bench(bench_gpu.options(args))
    bench.keep("attention", rows)
    bench.keep("sweep", sweep)
    assert bench_gpu.Bench(bench_gpu.options(args)).best() == {"model.attention": "c", "k": 1}
    with pytest.raises(SystemExit, match="give another --out"):
        bench_gpu.Bench(bench_gpu.options([*args, "--tiny"]))


def test_without_a_gpu_it_says_so_at_once(capsys, monkeypatch):
    monkeypatch.setattr(bench_gpu, "card", lambda: bench_gpu.NO_CARD)
    with pytest.raises(SystemExit):
        bench_gpu.options([])
    assert "--device=cpu --tiny" in capsys.readouterr().err


@pytest.mark.parity
def test_the_peer_by_hand_is_a_llama():
    """Its loss and gradients are those of plain next-token cross-entropy, whatever the chunk; ours have the same shape."""
    import torch
    from peers import torch_llama

    cfg = tiny.model_config()
    torch.manual_seed(0)
    model = torch_llama.Stack(cfg, 16)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, cfg.vocab_size, (2, 17)))
    ids, targets = tokens[:, :-1], tokens[:, 1:].reshape(-1)
    sizes = sum(p.numel() for p in model.parameters())
    padding = (cfg.padded_vocab_size - cfg.vocab_size) * cfg.d_model
    assert sizes - padding == count_params(cfg)

    def gradients(loss):
        model.zero_grad()
        loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    logits = (model(ids).reshape(32, -1) @ model.embed.weight.t())[:, : cfg.vocab_size]
    want = torch.nn.functional.cross_entropy(logits, targets)
    wanted = gradients(want)
    got = torch_llama.ChunkedLoss.apply(
        model(ids).reshape(32, -1), model.embed.weight, targets, cfg.vocab_size, 12, torch_llama.chunk_gradients
    )
    torch.testing.assert_close(got, want)
    for one, other in zip(gradients(got), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
