"""What the help knows of each key: what the schema says."""

import pytest

from jaxlm.config import ConfigError, config_files, help

BASE = config_files.module(config_files.find_config("base"))
KNOWN = help.read()


def test_every_section_and_key_has_a_comment():
    assert all(KNOWN.sections.values())
    assert all(key.comment for key in KNOWN.keys)
    assert {key.name: key.comment for key in KNOWN.keys}["optim.clip_norm"] == "of the global gradient norm; 0 = off"


def test_the_keys_are_those_of_base_with_its_defaults():
    defaults = config_files.load("base")
    flat = config_files.flat_keys(defaults)
    named = {key.name: key for key in KNOWN.keys if ".NAME." not in key.name}
    assert {*named, *KNOWN.sections} == {*flat, "prepare.sources.NAME", "phases.plan.NAME"}
    for name, key in named.items():
        value = defaults
        for part in name.split("."):
            value = value[part]
        assert (value.to_dict() if name in ("data.sources", "data.final.weights") else value) == key.default, name


def test_the_keys_of_a_source_of_prepare_are_those_of_base_source():
    source = BASE.source("texts")
    known = {key.name.rpartition(".")[2]: key for key in KNOWN.keys if key.section == "prepare.sources.NAME"}
    assert known.keys() == source.keys()
    assert {name: known[name].default for name in source if name != "path"} == {
        name: value for name, value in source.items() if name != "path"
    }


def test_the_keys_of_a_phase_are_those_of_base_phase():
    phase = BASE.phase()
    assert {key.name: key.default for key in KNOWN.keys if key.section == "phases.plan.NAME"} == {
        f"phases.plan.NAME.{name}": value for name, value in phase.items()
    }
    with pytest.raises(ValueError, match="phase has no key \\['max_loss'\\]"):
        BASE.phase(steps=1, max_loss=3.0)


@pytest.mark.parametrize(
    ("name", "type", "limits"),
    [
        ("train.steps", "int", "at least 1"),
        ("train.microbatch_size", "int", "at least -1"),
        ("optim.lr", "float", "at least 0"),
        ("optim.b1", "float", "at least 0 and below 1"),
        ("model.dropout", "float", "at least 0 and below 1"),
        ("model.family", "str", "one of llama, gpt2"),
        ("log.wandb", "str", "one of '', offline, online"),
        ("mesh.fsdp", "int", "at least 1, or -1 for all remaining devices"),
        ("model.bias", "bool", ""),
        ("sample.prompts", "tuple of str", ""),
        ("tune.remat", "tuple of str", "each one of none, names, dots, full"),
        ("prepare.sources.NAME.priority", "int", "in -128 to 127"),
        ("phases.plan.NAME.max_nonfinite_steps", "int", "at least 0, or -1 for no gate"),
        ("runs.on_exit.gate", "str", ""),
        ("prepare.stages.near.threshold", "float", ""),
        ("prepare.stages.pii.kinds", "tuple of str", ""),
    ],
)
def test_types_and_limits_are_those_of_the_schema(name, type, limits):
    key = next(key for key in KNOWN.keys if key.name == name)
    assert (key.type, key.limits) == (type, limits)


def test_a_page_has_values_defaults_types_limits_and_comments():
    config = config_files.load("local_35m", ["optim.lr=1"])
    page = help.page(KNOWN, "optim", config)
    assert "  optim.lr = 1.0  (default 0.001; float, at least 0)\n      peak learning rate; 0 = by rule" in page
    assert "  optim.b1 = 0.9  (default; float, at least 0 and below 1)\n" in page
    assert "optim: optimizer and learning rate\n" in page
    assert "model." not in page
    assert max(map(len, page.splitlines())) <= help.WIDTH


def test_a_page_of_one_key_of_a_section_inside_another_and_of_one_without_keys():
    config = config_files.load("base")
    assert [line for line in help.page(KNOWN, "train.seq_len", config).splitlines() if line.startswith("  train.")] == [
        "  train.seq_len = 512  (default; int, at least 1)"
    ]
    assert "prepare.stages.near.ngram = 5" in help.page(KNOWN, "prepare.stages.near", config)
    assert "prepare.stages.exact: the same text" in help.page(KNOWN, "prepare.stages.exact", config)
    assert "  seed = 0  (default" in help.page(KNOWN, "seed", config)


def test_the_page_of_everything_has_each_key_once():
    page = help.page(KNOWN, "all", config_files.load("base")).splitlines()
    for key in KNOWN.keys:
        assert len([line for line in page if line.startswith(f"  {key.name} = ")]) == 1, key.name


def test_sources_are_named_and_shown_with_their_own_values():
    config = config_files.load("quickstart")
    assert "in this config: code, math, prose" in help.page(KNOWN, "prepare.sources", config)
    page = help.page(KNOWN, "prepare.sources.math", config)
    assert "prepare.sources.math.weight = 10.0  (default 1.0; float, at least 0)" in page
    assert "NAME" not in page.replace("tfds:NAME", "").replace("embedded:NAME", "")


@pytest.mark.parametrize(
    ("wanted", "hint"),
    [
        ("opitm", "did you mean optim?"),
        ("near", "did you mean prepare.stages.near?"),
        ("lr", "did you mean optim.lr?"),
        ("zzz", "there are model, data, adapter"),
        ("mod", ""),
        ("prepare.sources.NAMES.path", ""),
    ],
)
def test_an_unknown_section_is_one_line_with_the_nearest(wanted, hint):
    with pytest.raises(ConfigError, match="no section or key") as error:
        help.page(KNOWN, wanted, config_files.load("base"))
    assert hint in str(error.value)
    assert "\n" not in str(error.value)


def test_the_overview_has_every_section_once_in_short_words_the_first_ones_first():
    top = [name for name in KNOWN.sections if "." not in name]
    assert all(len(KNOWN.sections[name].partition(";")[0]) <= 34 for name in top)
    lines = help.overview(KNOWN, ("tune", "plan"))
    names = [cell.split()[0] for line in lines[:-1] for cell in (line[:50], line[50:]) if cell.strip()]
    assert names[:2] == ["tune", "plan"]
    assert sorted(names) == sorted(top)
    assert (
        lines[-1]
        == "  and the keys program, workdir, seed, origin, origin_checkpoint, origin_state, origin_merge, engine"
    )
    assert max(map(len, lines)) <= help.WIDTH
