"""The script that makes the techdocs corpus, against apt and dpkg-deb made of shell scripts: a .deb here is a tar."""

import gzip
import io
import json
import pathlib
import shutil
import subprocess
import sys
import tarfile

import make_techdocs_corpus
import pytest
from documented import ROOT

from jaxlm.config import config_files

SCRIPT = ROOT / "scripts/make_techdocs_corpus.py"
VERSIONS = {
    "python3.9-doc": ["3.9.2-1"],
    "python3.11-doc": ["3.11.2-6+deb12u9", "3.11.2-6+deb12u8", "3.11.2-6"],
    "postgresql-doc": ["15+248"],
    "postgresql-doc-15": ["15.20-0"],
    "linux-doc": ["6.12-1"],
    "linux-doc-6.1": ["6.1.192-2"],
    "linux-doc-6.12": ["1:6.12.117-1~deb12u1"],
    "git-doc": ["2.39-1"],
}
APT_CACHE = """#!/bin/sh
case $1 in
pkgnames) ls archive | sed 's/_.*//' | sort -u ;;
madison) sed 's/^/ '$2' | /; s/$/ | http:\\/\\/deb.debian.org bookworm\\/main amd64 Packages/' versions/$2
         echo " $2 | 0.0-1 | http://deb.debian.org bookworm/main Sources" ;;
esac
"""
APT_GET = """#!/bin/sh
echo "$3" >> "$APT/log"
name=$(echo "$3" | sed 's/=/_/; s/:/%3a/')
cp "$APT/archive/$name.deb" . 2>/dev/null || { echo "W: noise" >&2; echo "E: Failed to fetch $3" >&2; exit 100; }
"""
# A tar is padded to 10 KiB: a shorter one was cut.
DPKG_DEB = """#!/bin/sh
cat "$2"
[ $(wc -c < "$2") -ge 10240 ] || { echo "dpkg-deb: error: unexpected end of file" >&2; exit 2; }
"""


def deb(path: pathlib.Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("./usr/share/doc/link.html")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)


@pytest.fixture
def apt(tmp_path, monkeypatch):
    """A folder with archive/*.deb, versions/PACKAGE and the three commands, which is put on PATH."""
    root = tmp_path / "apt"
    for folder in ("archive", "versions", "bin"):
        (root / folder).mkdir(parents=True)
    for package, versions in VERSIONS.items():
        (root / "versions" / package).write_text("\n".join(versions) + "\n")
        for version in versions:
            page = f"<nav>menu</nav><p>{package} {version}</p>".encode()
            files = {
                f"./usr/share/doc/{package}/html/index.html": page,
                f"./usr/share/doc/{package}/html/deep/more.html.gz": gzip.compress(page + b"\xff"),
                f"./usr/share/doc/{package}/copyright": b"a licence",
                f"./usr/share/doc/{package}/html/logo.png": b"picture",
                f"./usr/share/doc/{package}/html/_sources/index.rst.txt": b"text",
                "./../../escaped.html": b"no",
            }
            deb(root / "archive" / f"{package}_{version.replace(':', '%3a')}.deb", files)
    for name, text in {"apt-cache": APT_CACHE, "apt-get": APT_GET, "dpkg-deb": DPKG_DEB}.items():
        (root / "bin" / name).write_text(text)
        (root / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{root / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("APT", str(root))
    monkeypatch.chdir(root)
    return root


def run(out: pathlib.Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, SCRIPT, f"--out={out}", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def pages(out: pathlib.Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*.*html*")) if path.is_file()}


def test_newest_and_older_versions_are_laid_out_as_raw_html(apt, tmp_path):
    out = tmp_path / "out"
    done = run(out)
    assert done.returncode == 0, done.stderr
    found = pages(out)
    folders = {tuple(pathlib.PurePath(name).parts[:2]) for name in found}
    assert folders == {
        ("python", "python3.11-doc_3.11.2-6+deb12u9"),
        ("older", "python3.9-doc_3.9.2-1"),
        ("older", "python3.11-doc_3.11.2-6"),  # not u8: two older ones are enough, and this differs most
        ("postgresql", "postgresql-doc-15_15.20-0"),  # the metapackages hold no manual
        ("linux", "linux-doc-6.12_6.12.117-1~deb12u1"),
        ("older", "linux-doc-6.1_6.1.192-2"),
        ("git", "git-doc_2.39-1"),
    }
    page = b"<nav>menu</nav><p>git-doc 2.39-1</p>"
    assert found["git/git-doc_2.39-1/git-doc/html/index.html"] == page
    assert found["git/git-doc_2.39-1/git-doc/html/deep/more.html"] == page + b"\xff"
    assert len(found) == 2 * len(folders)
    assert (out / "licences/git-doc_2.39-1.txt").read_bytes() == b"a licence"
    assert not list(tmp_path.rglob("escaped.html"))
    assert not list(out.rglob("link.html"))
    assert "sqlite: no package sqlite3-doc in this distribution, left out" in done.stderr
    table = done.stdout.split("source        files")[1].splitlines()
    counts = [tuple(line.split()[:2]) for line in table[1:]]
    assert counts == [
        *((name, "2") for name in ("python", "postgresql", "linux", "git")),
        ("older", "6"),
        ("all", "14"),
    ]


def test_it_resumes_where_it_stopped_and_keeps_to_the_first_choice(apt, tmp_path):
    out = tmp_path / "out"
    gone = apt / "archive/linux-doc-6.12_1%3a6.12.117-1~deb12u1.deb"
    content = gone.read_bytes()
    gone.write_bytes(content[: len(content) // 2 + 100])  # the download was cut
    first = run(out, "--older=0")
    assert first.returncode == 1
    assert "linux-doc-6.12=1:6.12.117-1~deb12u1: " in first.stderr
    assert "1 of 4 packages are missing" in first.stderr
    assert not (out / "linux").exists()
    gone.unlink()
    (apt / "versions/linux-doc-6.12").write_text("6.12.999-1\n")
    second = run(out)
    assert "E: Failed to fetch linux-doc-6.12=1:6.12.117-1~deb12u1" in second.stderr
    assert "noise" not in second.stderr
    assert "Traceback" not in second.stderr
    gone.write_bytes(content)
    (out / ".incomplete/left").mkdir(parents=True)
    (apt / "log").unlink()
    third = run(out)
    assert third.returncode == 0, third.stderr
    assert (apt / "log").read_text() == "linux-doc-6.12=1:6.12.117-1~deb12u1\n"
    assert len(pages(out)) == 8
    assert len(json.loads((out / "packages.json").read_text())) == 4
    assert not (out / ".incomplete/left").exists()


def test_elsewhere_and_without_package_lists_one_line_says_so(apt, tmp_path, monkeypatch):
    shutil.rmtree(apt / "archive")
    (apt / "archive").mkdir()
    done = run(tmp_path / "out")
    none = "apt knows none of the packages: run `apt-get update` first"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, none)
    monkeypatch.setenv("PATH", str(tmp_path))
    done = run(tmp_path / "out")
    elsewhere = "no apt-cache, apt-get, dpkg-deb here: this needs Debian or Ubuntu (or a container of it)\n"
    assert (done.returncode, done.stderr) == (2, elsewhere)


def test_the_config_has_the_scripts_sources():
    sources = config_files.load("data/techdocs").prepare.sources
    assert set(sources) == {*make_techdocs_corpus.SOURCES, make_techdocs_corpus.OLDER}
    assert all(source.path.split("/")[:3] == ["corpora", "techdocs", name] for name, source in sources.items())
    assert all(sources[name].priority > sources.older.priority for name in make_techdocs_corpus.SOURCES)
