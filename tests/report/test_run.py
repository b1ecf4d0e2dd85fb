"""The report of a run: every section from a summary, and none where there is nothing to say."""

import re

from jaxlm.report import run as page

RUN = {
    "name": "<1b>", "model": "llama", "step": 40, "steps": 60, "tokens": 5e6, "loss": 2.5, "held_out": None,
    "best": None, "wall_s": 100.0, "cost_usd": 1.25, "goodput": 0.75, "ended": "",
}  # fmt: skip
SUMMARY = {
    "run": RUN,
    "curves": {
        "step": [1, 20, 40], "tokens": [1e5, 2e6, 5e6], "cost_usd": [0.1, 0.5, 1.25], "loss": [9.0, None, 2.5],
        "grad_norm": [3.0, 2.0, 1.0], "lr": [1e-4, 3e-4, 1e-5], "tokens_per_second": [None, 900.0, 1000.0],
        "mfu_palm": [None, None, None],
    },
    "held_out": {"": [(20, 4.0), (40, 3.0)], "prose": [(20, 4.1), (40, 3.1)]},
    "activities": {"step": 75.0, "compile": 25.0, "hung": 0.0},
    "phases": [{"phase": "wake", "last_step": 20, "tokens": 2e6, "loss_begin": 9.0, "loss_end": 4.0, "hours": 0.01, "usd": 0.5,
                "usd_per_point": 0.1}],
    "futures": {"advice": "go on", "rows": [{"name": "to the plan", "step": 60, "loss": 2.4, "low": 2.3, "high": 2.5,
                                             "hours": 0.1, "usd": 0.6, "usd_per_centinat": 0.06}]},
    "samples": {"Once <b>": [{"step": 20, "temperature": 0.0, "text": "upon"}, {"step": 40, "temperature": 0.7, "text": "a"}]},
    "spikes": [{"step": 30, "batch": 31, "loss": 7.0, "score": 12.0, "documents": ["a.txt:1"]}],
    "rollbacks": [{"steps": [30, 35], "to": 20, "batches": [31, 36], "why": "a spike"}],
    "starts": [{"time": "2026", "step": 20, "usd_per_hour": 2.0, "device": "H200", "devices": 1, "commit": "0123456789",
                "dirty": True, "ended": ""}],
}  # fmt: skip


def titles(text: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", text)


def test_a_whole_summary_makes_every_section(tmp_path):
    page.write(tmp_path / "report.html", SUMMARY)
    text = (tmp_path / "report.html").read_text()
    assert titles(text) == [
        "Loss", "Where the time went", "Bill", "Three futures", "Samples", "Optimizer and speed", "Spikes and rollbacks",
        "Starts",
    ]  # fmt: skip
    for words in (
        "40 of 60",
        "$1.25",
        "75.0%",
        "&lt;1b&gt;",
        "Once &lt;b&gt;",
        "greedy",
        "temperature 0.7",
        "a.txt:1",
        "01234567",
    ):
        assert words in text, words
    assert text.count("<figure") == 4 + 3 + 1  # loss four times, rate, norm and speed, the time
    assert text.count('class="mark"') >= 1  # the start after step 20


def test_the_page_needs_no_script_and_no_request(tmp_path):
    page.write(tmp_path / "report.html", SUMMARY)
    text = (tmp_path / "report.html").read_text()
    assert "<script" not in text
    assert not re.search(r'(src|href)="(?!#)', text)
    assert "default-src &#x27;none&#x27;" in text


def test_a_run_that_has_just_begun_has_a_page_too(tmp_path):
    page.write(tmp_path / "report.html", {"run": RUN | {"loss": None, "goodput": None}})
    text = (tmp_path / "report.html").read_text()
    assert titles(text) == []
    assert "40 of 60" in text
