"""Worker processes are started once, hold no library that nobody asked for, and end with their block."""

import os

import psutil
import pytest

from jaxlm.corpus import engine


def test_a_block_within_a_block_uses_its_workers():
    with engine.worker_processes(1) as pool:
        worker = pool.submit(os.getpid).result()
        process = psutil.Process(worker)
        with engine.worker_processes(2) as inner:
            assert inner.submit(os.getpid).result() == worker
        assert pool.submit(os.getpid).result() == worker
    assert not psutil.wait_procs([process], timeout=10)[1]
    with engine.worker_processes(1) as pool:
        assert pool.submit(os.getpid).result() != worker


def test_lists_become_arrays_without_pandas_which_a_stage_may_import():
    pytest.importorskip("pandas")
    with engine.worker_processes(1) as pool:
        pool.submit(eval, "__import__('pyarrow').array(['a'])").result()
        assert not pool.submit(eval, "'pandas' in __import__('sys').modules").result()
        assert pool.submit(eval, "__import__('pandas').__name__").result() == "pandas"
