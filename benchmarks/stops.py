"""What it costs on a GPU that a rule looks at every drafted token: drafts of one length, under rules that never fire.

    python benchmarks/stops.py [--batches 1,8,64] [--length 6] [--target 1b]

Random weights in the shapes of a 1B draft (and target), greedy, a drafted token accepted with probability 0.8. With a
rule the host must hear of every pass before it starts the next one; without one it queues them all. Both make the same
passes, in turn, a few steps at a time; the best round of each counts. Seconds of a pass are the device's, from the
verdict of one step to the verification of the next, waits for the host included; those of a step are the host's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from dsde import SamplingParams  # isort: skip  (before torch, as in cpu.py)
import numpy as np
import torch

from dsde.core.stops import Signal, Stop, StopAfter, StopBefore, StopByWorth
from dsde.drafting import ModelDrafter
from dsde.engine.config import EngineConfig
from dsde.engine.engine import Engine
from dsde.models.batch import BLOCK_SIZE
from dsde.models.decoder import Decoder
from dsde.policies import BatchView, Plan, Policy
from dsde.sampling import Sampler
from gpu import SHAPES, random_model
from report import whole
from vllm_run import PROMPT_TOKENS, random_prompts

MOST_COST = 0.03
"""of a draft pass, that looking at it may cost"""
MAX_MODEL_LEN = 2048
ACCEPTANCE = 0.8


def before(count: int) -> Stop:
    return StopBefore(Signal.ENTROPY, np.full(count, np.inf), stops_above=True)


def after(count: int) -> Stop:
    return StopAfter(Signal.ENTROPY, np.full(count, np.inf), stops_above=True)


def by_worth(count: int) -> Stop:
    """Any token is worth its costs, but it might not be: the last one is waited for as well."""
    return StopByWorth(np.zeros(3), np.full(count, 30.0), np.ones(count), keep_above=1e-9, go_on_above=0, pass_above=0)


RULES: dict[str, Callable[[int], Stop] | None] = {"none": None, "after": after, "before": before, "worth": by_worth}


class FixedLength(Policy):
    def __init__(self, length: int, rule: Callable[[int], Stop] | None) -> None:
        self.length, self.rule = length, rule

    def plan(self, batch: BatchView) -> Plan:
        lengths = np.minimum(self.length, batch.rooms)
        stop = None if self.rule is None else self.rule(len(lengths))
        return Plan(lengths, lengths.astype(float), np.ones(len(lengths), dtype=bool), stop=stop)


def make_engine(target: Decoder, draft: Decoder, policy: Policy, batch: int) -> Engine:
    per_token = target.config.kv_bytes_per_token(target.dtype) + draft.config.kv_bytes_per_token(draft.dtype)
    config = EngineConfig(
        max_num_seqs=batch,
        max_model_len=MAX_MODEL_LEN,
        kv_cache_bytes=batch * (MAX_MODEL_LEN + 2 * BLOCK_SIZE) * per_token,
        synthetic_acceptance=(ACCEPTANCE,),
    )
    sampler = Sampler()
    drafter = ModelDrafter(draft, sampler, target.config.vocab_size, config.tokens_per_pass(target.device))
    engine = Engine(target, drafter, policy, None, sampler, config)
    params = SamplingParams(temperature=0, max_tokens=MAX_MODEL_LEN - PROMPT_TOKENS, ignore_eos=True)
    for prompt in random_prompts(batch, batch, target.config.vocab_size):
        engine.add(prompt, params)
    return engine


def run_round(engine: Engine, num_steps: int) -> tuple[float, float]:
    """Milliseconds of a draft pass and of a step."""
    metrics = engine.metrics
    draft_s, num_passes, num_steps_before = metrics.draft_s, metrics.num_draft_passes, metrics.num_steps
    began = time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    step_s = (time.perf_counter() - began) / (metrics.num_steps - num_steps_before)
    pass_s = (metrics.draft_s - draft_s) / (metrics.num_draft_passes - num_passes)
    return 1e3 * pass_s, 1e3 * step_s


def compare(target: Decoder, draft: Decoder, batch: int, options: argparse.Namespace) -> bool:
    """Whether every rule is cheap enough."""
    engines = {
        name: make_engine(target, draft, FixedLength(options.length, rule), batch) for name, rule in RULES.items()
    }
    for engine in engines.values():  # prompts, and graphs
        run_round(engine, 12)
    # While prompts are read, drafts may be shorter for want of room in a pass.
    num_stopped = {name: engine.metrics.num_stopped for name, engine in engines.items()}
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for _ in range(options.rounds):
        for name, engine in engines.items():
            rounds[name].append(run_round(engine, options.steps))
    best = {name: np.min(found, axis=0) for name, found in rounds.items()}
    is_cheap = True
    for name, (pass_ms, step_ms) in best.items():
        metrics = engines[name].metrics
        assert metrics.num_stopped == num_stopped[name], "a rule fired"
        assert metrics.num_host_steps == 0, "a step went the host's way"
        added = pass_ms / best["none"][0] - 1
        is_cheap = is_cheap and added < MOST_COST
        added_step = (step_ms - best["none"][1]) / (options.length * best["none"][0])
        print(
            f"batch {batch:3}  rule {name:7} {pass_ms:.4f} ms a draft pass ({added:+.1%})  {step_ms:.3f} ms a step "
            f"({added_step:+.1%} of a pass for each)",
            flush=True,
        )
    return is_cheap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=whole, default=[1, 8, 64])
    parser.add_argument("--length", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=25, help="in every round")
    parser.add_argument("--target", choices=list(SHAPES), default="1b")
    parser.add_argument("--draft", choices=list(SHAPES), default="1b")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This measures a GPU, and torch finds none.")
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    shapes = SHAPES[options.target], SHAPES[options.draft]
    target, draft = (random_model(shape, torch.bfloat16, device, i) for i, shape in enumerate(shapes))
    is_cheap = [compare(target, draft, batch, options) for batch in options.batches]
    print(f"Looking costs {'less' if all(is_cheap) else 'MORE'} than {MOST_COST:.0%} of a draft pass.")


if __name__ == "__main__":
    main()
