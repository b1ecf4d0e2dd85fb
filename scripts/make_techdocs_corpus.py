"""Makes a raw corpus of technical documentation from Debian packages: `python scripts/make_techdocs_corpus.py --out=DIR`.

The corpus is the HTML of the manuals of Python, PostgreSQL, the Linux kernel, clang, Apache, git, SQLite and Django, and of
Debian's own books, with all navigation; `configs/data/techdocs.py` cleans it. Installs nothing and needs no root
(`apt-get download`); `apt-get update` must have been run once.

    DIR/<source>/PACKAGE_VERSION/...   the newest version of each manual
    DIR/older/PACKAGE_VERSION/...      older versions of the same manuals, near-duplicates
    DIR/licences/PACKAGE_VERSION.txt   the copyright file of each package
    DIR/packages.json                  the chosen packages; a second run continues with the same list

The older versions are the few that the distribution has: other major versions (clang 14 to 22, the kernels 6.1 and 6.12 in
Debian 12), and for manuals with a single package (Python, PostgreSQL, Django, Apache, git) the point release before the
security update, most of whose pages are identical. Links within a package are left out.

Debian 12, 2 cores: 22 packages, 21,791 files, 753 MB (398 of them older versions) in 54 s, 250 MB downloaded.
"""

import argparse
import gzip
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib

# Source -> its manuals, each a regular expression for package names; of several matches the one with the highest number
# is the newest.
SOURCES = {
    "python": (r"python3\.\d+-doc",),
    "postgresql": (r"postgresql-doc-\d+",),
    "linux": (r"linux-doc(-[\d.]+)?",),
    "handbook": (r"debian-handbook",),
    "debian": (r"debian-policy", r"debian-reference-en", r"developers-reference", r"debian-faq"),
    "clang": (r"clang-\d+-doc",),
    "apache": (r"apache2-doc",),
    "git": (r"git-doc",),
    "sqlite": (r"sqlite3-doc",),
    "django": (r"python-django-doc",),
}
OLDER = "older"
PLAN = "packages.json"
INCOMPLETE = ".incomplete"


class Failed(Exception):
    """A command failed; the message is its last line."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR")
    parser.add_argument("--older", type=int, default=2, metavar="N", help="older versions of each manual (default: 2)")
    args = parser.parse_args()
    absent = [name for name in ("apt-cache", "apt-get", "dpkg-deb") if not shutil.which(name)]
    if absent:
        print(f"no {', '.join(absent)} here: this needs Debian or Ubuntu (or a container of it)", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(args.out / INCOMPLETE, ignore_errors=True)
    try:
        plan = read_plan(args.out, args.older)
    except Failed as error:
        print(error, file=sys.stderr)
        return 2
    failed = 0
    for entry in plan:
        try:
            get(args.out, **entry)
        except Failed as error:
            print(f"{entry['package']}={entry['version']}: {error}", file=sys.stderr)
            failed += 1
    report(args.out)
    if failed:
        print(
            f"{failed} of {len(plan)} packages are missing: run `apt-get update` and this again, "
            f"or delete {args.out / PLAN} to choose anew",
            file=sys.stderr,
        )
    return 1 if failed else 0


def read_plan(out: pathlib.Path, older: int) -> list[dict[str, str]]:
    """Returns the packages to get: those that an earlier run chose, else chooses them and writes the list."""
    path = out / PLAN
    if path.exists():
        try:
            return json.loads(path.read_text())
        except ValueError as error:
            raise Failed(f"{path} is damaged ({error}): delete it") from error
    plan = choose(older)
    if not plan:
        raise Failed("apt knows none of the packages: run `apt-get update` first")
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(plan, indent=1) + "\n")
    temporary.replace(path)
    return plan


def choose(older: int) -> list[dict[str, str]]:
    """Returns rows of folder, package, version: each manual's newest version, and up to `older` others in the folder OLDER."""
    known = output("apt-cache", "pkgnames").split()
    plan = []
    for source, manuals in SOURCES.items():
        for manual in manuals:
            names = [name for name in known if re.fullmatch(manual, name)]
            numbered = [name for name in names if re.search(r"\d", name.removeprefix("python3"))]
            names = sorted(numbered or names, key=numbers, reverse=True)
            # Other major versions first, as they differ most; then other versions of the newest package, the oldest first.
            versions = {name: available(name) for name in names}
            rows = [(name, versions[name][0]) for name in names if versions[name]]
            rows += [(name, version) for name, _ in rows[:1] for version in reversed(versions[name][1:])]
            if not rows:
                print(f"{source}: no package {manual} in this distribution, left out", file=sys.stderr)
            for i, (package, version) in enumerate(rows[: 1 + older]):
                plan.append({"folder": OLDER if i else source, "package": package, "version": version})
    return plan


