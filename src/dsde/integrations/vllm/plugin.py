"""What vLLM loads: the entry point `vllm.general_plugins`, called in every process of vLLM, more than once.

It only makes vLLM's scheduler and workers look, when they are made, whether somebody asked for dsde. Nothing else is
touched until then.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from dsde.core.errors import InvalidInput
from dsde.integrations.vllm import hooks
from dsde.integrations.vllm.settings import Settings, read_settings
from dsde.integrations.vllm.support import make_supported, wants_signals

logger = logging.getLogger("vllm.dsde")

MAKE_SCHEDULER = hooks.Hook(hooks.SCHEDULER, "Scheduler", "__init__", ("vllm_config",))
MAKE_WORKER = hooks.Hook("vllm.v1.worker.worker_base", "WorkerBase", "__init__", ("vllm_config",))

_said: set[str] = set()


def register() -> None:
    changes = hooks.find_changes((MAKE_SCHEDULER, MAKE_WORKER))
    if changes:
        _say(changes)
        return
    from dsde.integrations.vllm.exporter import offer_metrics

    offer_metrics()
    hooks.wrap(MAKE_SCHEDULER, make_scheduler)
    hooks.wrap(MAKE_WORKER, make_worker)


def make_scheduler(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    original(scheduler, *args, **kwargs)
    settings = asked_for(scheduler.vllm_config)
    if settings is None:
        return
    from dsde.integrations.vllm import room, scheduling

    changes = hooks.find_changes(hooks.NEEDED)
    if changes:
        _say(changes)
        scheduling.count_changes(len(changes))
        return
    controller = scheduling.steer(scheduler, settings)
    scheduling.install()
    room.install()
    logger.info("dsde: policy %s chooses up to %d tokens", settings.policy, controller.limits.max_length)
    if controller.limits.num_in_flight == 1 and scheduling.could_be_async(scheduler.vllm_config):
        logger.warning(
            "dsde: asynchronous scheduling is off, and steps without drafts take longer than without speculation; "
            "--async-scheduling turns it on"
        )


def make_worker(original: Any, worker: Any, *args: Any, **kwargs: Any) -> None:
    original(worker, *args, **kwargs)
    settings = asked_for(worker.vllm_config)
    if settings is None or hooks.find_changes(hooks.NEEDED):
        return
    from dsde.integrations.vllm import graphs, room, running

    running.install()
    room.install()
    # Ranks of data parallel pad their batches to one another's, which a graph chosen here would not know.
    if settings.graphs and worker.vllm_config.parallel_config.data_parallel_size == 1:
        graphs.install()


def asked_for(vllm_config: Any) -> Settings | None:
    """Raises InvalidInput where what was asked for cannot be."""
    settings = read_settings(vllm_config.additional_config, os.environ)
    if settings is None:
        return None
    speculative = vllm_config.speculative_config
    if speculative is None:
        if read_settings(vllm_config.additional_config, {}) is None:
            return None  # a policy in the environment is for whoever speculates
        raise InvalidInput(
            "dsde chooses how many tokens a draft proposes, and there is no draft; give vLLM a --speculative-config"
        )
    # Workers are made first, and before they load their models: whoever asked for too much hears of it at once.
    if getattr(vllm_config, "use_v2_model_runner", False):
        raise InvalidInput(
            "dsde works with vLLM's model runner V1, and this vLLM would use V2; set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    if getattr(speculative, "num_speculative_tokens_per_batch_size", None):
        raise InvalidInput(
            "dsde chooses the length, and so does num_speculative_tokens_per_batch_size; leave one of them out"
        )
    policy = make_supported(settings.policy, speculative.method)
    if wants_signals(policy) and getattr(speculative, "use_local_argmax_reduction", False):
        raise InvalidInput(
            f"policy {settings.policy!r} looks at the draft's distribution, and with use_local_argmax_reduction there "
            "is none; leave that out, or try goodput"
        )
    return settings


def _say(changes: list[str]) -> None:
    text = "; ".join(changes)
    if text not in _said:
        _said.add(text)
        logger.warning("dsde: this vLLM is not one that it knows, which goes on without it: %s", text)
