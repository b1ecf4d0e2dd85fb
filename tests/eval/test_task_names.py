"""A mistyped benchmark is refused before JAX or the harness are imported."""

import subprocess
import sys

import pytest

from jaxlm.config import ConfigError
from jaxlm.eval import task_names

pytest.importorskip("lm_eval")


def test_the_nearest_names_are_told():
    with pytest.raises(ConfigError, match="no task helaswag in lm-evaluation-harness; did you mean hellaswag"):
        task_names.check(["arc_easy", "helaswag"])


def test_what_is_no_task_of_the_harness_is_left_to_others(monkeypatch):
    monkeypatch.setattr(task_names, "folders", None)
    task_names.check(["mine.jsonl", "mine.json", "humaneval", "core:copa", "redteam_privacy", ""])


def test_tasks_groups_and_tags_have_their_folders():
    def names(*tasks: str) -> list[str]:
        return [folder.name for folder in task_names.folders(tasks)]

    assert names("arc_easy", "hellaswag") == ["arc", "hellaswag"]
    assert names("truthfulqa") == ["truthfulqa"]  # a tag in a list of tags
    assert "gsm8k" in names("math_word_problems")  # a tag of another folder


def test_nothing_heavy_is_imported():
    code = "import sys; from jaxlm.eval import task_names as t; t.check(['piqa']); print({'jax', 'lm_eval'} & {*sys.modules})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"
