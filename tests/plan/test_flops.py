"""FLOPs per token in both conventions, the table of peaks, and counts of parameters."""

import dataclasses
import functools

import jax
import pytest
import tiny_models as tiny

from jaxlm import config, models
from jaxlm.config import MeshConfig, config_files
from jaxlm.devices import sharding, tree
from jaxlm.models import hardware
from jaxlm.plan import flops, lower
from jaxlm.plan.flops import adapter_params, count_params, flops_per_token, params_by_component, peak_tflops
from jaxlm.plan.memory import abstract_mesh


def test_one_billion_at_2048():
    shape = {"n_layers": 16, "d_model": 2048, "n_heads": 32, "n_kv_heads": 8, "d_ff": 8192, "vocab_size": 32005}
    found = flops_per_token(tiny.model_config(**shape), 2048)
    assert [round(value / 1e9, 2) for value in found] == [6.23, 7.04, 6.63]
    assert found.products == 6 * 1_038_692_352
    assert found.palm - found.causal == found.causal - found.products


def test_attention_counts_head_dim_not_d_model():
    narrow = flops_per_token(tiny.model_config(head_dim=8), 100)
    wide = flops_per_token(tiny.model_config(head_dim=16), 100)
    assert wide.palm - wide.products == 2 * (narrow.palm - narrow.products)


SMALL = (
    "train.batch_size=2",
    "train.microbatch_size=2",
    "train.seq_len=128",
    "model.n_layers=1",
    "model.vocab_size=256",
)
KINDS = {
    "pretrain": (),
    "sft": ("program=sft",),
    "lora": ("program=sft", "adapter.kind=lora", "adapter.rank=2"),
    "dpo": ("program=dpo",),
    "dpo by lora": ("program=dpo", "adapter.kind=lora", "adapter.rank=2"),
    "orpo by lora": ("program=dpo", "dpo.loss=orpo", "adapter.kind=lora", "adapter.rank=2"),
}


def load(*overrides: str) -> config.Config:
    small = (*SMALL, "optim.name=adamw", "model.attention=xla", "loss.tile_tokens=0", "model.scan_layers=False")
    c = config.resolve(config_files.load("quickstart", ["workdir=w", *small, *overrides]))
    return dataclasses.replace(c, model=hardware.for_platform(c.model, "cpu"))


@functools.cache
def counted_by_xla(*overrides: str) -> float:
    c = load(*overrides)
    return lower.parts_of(c, sharding.make_mesh(c.mesh, jax.devices()[:1])).lower().cost_analysis()["flops"]


def test_each_kind_of_training_takes_the_flops_that_xla_counts():
    """Of the lowered step, before XLA optimises. Embeddings, which are no product, count here on one side alone: all tied."""
    kinds = ("pretrain", "lora", "dpo", "dpo by lora")
    counted = {kind: counted_by_xla(*KINDS[kind]) for kind in kinds}
    found = {kind: flops.of(load(*KINDS[kind])).palm for kind in kinds}
    for kind in found:
        assert found[kind] / found["pretrain"] == pytest.approx(counted[kind] / counted["pretrain"], abs=0.04), kind
    assert found["dpo"] == found["pretrain"]
    assert found["lora"] < 0.75 * found["pretrain"] < 0.75 * found["dpo by lora"]


LOOKED_UP = {  # what is only looked up, in most of the parameters
    "untied": ("model.tie_embeddings=False", "model.vocab_size=8192"),
    "positions": ("model.family=gpt2", "model.n_kv_heads=0", "model.max_seq_len=16384"),
    "reward": ("program=reward", "model.vocab_size=8192"),
    "rows": ("program=sft", "model.tie_embeddings=False", "adapter.kind=lora", "adapter.rank=1"),
}


@pytest.mark.parametrize("keys", LOOKED_UP.values(), ids=LOOKED_UP)
def test_tables_that_are_only_looked_up_are_no_products(keys):
    """Held against XLA's count of the lowered step."""
    found = flops.of(load(*keys)).palm / flops.of(load()).palm
    assert found == pytest.approx(counted_by_xla(*keys) / counted_by_xla(), rel=0.1)


def test_the_formula_in_words_is_what_is_counted():
    for kind, words in {"sft": "6N 12LdT", "lora": "4N 12LdT", "dpo": "6N 12LdT", "dpo by lora": "6N 16LdT"}.items():
        c = load(*KINDS[kind])
        assert " ".join(flops.formula(c)) == words, kind
    assert flops.judging(load(*KINDS["dpo"])).products == 2 * count_params(load().model)


