"""How tasks are written in the config."""

import pytest

from jaxlm.config import ConfigError
from jaxlm.train.rl import prompts


def test_several_tasks_with_options():
    text = (
        "reasoning_gym:chain_sum?max_terms=3&allow_negation=true, gsm8k:a/b.jsonl,gsm8k,reasoning_gym:a?x=[1,2]&y=(3,)"
    )
    assert [tuple(spec) for spec in prompts.parse_tasks(text)] == [
        (
            "reasoning_gym:chain_sum?max_terms=3&allow_negation=true",
            "reasoning_gym",
            "chain_sum",
            {"max_terms": "3", "allow_negation": "true"},
        ),
        ("gsm8k:a/b.jsonl", "gsm8k", "a/b.jsonl", {}),
        ("gsm8k", "gsm8k", "", {}),
        ("reasoning_gym:a?x=[1,2]&y=(3,)", "reasoning_gym", "a", {"x": "[1,2]", "y": "(3,)"}),
    ]
    assert prompts.parse_tasks("") == prompts.parse_tasks(" ") == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("gsm9k", "there is no kind of task 'gsm9k'; did you mean 'gsm8k'?"),
        ("gsm8k,", "there is no kind of task ''"),
        ("reasoning_gym", "names no task"),
        ("reasoning_gym:?a=1", "names no task"),
        ("reasoning_gym:a?b", "'b' in 'reasoning_gym:a?b' is no key=value"),
    ],
)
def test_what_is_not_written_so(text, why):
    with pytest.raises(ConfigError) as error:
        prompts.parse_tasks(text)
    assert str(error.value).startswith("config.reward.tasks: ")
    assert why in str(error.value)
