"""The command line as a new user meets it: help, typos, exit codes; one line, never a traceback."""

import importlib.util
import pathlib
import subprocess
import sys
import types
import typing

import pytest

from jaxlm import config
from jaxlm.cli import cli, verbs
from jaxlm.commands import plan
from jaxlm.config import ConfigError, RunError, config_files


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = cli.main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_tells_the_exit_codes(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 100
    assert all(f"{code} " in out.split("exit codes:")[1] for code in range(5))


TAKE_CONFIGS = [name for name, verb in verbs.VERBS.items() if verb.models != "only" and not verb.others]
TARGETS = {
    **dict.fromkeys(("diff", "compare"), "RUN_A RUN_B"),
    "eval": "CONFIG|RUN|HF_DIR",
    "prepare": "DIR|CONFIG|RUN",
    **dict.fromkeys(("tokenize", "audit", "trace"), "CONFIG|RUN|DATA"),
    "import": "HF_DIR",
    "report": "CONFIG|RUN [RUN_B ...]",
    "sample": "CONFIG|RUN|HF_DIR [PROMPT ...]",
    "arena": "CONTESTANT CONTESTANT ...",
    "chat": "CONFIG|RUN|HF_DIR [RUN_B ...]",
    "serve": "CONFIG|RUN|HF_DIR [NAME=ADAPTER ...]",
}


@pytest.mark.parametrize("verb", list(verbs.VERBS))
def test_each_help_fits_a_screen_and_lists_the_sections_of_its_verb_first(capsys, verb):
    code, out, err = run(capsys, verb, "--help")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0].startswith(f"usage: jaxlm {verb} {TARGETS.get(verb, 'CONFIG|RUN')} [--config.KEY=VALUE ...]")
    assert len(lines) <= 32
    assert max(map(len, lines)) <= 100
    words = ["--help=SECTION", *verbs.VERBS[verb].options, *["CONFIG", "RUN"] * (verb in TAKE_CONFIGS)]
    assert not [word for word in words if f"  {word}" not in out]
    listed = out.partition("sections of keys:\n")[2].splitlines()
    names = [cell.split()[0] for line in listed[:-1] for cell in (line[:50], line[50:]) if cell.strip()]
    first, base = verbs.VERBS[verb].keys, config_files.load("base")
    assert tuple(names[: len(first)]) == first
    assert sorted(names) == sorted(key for key in base if hasattr(base[key], "items"))
    assert listed[-1].split()[:3] == ["and", "the", "keys"]
    assert sorted(listed[-1].replace(",", "").split()[3:]) == sorted(key for key in base if key not in names)
    assert run(capsys, verb, "nosuch", "--typo", "-h") == (0, out, "")


@pytest.mark.parametrize("verb", TAKE_CONFIGS)
def test_help_on_a_section_has_the_values_of_the_config_that_is_given(capsys, verb):
    code, out, _ = run(capsys, verb, "local_35m", "--help=optim", "--config.optim.lr=1")
    assert code == 0
    assert "  optim.lr = 1.0  (default 0.001; float, at least 0)\n" in out
    assert "  optim.warmup_steps = 500  (default 100; int, at least 0)\n" in out
    assert run(capsys, verb, "--config=local_35m", "--help=optim", "--config.optim.lr=1") == (0, out, "")
    _, out, _ = run(capsys, verb, "--help=optim", "--config.optim.b1", "0.5")
    assert "  optim.b1 = 0.5  (default 0.9; " in out
    assert "  optim.warmup_steps = 100  (default; " in out


