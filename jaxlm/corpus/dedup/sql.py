"""DuckDB, to join and sort tables on disk within a stated memory."""

import contextlib
import pathlib
import shutil
import tempfile
import typing
from collections.abc import Iterator

import duckdb


@contextlib.contextmanager
def connect(folder: pathlib.Path, memory_gb: float, threads: int) -> Iterator[duckdb.DuckDBPyConnection]:
    """A DuckDB that spills to `folder` beyond `memory_gb`."""
    (folder / "spill").mkdir(parents=True, exist_ok=True)
    spill = tempfile.mkdtemp(
        dir=folder / "spill"
    )  # its own: DuckDB names files by process, and machines share the disk
    settings = {
        "memory_limit": f"{memory_gb}GB",
        "temp_directory": spill,
        "threads": threads,
        "preserve_insertion_order": False,
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
    try:
        with duckdb.connect(":memory:", config=settings) as connection:
            yield connection
    finally:
        shutil.rmtree(spill, ignore_errors=True)


def quoted(path: typing.Any) -> str:
    """A path or glob as an SQL string."""
    return "'" + str(path).replace("'", "''") + "'"


def best_ranked(column: str) -> str:
    """SQL of the `column` of the best-ranked document of a group, in a state of fixed size."""
    return f"arg_min({column}, (rank::UHUGEINT << 64) | tie::UHUGEINT)"
