"""The config edge: keys, types, impossible combinations, each refused in one clear line."""

import dataclasses
import functools
import json
import re

import pytest

from jaxlm import config
from jaxlm.config import ConfigError, config_files, older
from jaxlm.configs import base
from jaxlm.corpus.stages import registry
from jaxlm.plan import flops

OK = ("workdir=w",)


def resolve(*overrides: str, name: str = "quickstart") -> config.Config:
    return config.resolve(config_files.load(name, [*OK, *overrides]))


@pytest.mark.parametrize("name", config_files.shipped_configs())
def test_every_shipped_config_resolves_and_says_how_large_it_is(name):
    c = resolve(name=name)
    text = config_files.find_config(name).read_text()
    assert f"    jaxlm train {name} --config.workdir=" in text
    stated = re.search(r"([\d,]{9,}) parameters", text) or re.search(r"same size|parameters: ([\d,]{9,})", text)
    if stated and stated.group(1):
        assert int(stated.group(1).replace(",", "")) == flops.count_params(c.model)


@pytest.mark.parametrize("name", config_files.shipped_configs("data"))
def test_every_shipped_data_config_resolves_and_names_its_command(name):
    c = resolve(name=name)
    assert c.data.dir
    assert f"    jaxlm prepare configs/{name}.py\n" in config_files.find_config(name).read_text()
    for source in c.prepare.sources.values():
        for i, line in enumerate(source.stages):
            registry.parse(line, c.prepare.stages, f"stage {i}")


def test_final_weights_of_the_command_line_join_those_of_the_config(tmp_path):
    sources = [f"c.data.sources.{name} = dict(path='w', weight=9.0)" for name in ("web", "my_math")]
    file = own(tmp_path, *sources, "c.data.final.share = 0.2", "c.data.final.weights = dict(web=5)")
    c = resolve("data.final.weights.my_math=4.5", "data.final.weights.web=6", name=file)
    assert (c.data.final.share, c.data.final.weights) == (0.2, {"web": 6.0, "my_math": 4.5})
    (tmp_path / "config.json").write_text(config.to_json(c))
    again = config_files.of_run(tmp_path, ["data.final.weights.my_math=3"])
    assert config.resolve(again).data.final.weights == {"web": 6.0, "my_math": 3.0}


FINAL = ("data.final.weights.math=4", "data.final.share=0.2")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("data.final.share=0.2",), "data.final.share=0.2 needs data.final.weights"),
        (FINAL[:1], "data.final.weights (math) has no steps: set data.final.share"),
        ((*FINAL, "data.final.share=1"), "config.data.final.share=1.0 must be at least 0 and below 1"),
        ((*FINAL, "data.final.share=-0.1"), "config.data.final.share=-0.1 must be at least 0 and below 1"),
        ((*FINAL, "data.final.weights.math=-4"), "config.data.final.weights.math=-4.0 must be at least 0"),
        ((*FINAL, "data.final.weights.math=nan"), "config.data.final.weights.math=nan must be finite and at least 0"),
        ((*FINAL, "data.final.weights.math=much"), "config.data.final.weights.math=much: expected float"),
        ((*FINAL, "data.final.weights.maths=4"), "data.final.weights names maths, which is no source: did you mean 'math'?"),
        ((*FINAL, "data.final.weight.math=4"), "unknown key config.data.final.weight.math"),
        ((*FINAL, "data.final.weights=4"), "config.data.final.weights is a section"),
        (("data.final.share=0.2", *(f"data.final.weights.{n}=0" for n in ("prose", "math", "code"))),
         "data.final.weights leaves every source at 0"),
        ((*FINAL, "program=sft"), "data.final.weights (math) is for pretraining; program=sft has no mixture"),
    ],
)  # fmt: skip
def test_what_no_final_mixture_can_be_is_one_line(overrides, line):
    with pytest.raises(ConfigError, match=re.escape(line)) as error:
        resolve(*overrides, name="local_35m")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("data", "train"), [("data/techdocs", "techdocs_35m"), ("data/gpuburnout", "gpuburnout_1b")])
