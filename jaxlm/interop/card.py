"""Writes the model card of an export: README.md with the YAML that the Hugging Face hub reads."""

import dataclasses
import json
import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence

from jaxlm.config import ModelConfig
from jaxlm.host.console import count, dollars, duration, human, loss
from jaxlm.interop import gguf
from jaxlm.report.benchmarks import BITS, MARGIN
from jaxlm.report.markup import with_error


@dataclasses.dataclass(frozen=True)
class Base:
    """The base model of an adapter.

    Attributes:
      step: of its checkpoint; None for a model from elsewhere.
      ids: the vocabulary size to which its embedding must be resized before the adapter is loaded; 0 to keep its size.
      codes: how its layers were quantised in training: nf4, int8, or none.
    """

    name: str
    step: int | None
    ids: int
    codes: str


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts that a model card states.

    Attributes:
      to: "hf", "peft" or "gguf".
      step, parameters: the checkpoint's step; the model's number of parameters.
      run: the key `run` of a report's summary (see `report.run_page`).
      phases: rows of the bill, as `train.phases` writes them.
      sources: name -> {"origin": where the source comes from, "share": of the mixture, "tokens": of the training split}.
      mixture: the mixtures in words, if the run has two (`sources` has the shares of the first); else "".
      licences: source -> the licences that its preparation allowed; empty if it did not filter by licence.
      examples, origin: the names of the files of chats, pairs or prompts, and of the run or model that it began with.
      scores: results of benchmarks on this checkpoint (`eval.results.TaskResult`).
      evaluation: the latest record of metrics.jsonl at or before `step` that has held-out losses; {} if there is none.
      samples: lines of the latest file in samples/ at or before `step`, one for each prompt.
      chats: True if the tokenizer has a chat template.
      tokenizer_class: the class of transformers that loads the tokenizer, AutoTokenizer if possible.
      base: the adapter's base; None if the export is a whole model.
      files: the types of the export's GGUF files.
      bits: bits per byte of held-out text, of the weights ("run") and of each quantised file (its type); {} if not measured.
      coarse: matrices of these files that a K-quant can't hold: name -> columns.
    """

    name: str
    to: str
    config: ModelConfig
    step: int
    parameters: int
    run: Mapping
    phases: Sequence[Mapping]
    sources: Mapping[str, Mapping]
    mixture: str
    licences: Mapping[str, Sequence[str]]
    scores: Sequence
    chats: bool
    tokenizer_class: str
    evaluation: Mapping = dataclasses.field(default_factory=dict)
    samples: Sequence[Mapping] = ()
    examples: Sequence[str] = ()
    origin: str = ""
    rewards: bool = False
    base: Base | None = None
    files: Sequence[str] = ()
    bits: Mapping[str, float] = dataclasses.field(default_factory=dict)
    coarse: Mapping[str, int] = dataclasses.field(default_factory=dict)


def text(facts: Facts) -> str:
    before, after = (_model, _use, _files, _data, _training), (_held_out, _samples, _scores, _limits)
    parts = [_front(facts), f"# {facts.name}", *(part(facts) for part in (*before, *after))]
    return "\n\n".join(filter(None, parts)) + "\n"


def _front(facts: Facts) -> str:
    """Returns the hub's metadata as YAML. Values are written as JSON, which is YAML too, whatever characters they hold."""
    fields = {
        "library_name": {"hf": "transformers"}.get(facts.to, facts.to),
        "pipeline_tag": "text-classification" if facts.rewards else "text-generation",
        "license": "other",
        "tags": ["jaxlm", facts.config.family],
    }
    return "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in fields.items()), "---"])


def _model(facts: Facts) -> str:
    c = facts.config
    heads = f"{c.n_heads} heads" + (f" ({c.n_kv_heads} for keys and values)" if c.n_kv_heads != c.n_heads else "")
    rope = "" if c.family == "gpt2" else f", RoPE theta {c.rope.theta:,.0f}"
    kind = "reward model" if facts.rewards else "language model"
    if facts.base:
        step = "" if facts.base.step is None else f" (step {count(facts.base.step)} of its training)"
        codes = "" if facts.base.codes == "none" else f", whose layers were kept in {facts.base.codes} in training"
        return (
            f"An adapter of {human(facts.parameters)} numbers, from step {count(facts.step)} of its training, for the model "
            f"{facts.base.name}{step}{codes}. Trained and exported with jaxlm."
        )
    return (
        f"A {kind} of {human(facts.parameters)} parameters, from step {count(facts.step)} of its training: {c.family}, "
        f"{c.n_layers} layers of d {c.d_model}, {heads} of {c.head_dim}{rope}, {count(c.vocab_size)} tokens, "
        f"{count(c.max_seq_len)} of context. Trained and exported with jaxlm."
    )


