"""Every test runs with eight CPU devices, and compiles fast rather than well: none of them is about speed."""

import gc
import os
import random
import shutil
import tempfile

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_traceback_in_locations_limit", 0)  # no program says where it was traced: a twentieth of the time
# What one test compiled, no other compiles again, in either process: a resumed run has the program of the first one.
CACHE = "JAXLM_TESTS_CACHE"
FOLDER = tempfile.mkdtemp(prefix="jaxlm-tests-") if CACHE not in os.environ else None  # only the first process makes it
jax.config.update("jax_compilation_cache_dir", os.environ.setdefault(CACHE, FOLDER or ""))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
# XLA's older emitters make the same programs in half the time; jax 0.11 has none, and ends on the flag.
if jax.__version_info__ < (0, 11):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false".strip()
# Of the processes that tests begin.
os.environ |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0"}
jax.devices()
gc.set_threshold(100_000, 50, 100)  # as jaxlm/main.py: what thousands of tests leave behind is looked at less often


# Minutes each; the rest takes seconds. First in, so that the processes end together.
LONGEST = (
    "test_leaderboard.py", "test_commands.py", "test_story.py", "test_check_install.py",
    "test_end_to_end.py", "test_prepare.py", "test_models.py", "test_step.py", "test_generate.py",
    "test_supervisor.py", "test_several.py", "test_kills.py", "test_disk.py", "test_damage.py", "test_mirror.py",
)  # fmt: skip
PARITY = ("torch", "transformers")


def pytest_collection_modifyitems(items):
    """The longest files first, the others as they come."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_addoption(parser):
    parser.addoption(
        "--trials", type=int, help="how many cases a test draws that draws its cases; each has a small number"
    )
    parser.addoption("--draw", type=int, default=0, help="the seed of those cases")


@pytest.fixture
def trials(request):
    """`trials(small)`: how many cases to draw: --trials, or `small`."""
    return lambda small: request.config.getoption("--trials") or small


@pytest.fixture
def draw(request):
    """The random numbers of a test that draws its cases."""
    return random.Random(request.config.getoption("--draw"))


def pytest_unconfigure(config):
    if FOLDER:
        shutil.rmtree(FOLDER, ignore_errors=True)


@pytest.fixture
def compiled_anew():
    """No program is read from the cache: what comes out of it has no dump of passes, and takes no time."""
    for on in (False, True):
        jax.config.update("jax_enable_compilation_cache", on)
        compilation_cache.reset_cache()
        if not on:
            yield


def pytest_runtest_setup(item):
    """Skips a test of parity where there is nothing to compare with."""
    if item.get_closest_marker("parity"):
        for name in PARITY:
            pytest.importorskip(name, reason=f"parity needs {name}: pip install -e '.[parity]'")
