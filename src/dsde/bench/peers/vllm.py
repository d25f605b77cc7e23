"""vLLM, without speculation and with a fixed length: a process of its own for each, since vLLM fixes it at its start.

A process waits while others have their turn. Target and draft must be Hugging Face folders or hub ids; the embedded
pair is written out as such. What vLLM drafts and accepts is not asked: only tokens and seconds are compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dsde.bench.contender import Advance, Contender, Task, Turn
from dsde.bench.results import Counts, Results, Round
from dsde.core.errors import DsdeError
from dsde.engine.llm import LLM
from dsde.models.export import export_pair

LENGTH = 4
MARK = "DSDE "
"""begins the lines that are meant for us; vLLM prints others"""
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
_SHARE_OF_GPU = 0.2


class PeerFailed(DsdeError):
    """Another program ended when it should have answered."""


def make_vllm(results: Results, llm: LLM, longest: int) -> list[Contender]:
    pair = _folders(results.setting.target, llm.draft)
    if pair is None:
        results.note("vLLM is left out: it needs target and draft as folders or hub ids.")
        return []
    target, draft, temporary = pair
    model = llm.engine.target.model
    options: dict[str, Any] = {
        "model": target,
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": longest,
        "max_num_seqs": max(results.setting.batch_sizes),
        "gpu_memory_utilization": _SHARE_OF_GPU,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
    }
    drafting = {"method": "draft_model", "model": draft, "num_speculative_tokens": LENGTH}
    eos = sorted(llm.engine.intake.eos_token_ids)
    contenders: list[Contender] = []
    for name, more in (("vllm", {}), (f"vllm:{LENGTH}", {"speculative_config": drafting})):
        try:
            contenders.append(VllmContender(name, options | more, eos, temporary))
        except PeerFailed as error:
            results.note(f"Left out: {error}")
    return contenders


def _folders(target: str | None, draft: str) -> tuple[str, str, tempfile.TemporaryDirectory[str] | None] | None:
    if target is None and draft == "embedded":
        temporary: tempfile.TemporaryDirectory[str] = tempfile.TemporaryDirectory()
        first, second = export_pair(Path(temporary.name))
        return str(first), str(second), temporary
    names = [name for name in (target, draft) if name and (Path(name).is_dir() or ("/" in name and ":" not in name))]
    return (names[0], names[1], None) if len(names) == 2 and not any(n.endswith(".gguf") for n in names) else None


class VllmContender:
    most_places: int | None = None

    def __init__(
        self,
        name: str,
        options: dict[str, Any],
        eos_token_ids: list[int],
        temporary: tempfile.TemporaryDirectory[str] | None = None,
    ) -> None:
        self.name = name
        self._temporary = temporary
        """folder that must live as long as this"""
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dsde.bench.peers.vllm_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **_ENVIRONMENT},
        )
        self._ask({"options": options, "eos_token_ids": eos_token_ids})

    def take_turn(self, tasks: Sequence[Task], places: int, arrivals: Sequence[float] | None, advance: Advance) -> Turn:
        requests = [[task.prompt, task.params.max_tokens, task.params.temperature, task.params.seed] for task in tasks]
        answer = self._ask({"requests": requests, "places": places, "arrivals": arrivals})
        for _ in tasks:
            advance()
        counts = Counts(num_target_passes=answer.pop("num_steps"), num_draft_passes=None, num_draft_tokens=None)
        texts = answer.pop("answers")
        return Turn(Round(counts=counts, **answer), texts)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()  # closes the pipes
        self._log.close()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # the process has ended, and what it said last tells why
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return answer
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        self.close()
        raise PeerFailed(f"{self.name} ended: {lines[-1] if lines else 'it did not say why'}.")