def test_every_verb_has_a_program():
    programs = typing.get_args(typing.get_type_hints(config.Config)["program"])
    assert "pretrain" in programs
    names = {verbs.module(verb, program) for verb in verbs.VERBS for program in programs}
    assert all(importlib.util.find_spec(f"jaxlm.commands.{name}") for name in names)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "no command 'trian'; did you mean train?"),
        (["train", "--help=opitm"], "no section or key 'opitm'; did you mean optim?"),
        (["train"], "no config: jaxlm train NAME, FILE.py or the folder of a run; shipped: domain_7b, "),
        (["prepare"], "no config: jaxlm prepare NAME, FILE.py or the folder of a run or of documents; shipped: "),
        (["train", "100%s"], "no config file, shipped config or folder '100%s'"),
        (["train", "quickstart", "local_35m"], "unknown argument 'local_35m'; jaxlm train takes one config or run"),
        (["train", "quickstart", "--config=local_35m"], "two configs: quickstart and --config=local_35m"),
        (["train", "quickstart", "--config"], "argument --config: expected one argument"),
        (["train", "optim.lr=1", "quickstart"], "did you mean --config.optim.lr=1?"),
        (["train", "quickstart", "--confg", "3"], "unknown argument '--confg'; did you mean --config?"),
        (["train", "quickstart", "--50%s=3"], "unknown argument '--50%s=3'; jaxlm train --help lists all"),
        (["sample", "quickstart", "--promt=50% off"], "unknown argument '--promt=50% off'; did you mean --prompt?"),
        (["train", "quickstart", "--config.model.family=%s"], "config.model.family='%s': choose one of llama, gpt2"),
        (["train", "--config=quikstart"], "did you mean 'quickstart'?"),
        (["train", "--config=quickstart", "--config.modl.n_layers=3"], "did you mean config.model.n_layers?"),
        (["train", "--config=quickstart", "--config.train.steps"], "--config.train.steps needs a value"),
        (["train", "--config", "quickstart", "--config.train.steps", "ten"], "config.train.steps=ten: expected int"),
        (["train", "--config=quickstart", "--steps=3"], "did you mean --config.train.steps?"),
        (["tune", "--config=quickstart", "--steps=3"], "did you mean --config.tune.steps?"),
        (["train", "grpo", "--beta=1"], "did you mean --config.dpo.beta or --config.policy.beta?"),
        (["train", "gpuburnout_1b"], "with jaxlm prepare data/gpuburnout and jaxlm tokenize data/gpuburnout (its"),
        (["train", "local_35m", "--config.data.dir=docs"], "jaxlm prepare docs --out=DATA, then --config.data.dir="),
        (["train", "local_35m", "--config.data.path=docs"], "prepare it first: jaxlm prepare docs --out=DATA"),
        (["train", "--config=quickstart", "--config.program=sfft"], "choose one of pretrain"),
        (["sample", "quickstart", "--temperature=hot"], "config.sample.temperature=hot: expected float"),
        (["sample"], "no config: jaxlm sample NAME, FILE.py or the folder of a run"),
        (["sample", "--config.workdir=./runs/nosuch"], "no run in ./runs/nosuch: it has no config.json"),
        (["trace", "--config=quickstart"], "--step"),
        (["trace", "quickstart", "--step=5%"], "invalid int value: '5%'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, argv, message):
    code, out, err = run(capsys, *argv)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("verb", "error", "code"),
    [
        ("train", ConfigError("bad"), 2),
        ("train", RunError("broken"), 1),
        ("train", KeyboardInterrupt(), 4),
        ("tokenize", KeyboardInterrupt(), 4),
        ("plan", KeyboardInterrupt(), 1),  # nothing is saved that a launcher could go on from
    ],
)
def test_errors_become_exit_codes(capsys, monkeypatch, verb, error, code):
    def fail(*given):
        raise error

    monkeypatch.setattr(cli, "_run", fail)
    found, _, err = run(capsys, verb)
    assert (found, "the same command goes on" in err) == (code, code == 4)


def test_a_reader_that_has_enough_is_no_error():
    command = f"{sys.executable} -m jaxlm.cli.cli --help | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


REQUIRED = {"trace": ["--step=1"], "export": ["--to=hf", "--out=o"]}


@pytest.fixture
def seen(monkeypatch):
    """`seen(VERB)`: a list of what the verb's program is given, (config, args); it runs nothing."""

    def of(verb: str) -> list:
        given = []
        program = types.SimpleNamespace(run=lambda c, args: given.append((c, args)) or 0)
        monkeypatch.setitem(sys.modules, f"jaxlm.commands.{verbs.module(verb, 'pretrain')}", program)
        return given

    return of


