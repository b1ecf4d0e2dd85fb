"""What is exported is the run's to the bit, as its readers read it; a folder is replaced whole or not at all."""

import dataclasses
import functools
import json
import pathlib
import threading
import types

import numpy as np
import pytest
import tiny_data
import tiny_models as tiny
import tiny_peft
from interop import reader

from jaxlm import models
from jaxlm.config import ConfigError, RunError
from jaxlm.devices import tree
from jaxlm.interop import card, export, gguf, hf_folder, leaves, peft, peft_config

CASES = {
    "gqa_tied": {"n_kv_heads": 2, "tie_embeddings": True},
    "gpt2_untied": {"family": "gpt2", "tie_embeddings": False},
    "llama3_scaling": {"rope_theta": 500000.0, "rope_scaling": "llama3", "rope_factor": 4.0,
     "rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0, "rope_original_max_len": 16},
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_data.make(tmp_path_factory.mktemp("data"), {"a": 1.0}).tokenizer()


def source(tokenizer, dtype=np.float32, **overrides) -> export.Source:
    """A model with random parameters, and the tokenizer of the tiny data."""
    cfg = tiny.model_config(vocab_size=tokenizer.vocab_size, **overrides)
    params = tiny.random_params(models.build(cfg, "xla"))
    values = {name: np.asarray(leaf, dtype) for name, leaf in tree.named_leaves(params)}
    return export.Source(values.__getitem__, cfg, tokenizer, "tiny", {"run": "tiny", "step": 7}, "# card\n")


@pytest.mark.parametrize(
    ("case", "to", "dtype"),
    [("gqa_tied", "hf", "bf16"), ("gpt2_untied", "gguf", "f16"), ("llama3_scaling", "gguf", "q8_0")],
)
def test_what_is_written_is_the_runs(tokenizer, tmp_path, case, to, dtype):
    given = source(tokenizer, **CASES[case])
    done = export.export(given, to, dtype, tmp_path / "out")
    assert done.tensors >= len(list(leaves.tensors(given.config)))
    assert json.loads((tmp_path / "out" / export.MARK).read_text())["step"] == 7
    assert done.place.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_export_replaces_an_earlier_one_of_its_kind_alone(tokenizer, tmp_path):
    out = tmp_path / "out"
    export.export(source(tokenizer), "hf", "f32", out / "hf")
    before = (out / "hf" / "model.safetensors").stat().st_size
    export.export(source(tokenizer), "hf", "bf16", out / "hf")
    assert (out / "hf" / "model.safetensors").stat().st_size < before
    with pytest.raises(ConfigError, match="holds an export to hf"):
        export.export(source(tokenizer), "gguf", "f16", out / "hf")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="not empty"):
        export.export(source(tokenizer), "hf", "bf16", tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_what_lies_beside_an_earlier_export_is_named_and_kept(tokenizer, tmp_path):
    """The user's own files, and eval/, which `jaxlm eval` writes there."""
    out = tmp_path / "out"
    export.export(source(tokenizer), "hf", "f32", out)
    (out / "notes.txt").touch()
    (out / "eval").mkdir()
    with pytest.raises(ConfigError, match=r"holds eval/, notes.txt beside an earlier export .*: give another folder"):
        export.export(source(tokenizer), "hf", "bf16", out)
    assert (out / "notes.txt").exists()
    assert (out / "eval").exists()


def test_a_failed_export_leaves_the_earlier_one(tokenizer, tmp_path):
    out = tmp_path / "out"
    export.export(source(tokenizer), "hf", "f32", out)
    before = (out / "model.safetensors").read_bytes()

    def broken(leaf):
        raise OSError(28, "No space left on device")

    with pytest.raises(RunError, match=r"disk .* is full"):
        export.export(dataclasses.replace(source(tokenizer), read=broken), "hf", "bf16", out)
    assert (out / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    large = source(tokenizer)
    large = dataclasses.replace(large, read=lambda leaf: large_values(source(tokenizer).read(leaf)))
    for to in ("hf", "gguf"):
        with pytest.raises(ConfigError, match="too large for f16"):
            export.export(large, to, "f16", tmp_path / "large")


def large_values(value):
    return value * 1e6


def written(to: str, folder: pathlib.Path, cfg, dtype: str) -> export.Written:
    folder.mkdir()
    if to == "hf":
        made = hf_folder.HfFolder(folder, cfg, dtype)
        made.shard_bytes = 20_000
        return made
    return gguf.GgufFile(folder, cfg, dtype, "tiny")


@pytest.mark.parametrize("to", ["hf", "gguf"])
def test_one_changed_bit_is_found_and_its_leaf_named(tokenizer, tmp_path, to):
    given = source(tokenizer)
    made = written(to, tmp_path / "out", given.config, "f16")
    made.write(given.read, tokenizer, lambda done: None)
    assert export.check(made, given.read, lambda done: None) == len(list(leaves.tensors(given.config)))
    files = [path for path in made_files(tmp_path / "out") if path.stat().st_size > 4000]
    where = np.asarray(given.read("layers_1/mlp/up/kernel"), np.float16).T.tobytes()[:64]
    path = next(path for path in files if where in path.read_bytes())
    content = bytearray(path.read_bytes())
    content[content.index(where) + 10] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunError, match="layers_1/mlp/up/kernel") as error:
        export.check(made, given.read, lambda done: None)
    assert "\n" not in str(error.value)


def made_files(folder):
    return sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".gguf"))


