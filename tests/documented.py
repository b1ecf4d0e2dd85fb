"""The commands that README, docs, docstrings of configs and the leaderboard give, each with the file and line it stands in."""

import ast
import dataclasses
import pathlib
import re
import shlex
from collections.abc import Collection

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "dev/MEASURED.md"]
CONFIGS = [path for path in sorted((ROOT / "configs").rglob("*.py")) if path.name != "__init__.py"]
LEADERBOARD = ROOT / "dev/LEADERBOARD.md"
FIRST_WORDS = r"(?:jaxlm|python|pip|pytest|tensorboard|lm_eval|scripts/\w+\.(?:sh|py))"
SETTING = r"[A-Z_]+=\S* "  # of the environment, in front of a command
COMMAND = rf"(?:{SETTING})*{FIRST_WORDS}(?= |$).*"


@dataclasses.dataclass(frozen=True)
class Command:
    """A command as one would type it, without what only describes it."""

    place: str  # FILE:LINE
    words: tuple[str, ...]
    environment: tuple[str, ...] = ()

    def __str__(self) -> str:
        return shlex.join([*self.environment, *self.words])

    @property
    def script(self) -> str:
        """Returns scripts/NAME if the command runs one of ours, else ""."""
        name = self.words[self.words[0] == "python"] if len(self.words) > 1 else self.words[0]
        return name if name.startswith("scripts/") else ""


def commands(text: str, place: str) -> list[Command]:
    """Returns the commands of a page: lines of blocks, and `code` within sentences, in the order of its lines."""
    blocks, sentences = _apart(text)
    joined = re.sub(r"\\\n *", lambda match: "\0" * match[0].count("\n"), blocks)
    found = []
    line = 1
    for typed in joined.split("\n"):
        if match := re.match(rf" +(?:\$ )?({COMMAND})", typed.replace("\0", "")):
            found.append((line, match[1]))
        line += 1 + typed.count("\0")
    for match in re.finditer(r"`([^`]+)`", sentences):
        words = " ".join(match[1].split())
        if re.fullmatch(COMMAND, words) and (" " in words or words.endswith(".sh")):
            found.append((1 + sentences.count("\n", 0, match.start()), words))
    return [command for line, said in sorted(found) for command in _split(f"{place}:{line}", said)]


def _apart(text: str) -> tuple[str, str]:
    """Returns (blocks, sentences): each has the lines of the text, those of the other are empty. Python is neither."""
    blocks, sentences, fence = [], [], ""
    for line in text.split("\n"):
        if line.startswith("```"):
            fence = "" if fence else line.removeprefix("```") or "plain"
            line = ""
        block = fence != "python" and f"    {line}" if fence else line if line.startswith("    ") else ""
        blocks.append(block or "")
        sentences.append("" if fence or block else line)
    return "\n".join(blocks), "\n".join(sentences)


def _split(place: str, said: str) -> list[Command]:
    """Returns the commands of a line; one that shows a form, with KEY, is none, nor is the bare name of a verb."""
    said = re.sub(r" \.\.\.$| \$\(.*?\)| < \S+$", "", re.sub(r" +# .*", "", said))
    found = []
    for part in said.split(" && "):
        words = [word.partition("|")[0] for word in shlex.split(part)]
        count = next(i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
        bare = words[count:] == ["python", "-m", "jaxlm.main"] or (words[count] == "jaxlm" and len(words) - count < 3)
        if "KEY" not in part and not bare:
            found.append(Command(place, tuple(words[count:]), tuple(words[:count])))
    return found


def every() -> list[Command]:
    """Returns all of them, page by page."""
    found = []
    for path in [*PAGES, *CONFIGS, LEADERBOARD]:
        text = path.read_text("utf-8")
        if path.suffix == ".py":
            text = ast.get_docstring(ast.parse(text), clean=False) or ""
        found += commands(text, str(path.relative_to(ROOT)))
    return found


def with_new_words(commands: Collection[Command]) -> list[Command]:
    """Returns the commands, in their order, that have a word which no longer one has, of the same verb or script.

    Of a flag the name counts, not the value.
    """
    known, chosen = set(), set()
    for command in sorted(commands, key=lambda command: -len(command.words)):
        verb = command.script or command.words[:2]
        words = {(verb, word.partition("=")[0] if word.startswith("-") else word) for word in command.words}
        if words - known:
            known |= words
            chosen.add(command)
    return [command for command in commands if command in chosen]


# Of the leaderboard's scripts: one needs a run, and is run where there is one; one is run whole by `pytest -m recipe`; and
# all sections of the GPU's are minutes, of which other rows run two.
NOT_BY_SMALLEST = ("scripts/bench_eval.py", "scripts/story.sh")
TOO_LONG = ("python scripts/bench_gpu.py",)


def without_numbers(command: Command) -> str:
    """Returns a script's command without the numbers that --smallest replaces."""
    return " ".join(word for word in command.words if not re.fullmatch(r"--[\w-]+=[\d.]+", word))


def by_smallest() -> dict[str, Command]:
    """Returns the commands of the leaderboard's scripts, each once whatever its numbers are."""
    commands: dict[str, Command] = {}
    for command in every():
        if command.place.startswith("dev/LEADERBOARD.md") and command.script not in ("", *NOT_BY_SMALLEST):
            commands.setdefault(without_numbers(command), command)
    return {text: command for text, command in commands.items() if text not in TOO_LONG}
