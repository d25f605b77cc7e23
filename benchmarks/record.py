"""Record how a real pair agrees, position by position along the target's own answers: food for `dsde simulate`.

    python benchmarks/record.py TARGET DRAFT --prompts spec_bench_question.jsonl --out trace.json

Both models read the target's greedy answer once; nothing is drafted. What a draft would say behind its own mistake is
not recorded. `embedded` as TARGET and DRAFT is the pair in the package.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dsde import LLM, SamplingParams  # isort: skip  (before torch, as in cpu.py)
import numpy as np
import torch

from dsde.core.stops import Signal
from dsde.device.backend import device_context
from dsde.drafting import ModelDrafter
from dsde.drafting.signals import measure
from dsde.models.batch import BLOCK_SIZE, pack
from dsde.models.decoder import Decoder
from dsde.verification.divergence import kl_divergence
from pair import read_questions
from report import MAX_NUM_BATCHED_TOKENS, make_parser, parse

SIGNALS = {"draft_entropy": Signal.ENTROPY, "draft_top_prob": Signal.TOP_PROB, "draft_margin": Signal.MARGIN}


def read(model: Decoder, tokens: list[int], num_answered: int, vocab: int) -> torch.Tensor:
    """[answered, vocab] logits of the positions that gave the last tokens."""
    count = len(tokens) - 1
    num_blocks = -(-count // BLOCK_SIZE)
    rows = np.arange(count - num_answered, count)
    lengths = np.array([count])
    batch = pack(np.array(tokens[:-1]), lengths, lengths, [list(range(num_blocks))], rows, model.device)
    with device_context(model.device):
        return model.forward(batch, model.new_cache(num_blocks))[:, :vocab].float()


def agreement(target: torch.Tensor, draft: torch.Tensor) -> dict[str, list[float]]:
    """What a trace says of every position."""
    columns: dict[str, Any] = {
        "match": (target.argmax(-1) == draft.argmax(-1)).int(),
        "kl": kl_divergence(target, torch.arange(len(target), device=target.device), draft),
        "overlap": torch.minimum(target.softmax(-1), draft.softmax(-1)).sum(-1),
    }
    columns |= {name: measure(draft, signal) for name, signal in SIGNALS.items()}
    return {name: [round(value, 5) for value in values.tolist()] for name, values in columns.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="as for pair.py")
    parser.add_argument("--per-category", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=160, help="at most, an answer")
    parser.add_argument("--max-model-len", type=int, default=4096)
    options = parse(parser)
    llm = LLM(
        None if options.target == "embedded" else options.target,
        options.draft,
        "off",
        dtype=str(options.dtype).removeprefix("torch."),
        device=options.device,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_model_len=options.max_model_len,
        kv_cache_bytes=4 << 30,
    )
    drafter = llm.engine.drafter
    assert isinstance(drafter, ModelDrafter), "a draft model is needed"
    target, draft = llm.engine.target.model, drafter.model
    vocab = min(target.config.vocab_size, draft.config.vocab_size)
    records = []
    for category, questions in read_questions(options.prompts).items():
        prompts = [llm.chat_prompt([{"role": "user", "content": text}]) for text in questions[: options.per_category]]
        prompts = [prompt for prompt in prompts if len(prompt) + options.tokens <= options.max_model_len]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=options.tokens))
        for prompt, output in zip(prompts, outputs, strict=True):
            tokens = output.outputs[0].token_ids
            logits = [read(model, [*prompt, *tokens], len(tokens), vocab) for model in (target, draft)]
            records.append({"cat": category, "prompt_tokens": len(prompt), **agreement(*logits)})
        print(f"{category}: {len(prompts)} answers", flush=True)
    if options.out:
        options.out.write_text(json.dumps(records, separators=(",", ":")))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