def test_weights_are_split_into_files_with_an_index(tokenizer, tmp_path):
    from safetensors.numpy import load_file

    given = source(tokenizer)
    made = written("hf", tmp_path / "out", given.config, "f32")
    made.write(given.read, tokenizer, lambda done: None)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    names = [path.name for path in made_files(tmp_path / "out")]
    assert len(names) > 3
    assert sorted(set(index["weight_map"].values())) == names
    tensors = {k: v for name in names for k, v in load_file(tmp_path / "out" / name).items()}
    assert tensors.keys() == index["weight_map"].keys()
    assert sum(value.nbytes for value in tensors.values()) == index["metadata"]["total_size"]


def test_damaged_factors_of_the_rotary_frequencies_are_found(tokenizer, tmp_path):
    given = source(tokenizer, **CASES["llama3_scaling"])
    made = written("gguf", tmp_path / "out", given.config, "f16")
    made.write(given.read, tokenizer, lambda done: None)
    (path,) = made_files(tmp_path / "out")
    factors = made.held("rope_freqs.weight")
    assert factors.max() == 4
    path.write_bytes(path.read_bytes().replace(factors.tobytes(), np.ones_like(factors).tobytes()))
    with pytest.raises(RunError, match=r"rope_freqs\.weight differs"):
        export.check(made, given.read, lambda done: None)


def test_an_adapter_is_read_back_to_the_bit(tokenizer, tmp_path):
    given = source(tokenizer)
    params = tree.nested((name, given.read(name)) for tensor in leaves.tensors(given.config) for name in tensor.leaves)
    adapted = tiny_peft.adapted(params, (1, 2))
    given = dataclasses.replace(given, adapted=adapted, base=("base", "7"))
    for dtype in export.TARGETS["peft"]:
        out = tmp_path / dtype
        done = export.export(given, "peft", dtype, out)
        content, tensors = peft.read_files(out)
        assert (content["revision"], len(tensors)) == ("7", done.tensors)
        assert {"README.md", "tokenizer.json", "generation_config.json"} <= {path.name for path in out.iterdir()}
    made = peft.PeftFolder(tmp_path / "f32", given.config, "f32", adapted, given.base)
    path = tmp_path / "f32" / peft_config.WEIGHTS
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunError, match=r"what was written is not the run's: base_model.* differs"):
        export.check(made, given.read, lambda done: None)