def _use(facts: Facts) -> str:
    if facts.to == "gguf":
        return ""
    code, note = (_use_scores if facts.rewards else _use_adapter if facts.base else _use_model)(facts)
    return "\n".join(["## Use", "", *(f"    {line}" for line in code), "", note])


def of_llama_cpp(file: str, chats: bool) -> str:
    """Returns the command of llama.cpp for a GGUF file. Its llama-cli only chats; llama-completion continues a text."""
    return f"llama-cli -m {file}" if chats else f'llama-completion -m {file} -no-cnv -p "Once upon a time"'


def of_files(facts: Facts) -> list[str]:
    """Returns lines on the GGUF files: the bits per byte that each loses, and the matrices that are in a finer type."""
    lines, run = [], facts.bits.get("run", 0.0)
    for dtype in filter(facts.bits.get, facts.files):
        lost = f"{facts.bits[dtype] - run:.4f} bits per byte of held-out text ({run:.4f} without rounding)"
        lines.append(f"{gguf.file_name(facts.name, dtype)} loses {lost}")
    if facts.coarse:
        kinds = {f"{re.sub(r'blk.[0-9]+', 'blk.*', name)} ({n:,} columns)": 0 for name, n in facts.coarse.items()}
        lines.append(f"kept in q8_0, or f16, since 256 does not divide their columns: {', '.join(kinds)}")
    return lines


def _files(facts: Facts) -> str:
    lines = [of_llama_cpp(gguf.file_name(facts.name, dtype), facts.chats) for dtype in facts.files]
    lines.append(f"ollama create {shlex.quote(facts.name)} -f Modelfile  # untried\n")
    notes = [f"- {line}." for line in of_files(facts)]
    return "\n".join(["## GGUF files\n", *(f"    {line}" for line in lines), *notes]).strip() if facts.files else ""


_CHAT = [
    'chat = [{"role": "user", "content": "Hello"}]',
    'inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")',
]


def _use_model(facts: Facts) -> tuple[list[str], str]:
    code = [
        f"from transformers import AutoModelForCausalLM, {facts.tokenizer_class}",
        f'tokenizer = {facts.tokenizer_class}.from_pretrained("PATH")',
        'model = AutoModelForCausalLM.from_pretrained("PATH")',
        *(_CHAT if facts.chats else ['inputs = tokenizer("Once upon a time", return_tensors="pt")']),
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))",
    ]
    note = "Each text must begin with one end-of-text token; the tokenizer puts it there."
    if facts.chats:
        note += " The chat template spells control tokens, so a text that spells one gets its id; to avoid that, pass "
        note += "`split_special_tokens=True`."
    return code, note


def _use_scores(facts: Facts) -> tuple[list[str], str]:
    code = [
        f"from transformers import AutoModelForSequenceClassification, {facts.tokenizer_class}",
        f'tokenizer = {facts.tokenizer_class}.from_pretrained("PATH")',
        'model = AutoModelForSequenceClassification.from_pretrained("PATH")',
        'chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi there."}]',
        "text = tokenizer.apply_chat_template(chat, tokenize=False).rstrip()",
        'print(model(**tokenizer(text, add_special_tokens=False, return_tensors="pt")).logits)',
    ]
    note = "The score is that of a text's last token, so a chat ends with the token that ends an answer, without the newline "
    return code, note + "after it. Compare scores only of answers to the same prompt."


def _use_adapter(facts: Facts) -> tuple[list[str], str]:
    base = facts.base
    code = [
        "from peft import PeftModel",
        f"from transformers import AutoModelForCausalLM, GenerationConfig, {facts.tokenizer_class}",
        f'tokenizer = {facts.tokenizer_class}.from_pretrained("PATH")',
        'model = AutoModelForCausalLM.from_pretrained("BASE")',
        *([f"model.resize_token_embeddings({base.ids})"] if base.ids else []),
        'model = PeftModel.from_pretrained(model, "PATH")',
        'model.generation_config = GenerationConfig.from_pretrained("PATH")  # what ends an answer',
    ]
    made = f", which `jaxlm export {base.name} --checkpoint={base.step} --to=hf --out=BASE` writes"
    note = f"BASE is the folder of {base.name}{made if base.step is not None else ''}. No other model fits."
    if base.ids:
        note += " It has no rows for the chat tokens: they are in the adapter."
    if base.codes != "none":
        note += (
            f" Its layers were in {base.codes} in training; in full precision, as above, the logits differ a little. "
        )
        note += f"`jaxlm export {facts.name} --to=hf` writes the model as it was trained."
    return code, note


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines)


