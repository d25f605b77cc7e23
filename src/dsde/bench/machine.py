"""What a run was measured on and with: figures without it are worth nothing."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from dsde.engine.llm import LLM

PACKAGES = ("numpy", "triton", "transformers", "vllm")


def describe_machine(llm: LLM) -> dict[str, str]:
    device = llm.engine.target.model.device
    described = {"processor": _processor(), "cores": str(os.cpu_count()), "threads": str(torch.get_num_threads())}
    if device.type == "cuda":
        described |= {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
    described |= {"system": platform.system(), "python": platform.python_version(), "torch": torch.__version__}
    for package in PACKAGES:
        try:
            described[package] = version(package)
        except PackageNotFoundError:
            continue
    return described


def describe_models(llm: LLM) -> dict[str, str]:
    model = llm.engine.target.model
    dtype = str(model.dtype).removeprefix("torch.")
    return {"target": llm.target, "draft": llm.draft, "dtype": dtype, "device": model.device.type}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
