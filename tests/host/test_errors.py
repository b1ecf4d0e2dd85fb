"""What installs an extra is said as it works where jaxlm is: no index has jaxlm."""

import re

from documented import ROOT

from jaxlm.host import errors


def test_the_command_for_an_extra_names_the_checkout_if_there_is_one(tmp_path, monkeypatch):
    assert errors.pip_install("serve") == f'pip install -e "{ROOT}[serve]"'
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "jaxlm/host/errors.py"))
    assert errors.pip_install("serve") == 'pip install -e ".[serve]" in a checkout of jaxlm'


def test_nothing_says_that_an_index_has_jaxlm():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "configs").rglob("*.py")]
    for path in [*pages, *(ROOT / "jaxlm").rglob("*.py"), *(ROOT / "scripts").rglob("*.*")]:
        assert not re.search(r"""install ['"]?jaxlm""", path.read_text(errors="replace")), path
