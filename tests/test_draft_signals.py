"""The signals of a draft's logits: all at once as one by one, and what they are by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsde.core.stops import SIGNALS
from dsde.drafting.signals import measure, measure_all


@pytest.mark.parametrize("sharpness", [0.0, 0.1, 3.0, 60.0])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_all_at_once_as_one_by_one(sharpness: float, num_rows: int) -> None:
    logits = torch.randn(num_rows, 997, generator=torch.Generator().manual_seed(num_rows)) * sharpness + 7.0
    before = logits.clone()
    expected = np.stack([measure(logits, signal) for signal in SIGNALS], axis=1)
    assert measure_all(logits) == pytest.approx(expected, abs=1e-5)
    assert torch.equal(logits, before)


def test_tokens_that_have_no_chance() -> None:
    """Of a trimmed vocabulary; the last row is sure of its token."""
    logits = torch.tensor([[0.0, 0.0, -torch.inf, -torch.inf], [1.0, -torch.inf, -torch.inf, -torch.inf]])
    assert measure_all(logits) == pytest.approx(np.array([[np.log(2), 0.5, 0.0], [0.0, 1.0, 1.0]]), abs=1e-6)


def test_of_a_trimmed_vocabulary_only_its_own_tokens_are_looked_at() -> None:
    generator = torch.Generator().manual_seed(0)
    known = torch.randperm(997, generator=generator)[:300]
    logits = torch.full((5, 997), -torch.inf)
    logits[:, known] = 4 * torch.randn(5, 300, generator=generator)
    assert measure_all(logits, known) == pytest.approx(measure_all(logits), abs=1e-6)
