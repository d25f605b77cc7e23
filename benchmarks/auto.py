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
RIVALS = ["goodput:per=sequence", "nightjar", "svip", "adaedl", "dsde"]


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


def log_losses(trace: Path) -> dict[str, float]:
    """Of a logistic regression of agreement on what is known of a position, fitted to the whole trace."""
    records = json.loads(trace.read_text(encoding="utf-8"))
    agreed = np.concatenate([r["match"] for r in records]).astype(float)
    looks = {
        "entropy": np.sqrt(np.concatenate([r["draft_entropy"] for r in records])),
        "top probability": np.concatenate([r["draft_top_prob"] for r in records]),
        "margin": np.concatenate([r["draft_margin"] for r in records]),
        "recent acceptance": np.concatenate([recent(r["match"], 0.75, 4.0, 0.95) for r in records]),
        "recent KLD": np.sqrt(np.concatenate([recent(r["kl"], 0.5, 1.0, 0.9) for r in records])),
    }
    own, history = ["entropy", "top probability", "margin"], ["recent acceptance", "recent KLD"]
    sets = [[], ["entropy"], ["margin"], own, history[:1], history, own + history]
    return {" + ".join(names) or "nothing": fit(agreed, [looks[name] for name in names]) for names in sets}


def recent(values: list[float], prior: float, weight: float, kept: float) -> list[float]:
    """Fading mean of what came before each position."""
    means, total, count = [], 0.0, 0.0
    for value in values:
        means.append((total + weight * prior) / (count + weight))
        total, count = kept * total + value, kept * count + 1
    return means


def fit(agreed: np.ndarray, columns: list[np.ndarray]) -> float:
    x = np.column_stack([np.ones(len(agreed)), *columns])
    weights = np.zeros(x.shape[1])
    for _ in range(30):
        chances = 1 / (1 + np.exp(-x @ weights))
        curvature = x.T @ (x * (chances * (1 - chances))[:, None]) + 1e-6 * np.eye(x.shape[1])
        weights += np.linalg.solve(curvature, x.T @ (agreed - chances))
    chances = np.clip(1 / (1 + np.exp(-x @ weights)), 1e-9, 1 - 1e-9)
    return float(-(agreed * np.log(chances) + (1 - agreed) * np.log(1 - chances)).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--costs", default="memory-bound", help="as for `dsde simulate`")
    parser.add_argument("--tokens", type=int, default=192)
    options = parser.parse_args()
    costs = make_costs(options.costs)
    requests = categories(options.trace, options.tokens)
    for names, loss in log_losses(options.trace).items():
        print(f"log-loss knowing {names}: {loss:.3f}", flush=True)
    for batch_size in map(int, options.batches.split(",") if options.batches else []):
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
