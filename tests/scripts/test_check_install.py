"""The wheel is installed and trains, as scripts/check_install.py tries it: in this Python, with the packages that are here."""

import sys

import check_install
import pytest


@pytest.mark.scripts
def test_the_wheel_the_dockerfile_and_the_notebook_install(capsys):
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    with pytest.raises(SystemExit) as ended:
        check_install.main(["--reuse", f"--pythons={version},3.99"])
    assert ended.value.code == 0
    first, docker, notebook, other, older = capsys.readouterr().out.splitlines()
    assert first.startswith(f"Python {version}: wheel installed in ")
    assert first.endswith(" GB), quickstart trained, shrunk")
    assert docker == 'Dockerfile: pip install --no-cache-dir ".${EXTRA:+[$EXTRA]}"'
    assert notebook == 'notebook: !pip install --quiet "{package}"'
    assert other == "Python 3.99: not tried, none on PATH"
    assert older in (
        "Python 3.10: refused: jaxlm needs Python 3.11 or newer; this is Python 3.10",
        "Python 3.10: not tried, none on PATH",
    )


def test_a_python_that_does_not_start_is_none(tmp_path, monkeypatch):
    """As pyenv's, which stands on PATH and refuses."""
    (tmp_path / "python3.9").write_text("#!/bin/sh\nexit 127\n")
    (tmp_path / "python3.9").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert check_install.python("3.9") is None
    (tmp_path / "python3.9").write_text("#!/bin/sh\necho /there/python\n")
    assert check_install.python("3.9") == "/there/python"


def test_what_fails_ends_it_with_what_was_printed(tmp_path):
    with pytest.raises(SystemExit, match=r"echo why; exit 3: ended with 3, not 0\nwhy"):
        check_install.run("echo why; exit 3", folder=tmp_path)
    assert check_install.run("echo $PYTHONPATH", folder=tmp_path) == "\n"  # a checkout that the caller sees is hidden
