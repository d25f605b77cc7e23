"""Where speculation cannot pay, only those who look at cost are as fast as plain decoding; in virtual time."""

from __future__ import annotations

from functools import cache

import pytest

from dsde.policies import make_policy
from dsde.simulation.costs import make_costs
from dsde.simulation.requests import Requests
from dsde.simulation.simulator import simulate
from dsde.simulation.streams import Mixed


@cache
def requests() -> Requests:
    return Mixed(0.9, 0.5).draw(1000, 128, seed=0)


@cache
def speed(spec: str, batch_size: int) -> float:
    return simulate(make_policy(spec), requests(), make_costs("compute-bound"), batch_size).tokens_per_s


@pytest.mark.parametrize("batch_size", [16, 64])
@pytest.mark.parametrize("spec", ["static:2", "static:4", "dsde", "svip", "svip|meancap", "gammatune"])
def test_blind_to_cost(spec: str, batch_size: int) -> None:
    assert speed(spec, batch_size) < 0.8 * speed("off", batch_size)


@pytest.mark.parametrize("batch_size", [16, 64])
@pytest.mark.parametrize("spec", ["goodput", "goodput:per=sequence", "dsde|gate", "static:4|gate", "svip|gate"])
def test_with_an_eye_on_cost(spec: str, batch_size: int) -> None:
    assert speed(spec, batch_size) > 0.97 * speed("off", batch_size)
