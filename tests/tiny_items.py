"""Made items of benchmarks, in the real field names of each layout, and prose around them."""

import dataclasses
import html
import random

split = str.split
PEOPLE = split("Anna Ben Chidi Dora Emil Fatima Goran Hana Igor Julia Kofi Lena Marek Nadia Omar Petra Quentin Rosa")
THINGS = split(
    "apples marbles pencils lanterns buckets tickets candles shells ribbons bricks seeds kites drums mirrors "
    "carrots stamps nails barrels carpets medals spoons bottles needles ropes baskets helmets tiles cushions"
)
PLACES = split("market harbour library orchard museum bakery station garden warehouse school valley theatre")
ACTS = split("buys sells paints repairs loses borrows carries counts polishes hides wraps delivers")
COMMON = split("the a and of in with to for at some many what which does it")
ENDS = ("How many {a} are {p}'s, at the {w}?", "Does {p} pay for {a} at ${n}.50?", "Which {w} sees all {n} {a}?")


def sentence(rng: random.Random) -> str:
    return (
        f"{rng.choice(PEOPLE)} {rng.choice(ACTS)} {rng.randint(3, 99)} {rng.choice(THINGS)} at the {rng.choice(PLACES)}, "
        f"then {rng.choice(ACTS)} some {rng.choice(THINGS)} & {rng.choice(THINGS)}."
    )


def question(rng: random.Random, sentences: int) -> str:
    """Words that all questions share, each time in another order: no phrase of six tells two of them apart by chance."""
    parts = [sentence(rng) for _ in range(sentences)]
    end = rng.choice(ENDS).format(
        p=rng.choice(PEOPLE), a=rng.choice(THINGS), w=rng.choice(PLACES), n=rng.randint(3, 99)
    )
    return " ".join([*parts, end])


def short(rng: random.Random) -> str:
    """A question as people type it into a search: eight words."""
    return f"does {rng.choice(PEOPLE)} give {rng.choice(THINGS)} and {rng.choice(THINGS)} from the {rng.choice(PLACES)}".lower()


def few(rng: random.Random) -> str:
    """An answer of two to four words."""
    return f"{rng.choice(COMMON)} {rng.choice(THINGS)}" + rng.choice(("", f" of {rng.choice(PEOPLE)}"))


_LETTERS = random.Random(0)
OTHERS = ["".join(_LETTERS.choices("abcdefghijklmnoprstuvw", k=_LETTERS.randint(3, 9))) for _ in range(3000)]


def passage(rng: random.Random) -> str:
    """An article of an encyclopedia, which clean text may hold too."""
    return " ".join(rng.choice(OTHERS) if rng.random() < 0.6 else rng.choice(COMMON) for _ in range(90)) + "."


def story(rng: random.Random) -> str:
    return " ".join(sentence(rng) for _ in range(5))


def clean_text(rng: random.Random, words: int) -> str:
    pool = [*PEOPLE, *THINGS, *PLACES, *ACTS, *COMMON]
    return " ".join(rng.choice(pool) + rng.choice(("", "", "", ",", ".")) for _ in range(words))


def zero_width(text: str) -> str:
    return "".join(c + ("\u200b" if i % 3 == 0 else "") + ("\u00ad" if i % 5 == 0 else "") for i, c in enumerate(text))


WRITINGS = {"verbatim": str, "another case": str.upper, "zero width": zero_width, "HTML-escaped": html.escape}


@dataclasses.dataclass(frozen=True)
class Made:
    """A record, what a document that leaks one of its items holds, and the passage that clean text may hold; "" for none."""

    record: dict
    leak: str
    passage: str = ""


def _choices(rng, n=4, sentences=0):
    """A question, its answers, the number of the right one, and what a leak holds."""
    q, answers, gold = question(rng, sentences), [few(rng) for _ in range(n)], rng.randrange(n)
    return q, answers, gold, f"{q} {answers[gold]}"


def _read(rng):
    return passage(rng), short(rng), few(rng)


def _talk(rng):
    return passage(rng), [short(rng), short(rng)], [few(rng), few(rng)]


def core_multiple_choice(rng):
    q, answers, gold, leak = _choices(rng)
    return Made({"query": f"Question: {q}\nAnswer:", "choices": answers, "gold": gold}, leak)


def core_boolq(rng):
    about, q = passage(rng), short(rng)
    query = f"Passage: {about}\nQuestion: {q}?\nAnswer:"
    return Made({"query": query, "choices": ["no", "yes"], "gold": 1}, f"{q}? yes", about)


