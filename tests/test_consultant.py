"""Consultant Decoding: its rule written out here, its label everywhere, and that the lossless test notices it."""

from __future__ import annotations

import math

import numpy as np
import torch

from dsde import SamplingParams
from dsde.core.consultant import Consultant
from dsde.core.sequence import Sequence
from dsde.drafting import Proposals
from dsde.policies import STAGES
from dsde.verification.leniency import consult
from test_lossless_distribution import (
    DRAFTS,
    LENGTH,
    NUM_REQUESTS,
    TOO_UNLIKELY,
    enumerate_outputs,
    p_value,
    sample_outputs,
)
from tiny import complete, make_engine, tiny_model

PARAMS = SamplingParams(max_tokens=LENGTH, ignore_eos=True)


def sequence(number: int, surprise: float) -> Sequence:
    made = Sequence(str(number), 0, PARAMS, [1], 1, LENGTH, frozenset(), number, number)
    made.surprise = surprise
    return made


def test_by_its_rule() -> None:
    rng = np.random.default_rng(0)
    rule = Consultant(epsilon=1.5, decay=0.3)
    for _ in range(50):
        lengths = rng.integers(0, 5, 6)
        logits = torch.from_numpy(rng.normal(0, 2, (int((lengths + 1).sum()), 9)).astype(np.float32))
        tokens = torch.from_numpy(rng.integers(0, 9, (6, 4)))
        starts = np.cumsum(lengths + 1) - lengths - 1
        chosen = rng.random(6) < 0.8
        before = rng.random(6).tolist()
        sequences = [sequence(i, before[i]) for i in range(6)]
        stands = consult(logits, sequences, Proposals(tokens, lengths), starts, chosen, rule)
        for i in range(6):
            average, expected = before[i], []
            for depth in range(int(lengths[i]) if chosen[i] else 0):
                log_probs = torch.log_softmax(logits[starts[i] + depth].double(), -1)
                average = 0.3 * average + 0.7 * -float(log_probs[tokens[i, depth]])
                if average > 1.5:
                    average = 0.0
                    break
                expected.append(depth)
            assert np.flatnonzero(stands[i]).tolist() == expected
            assert math.isclose(sequences[i].surprise, average, rel_tol=1e-5, abs_tol=1e-6)


def test_the_lossless_test_notices_it() -> None:
    counts = sample_outputs(DRAFTS["far"], STAGES["consultant"].example, PARAMS, False, NUM_REQUESTS)
    assert p_value(enumerate_outputs(PARAMS), counts) < TOO_UNLIKELY


def test_it_is_labelled_wherever_it_was_used() -> None:
    target, draft = tiny_model(seed=1), tiny_model(seed=4)
    params = [SamplingParams(temperature=0, max_tokens=20, speculation=wish) for wish in ("on", "off", 3)]
    engine = make_engine(target, draft, "static:4|consultant:6")
    names = [engine.add([3, 1, 4], one) for one in params]
    outputs = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step().finished}
    assert [outputs[name].metrics.lossless for name in names] == [False, True, True]
    assert engine.metrics.num_lossy > 0
    [plain] = complete(make_engine(target, None), [[3, 1, 4]], params[0])
    texts = [outputs[name].outputs[0].token_ids for name in names]
    assert texts[1] == texts[2] == plain.outputs[0].token_ids
    assert texts[0] != plain.outputs[0].token_ids
