"""What the target takes to verify drafts of fixed lengths, by how many sequences there are and how long they are.

    python benchmarks/verification.py [--cases 1x1,4x2,8x1] [--tile 128x4x2]

Random weights; contexts of 512 tokens; a case is sequences x tokens that each verifies (1: no drafts). Milliseconds of
a verification, which is a pass of the target and the verdict, and of a pass of the draft, means over `--steps` steps
behind a dozen that do not count. `--tile` is one for all of attention, keys x warps x stages, instead of those that it
chooses: what it asks of shared memory is taken from the cache that products read their rows through.
"""

from __future__ import annotations

import argparse

from dsde import SamplingParams  # isort: skip  (before torch, as in cpu.py)
import numpy as np
import torch

from dsde.drafting import ModelDrafter
from dsde.engine.config import EngineConfig
from dsde.engine.engine import Engine
from dsde.models.kernels import attention
from dsde.policies.static import Static
from dsde.sampling import Sampler
from gpu import SHAPES, random_model
from report import MAX_NUM_BATCHED_TOKENS, Report, items, make_parser, parse

CONTEXT = 512
NUM_UNCOUNTED = 14
MAX_TOKENS = 1024
CASES = "1x1,1x2,1x4,1x5,2x1,2x2,2x4,4x1,4x2,4x4,8x1,8x2,8x4,16x1,16x2,32x1,32x2,64x1,64x2"


def cases(text: str) -> list[tuple[int, int]]:
    return [(int(batch), int(tokens)) for batch, _, tokens in (item.partition("x") for item in items(text))]


def make_engine(options: argparse.Namespace) -> Engine:
    device = torch.device(options.device)
    target, draft = (random_model(SHAPES[name], options.dtype, device, i) for i, name in enumerate(options.shapes))
    largest = max(batch for batch, _ in options.cases)
    per_token = sum(model.config.kv_bytes_per_token(model.dtype) for model in (target, draft))
    config = EngineConfig(
        max_num_seqs=largest,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_model_len=CONTEXT + 2 * MAX_TOKENS,
        kv_cache_bytes=largest * (CONTEXT + MAX_TOKENS) * per_token,
        synthetic_acceptance=((0.6,),),
    )
    sampler = Sampler()
    drafter = ModelDrafter(draft, sampler, target.config.vocab_size, config.tokens_per_pass(device))
    return Engine(target, drafter, Static(0), None, sampler, config)


def measure(engine: Engine, batch: int, tokens: int, steps: int) -> tuple[float, float]:
    """Milliseconds of a verification, and of a draft pass."""
    engine.policy = engine.planner.policy = Static(tokens - 1)
    rng = np.random.default_rng(0)
    prompts = rng.integers(10, engine.intake.vocab_size, (batch, CONTEXT)).tolist()
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    names = [engine.add(prompt, params) for prompt in prompts]
    metrics = engine.metrics
    for number in range(NUM_UNCOUNTED + steps):
        if number == NUM_UNCOUNTED:
            before = metrics.target_s + metrics.accept_s, metrics.draft_s, metrics.num_draft_passes, metrics.num_steps
        engine.step()
    num_passes, num_steps = metrics.num_draft_passes - before[2], metrics.num_steps - before[3]
    verify_s, draft_s = metrics.target_s + metrics.accept_s - before[0], metrics.draft_s - before[1]
    for name in names:
        engine.abort(name)
    engine.step()
    return 1e3 * verify_s / num_steps, 1e3 * draft_s / max(num_passes, 1)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shapes", type=items, default="8b,1b", help=f"two of {', '.join(SHAPES)}")
    parser.add_argument("--cases", type=cases, default=CASES)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tile", help="of attention, as in 64x4x2")
    options = parse(parser)
    report = Report(options, cells=[])
    if options.tile:
        tile = attention.Tile(*map(int, options.tile.split("x")))
        attention.choose_tile = lambda *_, **__: tile
    engine = make_engine(options)
    print(f"{'sequences':>9}{'tokens':>7}{'verify ms':>10}{'pass ms':>8}", flush=True)
    for batch, tokens in options.cases:
        verify_ms, pass_ms = measure(engine, batch, tokens, options.steps)
        row = {"batch": batch, "tokens": tokens, "verify_ms": verify_ms, "pass_ms": pass_ms if tokens > 1 else None}
        report["cells"].append(row)
        report.save()
        print(f"{batch:9}{tokens:7}{verify_ms:10.3f}" + (f"{pass_ms:8.3f}" if tokens > 1 else ""), flush=True)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
