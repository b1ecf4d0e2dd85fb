"""Which packages are refused, and which only mentioned."""

import platform

import pytest

from jaxlm.plan.doctor import versions
from jaxlm.plan.doctor.findings import FAIL, OK, WARN

GOOD = {"jax": "0.10.2", "jaxlib": "0.10.2", "orbax-checkpoint": "0.12.8", "grain": "0.2.18", "numpy": "2.4.6"}
NEEDS = ["jax<0.12,>=0.10", "numpy>=2.0", "orbax-checkpoint>=0.12", 'tomli>=2; python_version < "3"']


def check(**packages: str | None):
    changed = {name.replace("_", "-"): version for name, version in packages.items()}
    return versions.check({k: v for k, v in (GOOD | changed).items() if v}, NEEDS)


def test_good_versions_are_one_line():
    (found,) = check()
    assert found.verdict == OK
    assert f"Python {platform.python_version()}, jax 0.10.2" in found.text


def test_what_runs_these_tests_is_good():
    assert [f.verdict for f in versions.check(versions.installed(), versions.required())] == [OK]
    assert any(line.startswith("jax<") for line in versions.required())
    assert not any("extra" in line for line in versions.required())


@pytest.mark.parametrize(
    ("packages", "verdict", "words"),
    [
        ({"jax": "0.9.1", "jaxlib": "0.9.1"}, FAIL, "jax 0.9.1 is not <0.12,>=0.10: pip install 'jax<0.12,>=0.10'"),
        ({"jax": None}, FAIL, "jax is not installed"),
        ({"jaxlib": "0.11.0"}, FAIL, "jax 0.10.2 with jaxlib 0.11.0: pip install jaxlib==0.10.2"),
        ({"jaxlib": "0.10.1"}, WARN, "jax 0.10.2 with jaxlib 0.10.1"),
        ({"orbax_checkpoint": "0.11.24"}, FAIL, "orbax-checkpoint 0.11.24 is not >=0.12: pip install 'orbax-"),
        ({"numpy": "1.26.4"}, FAIL, "numpy 1.26.4 is not >=2.0"),
        ({"jax_cuda12_plugin": "0.10.0"}, FAIL, "jax-cuda12-plugin 0.10.0 with jaxlib 0.10.2: JAX would leave the"),
        ({"jax_cuda12_pjrt": "0.10.2", "jax_cuda13_pjrt": "0.10.2"}, WARN, "CUDA 12 and for CUDA 13"),
    ],
)
def test_bad_versions_are_named_with_the_command_that_mends_them(packages, verdict, words):
    (found,) = check(**packages)
    assert found.verdict == verdict
    assert words in found.text


def test_a_development_version_of_one_release_is_the_same():
    assert [f.verdict for f in check(jaxlib="0.10.2.dev20261101")] == [OK]
