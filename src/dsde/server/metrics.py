"""Prometheus metrics: the engine's own counters read when asked, and times of requests counted as they end.

Names of speculation are those that vLLM, llama.cpp and LMDeploy share, without a prefix; the rest begins with `dsde_`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from dsde.core.errors import DsdeError
from dsde.core.outputs import RequestOutput
from dsde.engine.async_llm import AsyncLLM
from dsde.engine.engine import Engine
from dsde.server.admission import Admission
from dsde.server.records import Record

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64, 128)
_COST_SIZES = (1, 4, 16, 64, 256, 1024)
_ENGINE_ANSWERS_S = 2.0

_COUNTERS = {
    "spec_decode_num_drafts": ("num_drafts", "Sequence-steps in which something was drafted."),
    "spec_decode_num_draft_tokens": ("num_draft_tokens", "Drafted tokens."),
    "spec_decode_num_accepted_tokens": ("num_accepted_tokens", "Drafted tokens that stood, without the bonus token."),
    "dsde_prompt_tokens": ("num_prompt_tokens", "Tokens of prompts."),
    "dsde_cached_prompt_tokens": ("num_cached_prompt_tokens", "Tokens of prompts found in the prefix cache."),
    "dsde_generation_tokens": ("num_emitted_tokens", "Tokens generated."),
    "dsde_catch_up_tokens": ("num_catch_up_tokens", "Tokens that the draft read because it had not seen them."),
    "dsde_steps": ("num_steps", "Steps of the engine: target passes over the whole batch."),
    "dsde_preemptions": ("num_preemptions", "Sequences that gave up their KV blocks and were computed again."),
    "dsde_host_steps": ("num_host_steps", "Steps that the device could not do by itself and that went a slower way."),
    "dsde_cold_steps": (
        "num_cold_steps",
        "Steps that met a shape for the first times, much slower than those after them.",
    ),
    "dsde_lossy_drafts": ("num_lossy", "Sequence-steps judged by a rule that is not lossless."),
}
_LOWERED = {
    "cap": "num_capped",
    "memory": "num_trimmed",
    "draft": "num_undrafted",
    "stop": "num_stopped",
    "budget": "num_cut",
}
_PARTS = ("schedule", "plan", "draft", "target", "accept", "commit", "idle")

Costs = list[tuple[str, int, float]]


class ServerMetrics:
    def __init__(self, llm: AsyncLLM, admission: Admission) -> None:
        self._llm = llm
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector(llm.engine, admission)
        self._registry.register(self._engine)

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, about, buckets=buckets, registry=self._registry)

        self._queue_s = histogram("dsde_request_queue_seconds", "From arrival to first being scheduled.", _SECONDS)
        self._first_s = histogram("dsde_time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self._token_s = histogram(
            "dsde_time_per_output_token_seconds", "Per token after the first, of one completion.", _TOKEN_SECONDS
        )
        self._total_s = histogram("dsde_request_seconds", "From arrival to the last token.", _SECONDS)
        self._num_prompt = histogram("dsde_request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._num_generated = histogram("dsde_request_generation_tokens", "Tokens of a completion.", _TOKENS)
        self._finishes = Counter(
            "dsde_completions", "Finished completions by what ended them.", ["finish_reason"], registry=self._registry
        )
        self._answers = Counter(
            "dsde_http_requests", "Answers by route and status.", ["method", "route", "status"], registry=self._registry
        )

    def count_request(self, output: RequestOutput) -> None:
        """A request has finished."""
        metrics = output.metrics
        self._queue_s.observe(metrics.queue_s)
        self._first_s.observe(metrics.first_token_s)
        self._total_s.observe(metrics.total_s)
        self._num_prompt.observe(len(output.prompt_token_ids))
        longest = max(len(one.token_ids) for one in output.outputs)
        if longest > 1:
            self._token_s.observe((metrics.total_s - metrics.first_token_s) / (longest - 1))
        for one in output.outputs:
            self._num_generated.observe(len(one.token_ids))
            self._finishes.labels(one.finish_reason).inc()

    def count_answer(self, record: Record) -> None:
        self._answers.labels(record.method, record.route, record.status).inc()

    async def page(self) -> bytes:
        """Everything, in the text format."""
        try:
            async with asyncio.timeout(_ENGINE_ANSWERS_S):
                self._engine.costs = await self._llm.ask(_read_costs)
        except (TimeoutError, DsdeError):
            self._engine.costs = []  # an engine that does not answer; its counters can be read all the same
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Reads plain numbers of an engine that may be in the middle of a step."""

    def __init__(self, engine: Engine, admission: Admission) -> None:
        self._source = engine
        self._admission = admission
        self.costs: Costs = []

    def collect(self) -> Iterator[Metric]:
        metrics = self._source.metrics
        for name, (attribute, about) in _COUNTERS.items():
            yield CounterMetricFamily(name, about, value=getattr(metrics, attribute))
        yield _labelled(
            CounterMetricFamily(
                "spec_decode_num_accepted_tokens_per_pos",
                "Accepted tokens by their place in the draft, from 0.",
                labels=["position"],
            ),
            enumerate(list(metrics.num_accepted_tokens_per_pos)),
        )
        yield _labelled(
            CounterMetricFamily(
                "spec_decode_num_draft_tokens_per_pos",
                "Drafted tokens by their place in the draft, from 0.",
                labels=["position"],
            ),
            enumerate(list(metrics.num_draft_tokens_per_pos)),
        )
        yield from self._lengths()
        yield _labelled(
            CounterMetricFamily(
                "dsde_lengths_lowered",
                "Sequence-steps that drafted less than planned: by a cap, short memory, a draft without more to offer, "
                "a stopping rule or a verification budget.",
                labels=["by"],
            ),
            ((by, getattr(metrics, attribute)) for by, attribute in _LOWERED.items()),
        )
        yield _labelled(
            CounterMetricFamily("dsde_step_seconds", "Seconds of steps by what they were spent on.", labels=["part"]),
            ((part, getattr(metrics, f"{part}_s")) for part in _PARTS),
        )
        yield _labelled(
            CounterMetricFamily("dsde_requests", "Requests by what became of them.", labels=["outcome"]),
            (("finished", metrics.num_finished), ("aborted", metrics.num_aborted)),
        )
        yield CounterMetricFamily(
            "dsde_requests_refused", "Requests turned away: queue full, or shutting down.", self._admission.num_refused
        )
        yield from self._load()

    def _lengths(self) -> Iterator[Metric]:
        metrics = self._source.metrics
        yield _length_histogram(
            "dsde_speculation_length",
            "Tokens drafted in a step by a sequence that drafted.",
            metrics.num_drafts,
            list(metrics.num_draft_tokens_per_pos),
        )
        yield _length_histogram(
            "dsde_accepted_length",
            "Drafted tokens that stood in a step, by a sequence that drafted.",
            metrics.num_drafts,
            list(metrics.num_accepted_tokens_per_pos),
        )
        yield SummaryMetricFamily(
            "dsde_kld",
            "Divergence of draft and target at drafted positions, where a policy or a viewer asks for it.",
            count_value=metrics.num_klds,
            sum_value=metrics.kld_sum,
        )
        if metrics.last_cap is not None:
            yield GaugeMetricFamily(
                "dsde_length_cap", "Cap on lengths in the newest step that had one.", metrics.last_cap
            )
        costs = GaugeMetricFamily(
            "dsde_cost_model_seconds",
            "What the policy's cost model expects of a pass: a draft's over so many sequences, a verification of so "
            "many tokens.",
            labels=["pass", "size"],
        )
        for kind, size, seconds in self.costs:
            costs.add_metric([kind, str(size)], seconds)
        yield costs

    def _load(self) -> Iterator[Metric]:
        scheduler = self._source.scheduler
        pool = scheduler.pool
        num_used = pool.num_blocks - pool.num_free
        gauges = {
            "dsde_sequences_running": ("Sequences that run.", len(scheduler.running)),
            "dsde_sequences_waiting": ("Sequences that wait for memory or a place.", len(scheduler.waiting)),
            "dsde_requests_in_flight": ("Requests let in and not yet answered.", self._admission.num_requests),
            "dsde_queue_capacity": ("Sequences that may run and wait together.", self._admission.capacity),
            "dsde_kv_blocks_used": ("KV blocks held by sequences.", num_used),
            "dsde_kv_blocks": ("KV blocks there are.", pool.num_blocks),
            "dsde_kv_usage_ratio": ("Share of KV blocks held by sequences.", num_used / pool.num_blocks),
        }
        for name, (about, value) in gauges.items():
            yield GaugeMetricFamily(name, about, value)


def _labelled(family: CounterMetricFamily, values: Iterable[tuple[Any, float]]) -> CounterMetricFamily:
    for label, value in values:
        family.add_metric([str(label)], value)
    return family


def _length_histogram(name: str, about: str, num_drafts: int, num_per_pos: list[int]) -> HistogramMetricFamily:
    """Those of at most k tokens are all but those that reached position k."""

    def at_most(length: int) -> int:
        return num_drafts - (num_per_pos[length] if length < len(num_per_pos) else 0)

    buckets = [(str(float(length)), float(at_most(length))) for length in _LENGTHS]
    return HistogramMetricFamily(name, about, [*buckets, ("+Inf", float(num_drafts))], sum_value=sum(num_per_pos))


def _read_costs(engine: Engine) -> Costs:
    model = engine.policy.cost_model
    if model is None:
        return []
    curves = {"draft": model.draft_s(_COST_SIZES), "verify": model.verify_s(_COST_SIZES)}
    return [
        (kind, size, float(seconds))
        for kind, curve in curves.items()
        for size, seconds in zip(_COST_SIZES, curve, strict=True)
    ]
