"""`sample.weights=int8`: what it costs is said where it is chosen; scores of it are not kept as the run's."""

import re

import pytest
import tiny_chats

from jaxlm.cli import cli
from jaxlm.eval import results


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return tiny_chats.base(tmp_path_factory.mktemp("run"), n_layers=1)


def test_what_int8_costs_is_said_by_source(run, capsys):
    assert cli.main(["sample", str(run), "the", "--weights=int8", "--max-new-tokens=4"]) == 0
    line = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("int8 weights"))
    assert re.fullmatch(
        r"int8 weights, on [\d,]+ tokens of held-out text: bits per byte .+; [\d.]+% of greedy tokens stay", line
    )


def test_scores_of_int8_weights_are_printed_not_kept(run, capsys, tmp_path):
    (tmp_path / "text.txt").write_text("The sun is high. " * 20)
    printed = {}
    own = (run / "config.json").read_text()
    (run / "config.json").write_text(
        own.replace('"weights": "float"', '"weights": "int8"')
    )  # of its texts, not its scores
    assert '"weights": "int8"' in (run / "config.json").read_text()
    for kind, flags in {"int8": ["--weights=int8"], "float": []}.items():
        assert cli.main(["eval", str(run), f"--text={tmp_path / 'text.txt'}", *flags]) == 0
        said = capsys.readouterr()
        assert (
            "int8 weights (without --weights=int8 the run's own): the results are printed, not kept" in said.err
        ) == (kind == "int8")
        assert bool(results.steps(run)) == (kind == "float")
        printed[kind] = said.out
    assert printed["int8"].splitlines()[0] == printed["float"].splitlines()[0]


def test_a_kind_of_weights_that_is_not_there_is_one_line(run, capsys):
    assert cli.main(["sample", str(run), "the", "--weights=int4"]) == 2
    assert "sample.weights='int4': choose one of float, int8" in capsys.readouterr().err
