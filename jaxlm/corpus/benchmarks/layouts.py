"""The registry of layouts: which fields of a benchmark's records hold the question, and which the answers.

Field names are those of the hub, of the authors' own files, and of the CORE bundle. A passage that a question is about
(BoolQ, SQuAD, CoQA, RACE, ...) is mostly from Wikipedia and found in clean text too, so no layout takes it. A record
that fits no layout is refused, unless `prepare.stages.decontaminate.fields` names its fields.
"""

import ast
import dataclasses
import fnmatch
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from jaxlm.config import ConfigError
from jaxlm.corpus.benchmarks import reading

Texts = tuple[tuple[str, ...], tuple[str, ...]]  # (the ways to write the question, the answers)


@dataclasses.dataclass(frozen=True)
class Item:
    """One question of a benchmark. A document leaks it if it holds the question or a long answer."""

    benchmark: str
    id: str
    questions: tuple[str, ...]  # the ways to write the question; mostly one
    answers: tuple[str, ...]  # right and wrong


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a record holds its texts. A field is a name, or names with dots between: `choices.text`."""

    name: str
    needs: tuple[str, ...]  # fields that a record of the layout has
    question: tuple[str, ...] = ()  # fields that are joined to the question
    answers: tuple[str, ...] = ()  # fields, each of which may be missing
    several: Callable[[dict], Iterable[Texts]] | None = None

    def texts(self, record: dict) -> list[Texts]:
        """Returns the texts of each item of a record."""
        if self.several:
            return list(self.several(record))
        question = " ".join(text for field in self.question for text in _strings(record, field))
        return [((question,), tuple(text for field in self.answers for text in _strings(record, field)))]


_LABELS = ("label", "labels", "key")  # of choices: "A", "B", ...


def _strings(value: object, field: str) -> list[str]:
    """Returns the texts of a field, in order: of a list, all members' texts; of a dict, all values' texts."""
    if isinstance(value, list):
        return [text for each in value for text in _strings(each, field)]
    if isinstance(value, dict):
        name, _, rest = field.partition(".")
        inner = value.get(name) if field else [each for key, each in value.items() if key not in _LABELS]
        return _strings(inner, rest)
    return [value] if isinstance(value, str) and not field else []


def _has(record: dict, field: str) -> bool:
    first, _, rest = field.partition(".")
    value = record.get(first)
    return value is not None and (not rest or (isinstance(value, dict) and _has(value, rest)))


def _schema(record: dict) -> Iterator[Texts]:
    yield tuple(f"{context} {record['continuation']}" for context in _strings(record, "context_options")), ()


def _blank(record: dict) -> Iterator[Texts]:
    """Yields one item for a sentence with a blank `_`: the sentence, and the sentence with each option filled in."""
    sentence = record["sentence"]
    yield (sentence, *(sentence.replace("_", record[option]) for option in ("option1", "option2"))), ()


def _dialogue(record: dict) -> Iterator[Texts]:
    """Yields an item for each question about a story, with its answer."""
    answers = _strings(record, "answers.input_text") or _strings(record, "answers")
    for i, question in enumerate(_strings(record, "questions.input_text") or _strings(record, "questions")):
        yield (question,), tuple(answers[i : i + 1])


def _exam(record: dict) -> Iterator[Texts]:
    for question, options in zip(record["questions"], record["options"], strict=False):
        yield (question,), tuple(_strings(options, ""))


def _problems(record: dict) -> Iterator[Texts]:
    """Yields an item for each problem of an article; EleutherAI/race has the problems as a Python literal."""
    problems = record["problems"]
    for problem in ast.literal_eval(problems) if isinstance(problems, str) else problems:
        yield (problem["question"],), tuple(_strings(problem, "options"))


def _paragraphs(record: dict) -> Iterator[Texts]:
    for paragraph in record["paragraphs"]:
        for question in paragraph["qas"]:
            yield (question["question"],), tuple(_strings(question, "answers.text"))


_ABCD = ("A", "B", "C", "D")
_STORY = tuple(f"input_sentence_{i}" for i in range(1, 5))
_WRONG = tuple(f"Incorrect Answer {i}" for i in range(1, 4))
_OPTIONS = ("choices", "options", "answer", "answers", "answers_spans.spans", "correct_answer", "solution", "rationale")

# A record gets the first layout that fits, so those with more fields of their own come first.
LAYOUTS = (
    Layout("CORE multiple_choice, AGIEval", ("query", "choices", "gold"), ("query",), ("choices",)),
    Layout("CORE schema", ("context_options", "continuation"), several=_schema),
    Layout("CORE language_modeling", ("context", "continuation"), ("context",), ("continuation",)),
    Layout("HellaSwag", ("ctx", "endings"), ("ctx",), ("endings",)),
    Layout("SWAG", ("startphrase", "ending0"), ("startphrase",), tuple(f"ending{i}" for i in range(4))),
    Layout("Winogrande", ("sentence", "option1", "option2"), several=_blank),
    Layout("PIQA", ("goal", "sol1", "sol2"), ("goal",), ("sol1", "sol2")),
    Layout("SIQA", ("context", "question", "answerA"), ("context", "question"), ("answerA", "answerB", "answerC")),
    Layout("COPA", ("premise", "choice1", "choice2"), ("premise",), ("choice1", "choice2")),
    Layout("StoryCloze", ("input_sentence_1", "sentence_quiz1"), _STORY, ("sentence_quiz1", "sentence_quiz2")),
    Layout("HumanEval", ("prompt", "canonical_solution"), ("prompt",), ("canonical_solution", "test")),
    Layout("MBPP", ("text", "code", "test_list"), ("text",), ("code", "test_list")),
    Layout("MBPP, sanitized", ("prompt", "code", "test_list"), ("prompt",), ("code", "test_list")),
    Layout("IFEval", ("prompt", "instruction_id_list"), ("prompt",)),
    Layout(
        "TruthfulQA, multiple choice",
        ("question", "mc1_targets"),
        ("question",),
        ("mc1_targets.choices", "mc2_targets.choices"),
    ),
    Layout(
        "TruthfulQA, generation",
        ("question", "best_answer"),
        ("question",),
        ("best_answer", "correct_answers", "incorrect_answers"),
    ),
    Layout("OpenBookQA", ("question_stem", "choices"), ("question_stem",), ("choices",)),
    Layout("ARC, OpenBookQA, CommonsenseQA: original", ("question.stem",), ("question.stem",), ("question.choices",)),
    Layout("SQuAD, original", ("paragraphs",), several=_paragraphs),
    Layout("CoQA", ("story", "questions"), several=_dialogue),
    Layout("RACE, original", ("article", "questions", "options"), several=_exam),
    Layout("RACE, EleutherAI", ("article", "problems"), several=_problems),
    Layout("ReCoRD", ("passage", "query", "entities"), ("query",), ("answers",)),
    Layout("RTE, CB, ANLI", ("premise", "hypothesis"), ("hypothesis",)),
    Layout("WSC", ("text", "span1_text", "span2_text"), ("text",)),
    Layout("WiC", ("word", "sentence1", "sentence2"), ("sentence1", "sentence2")),
    Layout(
        "SciQ", ("question", "distractor1"), ("question",), ("correct_answer", *(f"distractor{i}" for i in (1, 2, 3)))
    ),
    Layout("C-Eval", ("question", *_ABCD), ("question",), _ABCD),
    Layout("CMMLU", ("Question", *_ABCD), ("Question",), _ABCD),
    Layout("MedMCQA", ("question", "opa", "opb"), ("question",), ("opa", "opb", "opc", "opd", "exp")),
    Layout("HEAD-QA", ("qtext", "answers"), ("qtext",), ("answers.atext",)),
    Layout("GPQA", ("Question", "Correct Answer"), ("Question",), ("Correct Answer", *_WRONG)),
    Layout("ASDiv", ("body", "question"), ("body", "question"), ("answer",)),
    Layout("SVAMP", ("Body", "Question"), ("Body", "Question")),
    Layout("MATH", ("problem", "solution"), ("problem",), ("solution", "answer")),
    Layout("MathQA, AIME", ("Problem",), ("Problem",), ("Rationale", "Solution", "Answer")),
    Layout("BBH", ("input", "target"), ("input",), ("target",)),
    # MMLU, MMLU-Pro, ARC, GSM8K, CommonsenseQA, MedQA, LogiQA, TriviaQA, WebQuestions, Natural Questions; with a passage
    # BoolQ, MultiRC, SQuAD, RACE, DROP
    Layout("a question with answers", ("question",), ("question",), _OPTIONS),
    Layout("a problem", ("problem",), ("problem",), _OPTIONS),
    Layout("a prompt", ("prompt",), ("prompt",), (*_OPTIONS, "completion")),
    Layout("LAMBADA, one text", ("text",), ("text",)),
)


def named(lines: Sequence[str], key: str) -> dict[str, Layout]:
    """Returns file-name pattern -> layout, from lines `FILE:QUESTION+QUESTION>ANSWER+ANSWER`. Else ConfigError."""
    layouts = {}
    for line in lines:
        form = re.fullmatch(r"([^:>]+):([^:>]+)(?:>([^:>]+))?", line)
        if not form:
            raise ConfigError(
                f"{key}: {line!r} is not of the form FILE:QUESTION>ANSWER, as in 'riddles*.jsonl:riddle>key+hint'"
            )
        question, answers = (tuple(part.strip() for part in (form[i] or "").split("+") if part.strip()) for i in (2, 3))
        layouts[form[1].strip()] = Layout(f"{key.rpartition('.')[2]} {line}", question, question, answers)
    return layouts


def items(path: str, fields: Mapping[str, Layout]) -> tuple[list[Item], list[str]]:
    """Returns (a file's items, the names of the layouts that fit them). Raises ConfigError if a record fits no layout."""
    own = next((fields[p] for p in fields if fnmatch.fnmatch(pathlib.PurePath(path).name, p)), None)
    known = LAYOUTS if own is None else (own,)
    items_of_file, layouts = [], {}
    for number, record in reading.records(path):
        layout = next((each for each in known if all(_has(record, field) for field in each.needs)), None)
        if layout is None:
            raise ConfigError(f"{path}:{number} {_unknown(path, record, own)}")
        layouts[layout.name] = None
        try:
            texts = layout.texts(record)
        except (ValueError, SyntaxError, TypeError, KeyError, AttributeError):
            raise ConfigError(f"{path}:{number} has the fields of {layout.name}, but in another form") from None
        of_record = next((str(record[key]) for key in _IDS if isinstance(record.get(key), str | int)), str(number - 1))
        for i, (questions, answers) in enumerate(texts):
            bare = tuple(text for text in map(_asked, questions) if text)
            if bare or answers:
                of_item = f"{of_record}/{i}" if len(texts) > 1 else of_record
                items_of_file.append(Item(reading.name(path), of_item, bare, answers))
    if not items_of_file:
        raise ConfigError(f"{path} holds no item of a benchmark")
    return items_of_file, list(layouts)


_IDS = ("task_id", "id", "ind", "idx", "question_id", "qid", "query_id", "example_id", "unique_id", "key", "source_id")


def _unknown(path: str, record: dict, own: Layout | None) -> str:
    has = ", ".join(list(record)[:12]) or "none"
    if own:
        missing = next(field for field in own.needs if not _has(record, field))
        return f"has no field {missing!r}, which {own.name} names; its fields: {has}"
    name = pathlib.PurePath(path).name
    return (
        f"has an unknown layout (fields: {has}); name its fields: "
        f"prepare.stages.decontaminate.fields=('{name}:QUESTION>ANSWER',)"
    )


_LABEL = re.compile(r"^\s*(?:question|problem|goal|q)\s*:|\banswer\s*:\s*$", re.IGNORECASE)
_PASSAGE = re.compile(r"(?:passage|context|story|article|paragraph|document|text|background)\s*:", re.IGNORECASE)
_LAST_QUESTION = re.compile(r".*^\s*(?:final )?(?:question|q|query)\s*:", re.IGNORECASE | re.DOTALL | re.MULTILINE)


def _asked(text: str) -> str:
    """Returns a question without the labels of its prompt ("Question:", "Answer:") and without a passage before it."""
    question = _LAST_QUESTION.match(text)
    if question and _PASSAGE.search(text, 0, question.end()):
        text = text[question.end() :]
    return _LABEL.sub(" ", text).strip()