def core_schema(rng):
    a, b = rng.sample(PEOPLE, 2)
    begin = f"{a} asked {b} to move the {rng.choice(THINGS)} because"
    end = f"was tired of {rng.choice(THINGS)} in the {rng.choice(PLACES)}."
    made = {"context_options": [f"{begin} {a}", f"{begin} {b}"], "continuation": end, "gold": 0}
    return Made(made, f"{begin} {a} {end}")


def core_lambada(rng):
    text, end = story(rng), rng.choice(THINGS)
    return Made({"context": f"{text} They saw", "continuation": end}, f"{text} They saw {end}")


def core_squad(rng):
    about, q, a = _read(rng)
    return Made({"context": f"Context: {about}\nQuestion: {q}?\nAnswer:", "continuation": a}, f"{q}? {a}", about)


def core_coqa(rng):
    about, q, a = _read(rng)
    context = (
        "Below is a story followed by a series of related questions. Please answer the final question.\n\n"
        f"Story: {about}\n\nPreceding questions:\n\nQuestion: {short(rng)}?\nAnswer: {few(rng)}\n\n"
        f"Final question:\n\nQuestion: {q}?\nAnswer:"
    )
    return Made({"context": context, "continuation": a}, f"{q}? {a}", about)


def lambada(rng):
    text = story(rng)
    return Made({"text": text}, text)


def boolq(rng):
    about, q = passage(rng), short(rng)
    return Made({"question": q, "answer": True, "passage": about}, f"{q}? Yes.", about)


def boolq_super_glue(rng):
    about, q = passage(rng), short(rng)
    return Made({"question": q, "passage": about, "idx": 3, "label": 1}, f"{q}? Yes.", about)


def boolq_original(rng):
    about, q = passage(rng), short(rng)
    return Made({"question": q, "title": rng.choice(THINGS), "answer": False, "passage": about}, q, about)


def multirc(rng):
    about, q, a = _read(rng)
    idx = {"paragraph": 0, "question": 1, "answer": 2}
    return Made({"paragraph": about, "question": q, "answer": a, "idx": idx, "label": 1}, f"{q} {a}", about)


def squad(rng):
    about, q, a = _read(rng)
    answers = {"text": [a], "answer_start": [5]}
    return Made({"id": "5733", "title": "X", "context": about, "question": q, "answers": answers}, f"{q} {a}", about)


def squad_original(rng):
    about, q, a = _read(rng)
    qas = [{"question": q, "id": "5733", "answers": [{"text": a, "answer_start": 5}]}]
    return Made({"title": "X", "paragraphs": [{"context": about, "qas": qas}]}, f"{q} {a}", about)


def coqa(rng):
    about, q, a = _talk(rng)
    questions = {"input_text": q, "turn_id": [1, 2]}
    answers = {"input_text": a, "span_text": ["x", "y"], "span_start": [1, 2], "span_end": [3, 4], "turn_id": [1, 2]}
    record = {"id": "3z", "source": "wikipedia", "story": about, "questions": questions, "answers": answers}
    return Made(record, f"{q[1]} {a[1]}", about)


def coqa_original(rng):
    about, q, a = _talk(rng)
    questions = [{"input_text": text, "turn_id": i} for i, text in enumerate(q, 1)]
    answers = [{"input_text": text, "span_text": "x", "turn_id": i} for i, text in enumerate(a, 1)]
    return Made({"id": "3z", "story": about, "questions": questions, "answers": answers}, f"{q[1]} {a[1]}", about)


def coqa_stanford(rng):
    about, q, a = _talk(rng)
    answers = {"input_text": a, "answer_start": [1, 2], "answer_end": [3, 4]}
    return Made({"source": "cnn", "story": about, "questions": q, "answers": answers}, f"{q[0]} {a[0]}", about)


def race(rng):
    about, (q, answers, gold, leak) = passage(rng), _choices(rng)
    record = {"example_id": "high1.txt", "article": about, "answer": "ABCD"[gold], "question": q, "options": answers}
    return Made(record, leak, about)


def race_original(rng):
    about, (q, answers, gold, leak) = passage(rng), _choices(rng)
    record = {"article": about, "questions": [q], "options": [answers], "answers": ["ABCD"[gold]], "id": "high1.txt"}
    return Made(record, leak, about)


