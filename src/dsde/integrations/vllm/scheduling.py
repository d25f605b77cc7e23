"""The scheduler's side of the plugin: wraps vLLM's schedulers, which then obey a `Controller`.

The lengths of a step are set as vLLM's own Dynamic SD sets its one, per request where vLLM has one for all: under
asynchronous scheduling as so many placeholders, otherwise by cutting what the draft brought.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

from dsde.integrations.vllm import hooks
from dsde.integrations.vllm.controller import Controller, Limits
from dsde.integrations.vllm.messages import attach, attached
from dsde.integrations.vllm.meter import Meter
from dsde.integrations.vllm.settings import Settings
from dsde.integrations.vllm.support import make_supported
from dsde.integrations.vllm.trace import TraceWriter

CONTROLLER = "dsde_controller"
METRICS_FOLDER = "DSDE_METRICS_DIR"


def steer(scheduler: Any, settings: Settings) -> Controller:
    """Let this scheduler obey the policy of `settings`, with nothing learnt."""
    config = scheduler.vllm_config
    speculative = config.speculative_config
    policy = make_supported(settings.policy, speculative.method)
    is_async = bool(config.scheduler_config.async_scheduling)
    has_graphs = _has_graphs(config)
    limits = Limits(
        max_length=scheduler.num_spec_tokens,
        max_model_len=scheduler.max_model_len,
        num_in_flight=2 if is_async else 1,
        exact_rooms=not has_graphs,
        can_skip=speculative.method == "draft_model",
        # As much as the target may read in one, which takes longer: who need not catch up waits for it.
        catch_up_budget=config.scheduler_config.max_num_batched_tokens,
        num_graph_tokens=_num_graph_tokens(config) if has_graphs and settings.graphs else 0,
    )
    # With a table vLLM does not pad a lone token with drafts that nobody made. The table itself is never used.
    scheduler.dynamic_sd_lookup = [scheduler.num_spec_tokens] * (config.scheduler_config.max_num_seqs + 1)
    meter = _make_meter(settings.policy)
    trace = TraceWriter(settings.trace) if settings.trace else None
    controller = Controller(policy, limits, meter, trace)
    setattr(scheduler, CONTROLLER, controller)
    return controller


def could_be_async(config: Any) -> bool:
    """Whether vLLM would schedule asynchronously if it were asked to."""
    speculative = config.speculative_config
    return bool(
        speculative.method == "draft_model"
        and not getattr(speculative, "disable_padded_drafter_batch", False)
        and config.parallel_config.distributed_executor_backend in (None, "uni", "mp")
        and config.device_config.device_type == "cuda"
    )


def count_changes(num: int) -> None:
    """vLLM is not as expected, and goes on without the plugin: say so where metrics are read."""
    _make_meter("none")["num_changed_hooks"] = num


def _make_meter(policy: str) -> Meter:
    folder = os.environ.get(METRICS_FOLDER)
    return Meter(Path(folder) / f"engine-{os.getpid()}-{uuid.uuid4().hex[:8]}.bin" if folder else None, policy)


def _has_graphs(config: Any) -> bool:
    mode = getattr(config.compilation_config, "cudagraph_mode", None)
    return not config.model_config.enforce_eager and mode is not None and bool(mode.has_full_cudagraphs())


def _num_graph_tokens(config: Any) -> int:
    """As plugin.make_worker has it: there are none of ours with data parallel."""
    if config.parallel_config.data_parallel_size > 1:
        return 0
    return int(getattr(config.compilation_config, "max_cudagraph_capture_size", None) or 0)


def after_schedule(original: Any, scheduler: Any, scheduler_output: Any) -> None:
    original(scheduler, scheduler_output)
    controller = getattr(scheduler, CONTROLLER, None)
    if controller is None:
        return
    directive = controller.decide(scheduler_output, scheduler.requests, len(scheduler.waiting))
    attach(scheduler_output, directive)
    scheduler_output.num_spec_tokens_to_schedule = directive.longest


def after_schedule_async(original: Any, scheduler: Any, scheduler_output: Any) -> None:
    """Its original calls the one above, then books as many placeholders for everybody as the longest draft has."""
    original(scheduler, scheduler_output)
    directive = attached(scheduler_output)
    if directive is None or not directive.longest:
        return
    for name, length in directive.lengths.items():
        if length < directive.longest:
            scheduler.requests[name].spec_token_ids = [-1] * length


def update_drafts(original: Any, scheduler: Any, draft_token_ids: Any) -> None:
    """Without asynchronous scheduling: keep of each draft what was asked for."""
    controller = getattr(scheduler, CONTROLLER, None)
    if controller is not None:
        lengths = controller.latest_lengths
        for place, name in enumerate(draft_token_ids.req_ids):
            drafts = draft_token_ids.draft_token_ids
            drafts[place] = drafts[place][: lengths.get(name, 0)]
    original(scheduler, draft_token_ids)


def update_from_output(original: Any, scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
    controller, directive = getattr(scheduler, CONTROLLER, None), attached(scheduler_output)
    if controller is not None and directive is not None and directive.is_timed:
        sampled = {}
        if scheduler_output.scheduled_spec_decode_tokens:  # or else everybody got one
            counts = map(len, model_runner_output.sampled_token_ids)
            sampled = dict(zip(model_runner_output.req_ids, counts, strict=False))
        controller.observe(directive.step, sampled, attached(model_runner_output))
    outputs = original(scheduler, scheduler_output, model_runner_output)
    if controller is not None:
        controller.forget(scheduler.finished_req_ids)
    return outputs


def install() -> None:
    hooks.wrap(hooks.AFTER_SCHEDULE, after_schedule)
    hooks.wrap(hooks.AFTER_SCHEDULE_ASYNC, after_schedule_async)
    hooks.wrap(hooks.UPDATE_DRAFTS, update_drafts)
    hooks.wrap(hooks.UPDATE_FROM_OUTPUT, update_from_output)
