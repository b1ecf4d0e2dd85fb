"""Starting, joining a cluster, speaking with one voice, and failing together."""

import dataclasses
import errno
import io
import os
import socket
import threading

import jax
import pytest

from jaxlm import config
from jaxlm.config import ConfigError, config_files
from jaxlm.devices import processes

C = config.resolve(config_files.load("quickstart", ["workdir=w"]))


def test_a_single_process_joins_nothing(monkeypatch):
    called = []
    monkeypatch.setattr(processes.jax.distributed, "initialize", lambda *a, **k: called.append((*a, k)))
    c = C.distributed
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.delenv(name, raising=False)
    processes.join_cluster(c)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    processes.join_cluster(c)
    assert called == []
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    processes.join_cluster(c)
    with socket.create_server(("localhost", 0)) as server:
        here = f"localhost:{server.getsockname()[1]}"
        processes.join_cluster(dataclasses.replace(c, coordinator=here, num_processes=2, process_id=1))
    times = {"initialization_timeout": 330, "heartbeat_timeout_seconds": 100}  # ours comes before JAX's abort
    assert called == [(times,), (here, 2, 1, times)]
    with pytest.raises(ConfigError, match=r"distributed\.coordinator=host: give HOST:PORT"):
        processes.join_cluster(dataclasses.replace(c, coordinator="host", num_processes=2, process_id=1))
    with pytest.raises(ConfigError, match=r"process_id from 0 to num_processes - 1, not -1"):
        processes.join_cluster(dataclasses.replace(c, coordinator="host:1", num_processes=2))
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    with pytest.raises(ConfigError, match=r"num_processes=2 needs distributed\.coordinator"):
        processes.join_cluster(dataclasses.replace(c, num_processes=2))


@pytest.mark.parametrize(("process", "waits"), [(0, "initialize"), (1, "create_connection")])
def test_processes_that_do_not_come_end_the_program_with_a_line(monkeypatch, capsys, process, waits):
    """JAX would say nothing for 300 s, and then abort; or, if nothing listens at the coordinator, wait in silence."""
    codes, over = [], threading.Event()

    def wait(*args, **kwargs):
        assert over.wait(5)
        return io.StringIO()

    monkeypatch.setattr(processes.jax.distributed, "initialize", lambda *a, **k: None)
    monkeypatch.setattr(processes.socket, "create_connection", lambda *a, **k: io.StringIO())
    monkeypatch.setattr(processes.socket if process else processes.jax.distributed, waits, wait)
    monkeypatch.setattr(processes.os, "_exit", lambda code: (codes.append(code), over.set()))
    c = config.resolve(config_files.load("quickstart", ["workdir=w", "distributed.start_timeout_s=1"])).distributed
    processes.join_cluster(dataclasses.replace(c, coordinator="host:1", num_processes=2, process_id=process))
    assert codes == [1]
    said = f"jaxlm: process {process} of 2 waits for the others at host:1, in vain for 1 s: start them all with the"
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize(
    ("error", "elsewhere"), [(ConfigError("bad"), ConfigError), (OSError("disk"), config.RunError)]
)
def test_together_raises_on_every_process_what_one_raised(monkeypatch, error, elsewhere):
    """Two processes acted out one after the other: what each sends to the others is kept in a list."""
    sent = []

    def gather(row):
        sent.append(row)
        return sent

    def fail():
        raise error

    monkeypatch.setattr(processes.jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes.multihost_utils, "process_allgather", gather)
    with pytest.raises(type(error)):
        processes.together(fail)
    with pytest.raises(elsewhere, match=f"process 0: {error}"):
        processes.together(lambda: 1)
    sent.clear()
    assert processes.together(lambda: 1) == 1
    monkeypatch.setattr(processes.jax, "process_index", lambda: 1)
    assert processes.together(fail, first_only=True) is None


@pytest.fixture
def own_jax_config():
    """JAX's own settings, put back afterwards."""
    names = [f"jax_{name}" for name in ("compilation_cache_dir", "persistent_cache_min_compile_time_secs")]
    names += ["jax_persistent_cache_min_entry_size_bytes", "jax_default_matmul_precision"]
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("own_jax_config")
def test_a_start_gives_the_mesh_and_turns_the_cache_on(tmp_path):
    c = config.resolve(config_files.load("quickstart", ["workdir=w", "mesh.data=2", "mesh.fsdp=4"]))
    hardware = dataclasses.replace(c.hardware, compile_cache=str(tmp_path / "cache"))
    mesh = processes.start(hardware, c.distributed, c.mesh, "float32")
    assert dict(mesh.shape) == {"data": 2, "fsdp": 4, "context": 1, "tensor": 1}
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "cache")


@pytest.mark.usefixtures("own_jax_config")
@pytest.mark.parametrize("code", [errno.EROFS, errno.EEXIST, errno.ENOSPC, errno.ENAMETOOLONG])
def test_where_no_cache_can_be_made_programs_are_not_kept(tmp_path, monkeypatch, capsys, code):
    hardware = dataclasses.replace(C.hardware, compile_cache=str(tmp_path / "cache"))
    before = jax.config.jax_compilation_cache_dir

    def refuse(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "makedirs", refuse)
    processes.start(hardware, C.distributed, C.mesh, "float32")
    assert "compiled programs are not kept: " in capsys.readouterr().err
    assert jax.config.jax_compilation_cache_dir == before


def test_only_the_first_process_speaks(monkeypatch, capsys):
    processes.say("a line")
    monkeypatch.setattr(processes.jax, "process_index", lambda: 1)
    processes.say("another")
    assert capsys.readouterr().err == "a line\n"
