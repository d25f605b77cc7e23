"""Finds a model by name: a local folder, a local `.gguf` file, or a repository of the Hugging Face hub.

Knows where models lie. Knows nothing of what is in them beyond which files must be there.
"""

from __future__ import annotations

import re
from pathlib import Path

from dsde.core.errors import DownloadError, ModelError

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<file>[\w./-]+\.gguf))?")
_FOLDER_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja"]


def resolve(name: str) -> Path:
    """The local folder or GGUF file that `name` means; a hub repository ("org/name", or "org/name:file.gguf" for
    one GGUF file of it) is downloaded first."""
    path = Path(name).expanduser()
    if path.is_dir():
        return _check_folder(path, name)
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise ModelError(f"{name} is neither a folder nor a .gguf file.")
    hub_id = _HUB_ID.fullmatch(name)
    if hub_id is None or name.startswith((".", "~")):
        raise ModelError(f"There is no model folder or .gguf file at {name}.")
    return _from_hub(hub_id["repo"], hub_id["file"])


def _check_folder(path: Path, name: str) -> Path:
    if not (path / "config.json").is_file():
        inside = sorted(path.glob("*.gguf"))
        if len(inside) == 1:
            return inside[0]
        hint = "; name one of its .gguf files" if inside else ""
        raise ModelError(f"{name} holds no config.json, so it is not a model folder{hint}.")
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"{name} holds no .safetensors weights; only safetensors and GGUF are read.")
    return path


def _from_hub(repo: str, file: str | None) -> Path:
    # Takes a third of a second to import, and local models never need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    wanted = [*_FOLDER_FILES, file] if file else _FOLDER_FILES
    unwanted = ["*.safetensors"] if file else None
    try:
        folder = Path(snapshot_download(repo, allow_patterns=wanted, ignore_patterns=unwanted))
    except GatedRepoError as error:
        raise DownloadError(f"{repo} is gated: ask for access on its hub page and run `hf auth login`.") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"{repo} is neither a local path nor a repository of the Hugging Face hub.") from error
    except Exception as error:
        # huggingface_hub lets the errors of several HTTP and file libraries through; all mean that it is not here.
        raise DownloadError(
            f"{repo} is not a local path and could not be downloaded from the Hugging Face hub "
            f"({type(error).__name__}); check the name and the network."
        ) from error
    if file is None:
        return _check_folder(folder, repo)
    if not (folder / file).is_file():
        raise ModelError(f"{repo} holds no file {file}.")
    return folder / file