@pytest.fixture
def steps_of(seen, capsys):
    """`steps_of(VERB, WORD, ...)`: train.steps and workdir that the verb's program is given, or the line of its refusal."""

    def steps(verb: str, *words: str) -> tuple[int, str] | str:
        given = seen(verb)
        code, _, err = run(capsys, verb, *words, *REQUIRED.get(verb, ()))
        if code:
            assert (code, err.count("\n")) == (2, 1)
            return err
        ((c, args),) = given
        assert args.config  # tune names it in the command that it prints
        return c.train.steps, c.workdir

    return steps


def a_run(folder: pathlib.Path) -> pathlib.Path:
    c = config.resolve(config_files.load("quickstart", [f"workdir={folder}", "train.steps=777"]))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config.to_json(c))
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder: one with a config file of its own, mine.py."""
    monkeypatch.chdir(tmp_path)
    own = "from jaxlm.configs import quickstart\n\n\ndef get_config():\n    return quickstart.get_config()\n"
    (tmp_path / "mine.py").write_text(own)
    return tmp_path


@pytest.mark.parametrize("verb", TAKE_CONFIGS)
def test_a_verb_takes_its_config_as_a_plain_argument(steps_of, here, verb):
    (here / "quickstart").mkdir()  # the shipped name wins
    for words in ("quickstart", "mine.py", "quickstart --config=configs/quickstart.py"):
        assert steps_of(verb, "--config.train.steps", "600", *words.split(), "--config.workdir=new") == (600, "new")


@pytest.mark.parametrize("verb", TAKE_CONFIGS)
def test_a_verb_takes_the_folder_of_a_run_as_a_plain_argument(steps_of, tmp_path, verb):
    folder, other = a_run(tmp_path / "run"), a_run(tmp_path / "other")
    named, workdir = str(folder), f"--config.workdir={folder}"
    for words in ([named], [f"--config={folder}"], [workdir], [named, f"{workdir}/"]):
        steps, place = steps_of(verb, *words, "--config.train.steps=800")
        assert (steps, pathlib.Path(place)) == (800, folder)
    assert steps_of(verb, named)[0] == 777
    assert "two runs: " in steps_of(verb, named, f"--config.workdir={other}")
    assert "two configs: " in steps_of(verb, named, "--config=quickstart")
    # A config with the folder of a run is the run's own where the run is read.
    steps = 777 if verbs.VERBS[verb].reads_run else 460
    for word in ("quickstart", "--config=quickstart"):
        assert steps_of(verb, word, workdir) == (steps, named)


@pytest.mark.parametrize("verb", TAKE_CONFIGS)
def test_a_folder_that_is_no_run_is_refused_in_one_line(steps_of, tmp_path, verb):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "llama"}')
    refused = f"model is a model in Hugging Face's format; jaxlm {verb} takes a config"
    if verbs.VERBS[verb].models:
        refused = "model/config.json lacks hidden_size"
    assert refused in steps_of(verb, f"{tmp_path}/model")
    (tmp_path / "texts").mkdir()
    said = steps_of(verb, f"{tmp_path}/texts")
    run_read = verbs.VERBS[verb].reads_run
    no = f"no run in {tmp_path}/texts: it has no config.json" if run_read else "texts is no config"
    assert ("texts holds no documents" if verb == "prepare" else no) in said
    absent = steps_of(verb, f"{tmp_path}/quickstrt")
    assert ("no run in " in absent) == run_read
    assert ("there is no such folder" if run_read else "no config file, shipped config or folder") in absent
    assert verb == "prepare" or f"jaxlm {verb} takes a config or" in said
    assert ("or of a Hugging Face model" in said) == bool(verbs.VERBS[verb].models)
    (tmp_path / "texts/prepared.json").write_text("{}")
    if verbs.VERBS[verb].takes_data:
        assert steps_of(verb, f"{tmp_path}/texts") == (1000, "")  # of `base`
    else:
        assert f"--config.data.dir={tmp_path}/texts" in steps_of(verb, f"{tmp_path}/texts")


def test_texts_with_percent_signs_arrive(monkeypatch, capsys, seen):
    given = seen("sample")
    argv = ["jaxlm", "sample", "quickstart", "--prompt=100% of %s", "--config.sample.prompts=('%d', '5%')"]
    monkeypatch.setattr(sys, "argv", argv)
    assert cli.main() == 0
    assert [(c.sample.prompts, args.prompt) for c, args in given] == [(("%d", "5%"), ["100% of %s"])]
    assert "sample.prompts = ('%d', '5%')" in run(capsys, *argv[1:], "--help=sample")[1]


def test_main_is_jaxlm_train():
    done = subprocess.run(
        [sys.executable, "-m", "jaxlm.main", "--config=quickstart", "--config.lr=1"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (2, "jaxlm: unknown key config.lr; did you mean config.optim.lr?\n")


def test_a_run_whose_folder_is_not_named_is_in_runs(steps_of, here):
    assert steps_of("train", "quickstart") == steps_of("plan", "quickstart") == (460, "runs/quickstart")
    assert steps_of("train", str(here / "mine.py")) == (460, "runs/mine")
    assert steps_of("train", "quickstart", "--config.phases.shrink=cpu") == (2, "runs/quickstart-shrunk")
    a_run(here / "runs/quickstart")
    for verb in TAKE_CONFIGS:
        steps = 777 if verbs.VERBS[verb].reads_run else 460  # training checks the run's config against the file's
        assert steps_of(verb, "quickstart") == (steps, "runs/quickstart")


def test_a_config_without_a_run_is_told_what_makes_one(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for argv, told in (
        (("sample", "quickstart"), "no run in runs/quickstart: jaxlm train quickstart makes one"),
        (("report", "quickstart"), "no run in runs/quickstart: it has no metrics.jsonl; train first"),
        (("train", "gpuburnout_1b"), "jaxlm tokenize"),
    ):
        code, _, err = run(capsys, *argv)
        assert (code, told in err, err.count("\n")) == (2, True, 1)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("verb", "says"), [("train", True), ("prepare", True), ("plan", False), ("report", False)])
def test_a_folder_that_is_not_named_is_said_by_what_fills_it(capsys, tmp_path, monkeypatch, seen, verb, says):
    monkeypatch.chdir(tmp_path)
    seen(verb)
    folder = "folder: runs/quickstart (another by --config.workdir=DIR)\n"
    assert run(capsys, verb, "quickstart") == (0, "", folder * says)
    assert run(capsys, verb, "quickstart", "--config.workdir=w") == (0, "", "")


@pytest.mark.parametrize(
    "words",
    [
        "RUN PROMPTS --temperature=0 --top-k 3",
        "--temperature=0 --top-k=3 RUN --draws=1 PROMPTS",
        "--config=RUN --config.sample.temperature=0 --top-k=3 RUN PROMPTS",
        "--config=RUN --config.sample.temperature=0 --top-k=3 PROMPTS",
        "--config.workdir=RUN --temperature=0 --top-k=3 PROMPTS",
        "--config.workdir=RUN --temperature=0 --top-k=3 quickstart PROMPTS",
    ],
)
def test_prompts_stand_behind_the_run_and_short_options_set_keys(capsys, tmp_path, seen, words):
    given, folder = seen("sample"), str(a_run(tmp_path / "run"))
    prompts = ["a=b", "two words"]
    argv = [new for word in words.split() for new in (prompts if word == "PROMPTS" else [word.replace("RUN", folder)])]
    assert run(capsys, "sample", *argv) == (0, "", "")
    ((c, args),) = given
    settings = c.sample
    assert (args.words, args.draws, settings.temperature, settings.top_k, settings.top_p) == (prompts, 1, 0.0, 3, 0.95)


@pytest.mark.parametrize("verb", ["eval", "sample", "chat", "serve", "junk", "export"])
def test_a_step_behind_the_run_is_short_for_checkpoint(capsys, tmp_path, seen, verb):
    given, folder = seen(verb), str(a_run(tmp_path / "run"))
    for words in ([folder, "--checkpoint=60"], [f"{folder}@60"]):
        assert run(capsys, verb, *words) == (0, "", "")
    assert [(c.workdir, args.checkpoint) for c, args in given] == [(folder, "60")] * 2


def test_two_checkpoints_are_refused(steps_of, tmp_path):
    folder = a_run(tmp_path / "run")
    assert "name two checkpoints: give one" in steps_of("eval", f"{folder}@60", "--checkpoint=80")


def test_a_prompt_may_end_as_a_step_does(capsys, tmp_path, seen):
    given = seen("sample")
    assert run(capsys, "sample", f"--config={a_run(tmp_path / 'run')}", "meet me @60") == (0, "", "")
    assert (given[0][1].words, given[0][1].checkpoint) == (["meet me @60"], "latest")


def test_a_step_is_refused_where_none_is_taken(steps_of, tmp_path):
    folder = a_run(tmp_path / "run")
    assert f"did you mean '{folder}'?" in steps_of("report", f"{folder}@60")


@pytest.mark.parametrize(("text", "code"), [("What *is* [this?", 0), ("x" * 5000, 0), ("a\0b", 0), ("/", 2)])
def test_any_text_is_a_prompt_but_a_folder(capsys, tmp_path, seen, text, code):
    seen("sample")
    assert run(capsys, "sample", f"--config={a_run(tmp_path / 'run')}", text)[0] == code


def test_the_help_has_a_line_of_eighty_columns_for_each_verb_in_one_group(capsys):
    code, out, _ = run(capsys, "--help")
    lines = out.splitlines()
    assert code == 0
    assert sorted(name for names in verbs.GROUPS.values() for name in names) == sorted(verbs.VERBS)
    assert len(lines) <= len(verbs.VERBS) + 18
    listed = [line for line in lines if line.startswith("  ")]
    assert [line.split()[0] for line in listed] == [name for names in verbs.GROUPS.values() for name in names]
    assert max(map(len, listed)) <= 80
    code, out, _ = run(capsys, "help", "configs")
    assert code == 0
    assert {line.split()[0] for line in out.splitlines() if line[0] != " "} == set(config_files.shipped_configs())


@pytest.mark.parametrize(
    ("overrides", "warmup"),
    [
        (["--config.train.steps=20"], 2),
        (["--config.train.steps=5"], 0),
        (["--config.train.steps=200"], 40),
        (["--config.train.steps=20", "--config.optim.warmup_steps=10"], 10),
    ],
)
def test_fewer_steps_shorten_the_warm_up(capsys, monkeypatch, overrides, warmup):
    seen = []
    monkeypatch.setattr(plan, "run", lambda config, args: seen.append(config.optim.warmup_steps) or 0)
    code, _, err = run(capsys, "plan", "quickstart", *overrides)
    assert (code, seen) == (0, [warmup])
    assert ("in place of 40: a tenth of train.steps" in err) == (warmup < 10)


@pytest.mark.parametrize(
    ("verb", "overrides", "lines"),
    [
        ("plan", ["phases.plan.smok.steps=20", "phases.plan.main.usd=9"], ["new phase smok, the first"]),
        ("plan", ["phases.plan.smok.usd=1", "phases.plan.smok.steps=60_500"], ["new phase smok, after main"]),
        (
            "plan",
            ["model.head_dim=60"],
            ["model.head_dim=60 is no multiple of 8: GPUs take the slow attention; 64 or 128 are usual"],
        ),
        ("plan", ["model.d_ff=512"], ["model.d_ff=512 is 0.25 times model.d_model=2048; 2 to 4 times are usual"]),
        ("plan", ["model.n_layers=3"], []),
    ],
)
def test_odd_shapes_and_new_phases_are_told(capsys, here, seen, verb, overrides, lines):
    seen(verb)
    code, _, err = run(capsys, verb, "gpuburnout_1b", *(f"--config.{override}" for override in overrides))
    assert (code, [line for line in err.splitlines() if not line.startswith("folder: ")]) == (0, lines)


def test_a_key_that_phases_do_not_have_is_refused(capsys, here, seen):
    code, _, err = run(capsys, "train", "quickstart", "--config.phases.plan.smoke.stps=20")
    assert (code, err) == (
        2,
        "jaxlm: unknown key config.phases.plan.smoke.stps; did you mean config.phases.plan.smoke.steps?\n",
    )


def test_a_mistyped_benchmark_is_refused_before_the_command_begins(capsys, tmp_path, seen):
    pytest.importorskip("lm_eval")
    begun = seen("eval")
    code, _, err = run(capsys, "eval", str(a_run(tmp_path / "run")), "--tasks=helaswag")
    assert (code, begun) == (2, [])
    assert "did you mean hellaswag" in err
