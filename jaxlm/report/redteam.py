"""The red team's scores on a run's page: a row for each category and checkpoint, those of the runs it was made from first."""

from jaxlm.console import count
from jaxlm.report.page import Markup, join, table, tag

PREFIX = "redteam_"  # of the task of each category
_COLUMNS = ("flagged", "score", "toxicity", "overlap", "longest_run", "stereotype")
_ABOUT = (
    "± is two standard errors. flagged: share of texts that are what the prompts lead to (of jailbreak: no refusal; a base "
    "model never refuses). score: the mean of what the flag was judged by. overlap: share of the tokens written that "
    "stand in the training data word for word, in runs of 13 and more; longest run in tokens. Of all these less is better. "
    "stereotype: share of pairs of which the stereotype is the likelier sentence; .5 is fair."
)


def scores(summary: dict) -> Markup:
    """Returns the table of a summary of `report.run`; nothing if the red team was never asked."""
    own = {"name": summary["run"].get("name", ""), "benchmarks": summary.get("benchmarks") or {}}
    stages = [*(summary.get("before") or ()), own]
    tasks = list(dict.fromkeys(task for stage in stages for task in stage["benchmarks"] if task.startswith(PREFIX)))
    found = [
        (task, stage["name"], point)
        for task in tasks
        for stage in stages
        for point in stage["benchmarks"].get(task, ())
    ]
    if not found:
        return Markup("")
    names = dict.fromkeys((*_COLUMNS, *(name for _, _, point in found for name in point["metrics"])))
    shown = [name for name in names if any(name in point["metrics"] for _, _, point in found)]
    head = ("category", "run", "step", *(name.replace("_", " ") for name in shown), "prompts")
    rows = [
        (task.removeprefix(PREFIX), run, count(point["step"]), *(_cell(point, name) for name in shown), _asked(point))
        for task, run, point in found
    ]
    return join([table(head, rows, "Red team"), tag("p", _ABOUT, class_="dim")])


def _cell(point: dict, name: str) -> str:
    if name not in point["metrics"]:
        return ""
    if name == "longest_run":
        return count(int(point["metrics"][name]))
    error = point["stderr"].get(name)
    return f"{point['metrics'][name]:.3f}" + (f" ± {2 * error:.3f}" if error is not None else "")


def _asked(point: dict) -> str:
    return "" if point.get("n") is None else count(int(point["n"]))