def test_a_model_trains_on_what_its_data_config_makes(data, train):
    made, used = resolve(name=data), resolve(name=train)
    assert made.data.dir == used.data.dir
    assert (made.model.vocab_size, made.data.chat_tokens) == (used.model.vocab_size, used.data.chat_tokens)
    weights = {name: source.weight for name, source in made.prepare.sources.items()}
    assert weights == {name: source.weight for name, source in used.data.sources.items()}
    assert not any(source.path for source in used.data.sources.values())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("modl.n_layers=3", "did you mean config.model.n_layers?"),
        ("lr=3", "did you mean config.optim.lr?"),
        ("train.steps=abc", "expected int"),
        ("optim.lr=fast", "expected float"),
        ("log.tensorboard=maybe", "expected bool"),
        ("train=5", "is a section"),
        ("model.n_heads=3", "not divisible by model.n_heads=3"),
        ("model.family=lama", "did you mean 'llama'?"),
        ("train.microbatch_size=3", "not divisible by train.microbatch_size=3"),
        ("optim.warmup_steps=100000", "not shorter than train.steps"),
        ("train.steps=0", "must be at least 1"),
        ("model.dropout=1.0", "below 1"),
        ("sample.top_p=0", "greater than 0"),
        ("train.microbatch_size=-2", "at least -1"),
        ("optim.b2=1.5", "at least 0 and below 1"),
        ("optim.name=adamw8bits", "did you mean 'adamw8bit'?"),
        ("optim.name=adamw8bit optim.mu_dtype=bfloat16", "mu_dtype=bfloat16 is for adamw and muon"),
        ("optim.full_precision=('[',)", "is not a regular expression"),
        ("model.offload=True", "needs model.remat=names"),
        ("optim.lr=inf", "must be finite and at least 0"),
        ("model.rope.factor=0", "at least 1"),
        ("prepare.sources.prose.weight=-1", "must be at least 0"),
        ("prepare.sources.prose.priority=200", "in -128 to 127"),
        ("prepare.task_mb=0", "at least 0.001"),
        ("mesh.data=0", "must be at least 1, or -1 for all remaining devices"),
        ("mesh.fsdp=-1", "only one axis"),
        ("model.family=gpt2 model.n_kv_heads=1", "no GQA"),
        ("model.family=gpt2 model.n_kv_heads=0 model.max_seq_len=64", "longer than model.max_seq_len"),
        ("program=dpo dpo.loss=ipo dpo.label_smoothing=0.1", "is for dpo.loss=sigmoid and robust, not for ipo"),
        ("program=dpo dpo.loss=robust dpo.label_smoothing=0.5", "half of the labels are swapped"),
        ("program=dpo dpo.margin=0.1", "is for dpo.loss=simpo, not for sigmoid"),
        ("program=dpo adapter.kind=lora adapter.dropout=0.1", "dpo trains without dropout"),
    ],
)
def test_bad_values_are_refused_in_one_line(overrides, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        resolve(*overrides.split())
    assert "\n" not in str(error.value)
    if overrides.startswith("program=dpo"):
        resolve(*overrides.split()[1:])  # another program does not read them


SIZES = {
    "model": "d_model d_ff n_layers head_dim max_seq_len vocab_size",
    "train": "batch_size seq_len steps microbatch_size",
    "eval": "batch_size max_examples",
    "sample": "max_new_tokens top_k",
    "mesh": "fsdp",
}


@pytest.mark.parametrize("key", [f"{section}.{key}" for section, names in SIZES.items() for key in names.split()])
def test_no_size_is_beyond_what_an_array_can_have(key):
    """Each of these died in a traceback, the last ones after the last step."""
    with pytest.raises(ConfigError, match=f"{key}=1{'0' * 21} must be at most"):
        resolve(f"{key}={10**21}")


def own(folder, *lines: str) -> str:
    """A config file of one's own, by what it changes of base."""
    path = folder / "mine.py"
    changed = "".join(f"    {line}\n" for line in ("c = base.get_config()", *lines, "return c"))
    path.write_text(f"from jaxlm.configs import base\n\n\ndef get_config():\n{changed}")
    return str(path)


def test_a_misspelt_key_of_a_section_in_a_file_is_met_with_the_key_that_was_meant(tmp_path):
    meant = r"unknown key config\.model\.n_layrs; did you mean config\.model\.n_layers\?"
    with pytest.raises(ConfigError, match=meant):
        config.resolve(config_files.load(own(tmp_path, "c.model.n_layrs = 3", "c.data.path = 'x'")))


def test_typed_overrides():
    c = resolve("model.n_heads=8", "optim.lr=2", "sample.prompts=('x y','z')", "log.tensorboard=false")
    assert (c.model.n_heads, c.optim.lr, c.sample.prompts, c.log.tensorboard) == (8, 2.0, ("x y", "z"), False)
    assert resolve("sample.at_steps=5").sample.at_steps == (5,)
    assert resolve("sample.prompts=hello").sample.prompts == ("hello",)
    assert resolve("optim.name=muon", "optim.mu_dtype=bfloat16").optim.mu_dtype == "bfloat16"


def test_derived_values():
    c = resolve("model.n_kv_heads=0", "data.path=/some/text", "eval.batch_size=0")
    assert c.model.n_kv_heads == c.model.n_heads
    assert c.model.head_dim == 128
    assert c.train.microbatch_size == c.train.batch_size == c.eval.batch_size
    assert c.data.dir == "w/data"
    assert {name: source.path for name, source in c.data.sources.items()} == {"text": "/some/text"}


@pytest.mark.parametrize(
    ("keys", "older_batches"),
    [
        (("eval.max_batches=2", "eval.batch_size=6"), (2, 6)),
        (("eval.batch_size=0", "eval.max_batches=2", "train.batch_size=12", "train.microbatch_size=4"), (2, 4)),
        (("eval.max_batches=2", "train.microbatch_size=-1", "train.batch_size=12", "eval.batch_size=0"), (2, 12)),
        (("eval.max_batches=0", "eval.batch_size=6"), (0, 6)),
        (("eval.max_batches=2", "eval.max_mb=1"), ()),
    ],
)
def test_the_flag_of_older_versions_means_the_rows_that_it_meant(keys, older_batches):
    """So that old scripts measure what they did: so many batches of so many rows, 0 = all."""
    c = resolve(*keys)
    assert c.eval.older_batches == older_batches
    assert "max_batches" not in config.to_json(c)


def test_a_run_of_an_older_version_keeps_what_its_keys_meant(tmp_path):
    """Its held-out rows, and `seed` for what `data.seed` chooses now; what the machine chose stands in run.json."""
    saved = json.loads(config.to_json(resolve("seed=3", "train.microbatch_size=-1")))
    for key in ("max_mb", "max_examples", "older_batches"):
        del saved["eval"][key]
    del saved["data"]["seed"]
    saved["eval"] |= {"max_batches": 2, "batch_size": 0}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    (tmp_path / "run.json").write_text(json.dumps({"starts": [{"choices": {"microbatch_size": 16}}]}))
    c = config.resolve(config_files.of_run(tmp_path, []))
    assert (c.eval.older_batches, c.data.seed) == ((2, 16), 3)
    assert config.resolve(config_files.of_run(tmp_path, ["eval.max_mb=1"])).eval.older_batches == ()
    (tmp_path / "run.json").unlink()
    assert config.resolve(config_files.of_run(tmp_path, [])).eval.older_batches == (2, c.train.batch_size)
    (tmp_path / "config.json").write_text(config.to_json(c))  # as the next start writes it
    assert config.resolve(config_files.of_run(tmp_path, [])) == dataclasses.replace(c, workdir=str(tmp_path))


def test_config_json_round_trip(tmp_path):
    c = resolve("optim.decay=('a','b')")
    path = tmp_path / "w" / "config.json"
    path.parent.mkdir()
    path.write_text(config.to_json(c))
    assert json.loads(path.read_text())["optim"]["decay"] == ["a", "b"]
    again = config_files.from_run(path)
    moved = config.resolve(again)
    assert (moved.workdir, moved.data.dir) == (str(path.parent), str(path.parent / "data"))
    assert dataclasses.replace(moved, workdir=c.workdir, data=c.data) == c
    config_files.apply_override(again, "train.steps=700")
    assert config.resolve(again).train.steps == 700


GONE = {  # key -> a value that it could have
    "data.num_threads": 7,
    "data.num_workers": 2,
    "data.prefetch": 3,
    "data.block_tokens": 64,
    "checkpoint.verify": False,
    "checkpoint.mirror_weights_only": True,
    "prepare.examples": 3,
    "prepare.excerpt_chars": 10,
    "tune.step_seconds": 1.0,
    "eval.redteam.max_new_tokens": 32,
    "eval.redteam.temperature": 1.0,
    "eval.redteam.seed": 1,
    "stability.window": 64,
    "prepare.stages.debris.menus": False,
    "prepare.stages.debris.max_mentions": 3,
}
DEFAULTS = {f"eval.redteam.{key}": value for key, value in (("max_new_tokens", 64), ("temperature", 0.0), ("seed", 0))}
DEFAULTS["stability.window"] = 256


def with_gone(saved: dict, keys: dict) -> dict:
    """Adds keys that are gone to the content of a config.json."""
    for name, value in keys.items():
        *sections, key = name.split(".")
        functools.reduce(dict.__getitem__, sections, saved)[key] = value
    return saved


@pytest.mark.parametrize("key", GONE)
def test_a_key_that_is_gone_is_refused_with_what_replaces_it(key, tmp_path):
    said = rf"^config.{key} is gone: .+; leave it out$"
    with pytest.raises(ConfigError, match=said):
        resolve(f"{key}={GONE[key]}")
    with pytest.raises(ConfigError, match=said):
        config.resolve(config_files.load(own(tmp_path, f"c.{key} = {GONE[key]!r}")))


def test_a_run_that_has_these_keys_opens_as_before(tmp_path):
    saved = with_gone(json.loads(config.to_json(resolve("data.dir=d"))), GONE)
    (tmp_path / "config.json").write_text(json.dumps(saved))
    c = config.resolve(config_files.of_run(tmp_path, []))
    assert c == dataclasses.replace(resolve("data.dir=d"), workdir=str(tmp_path))
    with pytest.raises(ConfigError, match="is gone"):
        config_files.of_run(tmp_path, ["data.prefetch=3"])


@pytest.mark.parametrize("key", DEFAULTS)
def test_a_run_goes_on_with_such_a_key_at_its_default_and_with_no_other_value(key):
    saved = json.loads(config.to_json(resolve()))
    older.check_goes_on(with_gone(saved, DEFAULTS))
    with pytest.raises(ConfigError, match=rf"^this run has config.{key}={GONE[key]}, and that key was removed: "):
        older.check_goes_on(with_gone(saved, {key: GONE[key]}))


def test_a_stage_without_its_older_settings_finds_its_older_caches():
    spec = registry.parse("debris", base.get_config().prepare.stages.to_dict(), "stages")
    assert spec.key == "debris-f0f754de8625"  # as until 2026-11-28, with nine settings
    with pytest.raises(ConfigError, match=r"^config.prepare.stages.debris.menus is gone: it is True; leave it out$"):
        registry.parse("debris menus=False", {"debris": {}}, "stages")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.rates=('embed/.*',)", '"PATTERN TIMES"'),
        ("optim.rates=('embed/.* -1',)", '"PATTERN TIMES"'),
        ("optim.rates=('embed/(.* 1',)", "regular expression"),
        ("optim.rates=('embed/.* 0',)", "0 is by rule, which the line layers_.*/kernel alone can be"),
        ("optim.rates=('embed/.* 1','embed/.* 2')", "a pattern twice"),
        ("optim.matrix_lr_ratio=2", "gone: it is the line 'layers_.*/kernel' and its number in config.optim.rates"),
    ],
)
def test_rates_that_say_nothing_are_refused(override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(override)


def test_a_run_with_the_older_ratios_reads_as_what_they_meant(tmp_path):
    saved = json.loads(config.to_json(resolve(f"workdir={tmp_path}")))
    del saved["optim"]["rates"]
    for ratio, rows, lines in (
        (0.25, 10.0, ("layers_.*/kernel 0.25", "rows 10.0")),
        (0.0, 1.0, ("layers_.*/kernel 0.0",)),
        (1.0, 1.0, ()),
    ):
        saved["optim"] |= {"matrix_lr_ratio": ratio, "rows_lr_ratio": rows}
        (tmp_path / "config.json").write_text(json.dumps(saved))
        optim = config.resolve(config_files.from_run(tmp_path / "config.json")).optim
        assert (optim.rates, optim.matrix_lr_ratio) == (lines, ratio)
