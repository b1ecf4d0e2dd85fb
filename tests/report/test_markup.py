"""Pages as a browser shows them: none is wider than a phone, asks for anything, or is allowed to run a script."""

import json
import pathlib

import pytest
from chromium import browser, needs_chromium
from tiny_pages import DATA, SUMMARY

from jaxlm.report import data_page, markup, run_page

SMALLEST_PX = 11


def write_pages(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Writes a page of a run and one of data, with every section, and returns their files."""
    run_page.write(folder / "run/report.html", SUMMARY)
    data_page.write(folder / "data/report.html", DATA)
    return folder / "run/report.html", folder / "data/report.html"


def test_the_pages_that_the_browser_is_shown_can_be_written(tmp_path):
    """Without a browser: a summary that has changed is seen wherever tests run."""
    for path, section in zip(write_pages(tmp_path), ("Starts", "Junk"), strict=True):
        assert f"<h2>{section}</h2>" in path.read_text()


@pytest.mark.browser
@needs_chromium
def test_on_paper_nothing_is_folded_or_cut_and_no_heading_ends_a_page(tmp_path):
    hidden = "[...document.querySelectorAll('details > :not(summary)')].filter(e => !e.checkVisibility()).length"
    cut = "[...document.querySelectorAll('pre')].filter(e => e.scrollHeight > e.clientHeight).length"
    loose = "[...document.querySelectorAll('h2')].filter(e => getComputedStyle(e).breakAfter != 'avoid').length"
    long = markup.tag("pre", "a line\n" * 100)
    parts = [("x", markup.details("folded", markup.tag("p", "on paper it is read"), long))]
    markup.write(tmp_path / "report.html", "A page", markup.Markup(""), parts)
    with browser(tmp_path / "profile") as shown:
        shown.show((tmp_path / "report.html").as_uri(), 1200)
        assert [shown.value(count) for count in (hidden, loose)] == [2, 1]  # on a screen
        shown.ask("Emulation.setEmulatedMedia", media="print")
        assert [shown.value(count) for count in (hidden, cut, loose)] == [0, 0, 0]


def test_options_of_a_command_in_a_sentence_are_marked_and_escaped():
    line = "a - b & c: jaxlm train x --config.a.b=1 --from='<r>', then"
    told = "a - b &amp; c: jaxlm train x OPTION--config.a.b=1</span> OPTION--from=&#x27;&lt;r&gt;&#x27;</span>, then"
    assert markup.sentence(line) == told.replace("OPTION", '<span class="option">')
    assert markup.sentence("no command") == "no command"


@pytest.mark.browser
@needs_chromium
def test_no_line_of_a_headline_ends_inside_an_option(tmp_path):
    line = "step 7: " + "".join(f"{'jaxlm ' * n}--config.train.microbatch_size=4 " for n in range(1, 8))
    run_page.write(
        tmp_path / "run/report.html", SUMMARY | {"run": SUMMARY["run"] | {"ended": f"{line} --x={'y' * 200}"}}
    )
    with browser(tmp_path / "profile") as shown:
        for width in (390, 1200):
            shown.show((tmp_path / "run/report.html").as_uri(), width)
            heights = shown.value("JSON.stringify([...document.querySelectorAll('.option')].map(e => e.clientHeight))")
            *one, long = json.loads(heights)
            assert (len(one), max(one) < 30) == (7, True)
            assert long > 45
            assert shown.value("document.documentElement.scrollWidth") <= width


@pytest.mark.browser
@needs_chromium
def test_the_pages_fit_a_phone_and_a_desk_and_ask_for_nothing(tmp_path):
    pages = write_pages(tmp_path)
    hostile = ("x", markup.Markup('<img src="https://example.com/x.png"><script>document.title = "run"</script>'))
    markup.write(tmp_path / "hostile.html", "asks", markup.Markup(""), [hostile])
    (tmp_path / "wide.html").write_text(
        '<meta name="viewport" content="width=device-width"><pre style="width:900px">x</pre>'
    )
    with browser(tmp_path / "profile") as shown:
        for path in pages:
            for width in (390, 1200):
                shown.show(path.as_uri(), width)
                shown.value("document.querySelectorAll('details').forEach(d => d.open = true)")
                assert shown.value("document.documentElement.scrollWidth") <= width, (path, width)
                sizes = "[...document.querySelectorAll('body *')].filter(e => e.innerText?.trim())"
                assert (
                    shown.value(f"Math.min(...{sizes}.map(e => parseFloat(getComputedStyle(e).fontSize)))")
                    >= SMALLEST_PX
                )
                assert shown.requests == [path.as_uri()]
                assert shown.said == []
        # Each of these would be noticed.
        shown.show((tmp_path / "wide.html").as_uri(), 390)
        assert shown.value("document.documentElement.scrollWidth") > 390
        shown.show((tmp_path / "hostile.html").as_uri(), 390)
        assert shown.value("document.title") == "asks"
        assert any("Content Security Policy" in line for line in shown.said)


@pytest.mark.browser
@needs_chromium
def test_the_curve_of_a_run_is_seen_without_scrolling(tmp_path):
    run, best = SUMMARY["run"], {"step": 20, "loss": 2.9}
    run = run | {
        "held_out": 3.0,
        "best": best,
        "time": 1.8e9,
        "left_s": 60.0,
        "left_usd": 0.5,
        "next": "jaxlm chat runs/a",
    }
    run_page.write(tmp_path / "report.html", SUMMARY | {"run": run})
    with browser(tmp_path / "profile") as shown:
        for width, height in ((390, 844), (1200, 800)):
            shown.show((tmp_path / "report.html").as_uri(), width)
            assert 0 < shown.value("document.querySelector('svg').getBoundingClientRect().bottom") < height
