"""The commands of the console script, with their arguments."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Verb:
    """One command.

    Attributes:
      summary: one line for the help.
      options: the flags in addition to --config: name -> arguments of `add_argument`. A flag with a `key` is short for
        --config.KEY.
      reads_run: True if the command works on an existing run. It then uses the run's own config, even if a config and a
        workdir are given.
      keys: the sections of the config that the command's help lists first.
      makes: True if the command writes to `workdir` or `data.dir`; the command prints a folder that it chose itself.
      resumes: what the same command does after an interruption, such as "goes on" (exit code 4); "" if it starts anew
        (exit code 1).
      rest, rest_help: the name of further plain arguments in the help, "PROMPT", and their help; stored in `args.words`.
      others: the name of plain arguments that are no config, "CONTESTANT"; stored in `args.words`, and the config is
        `base`, or that of --config.
      holds_runs: True if the command takes a folder of runs for all of these.
      second: the name of a second plain argument in the help, "RUN_B"; stored in `args.other`.
      folder: the module of jaxlm.commands whose `config(args, overrides)` makes a config for a folder of documents; or "".
      models: "also" if the command takes a Hugging Face model's folder besides a run's, "only" if it takes no run; or "".
      takes_data: True if a data directory may stand in place of a config: short for `base` with --config.data.dir.
      sweeps: True if a key of the config may have several values; they are stored in `args.space`.
      stands_in: an option, and the config used with that option if the command line names none.
    """

    summary: str
    options: dict[str, dict] = dataclasses.field(default_factory=dict)
    reads_run: bool = False
    keys: tuple[str, ...] = ()
    makes: bool = False
    resumes: str = ""
    rest: str = ""
    rest_help: str = "a text to continue; without one, those of the config"
    others: str = ""
    holds_runs: bool = False
    second: str = ""
    folder: str = ""
    models: Literal["", "also", "only"] = ""
    takes_data: bool = False
    sweeps: bool = False
    stands_in: tuple[str, str] = ("", "")

    @property
    def takes_step(self) -> bool:
        """True if RUN@STEP is short for RUN --checkpoint=STEP."""
        return self.reads_run and self.options.get("--checkpoint", {}).get("default") == "latest"


def _text(metavar: str, words: str, default: str | None = "") -> dict:
    return {"default": default, "metavar": metavar, "help": words}


def _number(words: str, default: int | None = 0) -> dict:
    return {"type": int, "default": default, "metavar": "N", "help": words}


def _flag(words: str) -> dict:
    return {"action": "store_true", "help": words}


def _option(words: str, metavar: str, **more: object) -> dict:
    return {"metavar": metavar, "help": words, **more}


# config.program -> the module of jaxlm.commands that trains it.
TRAINING = {"pretrain": "train.text"} | dict.fromkeys(("sft", "dpo", "reward"), "train.posttraining")
TRAINING |= dict.fromkeys(("ppo", "grpo"), "train.rewards")


def module(name: str, program: str) -> str:
    """Returns the module of jaxlm.commands whose `run(config, args)` executes a verb, and returns the exit code."""
    return {"train": TRAINING[program], "import": "import_hf"}.get(name, name)


_JSON = {"--json": _flag("print JSON instead of a table")}
_PARAMS = _text("N", "another size of CONFIG's model, in its proportions: 10M, 1.5B", None)
_CHECKPOINT = {"--checkpoint": {"default": "latest", "help": "latest, best or a step, also RUN@STEP (default: latest)"}}
_BRANCH = {
    "--branch": _option("finish RUN in a folder of its own, RUN-decay-STEP", "decay", choices=["decay"]),
    "--steps": _number("of --branch: let the learning rate fall to 0 in N steps"),
    "--without": _text("FILE", "RUN without the documents of a list (trace --remove), in RUN-without-STEP", None),
    "--checkpoint": _text("STEP", "of --branch: where it begins (default: latest)", "latest"),
}
_DRAWING = {
    "--temperature": _option("0 = the likeliest token", "T", key="sample.temperature"),
    "--top-k": _option("draw from the likeliest K tokens; 0 = off", "K", key="sample.top_k"),
    "--top-p": _option("draw from what has probability P together; 1 = off", "P", key="sample.top_p"),
}
_WEIGHTS = {
    "--weights": _option("int8: faster on a CPU, in a quarter of float32's memory", "KIND", key="sample.weights")
}
VERBS = {
    "train": Verb(
        "train a model; again: resume or continue (python -m jaxlm.main too)",
        {"--params": _PARAMS} | _BRANCH,
        keys=("train", "model", "optim", "data"),
        makes=True,
        resumes="goes on from what is done",
    ),
    "grow": Verb(
        "make a larger model of config.origin's, the same function at first",
        keys=("model", "optim", "train", "data"),
        makes=True,
    ),
    "prepare": Verb(
        "clean, deduplicate and audit documents, with a report",
        {
            "--preset": _text("NAME", "of a DIR: docs, web, code or books (default: by its content)", None),
            "--out": _text("DATA", "of a DIR: the folder for the result (default: data/NAME_OF_DIR)", None),
            "--strict": _flag("end with 3 if a line says that text was lost"),
            **_JSON,
        },
        keys=("data", "prepare"),
        makes=True,
        resumes="goes on from what is done",
        folder="folder",
    ),
    "tokenize": Verb(
        "make tokenizer, shards and manifest in config.data.dir",
        {
            "--sweep": _text("N,N,...", "only compare vocabularies of these sizes; writes nothing", None),
            "--reference": _text(
                "FILE.model",
                "what to compare with; none = nothing (default: trained on embedded prose)",
                "embedded:prose",
            ),
            "--without": _text("FILE", "DATA's shards without the documents of a list by jaxlm trace --remove", None),
            "--out": _text("NEW", "with --without: the folder for the new data", None),
            "--held-out": _flag("with --without: take held-out documents out too"),
            **_JSON,
        },
        keys=("data",),
        makes=True,
        resumes="goes on; unfinished shards are written again",
        takes_data=True,
    ),
    "tune": Verb(
        "time settings of the train step here, and write the fastest",
        {
            "--params": _PARAMS,
            "--out": _text("FILE", "file for the overrides (default: WORKDIR/tuned.txt)", None),
            **_JSON,
        },
        keys=("tune", "train", "model", "loss", "hardware"),
    ),
    "plan": Verb(
        "parameters, memory, hours, dollars, before anything is rented",
        {
            "--budget": _text("USD", "the best model for the money (default: of speed_1b)"),
            "--params": _PARAMS,
            "--without": _text("FILE", "of a run: what train RUN --without=FILE would repeat and cost", None),
            **_JSON,
        },
        keys=("plan",),
        stands_in=("budget", "speed_1b"),
    ),
    "ladder": Verb(
        "small runs on the data that predict a config's held-out loss",
        {
            "--hours": _option("for all runs (default: .5, or .03 of the config's own)", "H", type=float),
            "--sizes": _text("D,D,D", "widths (default: 1/4, 3/8, 1/2 of the config's)"),
            "--tokens": _text("N,N,N", "of the runs: 1M,2M,4M (default: what fits into the hours)"),
            "--plan": _flag("only print the runs and their hours"),
            "--params": _PARAMS,
            "--out": _text("LADDER", "the folder for the runs and ladder.json (default: WORKDIR/ladder)", None),
            **_JSON,
        },
        keys=("train", "model", "optim", "data"),
        makes=True,
        resumes="goes on with the run that it was at",
    ),
    "sweep": Verb(
        "runs with several values of keys, and which differences are noise",
        {
            "--seeds": _number("of each value, from config.seed on (default: 3; of a search: 1)", None),
            "--one-at-a-time": _flag("vary one key at a time (default: all combinations)"),
            "--search": _number("so many runs, by Optuna; a key may have a range: 1e-3..1e-2", None),
            "--usd": _option("begin no run that would pass these dollars", "USD", type=float),
            "--hours": _option("begin no run that would pass these hours", "H", type=float),
            "--metric": _text("NAME[:BEST]", "what is compared (default: val/loss); BEST: highest or lowest", None),
            "--plan": _flag("only print the runs, their hours and what they can tell apart"),
            "--out": _text("SWEEP", "the folder for it all (default: WORKDIR/sweeps/KEYS)", None),
            **_JSON,
        },
        keys=("train", "model", "optim", "data"),
        makes=True,
        resumes="goes on with the run that it was at",
        sweeps=True,
    ),
    "doctor": Verb(
        "check this machine: GPUs, memory, disk, mirror, speed, versions",
        {"--params": _PARAMS} | _JSON,
        keys=("train", "model", "data", "checkpoint", "hardware"),
    ),
    "sample": Verb(
        "continue prompts with the model of a run",
        {
            "--prompt": _option("a prompt, even one that begins with -; may be repeated", "TEXT", action="append"),
            "--draws": _number("continuations of each prompt (default: 1)", 1),
            **_DRAWING,
            "--max-new-tokens": _option("of each text, at most", "N", key="sample.max_new_tokens"),
            **_WEIGHTS,
            **_CHECKPOINT,
            **_JSON,
        },
        reads_run=True,
        rest="PROMPT",
        keys=("sample",),
        models="also",
    ),
    "chat": Verb(
        "talk to the models of one run or several, in the terminal",
        {
            "--system": _text("TEXT", "the system message of the conversation"),
            "--message": _option("say this and leave; may be repeated", "TEXT", action="append"),
            "--plain": _flag("continue plain text, though the model has a chat template"),
            **_DRAWING,
            "--max-new-tokens": _option("of each answer, at most", "N", key="sample.max_new_tokens"),
            **_WEIGHTS,
            **_CHECKPOINT,
        },
        reads_run=True,
        rest="RUN_B",
        rest_help="another model that hears the same, also RUN@STEP; or NAME=ADAPTER",
        keys=("sample",),
        models="also",
    ),
    "serve": Verb(
        "answer over HTTP as OpenAI's API does; a page to talk to it",
        {
            "--port": _number("0 = any that is free (default: 8000)", 8000),
            "--host": _text("ADDRESS", "0.0.0.0 = reached from other machines (default: 127.0.0.1)", "127.0.0.1"),
            "--api-key": _text("KEY", "what clients must show (default: JAXLM_API_KEY, or none)", None),
            "--rows": _number("requests that run at once (default: 8)", 8),
            "--queue": _number("requests that wait (default: 64)", 64),
            "--max-prompt": _number("tokens of a prompt; 0 = the context"),
            **_WEIGHTS,
            **_CHECKPOINT,
        },
        reads_run=True,
        rest="NAME=ADAPTER",
        rest_help="a run or a PEFT folder of LoRA, which clients choose as this model",
        models="also",
    ),
    "import": Verb(
        "make a run of a Hugging Face model: weights, tokenizer, config",
        {"--out": _option("the folder for the run", "RUN", required=True)},
        models="only",
        keys=("model",),
    ),
    "export": Verb(
        "write a run's model for others: Hugging Face, GGUF, PEFT",
        {
            "--to": {
                "default": "hf",
                "choices": ("hf", "gguf", "peft"),
                "help": "hf: for transformers (default); gguf: for llama.cpp; peft: the adapter alone",
            },
            "--out": _text("DIR", "the folder; replaces an earlier export (default: exports/RUN[-FORMAT])"),
            **_CHECKPOINT,
            "--dtype": _text(
                "TYPE[,TYPE]",
                "hf: bf16, f16, f32; gguf: f16, f32, q8_0, q6_k, q5_k_m, q4_k_m (default: 1st)",
                None,
            ),
            "--push": _text("USER/NAME", "send the folder to this repository of the Hugging Face hub, private if new"),
            "--public": _flag("of --push: a public repository"),
            "--base": _text("USER/NAME", "of peft: the adapter's base on the hub, instead of its path here"),
            **_JSON,
        },
        reads_run=True,
    ),
    "eval": Verb(
        "held-out loss, benchmarks, questions of your own",
        {
            "--tasks": _text("TASK,TASK,...", "benchmarks, arc_easy,mmlu,... (default: eval.tasks)", None),
            "--text": _text("PATH", "bits per byte of any text: a file, folder or glob"),
            "--limit": _number("questions of each task; 0 = all"),
            "--fewshot": _option("few-shot examples; -1 = as each task says", "N", key="eval.fewshot"),
            **_WEIGHTS,
            **_CHECKPOINT,
            **_JSON,
        },
        reads_run=True,
        keys=("eval",),
        models="also",
    ),
    "average": Verb(
        "the average of a run's checkpoints, measured beside them",
        {
            "--last": _option("of the last N checkpoints (without a flag: the best of several ways)", "N", type=int),
            "--steps": _text("A,B,C", "of these checkpoints"),
            "--ema": _option("their moving average: each takes W of the average before", "W", type=float),
            **_JSON,
        },
        reads_run=True,
    ),
    "audit": Verb(
        "find junk in documents, shards or sources, the worst first",
        {
            "--top": _number("findings to print (default: 50; 0 = all)", 50),
            "--source": _text("NAME", "print the findings of this source only"),
            "--max-bytes": _number("of each source to read; 0 = all"),
            **_JSON,
        },
        reads_run=True,
        keys=("data", "prepare"),
        takes_data=True,
    ),
    "trace": Verb(
        "which documents were in a step's batch, or hold a string",
        {
            "--step": _option("the documents of this step, counted from 1", "N", type=int),
            "--string": _text("TEXT", "the documents that hold it, by source, and the steps that saw them", None),
            "--string-file": _text("FILE", "the same for a file's bytes, newlines included", None),
            "--regex": _text("PATTERN", "the same for a regular expression of Python's", None),
            "--text": _text("FILE", "what a text, such as a model's answer, copies verbatim, and from where", None),
            "--remove": _text("FILE", "write the documents found, for jaxlm tokenize --without=FILE", None),
            **_JSON,
        },
        reads_run=True,
        takes_data=True,
    ),
    "junk": Verb(
        "strings that a model writes unasked, and what taught it them",
        {"--tokens": _number("of its texts; drawn if it has fewer (default: 200000)", 200_000), **_CHECKPOINT, **_JSON},
        reads_run=True,
        resumes="goes on with the texts that it has drawn",
    ),
    "report": Verb(
        "a page with a run's curves, costs, samples; or on several runs",
        _JSON
        | {
            "--took": _text("FOLDER", "also show the times of a script's commands: files with seconds"),
            "--out": _text("FILE.html", "the page of several runs (default: report-A-B.html, here)"),
        },
        reads_run=True,
        rest="RUN_B",
        rest_help="another run: one page on all; also a folder of runs",
        holds_runs=True,
    ),
    "verify": Verb(
        "check a run's receipt, and train some of its steps again",
        {
            "--steps": _option("how many to train again, towards the newest (default: 20)", "N", type=int),
            "--until-digest": _flag("train up to the next state that the receipt records instead"),
        },
        reads_run=True,
    ),
    "diff": Verb(
        "what differs between two runs, and where they part",
        _JSON,
        reads_run=True,
        second="RUN_B",
    ),
    "compare": Verb(
        "whether two runs can be told apart: the paired test, in words",
        {
            "--checkpoint": _text("A,B", "their steps, or latest (default: the latest with results)"),
            "--votes": _text("FILE", 'judge by votes: lines of {"winner": "a", "item": ...}; a, b or tie'),
            "--command": _text("CMD", "judge by a command: CMD RUN STEP prints a score a line, higher is better"),
            "--lower-is-better": _flag("--command prints losses: a lower score is better"),
            **_JSON,
        },
        reads_run=True,
        second="RUN_B",
        models="also",
    ),
    "arena": Verb(
        "people vote blindly between answers of runs, servers or files",
        {
            "--prompts": _text("FILE", "a line each, or .jsonl (default: the config's)"),
            "--store": _text("FILE", "answers and votes (arena.sqlite)", "arena.sqlite"),
            "--port": _number("of the page (default: 8080; 0 = any)", 8080),
            "--host": _text("HOST", "0.0.0.0 = other machines may vote too", "127.0.0.1"),
            "--no-reveal": _flag("don't say after a vote whose the answers were"),
            "--results": _flag("print ratings, agreement and biases; opens no page"),
            "--export-votes": _text("FILE", "of two, for jaxlm compare --votes"),
            "--export-pairs": _text("FILE", "preferences, for jaxlm train dpo"),
            **_JSON,
        },
        others="CONTESTANT",
        keys=("sample",),
    ),
}

# As `jaxlm --help` lists them.
GROUPS = {
    "data": ("prepare", "tokenize", "audit", "trace"),
    "before you pay": ("plan", "ladder", "tune", "doctor"),
    "train": ("train", "import", "grow"),
    "measure and compare": ("eval", "junk", "average", "sweep", "report", "verify", "diff", "compare"),
    "use": ("sample", "chat", "serve", "arena", "export"),
}
