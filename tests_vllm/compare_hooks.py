"""Compares what the plugin expects of vLLM with the sources of releases that are not installed.

    pip download --no-deps --only-binary=:all: vllm==0.30.0
    unzip -q vllm-0.30.0-*.whl '*.py' -d 0.30.0
    python tests_vllm/compare_hooks.py 0.30.0

Every hook by name and parameters, what else is called likewise, attributes by name alone; not what they do.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from dsde.integrations.vllm import hooks, plugin, room
from dsde.integrations.vllm.hooks import Hook

CALLED = (
    Hook(
        *(hooks.PROPOSER, "SpecDecodeBaseProposer", "prepare_next_token_ids_padded"),
        ("sampled_token_ids", "requests", "gpu_input_batch", "discard_request_mask"),
    ),
    Hook(
        *(hooks.RUNNER, "GPUModelRunner", "_copy_valid_sampled_token_count"),
        ("next_token_ids", "valid_sampled_tokens_count"),
    ),
)
EXPECTED = (plugin.MAKE_SCHEDULER, plugin.MAKE_WORKER, *hooks.NEEDED, *hooks.FOR_GRAPHS, *room.LOOPS, *CALLED)
ATTRIBUTES = {
    "vllm.config.speculative": ("num_speculative_tokens_per_batch_size",),
    "vllm.config.vllm": ("use_v2_model_runner",),
    "vllm.forward_context": ("num_reqs", "uniform", "has_lora"),
    "vllm.v1.core.sched.output": ("num_spec_tokens_to_schedule", "scheduled_spec_decode_tokens", "finished_req_ids"),
    "vllm.v1.request": ("is_prefill_chunk", "spec_token_ids", "num_computed_tokens", "all_token_ids"),
    "vllm.v1.spec_decode.metadata": ("num_draft_tokens", "target_logits_indices"),
    hooks.SCHEDULER: ("dynamic_sd_lookup", "num_spec_tokens", "finished_req_ids"),
    hooks.RUNNER: (
        *("valid_sampled_token_count_event", "discard_request_mask", "uniform_decode_query_len"),
        *("attn_groups", "speculative_config"),
    ),
    hooks.PROPOSER: ("compute_logits", "draft_attn_groups"),
    hooks.DISPATCHER: ("uniform_decode_query_len", "compilation_config"),
}


def find_parameters(source: str, hook: Hook) -> tuple[str, ...] | None:
    """Without `self`; None: there is no such method in the class itself."""
    for owner in ast.walk(ast.parse(source)):
        if isinstance(owner, ast.ClassDef) and owner.name == hook.owner:
            for one in owner.body:
                if isinstance(one, ast.FunctionDef) and one.name == hook.name:
                    return tuple(argument.arg for argument in (*one.args.posonlyargs, *one.args.args))[1:]
    return None


def compare(folder: Path) -> list[str]:
    """What is not as expected, one phrase each."""

    def read(module: str) -> str:
        path = folder / (module.replace(".", "/") + ".py")
        return path.read_text(encoding="utf-8") if path.exists() else ""

    changes = []
    for hook in EXPECTED:
        found = find_parameters(read(hook.module), hook)
        if found is None:
            changes.append(f"{hook.path} is not there")
        elif found[: len(hook.parameters)] != hook.parameters:
            changes.append(f"{hook.path} takes ({', '.join(found)})")
    for module, names in ATTRIBUTES.items():
        changes += [f"{module} knows no {name}" for name in names if not re.search(rf"\b{name}\b", read(module))]
    return changes


if __name__ == "__main__":
    has_changes = False
    for argument in sys.argv[1:]:
        found = compare(Path(argument))
        print(f"{argument}: {'; '.join(found) or f'{len(EXPECTED)} methods and all attributes are as expected'}")
        has_changes |= bool(found)
    sys.exit(has_changes)