def _data(facts: Facts) -> str:
    if facts.origin:
        examples = f"the examples of {', '.join(facts.examples)}" if facts.examples else "rewards"
        return f"## Data\n\nTrained from {facts.origin} by {examples}; the card of {facts.origin} names the data before that."
    if not facts.sources:
        return "## Data\n\nNot recorded: the data was not at hand when this model was exported."
    licences = {name: ", ".join(facts.licences.get(name, ())) for name in facts.sources}
    rows = [
        (name, source["origin"], f"{source['share']:.1%}", human(source["tokens"]), licences[name] or " ")
        for name, source in facts.sources.items()
    ]
    table = _table(("source", "from", "share", "tokens", "licences"), rows)
    mixture = f"\n\nThe mixture changed: {facts.mixture}." if facts.mixture else ""
    unknown = (
        "The licence of a source was not recorded where the column is empty: look it up before you publish this model."
    )
    return f"## Data\n\n{table}{mixture}" + ("" if all(licences.values()) else f"\n\n{unknown}")


def _training(facts: Facts) -> str:
    run = facts.run
    if not run["step"]:
        return "## Training\n\nNone by jaxlm: these are the weights that a run began with."
    cost = f", {dollars(run['cost_usd'])}" if run.get("cost_usd") else ""
    line = f"The run took {count(run['step'])} steps, {human(run['tokens'])} tokens, {duration(run['wall_s'])}{cost}"
    parts = ["## Training", line + "."]
    latest = {row["phase"]: row for row in facts.phases}
    if latest:
        rows = [
            (row["phase"], count(row["last_step"]), human(row["tokens"]), loss(row["loss_end"]), dollars(row["usd"]))
            for row in latest.values()
        ]
        parts.append(_table(("phase", "to step", "tokens", "loss", "cost"), rows))
    return "\n\n".join(parts)


def _held_out(facts: Facts) -> str:
    """Returns the table of `val/<source>/loss` and `val/<source>/bits_per_byte`; "" without an evaluation."""
    cells = {key: f"{value:.4f}" for key, value in facts.evaluation.items() if isinstance(value, float)}
    places = dict.fromkeys(key.rpartition("/")[0] for key in cells if re.fullmatch(f"val/(.+/)?(loss|{BITS})", key))
    names = {"val": "all", "val/base": "the base model's text"}
    rows = [(names.get(at, at[4:]), cells.get(f"{at}/loss", ""), cells.get(f"{at}/{BITS}", "")) for at in places]
    table = _table(("source", "loss, nats a token", "bits per byte"), rows)
    about = f"At step {count(facts.evaluation.get('step', 0))}, on text that was held out of training."
    return f"## Held-out loss\n\n{about}\n\n{table}" if rows else ""


def _samples(facts: Facts) -> str:
    """Returns the first three samples, shortened; "" without samples."""
    if not facts.samples:
        return ""
    step, temperature = facts.samples[0]["step"], facts.samples[0].get("temperature")
    texts = [" ".join(f"[{line['prompt']}]{line['text']}".split())[:300] for line in facts.samples[:3]]
    shown = [textwrap.fill(text, 100, initial_indent="    ", subsequent_indent="    ") for text in texts]
    about = f"At step {count(step)}, at temperature {temperature}; prompts in brackets, cut after 300 characters."
    return "\n\n".join(["## Samples", about, *shown])


def _scores(facts: Facts) -> str:
    if not facts.scores:
        return "## Benchmarks\n\nNone was measured: `jaxlm eval RUN --tasks=...` measures them."
    rows = []
    for task in facts.scores:
        shots = "" if task.fewshot is None else str(task.fewshot)
        for metric in task.metrics:
            chance = "" if task.chance is None or metric in (BITS, MARGIN) else f"{task.chance:.3f}"
            rows.append((task.task, metric, with_error(vars(task), metric), chance, shots, count(len(task.items))))
    head = ("task", "measure", "score ± 2 standard errors", "chance", "shots", "questions")
    return f"## Benchmarks\n\n{_table(head, rows)}"


def _limits(facts: Facts) -> str:
    return (
        "## Limits\n\nA model of this size states wrong facts fluently, and repeats what its data holds: errors, prejudice, "
        f"names. Nobody has checked it for any use. It reads at most {count(facts.config.max_seq_len)} tokens."
    )