def numbers(name: str) -> list[int]:
    """Returns the numbers in a name, to sort by."""
    return [int(digits) for digits in re.findall(r"\d+", name)]


def available(package: str) -> list[str]:
    """Returns the versions in the package lists, newest first."""
    lines = output("apt-cache", "madison", package).splitlines()
    versions = [line.split("|")[1].strip() for line in lines if line.count("|") == 2 and "Packages" in line]
    return list(dict.fromkeys(versions))


def get(out: pathlib.Path, folder: str, package: str, version: str) -> None:
    """Downloads a package and writes its HTML to `out/folder`, all or nothing. Raises Failed."""
    name = f"{package}_{version.rpartition(':')[2]}"
    final, licence = out / folder / name, out / "licences" / f"{name}.txt"
    if not final.exists():
        place = out / INCOMPLETE / name
        place.mkdir(parents=True)
        with tempfile.TemporaryDirectory() as scratch:
            output("apt-get", "download", "-qq", f"{package}={version}", cwd=scratch)
            packages = list(pathlib.Path(scratch).glob("*.deb"))
            if not packages:
                raise Failed("apt-get downloaded nothing")
            copyright_file = unpack(packages[0], place)
        if copyright_file:
            licence.parent.mkdir(exist_ok=True)
            licence.write_bytes(copyright_file)
        final.parent.mkdir(exist_ok=True)
        place.replace(final)
    files, size = measure(final)
    print(f"{folder:<12}{package:<22}{version:<26}{files:>7} files {size / 1e6:>7.1f} MB", flush=True)


def unpack(deb: pathlib.Path, place: pathlib.Path) -> bytes:
    """Writes the package's HTML files below `place`, .html.gz as .html; returns its copyright file."""
    copyright_file = b""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", deb], stdout=subprocess.PIPE) as process:
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as members:
                for member in members:
                    path = pathlib.PurePosixPath(member.name)
                    html = re.fullmatch(r"(.+\.x?html?)(\.gz)?", path.name)
                    if not member.isreg() or ".." in path.parts or not (html or path.name == "copyright"):
                        continue
                    content = members.extractfile(member).read()
                    if not html:
                        copyright_file = content
                        continue
                    if html[2]:
                        content = gzip.decompress(content)
                    parts = [part for part in path.parent.parts if part not in ("/", ".")]
                    while parts[:1] in (["usr"], ["share"], ["doc"]):
                        parts.pop(0)
                    target = place.joinpath(*parts, html[1])
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(content)
        except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
            process.kill()
            raise Failed(f"{deb.name} can't be unpacked: {error}") from error
    if process.returncode:
        raise Failed(f"dpkg-deb can't unpack {deb.name}")
    return copyright_file


def report(out: pathlib.Path) -> None:
    """Prints files and MB of each source."""
    total_files = total_size = 0
    print("\nsource        files       MB")
    for folder in [*SOURCES, OLDER]:
        files, size = measure(out / folder)
        total_files, total_size = total_files + files, total_size + size
        if files:
            print(f"{folder:<12}{files:>7}{size / 1e6:>9.1f}")
    print(f"{'all':<12}{total_files:>7}{total_size / 1e6:>9.1f}")


def measure(folder: pathlib.Path) -> tuple[int, int]:
    """Returns the number of files below a folder, and their bytes together."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return len(sizes), sum(sizes)


def output(*command: str, cwd: str | None = None) -> str:
    """Returns a command's output. Raises Failed with the last line of its errors."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.strip()]
        raise Failed(next((line for line in errors if line.startswith("E:")), (errors or ["failed"])[-1]))
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
