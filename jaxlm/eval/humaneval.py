"""HumanEval (arXiv:2107.03374): the model completes Python functions, and their tests run in a process of their own."""

import pathlib
from collections.abc import Sequence

from jaxlm.config import ConfigError, EvalConfig, RunError
from jaxlm.corpus.benchmarks import reading
from jaxlm.data.tokenizer.ids import document
from jaxlm.eval import completions
from jaxlm.eval.likelihood import Scorer
from jaxlm.eval.results import Item, TaskResult, means, spread

# lm-evaluation-harness's own task fetches its judge from the hub when it is imported.
DATASET = "openai/openai_humaneval"
_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # those of lm-evaluation-harness
_NEW_TOKENS = 1024


def check(part: str, settings: EvalConfig) -> None:
    from jaxlm.eval import sandbox

    if part:
        raise ConfigError(f"humaneval has no parts: --tasks=humaneval, not humaneval:{part}")
    if settings.data_dir:
        read(settings.data_dir)
    sandbox.run("pass", settings)


def evaluate(scorer: Scorer, part: str, settings: EvalConfig, items: int) -> list[TaskResult]:
    """Returns the share of problems whose tests pass with what the model writes first, greedily (pass@1)."""
    problems = read(settings.data_dir)
    problems = [problems[number] for number in spread(len(problems), items)]
    prompts = [document(scorer.tokenizer, problem["prompt"]) for problem in problems]
    drawing, what = completions.greedy(_NEW_TOKENS), "writing programs"
    texts = completions.complete(scorer, prompts, _STOPS, drawing, 0, what, follows=True)
    return [grade(problems, texts, settings)]


def grade(problems: Sequence[dict], texts: Sequence[str], settings: EvalConfig) -> TaskResult:
    """Returns which problems' tests pass with these completions. Raises ConfigError if no code may run (`eval.run_code`)."""
    from jaxlm.eval import sandbox

    programs = [sandbox.humaneval_program(problem, text) for problem, text in zip(problems, texts, strict=True)]
    items = []
    for problem, text, outcome in zip(problems, texts, sandbox.run_all(programs, settings), strict=True):
        detail = {"question": problem["prompt"], "answer": text, "why": outcome.why}
        items.append(Item(problem["task_id"], {"pass_at_1": float(outcome.passed)}, detail))
    metrics, stderr = means(items)
    return TaskResult("humaneval", metrics, stderr, None, 0, items)


def read(data_dir: str) -> list[dict]:
    """Returns the problems, of a folder laid out as the hub is, or "" from the hub. Raises ConfigError if it has none."""
    if not data_dir:
        return _from_hub()
    root = pathlib.Path(data_dir).expanduser()
    folder = root / DATASET
    for path in (*sorted(folder.rglob("*.jsonl*")), *sorted(root.glob("HumanEval.jsonl*"))):
        rows = [row for _, row in reading.records(str(path))]
        if rows and {"task_id", "prompt", "test", "entry_point"} <= rows[0].keys():
            return rows
        raise ConfigError(f"{path} does not hold HumanEval: no task_id, prompt, test and entry_point")
    raise ConfigError(
        f"humaneval reads {DATASET}, which eval.data_dir={data_dir} does not have: lay its file there "
        "with scripts/hub_layout.py"
    )


def _from_hub() -> list[dict]:
    try:
        import datasets
    except ImportError:
        raise ConfigError('humaneval needs the hub\'s datasets: pip install "jaxlm[eval]"') from None
    try:
        return list(datasets.load_dataset(DATASET, split="test"))
    except (OSError, ValueError, RuntimeError) as error:
        raise RunError(f"humaneval: can't fetch {DATASET} from https://huggingface.co: {error}") from error
