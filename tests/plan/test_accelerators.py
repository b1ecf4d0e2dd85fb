"""The prices file: it ships, it is read, and what is wrong in one's own copy is told in a line."""

import importlib.resources
import pathlib
import tomllib

import pytest

from jaxlm.config import ConfigError
from jaxlm.devices import processes
from jaxlm.plan import accelerators
from jaxlm.plan.flops import peak_tflops
from jaxlm.plan.tune import tune

ROOT = pathlib.Path(__file__).resolve().parents[2]
WANTED = ("A100 40GB", "A100 80GB", "H100", "H200", "H200 NVL", "L40S", "A6000")
WANTED += ("RTX 3060", "RTX 3090", "RTX 4070", "RTX 4090", "RTX 5090", "B200")
WANTED += ("TPU v5e", "TPU v5p", "TPU v6e")


def test_the_file_ships_and_has_them_all():
    assert importlib.resources.files("jaxlm.configs").joinpath("prices.toml").is_file()
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert packaged["jaxlm.configs"] == ["*.toml"]
    prices = accelerators.load()
    assert [a.name for a in prices.accelerators] == list(WANTED)
    for a in prices.accelerators:
        assert 0 < a.usd_spot < a.usd
        assert 0.3 < a.mfu < 0.8
        assert peak_tflops(f"NVIDIA {a.kind}") == a.tflops


def test_no_mfu_is_given_without_its_source():
    by_name = {a.name: a for a in accelerators.load().accelerators}
    assert "28.3k" in by_name["A100 80GB"].mfu_from
    assert by_name["H100"].mfu_from.startswith("jaxlm, 80.2k")
    assert by_name["H200 NVL"].mfu_from
    assert (by_name["B200"].mfu, by_name["B200"].mfu_from) == (0.4, "")


def test_plan_counts_on_the_memory_that_auto_and_tune_do():
    share = tomllib.loads(accelerators.SHIPPED.read_text())["usable_memory"]
    assert share == pytest.approx(processes.MEMORY_FRACTION * tune.HEADROOM, abs=0.001)


def test_names_are_found_whatever_their_case():
    prices = accelerators.load()
    assert prices.named("rtx4090").name == "RTX 4090"
    with pytest.raises(ConfigError, match="'A100' is not in the prices file; there are A100 40GB, A100 80GB"):
        prices.named("A100")
    with pytest.raises(ConfigError, match=r"'H10O' is not in the prices file; did you mean 'H100'\?"):
        prices.named("H10O")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("usd = 1.60", 'usd = "cheap"', "usd = 'cheap' must be a number"),
        ("usd = 1.60", "usd = -1", "usd = -1 must be a number"),
        ("usd = 1.60", "usb = 1.60", "unknown key usb; did you mean 'usd'?"),
        ("mfu = 0.57", "mfu = 42", "mfu = 42 must be a number above 0, at most 1"),
        ('mfu_from = "jaxlm', '# "', "say in mfu_from who measured"),
        ("assumed_mfu = 0.40", "", "assumed_mfu is missing"),
        ("[peak_tflops]", "[peak_tflops", "is not TOML"),
        ('"H800" = 989', '"H800" = "fast"', "[peak_tflops]: H800 = 'fast' must be a number"),
    ],
)
def test_a_broken_copy_is_one_line(tmp_path, old, new, message):
    text = accelerators.SHIPPED.read_text()
    assert old in text
    (tmp_path / "mine.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError) as error:
        accelerators.load(str(tmp_path / "mine.toml"))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_absent_file_is_one_line():
    with pytest.raises(ConfigError, match="prices=nowhere: No such file"):
        accelerators.load("nowhere")
