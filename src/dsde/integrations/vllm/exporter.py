"""Joins the plugin's numbers to vLLM's Prometheus endpoint, in whichever process serves it."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsde.integrations.vllm.meter import read_meter
from dsde.integrations.vllm.scheduling import METRICS_FOLDER

COUNTERS = {
    "num_steps": ("dsde_steps", "steps in which somebody decoded"),
    "num_off_steps": ("dsde_off_steps", "those of them that ended without a draft"),
    "num_plans": ("dsde_plans", "times the policy was asked"),
    "num_lowered": ("dsde_lowered", "lengths that a cap or gate lowered"),
    "num_catch_up_tokens": ("dsde_catch_up_tokens", "tokens that the draft read because it had missed them"),
    "num_draft_tokens": ("dsde_draft_tokens", "drafted tokens that were verified"),
    "num_accepted_tokens": ("dsde_accepted_tokens", "drafted tokens that stood"),
    "draft_s": ("dsde_draft_seconds", "time that drafting took"),
    "verify_s": ("dsde_verify_seconds", "time that the target's passes and verdicts took"),
}
GAUGES = {
    "cap": ("dsde_cap", "what a stage limited the lengths of the last plan to"),
    "mean_kld": ("dsde_mean_kld", "mean KLD of the last verified step"),
    "num_changed_hooks": ("dsde_changed_hooks", "places in vLLM that are not as expected; above 0 the plugin is off"),
}


class Collector:
    """Reads the files of all schedulers below a folder, whenever Prometheus asks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        engines = []
        for file in sorted(self.folder.glob("*.bin")):
            try:
                engines.append(read_meter(file))
            except (OSError, ValueError):
                continue  # one that is just being made
        if not engines:
            return
        labels = [[str(place), policy] for place, (_, _, policy) in enumerate(engines)]
        for families, kind in ((COUNTERS, CounterMetricFamily), (GAUGES, GaugeMetricFamily)):
            for name, (metric, text) in families.items():
                family = kind(metric, text, labels=["engine", "policy"])
                for label, (values, _, _) in zip(labels, engines, strict=True):
                    family.add_metric(label, values[name])
                yield family
        family = CounterMetricFamily("dsde_lengths", "lengths chosen", labels=["engine", "policy", "length"])
        for label, (_, counts, _) in zip(labels, engines, strict=True):
            for length, count in enumerate(counts):
                if count:
                    family.add_metric([*label, str(length)], count)
        yield family


_is_offered = False


def offer_metrics() -> None:
    """Once in every process. The first one names the folder, and those that it starts inherit the name."""
    global _is_offered
    if _is_offered:
        return
    _is_offered = True
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        return
    if METRICS_FOLDER not in os.environ:
        folder = Path(tempfile.gettempdir()) / f"dsde-{uuid.uuid4().hex}"
        os.environ[METRICS_FOLDER] = str(folder)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    REGISTRY.register(Collector(Path(os.environ[METRICS_FOLDER])))
