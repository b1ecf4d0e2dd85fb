"""What tells of a text that falls apart, by texts that do and texts that do not."""

import pytest

from jaxlm.eval import samples

PROSE = (
    "The harbour lay quiet under a sky of slate, and the last of the fishing boats had come in before the rain. "
    "A boy sat on the wall with a line in the water, though nobody had caught anything there since the spring."
)


def test_prose_is_sound():
    found = samples.degeneration(PROSE)
    assert found["repetition"] == 0
    assert found["distinct_2"] > 0.9
    assert found["degenerates_at"] is None
    assert found["junk"] == 0


def test_figures_by_hand():
    found = samples.degeneration("a b c d a b c d")  # 5 4-grams, 4 of them different; 7 2-grams, 4 different
    assert found["repetition"] == pytest.approx(1 / 5)
    assert found["distinct_2"] == pytest.approx(4 / 7, abs=1e-4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{PROSE} and so and so and so and so and so and so and", len(PROSE.split())),
        ("go " * 40, 0),
        ("It is said that the the the the the the the the the", 4),
        ("no no no", None),  # speech
        ("one two three one two three one two three four", None),  # it went on
        ("", None),
        ("x", None),
    ],
)
def test_from_where_it_loops(text, words):
    assert samples.degeneration(text)["degenerates_at"] == words


def test_junk():
    assert samples.junk("Hello <|im_start|>") == pytest.approx(12 / 18)
    assert samples.junk("\ufffd\ufffdab") == 0.5
    assert samples.junk("PersonX goes to the store") == pytest.approx(7 / 25)
    assert samples.junk("The `<|im_start|>` token opens a turn.") == 0  # talked about, not leaked
    assert samples.junk("") == 0
