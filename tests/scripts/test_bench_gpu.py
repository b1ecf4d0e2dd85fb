"""scripts/bench_gpu.py on small shapes of this machine: its parts end to end, and that a failure costs one row."""

import contextlib
import json
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import time

import bench_gpu
import bench_gpu_parts
import numpy as np
import psutil
import pytest
import tiny_installed
import tiny_models as tiny
from documented import ROOT

from jaxlm.plan.flops import count_params


@pytest.mark.parity
def test_the_main_parts_end_to_end(tmp_path):
    out = tmp_path / "bench.json"
    command = [sys.executable, str(ROOT / "scripts/bench_gpu.py"), "--device=cpu", "--tiny", "--eager", "--steps=4"]
    command += [f"--out={out}", "--sections", "attention", "jaxlm", "torch"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    state = json.loads(out.read_text())
    assert [(row["backend"], row["ok"]) for row in state["attention"]] == [("xla", True), ("blocked", True)]
    (ours,), (peer,) = state["jaxlm"], state["torch"]
    assert ours["tokens/s"] > 0 < peer["tokens/s"]
    assert ours["p50_ms"] <= ours["p95_ms"]
    assert f"ratio {round(ours['tokens/s'] / peer['tokens/s'], 3)}" in said


@pytest.mark.scripts
def test_decoding_post_training_and_flags_run_small(tmp_path):
    sections = ("decode", "serve", "sft", "grpo", "flags")
    command = [sys.executable, str(ROOT / "scripts/bench_gpu.py"), "--smallest", f"--out={tmp_path / 'bench.json'}"]
    subprocess.run([*command, "--sections", *sections], capture_output=True, text=True, check=True)
    state = json.loads((tmp_path / "bench.json").read_text())
    assert all(row["tokens/s"] > 0 for name in sections for row in state[name])
    assert state["grpo"][0]["rollout_s"] > 0 < state["grpo"][0]["step_s"]


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


PART = """
import json, os, pathlib, signal, subprocess, sys, time
work, rows = json.loads(sys.argv[1]), open(sys.argv[2], "a")
label = work["label"].removeprefix("jaxlm 1.04B").strip(", ") or "jaxlm"
notes = pathlib.Path(__file__).parent
def row(**more):
    print(json.dumps({"what": work["label"], "tokens/s": 10} | more), file=rows, flush=True)
def hang():  # with a child, both deaf to everything but SIGKILL
    for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (notes / "pids").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)
"""
MAIN = "import sys, bench_gpu; sys.exit(bench_gpu.main(sys.argv[2:], [sys.executable, sys.argv[1]]))"


def begin(tmp_path: pathlib.Path, part: str, *args: str, main: str = MAIN) -> subprocess.Popen:
    """The script with parts that do what `part` says, as a process."""
    program = tmp_path / "part.py"
    program.write_text(PART + textwrap.dedent(part))
    given = ["--device=cpu", "--tiny", f"--out={tmp_path / 'bench.json'}", *args]
    command = [sys.executable, "-c", main, str(program), *given]
    return subprocess.Popen(command, cwd=ROOT / "scripts", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ran(tmp_path: pathlib.Path, part: str, *args: str, main: str = MAIN) -> tuple[int, str, str]:
    """Exit code, standard output and error of the script with such parts."""
    process = begin(tmp_path, part, *args, main=main)
    said, errors = process.communicate(timeout=60)
    return process.returncode, said, errors


def kept(tmp_path: pathlib.Path, **rows: int) -> dict:
    """Writes what an earlier call measured: section -> tokens a second."""
    made = {name: [{"what": f"earlier {name}", "tokens/s": speed}] for name, speed in rows.items()}
    made["made with"] = {"card": bench_gpu.NO_CARD, "tiny": True, "set": []}
    (tmp_path / "bench.json").write_text(json.dumps(made))
    return made


def table(said: str) -> list[str]:
    """The lines of the table, which stands last."""
    return said.rpartition('{"card"')[2].splitlines()[1:]


def assert_gone(tmp_path: pathlib.Path) -> None:
    for pid in (tmp_path / "pids").read_text().split():
        with contextlib.suppress(psutil.NoSuchProcess):
            assert psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE  # nobody's to wait for in a container


def test_a_part_that_hangs_is_killed_with_its_children_when_the_minutes_are_over(tmp_path):
    began = time.monotonic()
    code, said, _ = ran(tmp_path, "row()\nif label == 'sweep': hang()", "--minutes=0.1")
    assert time.monotonic() - began < 6 + 4
    assert code == 1
    assert_gone(tmp_path)
    shown = table(said)
    assert [line.split("  ")[0] for line in shown[:2]] == ["what attention", "what sweep"]
    assert shown[2].startswith("sweep: FAILED no end within ")
    assert "[no time left for fp8]" in said
    state = json.loads((tmp_path / "bench.json").read_text())
    assert ["failed" in row for row in state["sweep"]] == [False, True]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_part_and_the_table_comes(tmp_path, signum):
    earlier = kept(tmp_path, jaxlm=7)
    process = begin(tmp_path, "hang() if label == 'jaxlm' else row()", "--minutes=5")
    end = time.monotonic() + 30
    while not (tmp_path / "pids").is_file() and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(0.1)
    process.send_signal(signum)
    began = time.monotonic()
    said, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < 3
    assert process.returncode == 128 + signum
    assert_gone(tmp_path)
    assert f"FAILED {signum.name}" not in said  # an earlier call's figure is worth more than none
    assert table(said) == ["what attention  tokens/s 10", "what sweep  tokens/s 10", "what earlier jaxlm  tokens/s 7"]
    assert "[stopped before torch]" in said
    state = json.loads((tmp_path / "bench.json").read_text())
    assert state == earlier | {name: [{"what": name, "tokens/s": 10}] for name in ("attention", "sweep")}


def test_whatever_a_part_does_costs_its_own_rows_alone(tmp_path):
    part = """
        if label == "attention":
            row(); sys.exit("no such kernel")
        if label == "sweep":
            row(); print('{"what": "sw', end="", file=rows, flush=True); os.kill(os.getpid(), signal.SIGKILL)
        if label == "jaxlm":
            row(); child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            (notes / "pids").write_text(str(child.pid))
        if label == "fp8":
            print("[1]", '{"what": 1}', '{"what": "x", "tokens/s": "many"}', '{"what": "x"}', sep="\\n", file=rows)
        if label == "128 rows a step":
            row(rows=4)
    """
    code, said, _ = ran(tmp_path, part, "--sections", "attention", "sweep", "jaxlm", "fp8", "h128", "accumulate")
    assert code == 1
    assert_gone(tmp_path)  # a child that a part leaves behind would slow the next
    unreadable = "jaxlm 1.04B fp8: FAILED unreadable row: "
    assert table(said) == [
        "what attention  tokens/s 10",
        "attention: FAILED exit code 1: no such kernel",
        "what sweep  tokens/s 10",
        'sweep: FAILED unreadable row: {"what": "sw',
        "sweep: FAILED killed by signal 9: nothing said",
        "what jaxlm 1.04B  tokens/s 10",
        "jaxlm 1.04B h128: FAILED exit code 0: nothing said",
        "what jaxlm 1.04B, 128 rows a step  tokens/s 10  rows 4",
        f"{unreadable}[1]",
        unreadable + "{'what': 1}",
        unreadable + "{'what': 'x', 'tokens/s': 'many'}",
        unreadable + "{'what': 'x'}",
    ]


def test_a_bug_in_the_script_itself_costs_no_table(tmp_path):
    kept(tmp_path, hf=7)
    main = "import bench_gpu; bench_gpu.SECONDS = {}\n" + MAIN
    code, said, errors = ran(tmp_path, "row()", "--sections", "attention", main=main)
    assert (code, table(said)) == (1, ["what earlier hf  tokens/s 7"])
    assert "KeyError: 'attention'" in errors


def test_out_that_breaks_on_the_way_costs_no_table(tmp_path):
    (tmp_path / "out").mkdir()
    part = "row()\nimport shutil\nshutil.rmtree(notes / 'out', ignore_errors=True)"
    out = f"--out={tmp_path / 'out' / 'bench.json'}"
    code, said, errors = ran(tmp_path, part, out, "--sections", "attention", "sweep")
    assert (code, table(said)) == (1, ["what attention  tokens/s 10", "what sweep  tokens/s 10"])
    assert errors.count("can't be written: No such file or directory") == 2


@pytest.mark.parametrize("broken", ["missing", "folder", '{"made wi', "[]", '{"made with": {}, "sweep": 3}'])
def test_out_that_is_broken_at_the_start_is_refused_before_anything_runs(tmp_path, broken):
    out = tmp_path / "missing/bench.json" if broken == "missing" else tmp_path / "results"
    if broken == "folder":
        out.mkdir()
    elif broken != "missing":
        out.write_text(broken)
    code, _, errors = ran(tmp_path, "(notes / 'ran').touch()", f"--out={out}")
    assert (code, "give another --out" in errors, "Traceback" in errors) == (1, True, False)
    assert not (tmp_path / "ran").exists()
    assert not out.is_file() or out.read_text() == broken


def test_a_later_call_merges_and_no_section_prints_the_table(tmp_path):
    for name in ("torch", "accumulate"):
        assert ran(tmp_path, f"row(rows={len(name)})", "--sections", name)[0] == 0
    code, said, _ = ran(tmp_path, "sys.exit(1)", "--sections")
    peer = "PyTorch by hand, torch.compile, 1.04B"
    ratio = f"ratio 1.0 (10 rows a step to 5 of {peer})"
    ours = f"what jaxlm 1.04B, 128 rows a step  tokens/s 10  rows 10  {ratio}"
    assert (code, table(said)) == (0, [f"what {peer}  tokens/s 10  rows 5", ours])


def test_peers_begin_with_what_the_card_has_room_for():
    """On 80 to 96 GB a first try of 32 rows is a compile for nothing."""

    def sizes(kind: str, gb: int, *overrides: str) -> tuple[int, ...]:
        return bench_gpu_parts.peer_sizes({"kind": kind, "tiny": False, "set": list(overrides)}, gb * 2**30)

    assert sizes("torch", 80) == sizes("torch", 96) == sizes("hf", 80) == sizes("hf", 139) == (16, 8)
    assert sizes("torch", 139) == sizes("torch", 180) == (32, 16, 8)
    assert sizes("torch", 139, "train.batch_size=4", "train.microbatch_size=4") == (4,)


def test_the_wheels_to_carry_are_those_that_the_parts_import():
    """With JAX, flax, optax, Orbax, PyTorch, transformers, what these need, and the docstring's list: no more, no less."""
    listed = re.search(r"needs the wheels of (.+?) besides its own", bench_gpu.__doc__, re.DOTALL)[1]
    names = {name for name in re.findall(r"[\w-]+", listed) if name != "and"}
    there = tiny_installed.needed(("jax", "flax", "optax", "orbax-checkpoint", "torch", "transformers"))
    loaded = tiny_installed.run("import bench_gpu_parts; print(*sys.modules)", there | names).split()
    used = set().union(*(tiny_installed.HOMES.get(module.partition(".")[0], ()) for module in loaded))
    assert names <= used


def test_without_a_gpu_it_says_so_at_once(capsys, monkeypatch):
    monkeypatch.setattr(bench_gpu, "card", lambda: bench_gpu.NO_CARD)
    with pytest.raises(SystemExit):
        bench_gpu.options([])
    assert "try it on the CPU with --smallest" in capsys.readouterr().err


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
