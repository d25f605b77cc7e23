"""The vocabulary pass on a GPU: drawing drafted tokens and judging them, in microseconds per CUDA-graph replay.

    python benchmarks/vocabulary.py [--vocab 128256] [--dtype bfloat16]

Bandwidth counts every byte of logits that a pass has to read or write at least once per kernel that goes through the
vocabulary. At few rows the logits stay in the L2 cache between replays, as they do between the head and the sampler.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from dsde.sampling.kernels import DraftStore, DrawMode, Draws, sample_drafts
from dsde.verification.kernels import Findings, Judgement, judge

DEVICE = "cuda"
DRAFT_ROWS = (1, 8, 64, 256)
JUDGED = ((1, 4), (8, 4), (64, 2), (256, 1), (64, 4))
"""sequences, drafted tokens of each"""
KINDS = {
    "greedy": (DrawMode.GREEDY, False),
    "ratio": (DrawMode.RATIO, False),
    "match": (DrawMode.MATCH, False),
    "ratio, top_p 0.9": (DrawMode.RATIO, True),
}


def microseconds(work: Callable[[], None], replays: int = 50) -> float:
    """Time of one call inside a graph, the best of three rounds."""
    work()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    for _ in range(3):
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end))
    return best * 1e3 / (4 * replays)


def ints(values: object) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device=DEVICE)


def make_draws(count: int, mode: DrawMode, truncated: bool) -> Draws:
    seeds = torch.randint(-(2**31), 2**31 - 1, (count, 2), dtype=torch.int32, device=DEVICE)
    zeros = torch.zeros(count, device=DEVICE)
    return Draws(
        seeds,
        ints(range(count)),
        ints([mode] * count),
        zeros + 1.25,
        ints([0] * count),
        zeros + (1 - 0.1 * truncated),
        zeros,
    )


def make_logits(rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """About as peaked as a language model's."""
    logits = torch.randn(rows, vocab, device=DEVICE) * 2.5
    logits[:, 17] += 8.0
    return logits.to(dtype)


def time_drafts(count: int, mode: DrawMode, truncated: bool, vocab: int, dtype: torch.dtype) -> None:
    logits = make_logits(count, vocab, dtype)
    draws = make_draws(count, mode, truncated)
    store = DraftStore.allocate(count, vocab, dtype, DEVICE)
    depth, first_row = ints([0]), ints([0])
    sampled = mode != DrawMode.GREEDY
    taken = microseconds(lambda: sample_drafts(logits, draws, depth, first_row, store, sampled, truncated))
    report(f"{count} rows", taken, 2 * logits.nbytes)


def time_judge(count: int, length: int, mode: DrawMode, truncated: bool, vocab: int, dtype: torch.dtype) -> None:
    target = make_logits(count * (length + 1), vocab, dtype)
    draws = make_draws(count, mode, truncated)
    store = DraftStore.allocate(count * length, vocab, dtype, DEVICE)
    sampled = mode != DrawMode.GREEDY
    drafted = [s * (length + 1) + d for d in range(length) for s in range(count)]
    logits = target[drafted].float()
    logits = (logits + torch.randn_like(logits)).to(dtype)
    for depth in range(length):
        part = logits[depth * count : (depth + 1) * count]
        sample_drafts(part, draws, ints([depth]), ints([depth * count]), store, sampled, truncated)
    rows = [(s, d, d * count + s if d < length else -1) for s in range(count) for d in range(length + 1)]
    columns = [ints(column) for column in zip(*rows, strict=True)]
    starts = ints([s * (length + 1) for s in range(count)])
    judgement = Judgement(*columns, starts, ints([length] * count), draws)
    findings = Findings.allocate(count, length, DEVICE)
    taken = microseconds(lambda: judge(target, judgement, store, findings, sampled, truncated, False))
    drafted_bytes = store.logits.nbytes
    stood = float(findings.accepted.float().mean())
    report(f"{count} x {length} drafted, {stood:.2f} stood", taken, target.nbytes + 2 * drafted_bytes)


def report(name: str, taken: float, num_bytes: int) -> None:
    print(f"  {name:<28} {taken:8.1f} us {num_bytes / taken * 1e-3:8.0f} GB/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, vocabulary {arguments.vocab}, {arguments.dtype}")
    for name, (mode, truncated) in KINDS.items():
        print(f"draft, {name}")
        for count in DRAFT_ROWS:
            time_drafts(count, mode, truncated, arguments.vocab, dtype)
        print(f"judge, {name}")
        for count, length in JUDGED:
            time_judge(count, length, mode, truncated, arguments.vocab, dtype)


if __name__ == "__main__":
    main()
