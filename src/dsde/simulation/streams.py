"""Requests drawn at random: agreement at a constant rate, in easy and hard phases, or mixed over requests.

A stream says how likely agreement is at every position; agreement, KLD and entropy are drawn from that. How they go
together was fitted by eye to 740 tokens of one pair of real models under greedy decoding: where the draft is wrong, KLD
and entropy are large and nearly independent; where it is right, both are small, go together, and are the smaller the
easier the text. Knows nothing of policies, costs and time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dsde.core.errors import InvalidInput
from dsde.policies.base import BoolArray, FloatArray
from dsde.policies.dsde import LARGEST_KLD
from dsde.policies.limits import check_real
from dsde.simulation.requests import Requests, Stream, check_size
from dsde.simulation.traces import Recorded

LARGEST_ENTROPY = float(np.log(128_256))
"""of a draft that knows nothing, at a common size of vocabulary"""
BLIND_RATE = 0.7
"""what the signals of a blind stream look like"""


class DrawnStream(ABC):
    """A stream that is known by its acceptance rates."""

    is_blind = False
    """whether KLD and entropy look the same whatever becomes of a token, as where a coin decides on random weights"""

    def draw(self, num_requests: int, num_tokens: int, seed: int) -> Requests:
        check_size(num_requests, num_tokens)
        rng = np.random.default_rng(seed)
        rates = self.rates(num_requests, num_tokens, rng)
        agreed = rng.random((num_requests, num_tokens)) < rates
        looks_like = np.full_like(rates, BLIND_RATE) if self.is_blind else rates
        shown = rng.random(agreed.shape) < BLIND_RATE if self.is_blind else agreed
        klds, entropies = draw_signals(looks_like, shown, rng)
        return Requests(
            num_tokens=np.full(num_requests, num_tokens),
            num_prompt_tokens=np.zeros(num_requests, np.int64),
            agreed=agreed,
            klds=klds,
            entropies=entropies,
            temperature=1.0,
            rates=rates,
        )

    @abstractmethod
    def rates(self, num_requests: int, num_tokens: int, rng: np.random.Generator) -> FloatArray:
        """[request, position] probability that the draft agrees; may be narrower where it is constant."""


class Iid(DrawnStream):
    """Every drafted token stands with the same probability, whatever happened before."""

    def __init__(self, rate: float = 0.8) -> None:
        check_real("rate", rate, 0.0, 1.0)
        self.rate = rate

    def rates(self, num_requests: int, num_tokens: int, rng: np.random.Generator) -> FloatArray:
        return np.full((num_requests, 1), self.rate)


class Phases(DrawnStream):
    """Easy and hard phases take turns in a request, `length` tokens each on average: a Markov chain of two states."""

    def __init__(self, easy: float = 0.95, hard: float = 0.4, length: float = 32) -> None:
        check_real("easy rate", easy, 0.0, 1.0)
        check_real("hard rate", hard, 0.0, 1.0)
        check_real("length", length, 1.0, np.inf)
        self.easy, self.hard, self.length = easy, hard, length

    def rates(self, num_requests: int, num_tokens: int, rng: np.random.Generator) -> FloatArray:
        changes = rng.random((num_requests, num_tokens)) < 1 / self.length
        changes[:, 0] = rng.random(num_requests) < 0.5  # a request starts in either phase
        is_hard = np.bitwise_xor.accumulate(changes, axis=1)
        return np.where(is_hard, self.hard, self.easy)


class Mixed(DrawnStream):
    """Every request has one of these rates, in turn, and keeps it."""

    def __init__(self, *rates: float) -> None:
        if len(rates) < 2:
            raise InvalidInput("mixed needs two rates or more, as in mixed:0.95,0.4")
        for rate in rates:
            check_real("rate", rate, 0.0, 1.0)
        self.request_rates = rates

    def rates(self, num_requests: int, num_tokens: int, rng: np.random.Generator) -> FloatArray:
        return rng.permutation(np.resize(self.request_rates, num_requests))[:, None]


def draw_signals(rates: FloatArray, agreed: BoolArray, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """KLD and draft entropy of every position, given the rate there and whether the draft agreed."""
    # With agreement, log KLD falls from 0.3 by a gamma variable of scale 2: bounded above, with a long tail below.
    mean_fall = 1.3 - 1.7 * np.log(1.02 - rates)
    log_klds = 0.3 - 2.0 * rng.standard_gamma(np.broadcast_to(mean_fall / 2, agreed.shape))
    log_entropies = 1.0 + 0.8 * log_klds + 0.8 * rng.standard_normal(agreed.shape)
    num_wrong = agreed.size - int(agreed.sum())
    log_klds[~agreed] = 0.9 * rng.standard_normal(num_wrong)
    log_entropies[~agreed] = 0.8 + 0.8 * rng.standard_normal(num_wrong)
    klds, entropies = np.exp(log_klds, out=log_klds), np.exp(log_entropies, out=log_entropies)
    return np.minimum(klds, LARGEST_KLD, out=klds), np.minimum(entropies, LARGEST_ENTROPY, out=entropies)


DRAWN: dict[str, Callable[..., DrawnStream]] = {"iid": Iid, "phases": Phases, "mixed": Mixed}
MOST_NUMBERS = {"iid": 1, "phases": 3, "mixed": 1000}


def make_stream(spec: str) -> Stream:
    """`iid:RATE`, `phases` or `phases:EASY,HARD,LENGTH`, `mixed:RATE,RATE,...`, a recorded FILE, or `sampled:FILE`.

    `blind:` before one of the first three: the draft's signals tell nothing.
    """
    name, _, rest = (part.strip() for part in spec.partition(":"))
    if name == "blind":
        stream = make_stream(rest)
        if not isinstance(stream, DrawnStream):
            raise InvalidInput(f"blind goes with {', '.join(DRAWN)}, not with {rest!r}")
        stream.is_blind = True
        return stream
    if name in DRAWN:
        numbers = [_number(name, text) for text in rest.split(",")] if rest else []
        if len(numbers) > MOST_NUMBERS[name]:
            raise InvalidInput(f"stream {spec!r} has {len(numbers)} numbers, at most {MOST_NUMBERS[name]} are allowed")
        try:
            return DRAWN[name](*numbers)
        except InvalidInput as error:
            raise InvalidInput(f"stream {spec!r}: {error}") from None
    sampled = name == "sampled"
    path = Path(rest if sampled else spec)
    if not path.is_file():
        raise InvalidInput(f"stream must be {', '.join(DRAWN)} or a file of recorded requests; there is no file {path}")
    return Recorded(path, sampled=sampled)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(f"{name} takes numbers separated by commas, not {text.strip()!r}") from None
