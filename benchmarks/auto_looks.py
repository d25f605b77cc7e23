"""What is known of a position and how much it tells of agreement: log-losses of regressions on a recorded trace."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np


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