def race_eleuther(rng):
    about, (q, answers, gold, leak) = passage(rng), _choices(rng)
    problems = repr([{"question": q, "answer": "ABCD"[gold], "options": answers}])
    return Made({"article": about, "problems": problems}, leak, about)


def drop(rng):
    about, q, a = _read(rng)
    spans = {"spans": [a], "types": ["span"]}
    made = {"section_id": "nfl_1", "query_id": "f3", "passage": about, "question": q, "answers_spans": spans}
    return Made(made, f"{q} {a}", about)


def record(rng):
    about, q = passage(rng), f"{sentence(rng)} @placeholder waits."
    made = {
        "passage": about,
        "query": q,
        "entities": PEOPLE[:3],
        "answers": PEOPLE[:1],
        "idx": {"passage": 1, "query": 2},
    }
    return Made(made, q, about)


def sciq(rng):
    about, (q, answers, _, _) = passage(rng), _choices(rng)
    names = ("distractor1", "distractor2", "distractor3", "correct_answer")
    made = {"question": q, **dict(zip(names, answers, strict=True)), "support": about}
    return Made(made, f"{q} {answers[3]}", about)


def mmlu(rng):
    q, answers, gold, leak = _choices(rng)
    return Made({"question": q, "subject": "anatomy", "choices": answers, "answer": gold}, leak)


def mmlu_pro(rng):
    q, answers, gold, leak = _choices(rng, 10)
    more = {"answer": "ABCDEFGHIJ"[gold], "answer_index": gold, "cot_content": "", "category": "law", "src": "x"}
    return Made({"question_id": 70, "question": q, "options": answers, **more}, leak)


def arc(rng):
    q, answers, gold, leak = _choices(rng)
    choices = {"text": answers, "label": list("ABCD")}
    return Made({"id": "M_7", "question": q, "choices": choices, "answerKey": "ABCD"[gold]}, leak)


def arc_original(rng):
    q, answers, gold, leak = _choices(rng)
    choices = [{"text": text, "label": label} for text, label in zip(answers, "ABCD", strict=True)]
    return Made({"id": "M_7", "question": {"stem": q, "choices": choices}, "answerKey": "ABCD"[gold]}, leak)


def openbookqa(rng):
    q, answers, gold, leak = _choices(rng)
    choices = {"text": answers, "label": list("ABCD")}
    return Made({"id": "7-9", "question_stem": q, "choices": choices, "answerKey": "ABCD"[gold]}, leak)


def hellaswag(rng):
    begin, (_, answers, gold, _) = sentence(rng), _choices(rng)
    made = {
        "ind": 24,
        "activity_label": "Roof",
        "ctx_a": begin,
        "ctx_b": "he",
        "ctx": f"{begin} he",
        "endings": answers,
    }
    more = {"source_id": "activitynet~v_x", "split": "val", "split_type": "indomain", "label": str(gold)}
    return Made(made | more, f"{begin} he {answers[gold]}")


def winogrande(rng):
    a, b = rng.sample(PEOPLE, 2)
    text = (
        f"{a} brought {b} the {rng.choice(THINGS)} because _ had no {rng.choice(THINGS)} at the {rng.choice(PLACES)}."
    )
    return Made({"sentence": text, "option1": a, "option2": b, "answer": "2"}, text.replace("_", b))


def piqa(rng):
    goal = f"how to fix {rng.choice(THINGS)} {rng.choice(PEOPLE)}"
    sols = [f"put {few(rng)} under {few(rng)} at the {rng.choice(PLACES)}" for _ in range(2)]
    return Made({"goal": goal, "sol1": sols[0], "sol2": sols[1], "label": 1}, f"{goal} {sols[1]}")


def gsm8k(rng):
    q = question(rng, 2)
    answer = f"{sentence(rng)} 4+5=<<4+5=9>>9\n#### 9"
    return Made({"question": q, "answer": answer}, f"{q} {answer}")


def humaneval(rng):
    a, b = (text.replace(" ", "_") for text in (few(rng), few(rng)))
    prompt = f'def {a}({b}):\n    """{question(rng, 1)}\n    >>> {a}(3)\n    9\n    """\n'
    solution = f"    return {b} * {b}\n"
    test = f"def check(candidate):\n    assert candidate(3) == {rng.randint(3, 99)}\n"
    made = {"task_id": "HumanEval/7", "prompt": prompt, "entry_point": a, "canonical_solution": solution, "test": test}
    return Made(made, prompt + solution)


