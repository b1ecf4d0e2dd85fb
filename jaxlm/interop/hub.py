"""Sends the folder of an export to the Hugging Face hub, by `huggingface_hub`.

The library finds the token itself (HF_TOKEN, or the hub's login) and asks the hub which files it has already.
"""

import contextlib
import pathlib
from collections.abc import Iterator

from jaxlm.config import ConfigError, RunError, optional

_WEIGHTS = "model*.safetensors*"  # one file, or several and their index


def prepare(repository: str, to: str, public: bool) -> None:
    """Makes the repository USER/NAME if there is none, private unless `public`.

    Raises:
      ConfigError: no token may write there, it is public against `public`, or it holds a model and this is an adapter ("peft").
      RunError: the hub does not answer.
    """
    with _errors(repository) as library:
        if repository.count("/") != 1:
            raise ConfigError(f"--push={repository}: name a repository as USER/NAME")
        if not library.get_token():
            raise ConfigError("--push needs a token that may write: `hf auth login`, or HF_TOKEN in the environment")
        api = library.HfApi()
        api.create_repo(repository, private=not public, exist_ok=True)
        there = api.model_info(repository)
        if not (there.private or public):
            raise ConfigError(f"--push={repository}: this repository is public: add --public, or name another")
        names = {file.rfilename for file in there.siblings or ()} - {".gitattributes", "README.md"}
        if names and ("adapter_config.json" in names) != (to == "peft"):
            held, other = ("a model", "an adapter") if to == "peft" else ("an adapter", "a model")
            raise ConfigError(f"--push={repository}: {held} is there; give {other} a repository of its own")


def push(folder: pathlib.Path, repository: str, message: str) -> str:
    """Sends all files of a folder; returns their address. Raises RunError if the hub does not answer.

    Weights of an earlier push in other files go: loaders would take them before those of today.
    """
    old = [_WEIGHTS] if any(folder.glob(_WEIGHTS)) else None
    with _errors(repository) as library:
        sent = library.HfApi().upload_folder(
            repo_id=repository, folder_path=folder, commit_message=message, delete_patterns=old
        )
        return str(sent)


@contextlib.contextmanager
def _errors(repository: str) -> Iterator:
    """Yields the library; its errors become one line."""
    library = optional("huggingface_hub", "--push needs the package huggingface_hub", "hub")
    try:
        yield library
    except ConfigError:
        raise
    except Exception as error:
        why = f"--push={repository}: {' '.join(str(error).split())}"
        if getattr(getattr(error, "response", None), "status_code", 0) in (401, 403, 404):
            raise ConfigError(f"{why}; has the token the right to write there?") from error
        if isinstance(error, ValueError):  # the name
            raise ConfigError(why) from error
        raise RunError(f"{why}; run it again: files that are there are not sent twice") from error
