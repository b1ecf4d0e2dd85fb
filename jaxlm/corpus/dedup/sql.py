"""Connects to DuckDB, which joins and sorts tables on disk within a memory limit."""

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator

import duckdb

_INTERRUPTED = "Query interrupted"


@contextlib.contextmanager
def connect(folder: pathlib.Path, memory_gb: float, threads: int) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yields a connection that spills to `folder` beyond `memory_gb`. Raises KeyboardInterrupt for ctrl-C in a query."""
    (folder / "spill").mkdir(parents=True, exist_ok=True)
    # A folder of its own: DuckDB names files by process id, and machines may share the disk.
    with tempfile.TemporaryDirectory(dir=folder / "spill", ignore_cleanup_errors=True) as spill:
        settings = {
            "memory_limit": f"{memory_gb}GB",
            "temp_directory": spill,
            "threads": threads,
            "preserve_insertion_order": False,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        }
        with duckdb.connect(":memory:", config=settings) as connection:
            try:
                yield connection
            except (RuntimeError, duckdb.InterruptException) as error:
                if isinstance(error, RuntimeError) and str(error) != _INTERRUPTED:
                    raise
                raise KeyboardInterrupt from None


def quoted(path: pathlib.Path | str) -> str:
    return "'" + str(path).replace("'", "''") + "'"
