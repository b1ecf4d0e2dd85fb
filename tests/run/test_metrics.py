"""metrics.jsonl: what is written is whole, what is read is a record."""

import json

import pytest

from jaxlm.run import metrics


def test_json_lines_drop_a_line_cut_short(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "wall_s": 2.5}\n{"step": 2, "wal')
    lines = metrics.JsonLines(path)
    lines.write({"step": 2, "train/loss": float("nan")})
    lines.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "wall_s": 2.5},
        {"step": 2, "train/loss": None},
    ]


def test_held_out_losses_are_read_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert metrics.held_out_losses(path) == {}
    lines = [
        '{"step": 1, "val/loss": 3.0}',
        '{"step": 2, "train/loss": 1}',
        '{"step": 1, "val/loss": 2.5}',
        "{broken val/",
    ]
    lines += ['{"step": 4, "val/loss": null}', '{"step": 5, "val/a/loss": 2}', '{"step": 7, "val/loss": "x"}']
    path.write_text("\n".join([*lines, '{"step": 6, "val/lo']))
    found = metrics.held_out_losses(path)
    assert {step: loss for step, loss in found.items() if loss == loss} == {1: 2.5}
    assert sorted(found) == [1, 4, 5, 7]  # evaluated, though without a loss to compare


def test_later_lines_of_a_step_count(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n{"step": 2, "b": 3}\n{"step": 2, "a": 4}\n')
    assert metrics.read(path) == {1: {"step": 1, "a": 1}, 2: {"step": 2, "a": 4, "b": 3}}


GARBAGE = [
    b"5",
    b"[]",
    b"\x00" * 300,
    b"\xff\xfe{\x80",
    b'{"step": "x"}',
    b'{"step": true}',
    b"[" * 100_000,
    b"{}",
    b"",
]
GARBAGE += [b'{"step": -1}', b'{"step": 1e300}', b"9" * 10_000]


@pytest.mark.parametrize("line", GARBAGE)
@pytest.mark.parametrize("last", [False, True])
def test_a_line_that_is_no_record_is_skipped(tmp_path, line, last):
    path = tmp_path / "metrics.jsonl"
    whole = [b'{"step": 1, "a": 1, "val/loss": 2}', b'{"step": 2, "a": 2}']
    path.write_bytes(b"\n".join([*whole, line] if last else [whole[0], line, whole[1]]) + b"\n")
    assert [record["step"] for record in metrics.records(path)] == [1, 2]
    assert metrics.read(path)[2] == {"step": 2, "a": 2}
    assert metrics.held_out_losses(path) == {1: 2}
    lines = metrics.JsonLines(path)
    lines.write({"step": 3})
    lines.close()
    assert list(metrics.read(path)) == [1, 2, 3]


def test_there_is_nothing_in_a_file_that_is_absent(tmp_path):
    assert metrics.read(tmp_path / "metrics.jsonl") == {}


def test_steps_with_benchmarks_are_read_back_without_what_a_rollback_undid(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 10, "time": 1.0, "eval/piqa/acc": 0.5}, {"step": 20, "time": 2.0, "eval/piqa/acc": 0.5}]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"step": 30, "val/loss": 1.0}]))
    assert metrics.benchmarked(path) == {10, 20}
    assert metrics.benchmarked(path, [{"steps": [15, 20], "time": 5.0}]) == {10}
    assert metrics.benchmarked(tmp_path / "none") == set()
