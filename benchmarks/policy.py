"""What a policy costs a step: microseconds of plan + observe on one core, with the selection of what to verify where it
asks for one; of what it does while the device is busy (settle); and memory growth over a long run.

Knows no model: outcomes are drawn at random, and drawing them is not timed. Target: under 1 ms for 256 sequences and no
growth, for every policy and stage by its example. Run `python benchmarks/policy.py`.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
import tracemalloc
from pathlib import Path

import numpy as np

from dsde import policies
from dsde.policies import POLICIES, STAGES, BatchView, Outcome, Pace, Plan, Policy, make_policy
from dsde.policies.base import FloatArray, IntArray

SPECS = [entry.example for entry in (*POLICIES.values(), *STAGES.values())]
BATCH_SIZES = (1, 64, 256)
NUM_WARMUP_STEPS = 100
LONG_RUN = (100, 2000)
NUM_FRAMES = 4
"""deep enough to see the policy behind an allocation inside NumPy"""


class Workload:
    """A fixed batch of sequences whose KLDs keep DSDE within its dynamic range, so that lengths differ and change."""

    def __init__(self, batch_size: int) -> None:
        self.rng = np.random.default_rng(0)
        self.klds = self.rng.exponential(0.08, size=1 << 16)
        self.batch = BatchView(
            slots=np.arange(batch_size),
            rooms=np.full(batch_size, 1000),
            temperatures=np.ones(batch_size),
            num_decoding=batch_size,
            pace=Pace(
                tpot_s=self.rng.choice([0.002, 0.01, np.inf], batch_size),
                elapsed_s=self.rng.uniform(0, 1, batch_size),
                num_emitted=self.rng.integers(0, 100, batch_size),
            ),
        )

    def drafted(self, plan: Plan) -> IntArray:
        return plan.lengths if plan.stop is None else self.rng.integers(0, plan.lengths + 1)

    def confidences(self, drafted: IntArray) -> FloatArray:
        return self.rng.random((drafted.size, int(drafted.max(initial=0))))

    def outcome(self, drafted: IntArray) -> Outcome:
        num_drafted, num_passes = int(drafted.sum()), int(drafted.max(initial=0))
        start = int(self.rng.integers(self.klds.size - num_drafted))
        return Outcome(
            slots=self.batch.slots,
            drafted=drafted,
            accepted=self.rng.integers(0, drafted + 1),
            klds=self.klds[start : start + num_drafted],
            temperatures=self.batch.temperatures,
            token_probs=self.rng.random(num_drafted),
            draft_signals=self.rng.random((num_drafted, 3)),
            draft_s=1e-3 * num_passes * self.rng.uniform(0.9, 1.1),
            verify_s=(4e-3 + 1e-5 * num_drafted) * self.rng.uniform(0.9, 1.1),
            num_decoding=self.batch.num_decoding,
            num_drafted=num_drafted,
            num_draft_passes=num_passes,
        )


def step_us(policy: Policy, workload: Workload) -> tuple[float, float]:
    """Of what the next step waits for, and of what it does not."""
    start = time.perf_counter_ns()
    plan = policy.plan(workload.batch)
    spent = time.perf_counter_ns() - start
    start = time.perf_counter_ns()
    policy.settle()
    settled = time.perf_counter_ns() - start
    drafted = workload.drafted(plan)
    if plan.budget is not None:
        confidences, rows = workload.confidences(drafted), np.arange(drafted.size)
        start = time.perf_counter_ns()
        drafted = plan.budget.select(confidences, drafted, rows)
        spent += time.perf_counter_ns() - start
    outcome = workload.outcome(drafted)
    start = time.perf_counter_ns()
    policy.observe(outcome)
    return (spent + time.perf_counter_ns() - start) / 1e3, settled / 1e3


def measure_us(spec: str, batch_size: int, num_steps: int) -> tuple[float, float, float]:
    """Median and best over the steps, and the median of what nobody waits for."""
    policy, workload = make_policy(spec), Workload(batch_size)
    for _ in range(NUM_WARMUP_STEPS):
        step_us(policy, workload)
    times = [step_us(policy, workload) for _ in range(num_steps)]
    medians = np.median(times, axis=0)
    return float(medians[0]), min(waited for waited, _ in times), float(medians[1])


def measure_growth(spec: str, batch_size: int) -> int:
    """Bytes held by allocations made in the policies at the end of a long run, less those near its beginning."""
    policy, workload = make_policy(spec), Workload(batch_size)
    first, last = LONG_RUN
    tracemalloc.start(NUM_FRAMES)
    in_use = {}
    for step in range(1, last + 1):
        step_us(policy, workload)
        if step in LONG_RUN:
            in_use[step] = _bytes_in_policies()
    tracemalloc.stop()
    return in_use[last] - in_use[first]


def _bytes_in_policies() -> int:
    gc.collect()
    snapshot = tracemalloc.take_snapshot()
    in_policies = tracemalloc.Filter(True, str(Path(policies.__file__).parent / "*"), all_frames=True)
    return sum(trace.size for trace in snapshot.filter_traces([in_policies]).traces)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--policies", help="separated by commas; all, by their examples, unless given")
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(f"{'policy':<48}{'sequences':>10}{'median us':>12}{'best us':>10}{'settle us':>11}{'growth bytes':>14}")
    for spec in args.policies.split(",") if args.policies else SPECS:
        for batch_size in BATCH_SIZES:
            median, best, settled = measure_us(spec, batch_size, args.steps)
            growth = measure_growth(spec, batch_size)
            print(f"{spec:<48}{batch_size:>10}{median:>12.1f}{best:>10.1f}{settled:>11.1f}{growth:>14}", flush=True)


if __name__ == "__main__":
    main()
