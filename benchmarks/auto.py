"""`auto` against fixed lengths and the literature, in virtual time, on the recorded agreement of a real pair.

    python benchmarks/auto.py [--trace FILE] [--batches 1,8] [--costs memory-bound]

Every category of the trace by itself, then all of them together; whatever a policy learns it learns within the run. A
lead, not a proof: what a draft would have said behind its own mistake was not recorded, and costs are a preset.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from dsde.policies import make_policy
from dsde.simulation import make_costs, simulate
from dsde.simulation.requests import Requests
from dsde.simulation.traces import Recorded

TRACE = Path(__file__).parent / "traces" / "qwen2.5_coder_1.5b_0.5b.json"
STATIC = [f"static:{length}" for length in (1, 2, 3, 4, 5, 6, 8, 10)]
RIVALS = ["goodput:per=sequence", "svip|meancap", "adaedl|meancap", "tapout", "dsde"]


def categories(trace: Path, num_tokens: int) -> dict[str, Requests]:
    """Requests by category, and all of them."""
    records = json.loads(trace.read_text(encoding="utf-8"))
    groups = {name: [r for r in records if r.get("cat") == name] for name in dict.fromkeys(r["cat"] for r in records)}
    groups["all"] = records
    requests = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, group in groups.items():
            path = Path(folder) / f"{name}.json"
            path.write_text(json.dumps(group), encoding="utf-8")
            requests[name] = Recorded(path).draw(2 * len(group), num_tokens, seed=0)
    return requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--costs", default="memory-bound", help="as for `dsde simulate`")
    parser.add_argument("--tokens", type=int, default=192)
    options = parser.parse_args()
    costs = make_costs(options.costs)
    requests = categories(options.trace, options.tokens)
    for batch_size in map(int, options.batches.split(",")):
        print(f"\n| batch {batch_size} | best static | {' | '.join(RIVALS)} | auto | auto / best static |")
        print("| --- |" + " --- |" * (len(RIVALS) + 3))
        ratios = []
        for name, group in requests.items():
            if batch_size > group.size:
                continue

            def speed(spec: str, group: Requests = group, batch_size: int = batch_size) -> float:
                return simulate(make_policy(spec), group, costs, batch_size).tokens_per_s

            off = speed("off")
            speeds = {spec: speed(spec) / off for spec in [*STATIC, *RIVALS, "auto"]}
            best = max(STATIC, key=speeds.__getitem__)
            ratios.append(speeds["auto"] / speeds[best])
            others = " | ".join(f"{speeds[spec]:.2f}" for spec in RIVALS)
            print(
                f"| {name} | {speeds[best]:.2f} ({best.partition(':')[2]}) | {others} | {speeds['auto']:.2f} "
                f"| {ratios[-1]:.3f} |",
                flush=True,
            )
        print(f"\nSpeed-up over off. auto / best static, mean over categories: {np.mean(ratios[:-1]):.3f}")


if __name__ == "__main__":
    main()
