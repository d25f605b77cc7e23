"""Asynchronous scheduling on the CPU, where vLLM does not offer it: what it waits for has always happened already.

So the bookkeeping of two steps under way can be tested without a GPU. It says nothing of streams.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    synchronize = wait = record


class _Stream:
    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, *args: Any) -> None:
        pass

    wait_event = wait_stream


def force_asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    """For engines made from now on, if they ask for it."""
    from vllm.platforms.cpu import CpuPlatform

    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: _Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda *_: contextlib.nullcontext())
    check = CpuPlatform.check_and_update_config.__func__

    def check_and_allow(cls: Any, config: Any) -> None:
        asked = config.scheduler_config.async_scheduling
        check(cls, config)
        config.scheduler_config.async_scheduling = bool(asked)

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(check_and_allow))
