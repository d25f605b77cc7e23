"""The kernels that read on from a verdict, beside the plain ones that the engine's tests use."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import plain_kernels
from dsde.device.staging import Layout
from dsde.drafting.kernels import NUM_REREAD, advance
from dsde.drafting.solo_kernels import GONE, NUM_ENDS, NUM_HEADS, SoloState, Told, go_deeper, lay_out
from dsde.models.batch import BLOCK_SIZE

HAS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
TABLE_WIDTH = 4
pytestmark = [pytest.mark.gpu] if HAS_CUDA else []


@pytest.mark.parametrize(("num_seqs", "padded"), [(1, 1), (3, 4), (5, 8), (9, 16)])
@pytest.mark.parametrize("is_solo", [False, True])
def test_reading_on_leaves_alone_what_is_not_its_own(num_seqs: int, padded: int, is_solo: bool) -> None:
    """A bucket may have room for more sequences than its tokens would serve."""
    rng = np.random.default_rng(num_seqs)
    num_tokens = NUM_REREAD * num_seqs
    sizes = dict.fromkeys(("tokens", "positions", "slots"), num_tokens)
    sizes |= {"starts": padded + 1, "tables": padded * TABLE_WIDTH}
    sizes |= dict.fromkeys(("contexts", "judged", "num_tokens", "last_tokens", "modes", "counters"), padded)
    sizes |= {"emitted_start": 1, "emitted_width": 1, "ends": NUM_ENDS * padded}
    sizes |= dict.fromkeys(("caps", "memories", "totals"), padded)
    layout = Layout(sizes)
    words = torch.from_numpy(rng.integers(0, 3, layout.num_words, dtype=np.int32))
    arrays = layout.views(words)
    arrays["judged"].fill_(-1)
    arrays["judged"][:num_seqs] = torch.arange(num_seqs)
    arrays["num_tokens"][:num_seqs] = torch.from_numpy(rng.integers(1, (TABLE_WIDTH - 1) * BLOCK_SIZE, num_seqs))
    arrays["emitted_start"][0], arrays["emitted_width"][0] = padded, 4
    arrays["ends"][:] = torch.from_numpy(rng.integers(3, 8, NUM_ENDS * padded))  # some of which are said
    verdict = torch.from_numpy(rng.integers(0, 4, padded * 5, dtype=np.int32))
    contexts = arrays["num_tokens"] + verdict[:padded] + 1
    for name, most in (("caps", 16), ("memories", 12), ("totals", 12)):  # some have no room, and some have ended
        first = 0 if name == "caps" else contexts
        arrays[name][:] = first + torch.from_numpy(rng.integers(0, most, padded, dtype=np.int32))
    on_device = words.to(DEVICE, copy=True)
    state = SoloState.blank(padded, torch.device("cpu"))
    there = moved(state)
    advance(layout.views(on_device), verdict.to(DEVICE), there, TABLE_WIDTH, is_solo)
    plain_kernels.advance(arrays, verdict, state, TABLE_WIDTH, is_solo)
    assert torch.equal(on_device.cpu(), words)
    assert torch.equal(there.heads.cpu(), state.heads)
    assert torch.equal(there.caps.cpu(), state.caps)
    assert is_solo or not state.heads[:, 3].any()
    assert is_solo or not state.caps.any()
    if is_solo and num_seqs > 4:
        has_room = torch.minimum(arrays["memories"] - contexts, arrays["totals"] - contexts - 1) > 0
        assert (state.heads[:, 3].bool() & has_room & (arrays["caps"] > 0))[:num_seqs].any(), "ended by what was said"


@pytest.mark.parametrize(("num_seqs", "padded"), [(1, 1), (2, 2), (3, 4), (8, 8)])
@pytest.mark.parametrize("depth", [0, 1, 6])
def test_a_draft_goes_deeper(num_seqs: int, padded: int, depth: int) -> None:
    rng = np.random.default_rng(num_seqs + 10 * depth)
    sizes = dict.fromkeys(("tokens", "sources", "positions", "slots", "contexts", "modes", "counters"), padded)
    sizes |= {
        "places": padded,
        "tables": padded * TABLE_WIDTH,
        "costs": 48,
        "rule_numbers": 7,
        "depth": 1,
        "first_row": 1,
        "count": 1,
    }
    layout = Layout(sizes)
    words = torch.from_numpy(rng.integers(0, 3, layout.num_words, dtype=np.int32))
    arrays = layout.views(words)
    arrays["costs"][:] = torch.from_numpy(rng.random(48).astype(np.float32))
    arrays["tables"][:] = torch.from_numpy(rng.permutation(padded * TABLE_WIDTH))
    arrays["count"][0], arrays["depth"][0] = num_seqs, depth
    state = some_state(rng, padded)
    on_device = words.to(DEVICE, copy=True)
    go_deeper(layout.views(on_device), moved(state), TABLE_WIDTH)
    plain_kernels.go_deeper(arrays, state, TABLE_WIDTH)
    assert torch.equal(on_device.cpu(), words)
    assert arrays["depth"][0] == depth + 1


@pytest.mark.parametrize(("num_seqs", "padded", "longest"), [(1, 1, 7), (1, 1, 15), (2, 2, 7), (3, 4, 7), (8, 8, 15)])
def test_what_is_verified_is_laid_out(num_seqs: int, padded: int, longest: int) -> None:
    rng = np.random.default_rng(num_seqs + longest)
    most = padded * (longest + 1)
    names = ("tokens", "sources", "positions", "slots", "row_sequences", "row_depths", "row_drafts")
    sizes = dict.fromkeys(names, most) | {"starts": padded + 1, "tables": padded * TABLE_WIDTH}
    sizes |= dict.fromkeys(("contexts", "judged_starts", "lengths", "modes", "counters"), padded)
    sizes |= {"count": 1, "turn": 1, "sizes": 3}
    layout = Layout(sizes)
    for turn in (0, 1, 0):
        words = torch.from_numpy(rng.integers(0, 3, layout.num_words, dtype=np.int32))
        arrays = layout.views(words)
        arrays["tables"][:] = torch.from_numpy(rng.permutation(padded * TABLE_WIDTH))
        arrays["sizes"][:] = torch.tensor([most // 4, most // 2, most])
        arrays["count"][0], arrays["turn"][0] = num_seqs, turn
        state = some_state(rng, padded)
        state.lengths[:] = torch.from_numpy(rng.integers(0, longest + 1, padded))
        on_device = words.to(DEVICE, copy=True)
        fits, told, told_there = torch.full((3,), 7, dtype=torch.int32), *(Told.blank(8, HAS_CUDA) for _ in range(2))
        fits_there, signals = fits.to(DEVICE, copy=True), torch.rand(most, 4)
        lay_out(layout.views(on_device), moved(state), fits_there, signals.to(DEVICE), told_there, TABLE_WIDTH, longest)
        plain_kernels.lay_out(arrays, state, fits, signals, told, TABLE_WIDTH, longest)
        there = layout.views(on_device.cpu())  # waits for the device
        num_rows = int(arrays["starts"][-1])
        for name, array in arrays.items():  # of rows that nobody reads nothing but that is said
            end = num_rows if name == "row_depths" else None
            assert there[name][:end].tolist() == array[:end].tolist(), name
        assert torch.equal(fits_there.cpu(), fits)
        told.numbers[:, 1] = told_there.numbers[:, 1]  # the time
        assert torch.equal(told_there.numbers, told.numbers)
        assert torch.equal(told_there.signals, told.signals)
        have_ended = bool(state.heads[:num_seqs, 3].all())
        assert fits.sum() == (not have_ended)
        assert (told.numbers[turn, 0] == GONE) == have_ended


def some_state(rng: np.random.Generator, num_seqs: int) -> SoloState:
    state = SoloState.blank(num_seqs, torch.device("cpu"))
    state.heads[:] = torch.from_numpy(rng.integers(1, TABLE_WIDTH * BLOCK_SIZE - 16, (num_seqs, NUM_HEADS)))
    state.heads[:, 3] = torch.from_numpy(rng.random(num_seqs) < 0.2)
    state.caps[:] = torch.from_numpy(rng.integers(0, 10, num_seqs))
    state.num_passes[0] = 5
    return state


def moved(state: SoloState) -> SoloState:
    return SoloState(*(getattr(state, field.name).to(DEVICE, copy=True) for field in fields(state)))
