"""Summaries of a run and of a data directory that fill every section of their pages."""

import dataclasses
import re

from jaxlm.corpus.audit.audit import Finding

RUN = {
    "name": "<1b>", "model": "llama", "step": 40, "steps": 60, "tokens": 5e6, "loss": 2.5, "held_out": None,
    "best": None, "wall_s": 100.0, "cost_usd": 1.25, "goodput": 0.75, "ended": "",
}  # fmt: skip
_PRETRAINED = {"program": "pretrain", "config": "story", "phases": ["smoke", "main"]}
STAGES = [
    {"name": "data", "program": "prepare", "config": "", "phases": [], "steps": None, "tokens": None, "wall_s": 90.0,
     "cost_usd": None, "figure": "documents", "begin": 12000, "end": 8000},
    {"name": "base", **_PRETRAINED, "steps": 1500, "tokens": 1_536_000, "wall_s": 600.0, "cost_usd": 0.5,
     "figure": "held-out loss", "begin": 8.3123, "end": 4.9222},
    {"name": "sft", "program": "sft", "config": "sft", "phases": [], "steps": 300, "tokens": 1_228_800, "wall_s": 300.0,
     "cost_usd": 0.25, "figure": "held-out loss", "begin": None, "end": 2.5},
    {"name": "<chat>", "program": "grpo", "config": "grpo", "phases": [], "steps": 200, "tokens": 819_200, "wall_s": 3600.0,
     "cost_usd": 3.0, "figure": "held-out reward", "begin": 0.25, "end": 0.875},
]  # fmt: skip
SUMMARY = {
    "run": RUN,
    "stages": STAGES,
    "curves": {
        "step": [1, 20, 40], "tokens": [1e5, 2e6, 5e6], "cost_usd": [0.1, 0.5, 1.25], "loss": [9.0, None, 2.5],
        "grad_norm": [3.0, 2.0, 1.0], "lr": [1e-4, 3e-4, 1e-5], "tokens_per_second": [None, 900.0, 1000.0],
        "mfu_palm": [None, None, None],
    },
    "figures": {"held-out reward": [(20, 0.2), (40, 0.6)], "reward": [(1, 0.1), (20, 0.3), (40, 0.7)]},
    "held_out": {"": [(20, 4.0), (40, 3.0)], "prose": [(20, 4.1), (40, 3.1)], "code": [(20, 3.9), (40, 2.9)]},
    "average": [(20, 3.8), (40, 2.9)],
    "decays": [{"name": "<1b>-decay-20", "end": 40, "decay": 2.875, "step": 40, "weights": 3.0, "average": 2.9}],
    "bends": [{"step": 20, "change": -0.25, "over": 0, "why": "the rate went <down>", "explained": -0.2, "events": []},
              {"step": 30, "change": 0.5, "over": 8, "why": "a restart", "explained": None, "events": []}],
    "activities": {"step": 75.0, "compile": 25.0, "hung": 0.0},
    "phases": [{"phase": "wake", "last_step": 20, "tokens": 2e6, "loss_begin": 9.0, "loss_end": 4.0, "hours": 0.01, "usd": 0.5,
                "usd_per_point": 0.1}],
    "futures": {"advice": "go on", "rows": [{"name": "to the plan", "step": 60, "loss": 2.4, "low": 2.3, "high": 2.5,
                                             "hours": 0.1, "usd": 0.6, "usd_per_centinat": 0.06}]},
    "benchmarks": {
        "arc_easy": [{"step": s, "metrics": {"acc_norm": a, "bits_per_byte": 2.0, "margin": 0.1}, "stderr": {"acc_norm": 0.01},
                      "chance": 0.25, "n": 1000, "fewshot": 0} for s, a in ((20, 0.3), (40, 0.2))],
        "<made>": [{"step": 40, "metrics": {}, "stderr": {}, "chance": None, "n": None, "fewshot": None}],
    },
    "samples": {"Once <b>": [
        {"step": 20, "temperature": 0.0, "text": "upon"},
        {"step": 40, "temperature": 0.7, "text": "a", "repetition": 0.98, "distinct_2": 0.02, "degenerates_at": 3, "junk": 0.5},
    ]},
    "junk": {"step": 40, "strings": [{"string": "Person<X>", "texts": 12, "source": "math", "share": 0.99, "of_text": 0.03,
                                      "times": 810, "documents": 81, "example": "math:7"}]},
    "spikes": [{"step": 30, "batch": 31, "loss": 7.0, "score": 12.0, "documents": ["a.txt:1"]}],
    "rollbacks": [{"steps": [30, 35], "to": 20, "batches": [31, 36], "why": "a spike"}],
    "starts": [{"time": "2026-11-22T20:07:03.394+00:00", "step": 20, "usd_per_hour": 2.0, "device": "H200",
                "devices": 1, "commit": "0123456789",
                "dirty": True, "ended": ""}],
}  # fmt: skip


def _stage(name: str, documents: int, removed: int) -> dict:
    sizes = {"bytes_in": 1000 * documents, "bytes_out": 1000 * (documents - removed)}
    counts = {"documents_in": documents, "documents_out": documents - removed}
    return {"name": name, **counts, **sizes, "removed": {"a reason of several words": removed}, "edits": {"e": 9}}


def _source(documents: int) -> dict:
    names = ("unicode", "language", "heuristics", "pii", "junk", "exact", "near", "decontaminate")
    stages = [_stage(name, documents - number, 1) for number, name in enumerate(names)]
    read, kept = ({"documents": n, "bytes": 1000 * n} for n in (documents, documents - len(names)))
    return {"path": "corpora/x", "read": read | {"failed": {}, "failures": []}, "stages": stages, "kept": kept}


_LONG = "a_name_without_a_space_" * 12
_FOUND = Finding("line", _LONG, _LONG, "a line of many documents", "web", 12, 9, 0.1, 1.0, 50.0, ((_LONG, _LONG),))
# A data report whose texts and tables are wider than a phone.
DATA = {
    "sources": {"web": _source(123_456), _LONG[:40]: _source(9_876)},
    "examples": [{"source": "web", "stage": "near", "reason": _LONG, "detail": _LONG, "id": _LONG, "excerpt": _LONG}],
    "clusters": {"sizes": {"2": 10, "900": 2}, "largest": [{"size": 900, "kept": _LONG, "members": [_LONG, "b"]}]},
    "junk": [_FOUND.to_row(), dataclasses.replace(_FOUND, pattern="").to_row()],
    "tokenizer_fit": [{"source": "web", "bytes_per_token": 3.2, "tokens_per_word": 1.4, "byte_fallback": 0.01}],
    "manifest": {"sha256": "0123456789abcdef" * 4, "config": {"path": _LONG}},
    "run": "runs/one",
    "left_out": "audit and mismatch report",
}  # fmt: skip


def rows(markup: str) -> list[list[str]]:
    """The cells of a page's tables, without their marks."""
    lines = re.findall(r"<tr>(.*?)</tr>", markup)
    return [[re.sub("<.*?>", "", c) for c in re.findall(r"<t[hd].*?</t[hd]>", line)] for line in lines]
