"""`--params`: a config's model in another size, within 5%, in the family's proportions."""

import json

import pytest
import tiny_data

from jaxlm import config
from jaxlm.cli import cli
from jaxlm.config import ConfigError, config_files
from jaxlm.plan import size
from jaxlm.plan.flops import count_params, params_by_component


def of(name, *overrides):
    return config.resolve(config_files.load(name, ["workdir=x", *overrides]))


@pytest.mark.parametrize(
    ("name", "text", "number"),
    [
        ("quickstart", "10M", 1e7),
        ("local_35m", "124m", 1.24e8),
        ("gpuburnout_134m", "350M", 3.5e8),
        ("gpuburnout_1b", "1.5B", 1.5e9),
    ],
)
def test_sizes_are_within_five_percent_with_the_familys_heads(name, text, number):
    whole = of(name).model
    model = of(name, *size.overrides(of(name), text)).model
    assert count_params(model) == pytest.approx(number, rel=0.05)
    assert model.head_dim == whole.head_dim
    assert model.n_heads * model.head_dim == model.d_model
    assert model.n_heads / model.n_kv_heads == whole.n_heads / whole.n_kv_heads
    parts = params_by_component(model)
    assert 2 * (parts["embed"] + parts["head"]) <= 1.05 * number
    ratio = model.d_ff / model.d_model / (whole.d_ff / whole.d_model)
    assert 0.74 < ratio < 1.26


@pytest.mark.parametrize("text", ["1e7", "10_000_000", "10m", "0.01B"])
def test_a_size_may_be_written_in_several_ways(text):
    assert size.overrides(of("quickstart"), text) == size.overrides(of("quickstart"), "10M")


def test_its_own_size_gives_about_the_model_itself():
    model, again = of("gpuburnout_1b").model, of("gpuburnout_1b", *size.overrides(of("gpuburnout_1b"), "1.0387B")).model
    assert (again.n_layers, again.d_model, again.n_heads) == (model.n_layers, model.d_model, model.n_heads)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1M", r"over half of it would be embeddings of 20,480 tokens.*about 1\d\.?\d*M is the next size"),
        ("9" * 400, "a number of parameters"),
        ("ten", "a number of parameters, such as 10M"),
        ("0", "a number of parameters"),
        ("", "a number of parameters"),
        ("nan", "a number of parameters"),
        ("1.2.3M", "a number of parameters"),
    ],
)
def test_what_is_no_size_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        size.overrides(of("local_35m"), text)


def test_a_size_that_is_named_as_the_next_fits():
    with pytest.raises(ConfigError) as error:
        size.overrides(of("domain_7b"), "100M")
    named = str(error.value).partition("about ")[2].split()[0]
    assert size.overrides(of("domain_7b"), named)


@pytest.mark.parametrize("verb", ["plan", "train", "doctor", "tune", "ladder"])
def test_a_key_that_is_given_too_is_refused(verb, capsys):
    assert cli.main([verb, "quickstart", "--params=10M", "--config.model.n_layers=2"]) == 2
    assert "--params sets config.model.n_layers too" in capsys.readouterr().err


def test_the_command_line_says_the_keys_that_it_sets(capsys):
    assert cli.main(["plan", "quickstart", "--params=10M", "--json"]) == 0
    out, err = capsys.readouterr()
    said = next(line for line in err.splitlines() if line.startswith("--params=10M: "))
    assert "--config.model.n_layers=" in said
    assert cli.main(["plan", "quickstart", *said.split()[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == json.loads(out)["model"]


def test_without_its_vocabulary_size_the_datas_counts(tmp_path):
    with pytest.raises(ConfigError, match="counts the embedding too"):
        size.overrides(of("quickstart", "model.vocab_size=0"), "3M")
    data = tiny_data.make(tmp_path, {"web": 1.0}, documents=50)
    found = size.overrides(of("quickstart", "model.vocab_size=0", f"data.dir={tmp_path}"), "3M")
    assert found == size.overrides(of("quickstart", f"model.vocab_size={data.vocab_size}"), "3M")
