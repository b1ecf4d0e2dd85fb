"""The report of a run: every section from a summary, and none where there is nothing to say."""

import re

import pytest
from tiny_pages import RUN, SUMMARY, rows

from jaxlm.report import run_page


def titles(text: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", text)


def written(folder, **changed) -> str:
    """The page of a run whose summary is `SUMMARY` with changes."""
    run_page.write(folder / "report.html", SUMMARY | changed)
    return (folder / "report.html").read_text()


WORDS = ("of 60 steps, 5M tokens", "$1.25", "75.0%", "&lt;1b&gt;", "Once &lt;b&gt;", "greedy", "temperature 0.7", "a.txt:1",
         "01234567", "Person&lt;X&gt;", "math:7",
         "98% repeated, 2% different, loops after 3 words, 50.0% junk", "2026-11-22 20:07 UTC")  # fmt: skip


def test_a_whole_summary_makes_every_section_and_needs_no_script_and_no_request(tmp_path):
    text = written(tmp_path)
    assert titles(text) == [
        "All stages", "Why the curve bent", "Loss", "Where the time went", "Bill", "Three futures", "As if decayed now",
        "Benchmarks", "Beside published models", "Junk", "Samples", "Optimizer and speed", "Spikes and rollbacks", "Starts",
    ]  # fmt: skip
    assert not [words for words in WORDS if words not in text]
    # Reward, loss four times, rate, norm and speed, the time, a task twice.
    assert text.count("<figure") == 1 + 4 + 3 + 1 + 2
    assert text.count(">steps</div>") == 1 + 2 + 3 + 2
    assert text.index("What it is trained for") < text.index("Loss by step")
    assert text.index(">held-out reward</span>") < text.index(">training loss</span>")  # what it is trained for leads
    assert text.count('class="mark"') >= 1  # the start after step 20
    assert "<script" not in text
    assert not re.search(r'(src|href)="(?!#)', text)
    assert "default-src &#x27;none&#x27;" in text


def test_bends_are_numbered_on_the_curve_of_the_loss_and_told_below(tmp_path):
    text = written(tmp_path)
    assert rows(text[text.index("Why the curve bent</h2>") :])[:3] == [
        ["bend", "from step", "nats", "what came there"],
        ["1", "20", "-0.250 at once", "the rate went &lt;down&gt;"],
        ["2", "30", "+0.500 over 8 steps", "a restart"],
    ]
    (chart,) = re.findall(r'aria-label="Loss by step">.*?</figure>', text)
    assert chart.count('class="bend"') == 2
    assert re.findall(r'class="xs tops">(.*?)</div>', chart) == [
        '<span style="left:48.72%">1</span><span style="left:74.36%">2</span>'
    ]
    without = written(tmp_path, bends=[])
    assert ("Why the curve bent" in without, 'class="bend"' in without) == (False, False)


def test_without_a_price_nothing_tells_of_dollars(tmp_path):
    """A machine of one's own costs nothing that the run knows of: no line at $0, no columns of $0.00."""
    stages = [row | {"cost_usd": 0.0} for row in SUMMARY["stages"]]
    paid, free = written(tmp_path), written(tmp_path, run=RUN | {"cost_usd": 0.0}, stages=stages)
    for words in ("loss by dollars", "cost of a nat", "cost of 0.01 nats", ">spent<"):
        assert (words in paid, words in free) == (True, False), words
    assert free.count("$") == 1  # the price of a start, which was one


def test_what_costs_less_than_a_cent_is_shown(tmp_path):
    """A plan that was shrunk: its bill said $0.00."""
    text = written(tmp_path, phases=[row | {"usd": 0.003241, "usd_per_point": 0.0413} for row in SUMMARY["phases"]])
    assert ("$0.0032" in text, "$0.041" in text) == (True, True)


def test_the_page_links_to_that_of_its_data_if_there_is_one(tmp_path):
    data = tmp_path / "my data"
    data.mkdir()
    summary = {"run": RUN | {"data": str(data)}}
    run_page.write(tmp_path / "run/report.html", summary)
    assert "Trained on" not in (tmp_path / "run/report.html").read_text()
    (data / "report.html").write_text("")
    run_page.write(tmp_path / "run/report.html", summary)
    assert '<a href="../my%20data/report.html">' in (tmp_path / "run/report.html").read_text()


def test_a_run_that_has_just_begun_has_a_page_too(tmp_path):
    run_page.write(tmp_path / "report.html", {"run": RUN | {"loss": None, "goodput": None}})
    text = (tmp_path / "report.html").read_text()
    assert titles(text) == []
    assert "of 60 steps, 5M tokens" in text


def test_the_page_begins_with_how_the_run_stands_what_is_next_the_figures_and_a_curve(tmp_path):
    """Before its list of sections: on a phone too nobody scrolls for these."""
    run = RUN | {
        "held_out": 3.0,
        "best": {"step": 20, "loss": 2.9},
        "time": 1_795_903_200.0,
        "left_s": 60.0,
        "left_usd": 0.42,
    }
    lead, rest = written(tmp_path, run=run).split("<nav>")
    stands, advice = "last seen training at 2026-11-28 22:00 UTC; about 1m00s and $0.42 left", "forecast: go on"
    texts = (stands, advice, "3.0000", "best 2.9000 at step 20", "$1.25", "<svg", "llama")
    assert [text for text in texts if text not in lead] == []
    assert sorted(texts, key=lead.index) == list(texts)
    assert "go on" not in rest
    free = written(tmp_path, run=run | {"cost_usd": 0.0}, futures=None)
    assert ("about 1m00s left" in free, "go on" in free) == (True, False)
    done = written(
        tmp_path, run=run | {"ended": "done", "next": "jaxlm chat a --b=c", "best": {"step": 40, "loss": 3.0}}
    )
    assert ("last seen training at" in done, "next: <code>jaxlm chat a <span" in done, "best 3" in done) == (
        False,
        True,
        False,
    )


@pytest.mark.parametrize(("sources", "drawn"), [(("prose",), False), (("prose", "code"), True)])
def test_one_source_has_no_curve_beside_the_held_out_loss(tmp_path, sources, drawn):
    held_out = {name: SUMMARY["held_out"][name] for name in ("", *sources)}
    assert ("Held-out loss by source" in written(tmp_path, held_out=held_out)) == drawn


def section(text: str, title: str) -> str:
    """What is in a section, without tags."""
    (found,) = re.findall(rf"<h2>{title}</h2>(.*?)</section>", text, re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", found))


def test_the_average_stands_beside_the_forecast_and_a_real_decay(tmp_path):
    text = written(tmp_path)
    chart = text[text.index("Loss by step") : text.index("Training loss by tokens")]
    assert chart.index("held out") < chart.index("as if decayed now")
    said = section(text, "As if decayed now")
    assert "a held-out loss of 2.9000 at step 40, 0.1 below the weights&#x27; own." in said
    assert "&lt;1b&gt;-decay-20 40 3.0000 2.9000 40 2.8750 0.025 80%" in said
    rows = [{"name": name, "step": 60, "loss": x, "low": x, "high": x, "hours": 1, "usd": 0, "usd_per_centinat": None}
            for name, x in (("on to the plan", 2.3), ("decay now", 2.75), ("stop", 3.0))]  # fmt: skip
    said = section(written(tmp_path, futures={"advice": "go on", "rows": rows}), "As if decayed now")
    assert "by the forecast a decay now takes 0.25 off the training loss." in said
    own = [SUMMARY["decays"][0] | {"step": 20}]  # its own decay: not at equal tokens
    assert "80%" not in section(written(tmp_path, decays=own), "As if decayed now")
    assert "As if decayed now" not in written(tmp_path, average=[])
