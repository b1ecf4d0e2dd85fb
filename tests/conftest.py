"""Every test runs with eight CPU devices, and compiles fast rather than well: none of them is about speed."""

import os

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)
# A program that a test runs in-process turns the cache on for all that follow, and what comes out of it is not compiled:
# no dump of passes, no compile to time.
jax.config.update("jax_enable_compilation_cache", False)
# XLA's older emitters make the same programs in half the time. It reads its flags once, when devices start; the
# processes that tests begin run as users' do.
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false")
    jax.devices()


def pytest_collection_modifyitems(items):
    """Files with slow tests first, so that the processes end together."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
