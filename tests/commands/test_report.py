"""`jaxlm report RUN`: the page, its numbers as JSON, and what the commands of a script took."""

import json

from jaxlm import config
from jaxlm.cli import cli
from jaxlm.config import config_files


def test_what_commands_took_is_printed_and_stands_in_page_and_json(tmp_path, capsys):
    run, took = tmp_path / "run", tmp_path / "took"
    run.mkdir()
    took.mkdir()
    given = [f"workdir={run}", "hardware.usd_per_hour=6.0"]
    (run / "config.json").write_text(config.to_json(config.resolve(config_files.load("quickstart", given))))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "wall_s": 5.0, "train/loss": 3.0}) + "\n")
    (took / "03-tokenize").write_text("600\n")
    assert cli.main(["report", str(run), f"--took={took}"]) == 0
    said = capsys.readouterr().out
    assert [line.split() for line in said.splitlines() if line.startswith("03")] == [["03-tokenize", "10m00s", "$1.00"]]
    assert "03-tokenize" in (run / "report.html").read_text()
    assert cli.main(["report", str(run), f"--took={took}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["commands"] == [
        {"name": "03-tokenize", "wall_s": 600.0, "cost_usd": 1.0}
    ]
    assert cli.main(["report", str(run)]) == 0
    assert "03-tokenize" not in (run / "report.html").read_text()
    assert cli.main(["report", str(run), f"--took={tmp_path / 'none'}"]) == 2
