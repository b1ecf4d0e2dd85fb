"""Every test runs with eight CPU devices, and compiles fast rather than well: none of them is about speed."""

import os

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)
# A program that a test runs in-process turns the cache on for all that follow, and what comes out of it is not compiled:
# no dump of passes, no compile to time.
jax.config.update("jax_enable_compilation_cache", False)
# XLA's older emitters make the same programs in half the time; jax 0.11 has none, and ends on the flag. XLA reads its flags
# once, when devices start; the processes that tests begin run as users' do.
with pytest.MonkeyPatch.context() as patch:
    if jax.__version_info__ < (0, 11):
        patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false")
    jax.devices()


# Minutes each; the rest takes seconds. First in, so that the processes end together.
LONGEST = (
    "test_end_to_end.py", "test_prepare.py", "test_models.py", "test_step.py", "test_generate.py",
    "test_several.py", "test_disk.py", "test_damage.py", "test_mirror.py",
)  # fmt: skip
PARITY = ("torch", "transformers")


def pytest_collection_modifyitems(items):
    """The longest files first, the others as they come."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_runtest_setup(item):
    """Skips a test of parity where there is nothing to compare with."""
    if item.get_closest_marker("parity"):
        for name in PARITY:
            pytest.importorskip(name, reason=f"parity needs {name}: pip install 'jaxlm[parity]'")