def test_what_a_format_has_no_place_for_is_refused_in_one_line(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="--dtype=q8_0"):
        export.dtypes_of("hf", "q8_0")
    assert (export.dtypes_of("hf", None), export.dtypes_of("gguf", None)) == (("bf16", []), ("f16", []))
    assert export.dtypes_of("hf", "f16,Q4_K_M, q8_0") == ("f16", ["q4_k_m", "q8_0"])
    assert export.dtypes_of("gguf", "q6_k,q6_k,f16") == ("q6_k", ["f16"])
    for to, dtypes in {"hf": "f16,bf16", "gguf": "f16,bf16", "peft": "f32,bf16"}.items():
        with pytest.raises(ConfigError, match=f"--dtype={dtypes}: --to={to} writes "):
            export.dtypes_of(to, dtypes)
    with pytest.raises(ConfigError, match="biases") as error:
        export.export(source(tokenizer, bias=True), "gguf", "f16", tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


SQUARE = {"d_ff": 32, "n_kv_heads": 4}  # every matrix of a layer is square: its shape tells nothing
BOUNDS = {"f32": 1e-5, "f16": 5e-3, "bf16": 5e-2, "q8_0": 5e-2}  # by which rounding moves the logits at most
BOUNDS |= dict.fromkeys(("q6_k", "q5_k_m", "q4_k_m"), BOUNDS["q8_0"])  # of matrices whose columns only q8_0 can hold
WIDE = {"d_model": 256, "n_heads": 4, "d_ff": 256, "n_layers": 2}
TOKENS = np.random.default_rng(0).integers(0, 300, (1, 32))


@pytest.fixture(scope="module")
def numbers(tokenizer):
    """The model's keys -> what is exported of random parameters, and its logits. The same keys are computed once."""

    @functools.cache
    def make(keys) -> tuple[export.Source, np.ndarray]:
        config = tiny.model_config(vocab_size=tokenizer.vocab_size, **dict(keys))
        model = models.build(config, "xla")
        params = tiny.random_params(model)
        values = {name: np.asarray(leaf) for name, leaf in tree.named_leaves(params)}
        given = export.Source(values.__getitem__, config, tokenizer, "tiny", {}, "# card\n")
        return given, np.asarray(tiny.jit(lambda p, t: tiny.logits(model, p, t))(params, TOKENS))

    return lambda **keys: make(tuple(keys.items()))


def unchecked(to, folder, given, dtype="f32"):
    """Returns what reads the files that are written, unchecked."""
    folder.mkdir()
    if to == "hf":
        hf_folder.HfFolder(folder, given.config, dtype).write(given.read, given.tokenizer, lambda done: None)
        return folder
    gguf.GgufFile(folder, given.config, dtype, "tiny").write(given.read, given.tokenizer, lambda done: None)
    return folder / gguf.file_name("tiny", dtype)


def logits_of(place) -> np.ndarray:
    model, tensors = reader.of_folder(place) if place.is_dir() else reader.of_file(place)
    return model.logits(tensors, TOKENS)


def gap(wanted, found) -> float:
    """The root mean square of the difference, relative to that of `wanted`."""
    return float(np.sqrt(np.mean(np.square(wanted - found)) / np.mean(np.square(wanted))))


@pytest.mark.parametrize("to", ["hf", "gguf"])
@pytest.mark.parametrize("case", tiny.EXPORTED)
def test_the_files_give_the_runs_numbers(numbers, tmp_path, case, to):
    if (case, to) == ("biases_wide_heads", "gguf"):
        pytest.skip("GGUF has no place for these biases")
    given, wanted = numbers(**tiny.EXPORTED[case])
    for dtype in export.TARGETS[to] if case == "gqa_tied" else ("f32",):
        moved = gap(wanted, logits_of(export.export(given, to, dtype, tmp_path / dtype).place))
        assert moved < BOUNDS[dtype]
        assert dtype == "f32" or moved > 1e-5


@pytest.mark.parametrize(
    "family", [{"n_kv_heads": 4, "tie_embeddings": True}, {"family": "gpt2", "tie_embeddings": False}]
)
def test_k_quants_hold_the_runs_numbers(numbers, tmp_path, family):
    """The leaves that are read back are near the run's, and are what another reader makes of the file."""
    given, _ = numbers(**WIDE, **family)
    bounds = {"q6_k": 0.019, "q5_k_m": 0.038, "q4_k_m": 0.074}
    done = export.export(given, "gguf", "q6_k", tmp_path / "out", ["q5_k_m", "q4_k_m"])
    assert done.tensors == 3 * len(list(leaves.tensors(given.config)))
    model = models.build(given.config, "xla")
    logits = tiny.jit(lambda params: tiny.logits(model, params, TOKENS))
    size = given.config.vocab_size  # what pads the vocabulary is not in the file
    real = {"embed/embedding": np.s_[:size], "head/kernel": np.s_[:, :size]}
    for dtype, bound in bounds.items():
        written = gguf.GgufFile(tmp_path / "out", given.config, dtype, "tiny")
        values = {name: written.leaf(name) for name in leaves.by_leaf(given.config)}
        gaps = {name: gap(given.read(name)[real.get(name, ...)], x[real.get(name, ...)]) for name, x in values.items()}
        assert 0 < max(gaps.values()) < bound, gaps
        assert not written.coarse
        theirs = logits_of(tmp_path / "out" / gguf.file_name("tiny", dtype))
        assert gap(np.asarray(logits(tree.nested(values.items()))), theirs) < BOUNDS["f32"]


def test_a_matrix_that_256_does_not_divide_stays_in_q8_0_and_is_named(tokenizer, tmp_path):
    given = source(tokenizer, **WIDE | {"d_ff": 288, "n_layers": 1})
    written = gguf.GgufFile(tmp_path, given.config, "q4_k_m", "tiny")
    written.write(given.read, given.tokenizer, lambda done: None)
    assert written.coarse == {"blk.0.ffn_down.weight": 288}
    assert written.held("blk.0.ffn_down.weight").shape == (256, 288 // 32 * 34)
    facts = types.SimpleNamespace(
        name="tiny", files=["q4_k_m"], bits={"run": 1.5, "q4_k_m": 1.625}, coarse=written.coarse
    )
    assert card.of_files(facts) == [
        "tiny-q4_k_m.gguf loses 0.1250 bits per byte of held-out text (1.5000 without rounding)",
        "kept in q8_0, or f16, since 256 does not divide their columns: blk.*.ffn_down.weight (288 columns)",
    ]


def test_a_modelfile_of_ollama_names_the_first_file(tokenizer, tmp_path):
    export.export(source(tokenizer), "gguf", "q8_0", tmp_path / "out", ["f16"])
    assert (tmp_path / "out/Modelfile").read_text() == 'FROM ./tiny-q8_0.gguf\nTEMPLATE """{{ .Prompt }}"""\n'


def unpermuted(monkeypatch):
    monkeypatch.setattr(gguf.GgufFile, "_heads", lambda self, tensor: 0)


def table(monkeypatch, change):
    """Every tensor of a Llama goes through `change`."""
    made = leaves._llama
    monkeypatch.setattr(leaves, "_llama", lambda config: map(change, made(config)))


def swapped(monkeypatch):
    other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}

    def change(tensor):
        *front, name, end = tensor.name.split(".")
        return dataclasses.replace(tensor, name=".".join([*front, other.get(name, name), end]))

    table(monkeypatch, change)


def not_transposed(*which):
    def mutate(monkeypatch):
        def change(tensor):
            wrong = tensor.name.endswith(tuple(f"{name}.weight" for name in which))
            return dataclasses.replace(tensor, transposed=False) if wrong else tensor

        table(monkeypatch, change)

    return mutate


MUTATIONS = {
    "q and k not permuted": unpermuted,
    "gate and up swapped": swapped,
    "gate not transposed": not_transposed("gate_proj"),
    "q and k not transposed": not_transposed("q_proj", "k_proj"),
    "o not transposed": not_transposed("o_proj"),
}


@pytest.mark.parametrize(
    ("mutation", "dtype"),
    [(name, dtype) for name in MUTATIONS for dtype in ("bf16", "q8_0") if dtype == "q8_0" or "permuted" not in name],
)
def test_a_wrong_layout_is_found_whatever_reads_it_back(numbers, tmp_path, monkeypatch, mutation, dtype):
    """The mutations: each moves the logits more than the coarsest rounding may."""
    given, wanted = numbers(**SQUARE)
    MUTATIONS[mutation](monkeypatch)
    place = unchecked("hf" if dtype == "bf16" else "gguf", tmp_path / "out", given, dtype)
    with pytest.raises(AssertionError, match=r"model\.layers\.0|blk\.0|too far"):
        assert gap(wanted, logits_of(place)) < 2 * BOUNDS[dtype], "too far"


def test_the_factors_of_the_rotary_frequencies_are_read(numbers, tmp_path):
    given, wanted = numbers(**tiny.EXPORTED["llama3_scaling"])
    place = unchecked("gguf", tmp_path / "out", given)
    assert gap(wanted, logits_of(place)) < BOUNDS["f32"]
    place.write_bytes(place.read_bytes().replace(b"rope_freqs.weight", b"rope_other.weight"))
    with pytest.raises(AssertionError, match=r"no reader looks for .*rope_other"):
        logits_of(place)


@pytest.mark.parametrize(
    "overrides", [{"qkv_bias": True, "tie_embeddings": False}, {"family": "gpt2"}, {"qk_norm": True}]
)
def test_every_leaf_is_in_one_tensor_and_comes_back(overrides):
    cfg = tiny.model_config(**overrides)
    values = {name: np.asarray(leaf) for name, leaf in tree.named_leaves(tiny.random_params(models.build(cfg, "xla")))}
    assert leaves.by_leaf(cfg).keys() == values.keys()
    total = 0
    for tensor in leaves.tensors(cfg):
        own = [values[leaf] for leaf in tensor.leaves]
        made = tensor.from_leaves(own)
        assert made.shape == tensor.shape
        assert made.flags.c_contiguous
        total += made.size
        backs = [tensor.to_leaf(made, place) for place in range(len(own))]
        np.testing.assert_array_equal(tensor.from_leaves(backs), made)
        for leaf, back in zip(own, backs, strict=True):
            assert back.shape == leaf.shape
            same = np.moveaxis(back == leaf, -1 if tensor.leaves[0].startswith("head/") else 0, 0)
            assert same[: tensor.vocab_size or None].all()
            assert not back[back != leaf].any()  # the vocabulary's padding is 0
    assert total == leaves.parameters(cfg)
    with pytest.raises(Exception, match="has shape"):
        tensor.from_leaves([value[..., :-1] for value in own])


def test_the_next_tensor_is_read_while_one_is_worked_on():
    wanted, ahead = [leaves.Tensor(name, (name, f"{name}2"), ((1,), (1,))) for name in "abc"], threading.Event()

    def read(leaf):
        if leaf == "b2":
            ahead.set()
        if leaf == "c2":
            raise OSError("gone")
        return leaf

    pairs = leaves.read_ahead(read, wanted)
    assert next(pairs) == (wanted[0], ["a", "a2"])
    assert ahead.wait(10)
    assert next(pairs) == (wanted[1], ["b", "b2"])
    with pytest.raises(OSError, match="gone"):
        next(pairs)
    assert list(leaves.read_ahead(read, wanted[:1])) == [(wanted[0], ["a", "a2"])]
