"""The prompts of a run as its data: a pure function of the seed and the batch's number; how tasks are written in the config."""

import json

import pytest
import tiny_chats
import tiny_rewards

from jaxlm.config import ConfigError
from jaxlm.train.rl import process, prompts


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_chats.tokenizer()


@pytest.fixture
def make(tokenizer, tmp_path):
    """Makes prompts of a file of 40; keys of the config as overrides."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n} + 1 =", "answer": n + 1}) + "\n" for n in range(40)))
    tiny_rewards.write(tmp_path)
    made = []

    def make(*overrides: str) -> prompts.Prompts:
        c = tiny_rewards.make_config(f"data.path={path}", "reward.model=m", *overrides)
        made.append(process.Process(((), c.reward.function, ""), 10.0))
        return prompts.make(c, tokenizer, made[-1], lambda line: None)

    yield make
    for one in made:
        one.close()


def gsm8k(path, name: str, count: int = 10) -> str:
    rows = [{"question": f"{name} {n}?", "answer": f"#### {n}"} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"gsm8k:{path}"


def places(made, steps) -> list[list[str]]:
    return [made.places(step) for step in steps]


def test_what_a_step_asks_follows_from_its_number(make):
    made = make()
    whole = places(made, range(1, 20))
    assert all(len(step) == 4 for step in whole)
    assert places(make(), range(19, 0, -1))[::-1] == whole  # another process, from the end
    assert places(make("seed=1"), range(1, 20)) != whole
    size = len(made.sources[0].train)
    once = [place for step in whole for place in step][:size]
    assert len(set(once)) == size  # a pass ends in the middle of a step
    assert [item.place for item in made.step(3)] == whole[2]
    assert made.passes(19) == {made.sources[0].name: pytest.approx(19 * 4 / size)}


def test_from_step_38_come_the_prompts_of_step_38(make):
    """As from the first step on: a resumed run begins there."""
    made = make().passing_over(((2, 3), (38, 38)))
    whole = places(made, range(1, 42))
    assert places(make().passing_over(((2, 3), (38, 38))), range(38, 42)) == whole[37:]
    assert whole[37:] == places(make(), range(41, 45))


def test_batches_are_passed_over(make):
    made = make()
    other = made.passing_over(((2, 3), (6, 6)))
    assert [other.batch_number(step) for step in (0, 1, 2, 3, 4)] == [0, 1, 4, 5, 7]
    assert places(other, (1, 2, 3, 4)) == places(make(), (1, 4, 5, 7))
    assert other.fingerprint() == made.fingerprint()
    assert other.passed_over == ((2, 3), (6, 6))


def test_the_fingerprint_knows_what_decides_the_prompts(make, tmp_path):
    first, task = make().fingerprint(), gsm8k(tmp_path / "t.jsonl", "t")
    others = [make("seed=1"), make("rollout.prompts=2"), make("data.val_fraction=0.4"), make(f"reward.tasks={task}")]
    hashes = [one.fingerprint()["sha256"] for one in others]
    assert make().fingerprint() == first
    assert make("rollout.answers=4", "train.seq_len=1024").fingerprint() == first
    assert len({first["sha256"], *hashes}) == 5
    assert set(first) == {"data", "seed", "prompts", "sha256"}


def test_what_is_told_of_the_data(make, tokenizer):
    made = make()
    assert made.data.tokenizer() is tokenizer
    assert made.data.vocab_size == tokenizer.vocab_size
    (tokens,) = made.data.token_counts().values()
    assert tokens == sum(len(item.ids) for item in made.sources[0].train)


def test_tasks_are_drawn_from_in_turn(make, tmp_path):
    names = [gsm8k(tmp_path / f"{name}.jsonl", name) for name in "bcd"]
    made = make(f"reward.tasks={','.join(names)}")
    asked = [item.prompt[0] for step in range(1, 7) for item in made.step(step)]
    assert asked == list("bcd" * 8)
    assert [item.judge[0] for item in made.step(1)] == [0, 1, 2, 0]
    size = len(made.sources[0].train)
    first = [item.prompt for step in range(1, 9) for item in made.step(step) if item.prompt[0] == "b"][:size]
    assert len(set(first)) == size
    held = made.held_out(4)
    assert [item.prompt[0] for item in held].count("b") >= 1
    assert not {item.prompt for item in held} & {item.prompt for step in range(1, 40) for item in made.step(step)}


def test_a_tasks_file_is_that_of_the_data_without_another(make, tmp_path):
    gsm8k(tmp_path / "a.jsonl", "x")
    made = make("reward.tasks=gsm8k")
    assert made.step(1)[0].place.startswith(f"{tmp_path}/a.jsonl:")


def test_the_room_is_what_an_answer_leaves_of_its_share_of_a_row():
    c = tiny_rewards.make_config("data.path=x", "reward.model=m")
    assert (c.train.seq_len, c.train.batch_size, c.rollout.prompts * c.rollout.answers) == (512, 2, 8)
    assert prompts.room(c) == 512 // 4 - 32


def test_the_function_takes_what_the_prompts_have(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make("reward.function=scores:score")
    with pytest.raises(ConfigError, match=r"scores:narrow can't be called with the columns answer of the prompts"):
        make("reward.function=scores:narrow")


def test_no_prompts(tokenizer):
    c = tiny_rewards.make_config("reward.model=m", "data.dir=d", "program=grpo")
    with pytest.raises(ConfigError, match=r"^grpo needs prompts: "):
        prompts.make(c, tokenizer, None, print)


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