def mbpp(rng):
    text, code = f"Write a function to sort {question(rng, 0)}", f"def f(x):\n    return {rng.randint(3, 99)}\n"
    more = {"test_list": ["assert f(1) == 2"], "test_setup_code": "", "challenge_test_list": []}
    return Made({"task_id": 11, "text": text, "code": code, **more}, f"{text}\n{code}")


def truthfulqa_mc(rng):
    q, answers, _, _ = _choices(rng)
    targets = {"choices": answers, "labels": [1, 0, 0, 0]}
    return Made({"question": q, "mc1_targets": targets, "mc2_targets": targets}, f"{q} {answers[0]}")


def truthfulqa_generation(rng):
    q, answers, _, _ = _choices(rng)
    more = {"best_answer": answers[0], "correct_answers": answers[:2], "incorrect_answers": answers[2:]}
    made = {"type": "Adversarial", "category": "Law", "question": q, **more, "source": "https://x.org"}
    return Made(made, f"{q} {answers[0]}")


def ifeval(rng):
    prompt = f"Write about this: {question(rng, 1)} Use no commas at all."
    rules = ["punctuation:no_comma"]
    return Made({"key": 1000, "prompt": prompt, "instruction_id_list": rules, "kwargs": [{"relation": None}]}, prompt)


def siqa(rng):
    context, q, (_, answers, gold, _) = sentence(rng), "How would Others feel as a result?", _choices(rng, 3)
    named = dict(zip(("answerA", "answerB", "answerC"), answers, strict=True))
    return Made({"context": context, "question": q, **named, "label": str(gold + 1)}, f"{context} {q} {answers[gold]}")


def math(rng):
    q, solution = question(rng, 1), f"{sentence(rng)} So $\\boxed{{9}}$."
    return Made({"problem": q, "level": "Level 5", "type": "Algebra", "solution": solution}, f"{q} {solution}")


def copa(rng):
    premise = f"{rng.choice(PEOPLE)} {rng.choice(ACTS)} the {rng.choice(THINGS)} of {rng.choice(PEOPLE)}."
    answers = [f"{rng.choice(PEOPLE)} wanted {few(rng)}." for _ in range(2)]
    made = {"premise": premise, "choice1": answers[0], "choice2": answers[1], "question": "cause", "idx": 0, "label": 1}
    return Made(made, f"{premise} {answers[1]}")


def commonsense_qa(rng):
    q, answers, gold, leak = _choices(rng, 5)
    choices = {"label": list("ABCDE"), "text": answers}
    made = {"id": "1af", "question": q, "question_concept": "x", "choices": choices, "answerKey": "ABCDE"[gold]}
    return Made(made, leak)


def triviaqa(rng):
    q, a = question(rng, 0), few(rng)
    answer = {"aliases": [a], "normalized_aliases": [a], "value": a, "type": "WikipediaEntity"}
    return Made({"question": q, "question_id": "tc_33", "question_source": "x", "answer": answer}, f"{q} {a}")


def gpqa(rng):
    q, answers, _, leak = _choices(rng, sentences=1)
    wrong = {f"Incorrect Answer {i}": text for i, text in enumerate(answers[1:], 1)}
    return Made({"Question": q, "Correct Answer": answers[0], **wrong, "Explanation": "x"}, leak)


def bbh(rng):
    q, a = question(rng, 1), few(rng)
    return Made({"input": q, "target": a}, f"{q} {a}")


def riddles(rng):
    """In no layout that is known: its fields are named."""
    body, q, a = sentence(rng), question(rng, 0), few(rng)
    return Made({"number": 3, "body_text": body, "riddle": q, "solved": a, "article": passage(rng)}, f"{body} {q} {a}")


MADE = (
    *(core_multiple_choice, core_boolq, core_schema, core_lambada, core_squad, core_coqa, lambada),
    *(boolq, boolq_super_glue, boolq_original, multirc, squad, squad_original, coqa, coqa_original, coqa_stanford),
    *(race, race_original, race_eleuther, drop, record, sciq, mmlu, mmlu_pro, arc, arc_original, openbookqa),
    *(hellaswag, winogrande, piqa, gsm8k, humaneval, mbpp, truthfulqa_mc, truthfulqa_generation, ifeval, siqa),
    *(math, copa, commonsense_qa, triviaqa, gpqa, bbh, riddles),
)
RIDDLES = "riddles.jsonl:body_text+riddle>solved"


def made(layout, count: int = 20) -> list[Made]:
    return [layout(random.Random(f"{layout.__name__}{i}")) for i in range(count)]