def test_when_the_reference_is_run():
    of = {kind: flops.reference(load(*keys)) for kind, keys in KINDS.items()}
    assert {kind: when for kind, when in of.items() if when} == {"dpo": "once", "dpo by lora": "each step"}
    assert flops.reference(load("program=dpo", "adapter.kind=prompt")) == "once"  # a new prompt changes what is said


PEAKS = """
NVIDIA A100-SXM4-80GB: 312, NVIDIA H100 80GB HBM3: 989, NVIDIA H100 PCIe: 756, NVIDIA H200: 989, NVIDIA H200 NVL: 835
NVIDIA L40S: 362, NVIDIA L4: 121, NVIDIA GeForce RTX 4090: 165.2, NVIDIA GeForce RTX 3060: 25.5, NVIDIA B200: 2250
NVIDIA GeForce RTX 4070 SUPER: 71, TPU v4: 275, TPU v5 lite: 197, TPU v5e: 197, TPU v5p: 459, TPU v6e: 918
"""


def test_peaks():
    rows = [row.split(": ") for row in PEAKS.strip().replace("\n", ", ").split(", ")]
    assert {kind: peak_tflops(kind) for kind, _ in rows} == {kind: float(peak) for kind, peak in rows}
    assert peak_tflops("cpu") is peak_tflops("NVIDIA RTX A4000") is None


GPUBURNOUT = {
    134_994_432: {"family": "gpt2", "n_layers": 12, "d_model": 768, "n_heads": 12, "n_kv_heads": 0, "d_ff": 3072}
    | {"vocab_size": 32000, "max_seq_len": 1024, "tie_embeddings": False},
    1_038_692_352: {"n_layers": 16, "d_model": 2048, "n_heads": 32, "n_kv_heads": 8, "d_ff": 8192, "vocab_size": 32005},
    3_122_969_600: {"n_layers": 32, "d_model": 2560, "n_heads": 40, "n_kv_heads": 10, "d_ff": 10240}
    | {"vocab_size": 32005},
}


def padding(cfg) -> int:
    tables = 1 if cfg.tie_embeddings else 2
    return tables * (cfg.padded_vocab_size - cfg.vocab_size) * cfg.d_model


@pytest.mark.parametrize("count", GPUBURNOUT)
def test_published_sizes(count):
    cfg = tiny.model_config(**GPUBURNOUT[count])
    assert count_params(cfg) == count
    assert tree.count(models.abstract_params(models.build(cfg, "xla"))) - padding(cfg) == count


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("tied", "biases", "qk_norm"),
    [(True, "none", False), (False, "qkv_bias", True), (True, "bias", True), (False, "bias", False)],
)
def test_count_is_that_of_the_model(family, tied, biases, qk_norm):
    given = {biases: True} if biases != "none" else {}
    cfg = tiny.model_config(family=family, tie_embeddings=tied, qk_norm=qk_norm, head_dim=16, **given)
    shapes = models.abstract_params(models.build(cfg, "xla"))
    assert count_params(cfg) == tree.count(shapes) - padding(cfg)
    parts = params_by_component(cfg)
    assert parts["norm"] == sum(tree.count(x) for n, x in tree.named_leaves(shapes) if "norm" in n)
    assert parts["mlp"] == sum(tree.count(shapes[f"layers_{i}"]["mlp"]) for i in range(cfg.n_layers))
    # The comparison can fail: one bias more or less is seen.
    smaller = jax.tree.leaves(shapes)[1:]
    assert count_params(cfg) != tree.count(smaller) - padding(cfg)


@pytest.mark.parametrize(
    "keys",
    [
        (),
        ("adapter.kind=lora",),
        ("adapter.kind=lora", "adapter.rank=3", "adapter.targets=('attn/[qv]',)", "model.tie_embeddings=False"),
        ("adapter.kind=lora", "model.family=gpt2", "model.n_kv_heads=0", "adapter.without_rows=True"),
        ("adapter.kind=prompt", "adapter.rows=()"),
        ("adapter.kind=prompt", "adapter.rows=('<a>', '<b>')"),
    ],
)
def test_what_an_adapter_trains_is_counted_as_it_is_made(keys):
    given = ["workdir=w", "program=sft", "optim.name=adamw", "model.vocab_size=256", *keys]
    c = config.resolve(config_files.load("quickstart", given))
    shape = {"family": c.model.family, "tie_embeddings": c.model.tie_embeddings, "vocab_size": 256}
    small = dataclasses.replace(c, model=tiny.model_config(**shape))
    made = lower.parts_of(small, abstract_mesh(MeshConfig(1, 1, 1, 1), 1))
    trained = tree.count(made.abstract.params) if made.frozen else 0
    assert adapter_params(made.config.model, c.adapter) == trained
    assert bool(trained) == bool(keys)
