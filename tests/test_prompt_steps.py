"""What drafts cost less because some steps read prompts anyway."""

from __future__ import annotations

import numpy as np
import pytest

from dsde.policies import Outcome
from dsde.policies.cost import CostModel
from dsde.policies.prompt_steps import PromptSteps

NUM = 8
DRAFTED = np.array([8.0, 16.0])


def step(
    num_prompt_tokens: int = 0, verify_s: float = 0.0, length: int = 0, draft_s: float = 0.0, **more: object
) -> Outcome:
    drafted = np.full(NUM, length)
    return Outcome(
        slots=np.arange(NUM),
        drafted=drafted,
        accepted=drafted,
        klds=np.empty(0),
        temperatures=np.zeros(NUM),
        draft_s=draft_s,
        verify_s=verify_s,
        num_decoding=NUM,
        num_prompt_tokens=num_prompt_tokens,
        num_drafted=NUM * length,
        num_draft_passes=length,
        is_odd=num_prompt_tokens > 0,
        **more,  # type: ignore[arg-type]
    )


def spared_s(prompts: PromptSteps, dearer_s: float = 1e-3) -> list[float]:
    """Of drafts of one and two tokens, of which all stand."""
    dearer = dearer_s * DRAFTED / NUM
    return np.broadcast_to(prompts.spared_s(NUM, DRAFTED, NUM + DRAFTED, dearer), 2).tolist()


def test_nothing_is_spared_before_anything_is_known() -> None:
    prompts = PromptSteps(0.01)
    assert spared_s(prompts) == [0, 0]
    prompts.observe(step(), 0.0)
    assert spared_s(prompts) == [0, 0]


def test_where_a_step_with_prompts_takes_as_long_with_drafts_these_cost_nothing_in_it() -> None:
    """One step in four reads some. As many prompts are read for as many tokens: of drafts of which all stand, one in
    two or three in four steps are such."""
    prompts = PromptSteps(0.01)
    for number in range(400):
        prompts.observe(step(64 if number % 4 == 0 else 0, 8e-3), 0.0)
    assert spared_s(prompts) == pytest.approx([2 / 4 * 1e-3, 3 / 4 * 2e-3], rel=0.02)


def test_no_more_steps_than_there_are_read_prompts() -> None:
    prompts = PromptSteps(0.01)
    for _ in range(50):
        prompts.observe(step(64, 8e-3), 0.0)
    assert spared_s(prompts) == pytest.approx([1e-3, 2e-3])


def test_where_every_token_takes_its_time_nothing_is_spared() -> None:
    prompts = PromptSteps(0.01)
    for number in range(400):
        length = number % 3
        prompts.observe(step(512, 1e-6 * (NUM + NUM * length + 512), length), 0.0)
    assert spared_s(prompts, 1e-6 * NUM) == pytest.approx([0, 0], abs=2e-6)


def test_what_the_draft_reads_of_prompts_is_charged() -> None:
    prompts = PromptSteps(0.01)
    for _ in range(50):
        prompts.observe(step(64, 8e-3, 1, draft_s=2.4e-3, num_draft_prompt_tokens=64), 2e-3)
    # Who had missed something read that, too.
    prompts.observe(step(64, 8e-3, 1, draft_s=90e-3, num_draft_prompt_tokens=64, num_catch_up_tokens=9), 2e-3)
    assert spared_s(prompts) == pytest.approx([1e-3 - 0.4e-3, 2e-3 - 0.4e-3])


def test_a_rest_tells_of_all_its_steps_with_prompts() -> None:
    told_one_by_one, together = PromptSteps(0.01), PromptSteps(0.01)
    for _ in range(3):
        told_one_by_one.observe(step(64, 8e-3), 0.0)
        told_one_by_one.observe(step(32), 0.0)
    together.observe(step(num_steps=6, prompt_steps=[(64, 8e-3), (32, 0.0)] * 3), 0.0)
    assert spared_s(together) == pytest.approx(spared_s(told_one_by_one), rel=0.05)


def test_steps_of_another_way_tell_nothing_of_others() -> None:
    cost = CostModel()
    for _ in range(4):
        cost.observe(step(0, 4e-3))
        cost.observe(step(0, 5e-3, 1, draft_s=1e-3))
        cost.observe(step(8, 9e-3))  # as many tokens
    cost.turn_to(NUM)
    assert cost.verify_s([NUM, 2 * NUM]).tolist() == pytest.approx([4e-3, 5e-3])
    assert cost.plain_s(NUM, NUM + 8, is_odd=True) == pytest.approx(9e-3)
    assert cost.plain_s(NUM, NUM + 8, is_odd=False) == pytest.approx(5e-3)
