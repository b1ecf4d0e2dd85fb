"""Tasks of lm-evaluation-harness beside its own `hf` model, on the same weights and the exported tokenizer."""

import json
import math
import subprocess
import sys

import hub_layout
import numpy as np
import pytest
import tiny_eval
import tiny_hf
from tiny_eval import settings

from jaxlm.config import ConfigError
from jaxlm.eval import harness, results
from jaxlm.interop import hf_config

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def scorer():
    return tiny_eval.scorer(max_seq_len=512)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return tiny_eval.benchmarks(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def theirs(scorer, tmp_path_factory):
    return of_hf(scorer, tmp_path_factory.mktemp("export"))


def of_hf(scorer, place):
    """lm-evaluation-harness's `hf` model of our weights; the tokenizer is loaded by AutoTokenizer's defaults."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    tokenizer_json = pytest.importorskip("jaxlm.interop.tokenizer_json")
    from lm_eval.models.huggingface import HFLM

    torch.set_num_threads(1)
    cfg = scorer.model.config
    fields = dict(hf_config.content(cfg))
    kind = getattr(transformers, fields.pop("architectures")[0])
    model = kind(transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)).eval()
    state = {k: torch.from_numpy(v.copy()) for k, v in tiny_hf.params_to_hf(scorer.variables["params"], cfg).items()}
    model.load_state_dict(state, strict=False)
    model.save_pretrained(place)
    for name, content in (
        ("tokenizer.json", tokenizer_json.tokenizer_json(scorer.tokenizer)),
        ("tokenizer_config.json", tokenizer_json.tokenizer_config(scorer.tokenizer, cfg.max_seq_len)),
    ):
        (place / name).write_text(json.dumps(content))
    return HFLM(pretrained=str(place), device="cpu", dtype="float32", batch_size=3)


def answers(lm, kind, arguments):
    """What a model of the harness answers to requests of one kind."""
    from lm_eval.api.instance import Instance

    requests = [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]
    return getattr(lm, kind)(requests, disable_tqdm=True)


@pytest.fixture(scope="module")
def ours(scorer):
    from jaxlm.eval.lm_harness import ScorerLM

    return ScorerLM(scorer, "scoring")


PAIRS = [
    ("", "the cat"), ("the cat sat", " on a mat"), ("the cat sat ", "on a mat"),
    ("Question: two small dogs ran\nAnswer:", " over"), ("Question: two small dogs ran\nAnswer:", " seven green hills"),
    ("  leading", "  double"), (" ".join(["the old river slept"] * 150), " while"), ("naïve 漢字 🙂", " the"),
]  # fmt: skip


def test_log_p_and_greedy_are_those_of_hf(ours, theirs):
    for got, want in zip(answers(ours, "loglikelihood", PAIRS), answers(theirs, "loglikelihood", PAIRS), strict=True):
        assert got[0] == pytest.approx(want[0], abs=1e-3)
        assert got[1] == want[1]


def test_rolling_begins_with_one_eos(ours, theirs, scorer):
    """`hf` puts the prefix in front of ids that begin with it: its own answer, without the second EOS."""
    # No text whose windows are alike: `hf` would take one's log p from the wrong places of the other.
    texts = [("the cat sat on a mat",), (tiny_eval.sentence(np.random.default_rng(0), 500),)]
    assert len(scorer.tokenizer.encode(texts[1][0])) > scorer.context
    got = answers(ours, "loglikelihood_rolling", texts)
    for (text,), value in zip(texts, got, strict=True):
        ids = scorer.tokenizer.encode(text)
        requests, limit = [], scorer.context
        whole = [theirs.prefix_token_id, *ids]
        for start in range(1, len(whole), limit):
            end = min(start + limit, len(whole))
            requests.append((("", ""), whole[max(0, end - limit - 1) : start], whole[start:end]))
        want = sum(logp for logp, _ in theirs._loglikelihood_tokens(requests, disable_tqdm=True))
        assert value == pytest.approx(want, abs=1e-3)


def test_generated_texts_are_those_of_hf(ours, theirs):
    asked = {"until": ["\n\n", "river the"], "max_gen_toks": 24, "do_sample": False}
    prompts = [(text, asked) for text in ("the cat sat", "two small dogs ran over", " ".join(["old river"] * 300))]
    got, want = answers(ours, "generate_until", prompts), answers(theirs, "generate_until", prompts)
    assert got == want
    assert all(got)


def test_tasks_score_as_with_hf(scorer, bench, theirs, tmp_path):
    import lm_eval

    from jaxlm.eval import lm_harness

    names = ["arc_easy", "piqa", "gsm8k"]
    found = tiny_eval.asked(scorer, names, settings(bench / "hub", fewshot=2), 0)
    loaded = lm_harness.load(names, str(bench / "hub"), 2, str(tmp_path))
    tasks = {name: loaded[name][name] for name in names}
    want = lm_eval.evaluate(theirs, {"tasks": tasks, "groups": {}, "group_map": {}})
    for result in found:
        metrics = {
            key.replace(",none", "").replace(",strict-match", ""): value
            for key, value in want["results"][result.task].items()
            if isinstance(value, float)
        }
        same = {name: value for name, value in result.metrics.items() if name not in (results.BITS, results.MARGIN)}
        assert same
        assert same == {name: pytest.approx(metrics[name]) for name in same}
        assert result.fewshot == 2
    by_task = {result.task: result for result in found}
    assert (by_task["arc_easy"].chance, by_task["piqa"].chance, by_task["gsm8k"].chance) == (0.25, 0.5, None)
    for result in found[:2]:
        for item, sample in zip(result.items, want["samples"][result.task], strict=True):
            detail, logp = item.detail, [response[0][0] for response in sample["resps"]]
            assert item.id == str(sample["doc_id"])
            assert detail["logp"] == pytest.approx(logp, abs=1e-3)
            assert detail["bytes"] == [len(f" {choice}".encode()) for choice in detail["choices"]]
            assert detail["gold"] == sample["target"]
            assert item.metrics["acc"] == float(np.argmax(logp) == detail["gold"])
        n = len(result.items)
        share = result.metrics["acc"]
        assert result.stderr["acc"] == pytest.approx(math.sqrt(share * (1 - share) / (n - 1)))
    assert [item.detail["answer"] for item in by_task["gsm8k"].items] == [
        sample["resps"][0][0] for sample in want["samples"]["gsm8k"] if sample["filter"] == "strict-match"
    ]


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    return tiny_eval.more_benchmarks(tmp_path_factory.mktemp("more")) / "hub"


@pytest.mark.parametrize(
    ("task", "gold", "chance"),
    [
        ("hellaswag", lambda doc: int(doc["label"]), lambda doc: 1 / 4),
        ("winogrande", lambda doc: int(doc["answer"]) - 1, lambda doc: 1 / 2),
        ("truthfulqa_mc2", lambda doc: [0, 1], lambda doc: 2 / len(doc["mc2_targets"]["choices"])),
        ("mmlu_anatomy", lambda doc: doc["answer"], lambda doc: 1 / 4),
        ("lambada_openai", lambda doc: 0, None),
    ],
)
def test_tasks_with_columns_of_their_own_score_as_with_hf(task, gold, chance, scorer, more, theirs, tmp_path):
    import lm_eval

    from jaxlm.eval import lm_harness

    shots = 0 if task in ("truthfulqa_mc2", "lambada_openai") else 2
    (found,) = tiny_eval.asked(scorer, [task], settings(more, fewshot=shots))
    loaded = lm_harness.load([task], str(more), shots, str(tmp_path))[task]
    want = lm_eval.evaluate(theirs, {"tasks": loaded, "groups": {}, "group_map": {}}, bootstrap_iters=0)
    scores = {k.removesuffix(",none"): v for k, v in want["results"][task].items() if k.endswith(",none")}
    scores = {name: pytest.approx(value, rel=1e-3) for name, value in scores.items() if isinstance(value, float)}
    assert scores
    assert {name: found.metrics[name] for name in scores} == scores
    samples = want["samples"][task]
    assert len(found.items) == len(samples) >= 5
    for item, sample in zip(found.items, samples, strict=True):
        assert item.detail["logp"] == pytest.approx([response[0][0] for response in sample["resps"]], abs=1e-3)
        assert item.detail["gold"] == gold(sample["doc"])
        assert item.detail["bytes"] == [len(text.encode()) for _, text in sample["arguments"]]
        assert item.metrics.keys() >= {"acc", "bits_per_byte"}
    guess = [chance(sample["doc"]) for sample in samples] if chance else None
    assert found.chance == (pytest.approx(np.mean(guess)) if guess else None)


@pytest.mark.parametrize("task", ["gsm8k", "mmlu_anatomy"])
def test_conversations_score_as_with_hf(task, bench, more, tmp_path):
    """Worked examples are turns; mmlu's description is a system message."""
    import lm_eval

    from jaxlm.eval import lm_harness

    scorer = tiny_eval.scorer(max_seq_len=512, chats=True)
    place = more if task.startswith("mmlu") else bench / "hub"
    (found,) = tiny_eval.asked(scorer, [task], settings(place, fewshot=2, chat_template=True))
    loaded = lm_harness.load([task], str(place), 2, str(tmp_path / "cache"))[task]
    given = {"apply_chat_template": True, "fewshot_as_multiturn": True, "bootstrap_iters": 0}
    want = lm_eval.evaluate(of_hf(scorer, tmp_path), {"tasks": loaded, "groups": {}, "group_map": {}}, **given)
    samples = {sample["doc_id"]: sample for sample in want["samples"][task]}
    assert found.items[0].detail["question"].count("<|im_start|><|user|>") == 3
    for item in found.items:
        sample = samples[int(item.id)]
        assert item.detail["question"] == sample["arguments"][0][0].removeprefix("</s>")  # which our ids have anyway
        answers = [response[0] for response in sample["resps"]]
        if "logp" in item.detail:
            assert item.detail["logp"] == pytest.approx([logp for logp, _ in answers], abs=1e-3)
        else:
            assert item.detail["answer"] == answers[0]


def test_what_is_wrong_is_one_line(bench):
    with pytest.raises(ConfigError, match="no task arc_esy in lm-evaluation-harness; did you mean arc_easy"):
        harness.Benchmarks(["arc_esy"], settings())
    with pytest.raises(ConfigError, match=r"hellaswag reads Rowan/hellaswag, not in eval.data_dir="):
        harness.Benchmarks(["hellaswag"], settings(bench / "hub"))
    with pytest.raises(ConfigError, match=r"arc_easy: no train in .* its 3 worked examples"):
        harness.Benchmarks(["arc_easy"], settings(bench / "bare", fewshot=3))
    harness.Benchmarks(["arc_easy"], settings(bench / "bare"))


def test_no_torch_and_no_network(scorer, bench, tmp_path):
    """In a process of its own, whose working directory holds nothing and stays what it was."""
    code = f"""
import os, socket, sys
def refuse(*args, **kwargs):
    raise AssertionError("the network")
socket.socket.connect = socket.create_connection = refuse
sys.path[:0] = {[module.__file__.rsplit("/", up)[0] for module, up in ((harness, 3), (tiny_eval, 1), (hub_layout, 1))]!r}
from tiny_eval import settings
from jaxlm.eval import harness, results
here = os.getcwd()
harness.Benchmarks(["arc_easy", "piqa"], settings({str(bench / "hub")!r}))
import jaxlm.eval.lm_harness
assert os.getcwd() == here and not os.listdir(".")
print("torch" in sys.modules, "transformers" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert found.stdout.split() == ["False", "False"], found.stderr[-2000:]
