"""What the help knows of each key: from the schema, from base.py's values and comments, however base.py is laid out."""

import ast
import io
import tokenize

import pytest

from jaxlm import config_files
from jaxlm.config import ConfigError, help

BASE = config_files.find_config("base")
STAGES = BASE.with_name("stages.py")
SOURCE = BASE.read_text(encoding="utf-8")
KNOWN = help.read(config_files.module(BASE))


def uncommented(known: help.Keys) -> list[str]:
    return [name for name, comment in known.sections.items() if not comment] + [
        key.name for key in known.keys if not key.comment
    ]


def written(layout: str, without: str = "", path=BASE) -> str:
    """A file written anew from its syntax tree, each comment placed by `layout`; one (by its statement) may be left out."""
    source = path.read_text(encoding="utf-8")
    notes = {
        token.start[0]: token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    ours = ["from jaxlm.config.older import add_stages", "from jaxlm.configs import stages"]
    lines = ["from ml_collections import ConfigDict", *(ours if path == BASE else [])]
    for function in ast.parse(source).body:
        if not isinstance(function, ast.FunctionDef):
            continue
        whole = ast.unparse(function).splitlines()
        lines += [line for line in whole if line.startswith("def ")]
        for statement in function.body:
            text = ast.unparse(statement)
            note = " ".join(notes[n] for n in range(statement.lineno, statement.end_lineno + 1) if n in notes)
            if not note or text == without:
                lines += [f"  {line}" for line in text.splitlines()]
                continue
            target, _, value = text.rpartition(" = ")
            first, *others = note.removeprefix("# ").split()
            lines += {
                "above": [f"  {note}", f"  {text}"],
                "behind": [f"  {text} {note}"],
                "inside": [f"  {target} = ( {note}", f"      {value}", "  )"],
                "after": [f"  {target} = \\", f"    ({value}", f"  )   {note}"],
                "split": [
                    f"  {target} = (",
                    f"      # {first}",
                    f"    {value}",
                    f"  )# {' '.join(others)}",
                ],
            }[layout]
    return "\n".join(lines) + "\n"


def read(text: str, folder, stages: str = "") -> help.Keys:
    path, beside = folder / "base.py", folder / "stages.py"
    path.write_text(text)
    base = config_files.module(path)
    if stages:
        beside.write_text(stages)
        base.stages = config_files.module(beside)
    return help.read(base)


def test_every_section_and_key_of_base_has_a_comment():
    assert uncommented(KNOWN) == []
    assert {key.name: key.comment for key in KNOWN.keys}["optim.clip_norm"] == "of the global gradient norm; 0 = off"


def test_a_key_without_a_comment_is_noticed(tmp_path):
    assert uncommented(read(written("behind", without="o.clip_norm = 1.0"), tmp_path)) == ["optim.clip_norm"]
    stages = written("above", without="s.near.bands = 20", path=STAGES)
    assert uncommented(read(written("above"), tmp_path, stages)) == ["prepare.stages.near.bands"]
    assert uncommented(read(written("inside", without="c.loss = ConfigDict()"), tmp_path)) == ["loss"]
    assert uncommented(read(written("inside", without="s.weight = 1.0"), tmp_path)) == ["prepare.sources.NAME.weight"]
    assert uncommented(read(written("inside", without="p.usd = usd"), tmp_path)) == ["phases.plan.NAME.usd"]


@pytest.mark.parametrize("layout", ["above", "behind", "inside", "after", "split"])
def test_another_layout_of_base_gives_the_same_help(tmp_path, layout):
    text = written(layout)
    assert text != SOURCE
    assert read(text, tmp_path, written(layout, path=STAGES)) == KNOWN


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
    source = config_files.module(BASE).source("texts")
    known = {key.name.rpartition(".")[2]: key for key in KNOWN.keys if key.section == "prepare.sources.NAME"}
    assert known.keys() == source.keys()
    assert {name: known[name].default for name in source if name != "path"} == {
        name: value for name, value in source.items() if name != "path"
    }


def test_the_keys_of_a_phase_are_those_of_base_phase():
    phase = config_files.module(BASE).phase()
    assert {key.name: key.default for key in KNOWN.keys if key.section == "phases.plan.NAME"} == {
        f"phases.plan.NAME.{name}": value for name, value in phase.items()
    }
    with pytest.raises(ValueError, match="phase has no key \\['max_loss'\\]"):
        config_files.module(BASE).phase(steps=1, max_loss=3.0)


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
        ("prepare.stages.pii.kinds", "tuple", ""),
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
        ("zzz", "there are model, data, train"),
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
