"""Lays out local benchmark files as on the hub, so that `jaxlm eval` reads them offline (`eval.data_dir`).

    python scripts/hub_layout.py BENCHMARKS arc_easy=arc_easy.jsonl gsm8k=gsm8k_test.jsonl humaneval=HumanEval.jsonl.gz

A file is .jsonl or .jsonl.gz, with the hub's own columns, or for arc_easy, arc_challenge and piqa with CORE's rows (query,
choices, gold). It becomes the split with the task's questions; `TASK:train=FILE` lays out another split. Few-shot examples come
from their own split: if there is no file for it, `--examples=N` moves the last N questions there.
"""

import argparse
import gzip
import json
import pathlib
import sys
import typing

Row = dict[str, typing.Any]


class Layout(typing.NamedTuple):
    """A task on the hub: dataset, config, splits of questions and of few-shot examples, a column, numbers of choices."""

    dataset: str
    config: str
    asked: str
    examples: str
    column: str
    choices: range = range(0)  # empty: rows without choices


LAYOUTS = {
    "hellaswag": Layout("Rowan/hellaswag", "default", "validation", "train", "endings", range(4, 5)),
    "arc_easy": Layout("allenai/ai2_arc", "ARC-Easy", "test", "train", "answerKey", range(3, 6)),
    "arc_challenge": Layout("allenai/ai2_arc", "ARC-Challenge", "test", "train", "answerKey", range(3, 6)),
    "piqa": Layout("baber/piqa", "default", "validation", "train", "sol1", range(2, 3)),
    "winogrande": Layout("allenai/winogrande", "winogrande_xl", "validation", "train", "option1"),
    "truthfulqa_mc2": Layout("truthfulqa/truthful_qa", "multiple_choice", "validation", "validation", "mc2_targets"),
    "gsm8k": Layout("openai/gsm8k", "main", "test", "train", "answer"),
    "humaneval": Layout("openai/openai_humaneval", "openai_humaneval", "test", "test", "entry_point"),
    "ifeval": Layout("google/IFEval", "default", "train", "train", "instruction_id_list"),
    "lambada_openai": Layout("EleutherAI/lambada_openai", "default", "test", "test", "text"),
}
MMLU = Layout("cais/mmlu", "", "test", "dev", "subject", range(4, 5))


def layout(task: str) -> Layout | None:
    """Returns a task's layout on the hub; None if this script does not know the task. MMLU has a task for each subject."""
    if task.startswith("mmlu_"):
        return MMLU._replace(config=task.removeprefix("mmlu_"))
    return LAYOUTS.get(task)


def read(path: pathlib.Path) -> list[Row]:
    """Returns the rows of a jsonl file."""
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def arc(row: Row, number: int) -> Row:
    """Converts a row of CORE to ARC's columns."""
    labels = [chr(ord("A") + place) for place in range(len(row["choices"]))]
    choices = {"text": row["choices"], "label": labels}
    return {"id": str(number), "question": _question(row), "choices": choices, "answerKey": labels[row["gold"]]}


def piqa(row: Row, number: int) -> Row:
    """Converts a row of CORE to PIQA's columns."""
    del number
    return {"goal": _question(row), "sol1": row["choices"][0], "sol2": row["choices"][1], "label": row["gold"]}


def _question(row: Row) -> str:
    return row["query"].removeprefix("Question:").strip()


FROM_CORE = {"arc_easy": arc, "arc_challenge": arc, "piqa": piqa}


def write(out: pathlib.Path, at: Layout, split: str, rows: list[Row]) -> None:
    """Writes a split, and lists it in the dataset's README, where `datasets` looks for splits."""
    folder = out / at.dataset
    (folder / at.config).mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / at.config / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    entries = ["---", "configs:"]
    for config in sorted(path for path in folder.iterdir() if path.is_dir()):
        entries += [f"- config_name: {config.name}", "  data_files:"]
        for path in sorted(config.glob("*.jsonl")):
            entries += [f"  - split: {path.stem}", f"    path: {config.name}/{path.name}"]
    (folder / "README.md").write_text("\n".join([*entries, "---", ""]), encoding="utf-8")


def check(rows: list[Row], at: Layout, wrong: str) -> None:
    """Raises ValueError if a row has a number of choices that the benchmark does not have."""
    for number, row in enumerate(rows, 1):
        choices = row.get("endings") or row.get("choices") or ()
        held = len(choices["text"] if isinstance(choices, dict) else choices)
        if held and at.choices and held not in at.choices:
            wanted = " or ".join(map(str, at.choices))
            raise ValueError(f"{wrong}, which have {wanted} choices: row {number} has {held}")


def lay(out: pathlib.Path, name: str, path: pathlib.Path, examples: int) -> str:
    """Lays out one file, and returns a line that says so. Raises ValueError if the file has another layout."""
    task, _, split = name.partition(":")
    if not (at := layout(task)):
        raise ValueError(f"no task {task} here: {', '.join(LAYOUTS)} or mmlu_SUBJECT")
    rows = read(path)
    check(rows, at, f"{path}: no rows of {task}")
    if rows and at.column not in rows[0] and "gold" in rows[0] and task in FROM_CORE:
        rows = [FROM_CORE[task](row, number) for number, row in enumerate(rows)]
    if not rows or at.column not in rows[0]:
        raise ValueError(f"{path}: no rows of {task}, which have a field {at.column}")
    said = ""
    if examples and not split and at.examples != at.asked:
        if examples >= len(rows):
            raise ValueError(f"{path}: --examples={examples} leaves no question of its {len(rows):,} rows")
        rows, shown = rows[:-examples], rows[-examples:]
        write(out, at, at.examples, shown)
        said = f", {len(shown):,} examples"
    write(out, at, split or at.asked, rows)
    return f"{task}: {len(rows):,} rows{said} in {out / at.dataset}"


def main(arguments: list[str]) -> int:
    """Runs the script; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path, help="folder for eval.data_dir")
    parser.add_argument("files", nargs="+", metavar="TASK[:SPLIT]=FILE")
    parser.add_argument("--examples", type=int, default=0, metavar="N", help="rows for worked examples (default: 0)")
    args = parser.parse_args(arguments)
    if args.examples < 0:
        parser.error("--examples is no number of rows")
    for given in args.files:
        name, _, path = given.partition("=")
        try:
            print(lay(args.out, name, pathlib.Path(path), args.examples))
        except (OSError, ValueError) as error:
            print(f"hub_layout: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
