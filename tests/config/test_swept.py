"""Keys with several values on a command line."""

import pytest

from jaxlm.config import ConfigError, config_files, swept


def test_several_values_are_taken_out_and_combined():
    given = ["optim.lr=1e-3,2e-3", "train.steps=5", "adapter.targets=(q,v);(q,k,v)", "data.path=a,b.jsonl"]
    plain, several = swept.split([*given, "eval.tasks=arc_easy,piqa"])
    assert plain == ["train.steps=5", "data.path=a,b.jsonl", "eval.tasks=arc_easy,piqa"]
    assert several == {"optim.lr": ["1e-3", "2e-3"], "adapter.targets": ["('q', 'v')", "('q', 'k', 'v')"]}
    arms = [list(arm) for arm in swept.combined(several, one_at_a_time=False)]
    assert len(arms) == 4
    assert arms[1] == ["optim.lr=1e-3", "adapter.targets=('q', 'k', 'v')"]
    one = swept.combined(several, one_at_a_time=True)
    assert one[:2] == [[], ["optim.lr=1e-3"]]
    assert len(one) == 5


def test_a_tuple_needs_no_quotes_and_may_have_them():
    values = "('a',);(b);(mlp/(gate|up),attn/q)"
    _, several = swept.split([f"adapter.targets={values}", "tune.microbatch_sizes=(2,4);(8,)"])
    arms = [config_files.load("base", arm) for arm in swept.combined(several, one_at_a_time=False)]
    assert [arm.adapter.targets for arm in arms[::2]] == [("a",), ("b",), ("mlp/(gate|up)", "attn/q")]
    assert [arm.tune.microbatch_sizes for arm in arms[:2]] == [(2, 4), (8,)]


def test_a_range_is_the_tuple_of_its_ends():
    given = ["optim.lr=1e-2..1e-4", "optim.schedule=a..b"]
    plain, several = swept.split(given)
    assert several == {"optim.lr": (1e-4, 1e-2)}
    assert plain == given[1:]  # the config says what is wrong with them


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed=1,2", "--seeds=N runs each with N seeds"),
        ("data.seed=1,2", "one data directory and one held-out text"),
        ("eval.max_mb=1,2", "one data directory and one held-out text"),
        ("optim.lr=1e-3...1e-2", r"optim\.lr=1e-3\.\.\.1e-2: a range is LOW\.\.HIGH .* other values have commas"),
        ("optim.lr=1e-2..1e-2", "a range is LOW"),
        ("optim.lr=1e-2..inf", "a range is LOW"),
        ("optim.lr=1e-3..1e-2,3e-2", "a range is LOW"),
        ("optim.weight_decay=0..x", "a range is LOW"),
        ("model.n_layers=2..8", "a range is LOW"),
        ("data.sources.web.weight=1,2", "one data directory and one held-out text"),
    ],
)
def test_what_can_not_be_swept_is_one_line(override, words):
    with pytest.raises(ConfigError, match=words):
        swept.split([override])


@pytest.mark.parametrize("again", ["optim.lr=4e-3,5e-3", "optim.lr=4e-3"])
def test_a_key_with_several_values_is_given_once(again):
    with pytest.raises(ConfigError, match=rf"config\.{again}: this key has several values already"):
        swept.split(["optim.lr=1e-3,2e-3", again])
    own = ["optim.lr=3e-3", "optim.lr=4e-3"]  # the config's own value, which --one-at-a-time begins with: the last
    assert swept.split([*own, "optim.lr=1e-3,2e-3"]) == (own, {"optim.lr": ["1e-3", "2e-3"]})
