"""The kernels that read on from a verdict, beside the plain ones that the engine's tests use."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import plain_kernels
from dsde.device.staging import Layout
from dsde.drafting.kernels import NUM_REREAD, advance
from dsde.models.batch import BLOCK_SIZE

HAS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
TABLE_WIDTH = 4
pytestmark = [pytest.mark.gpu] if HAS_CUDA else []


@pytest.mark.parametrize(("num_seqs", "padded"), [(1, 1), (3, 4), (5, 8), (9, 16)])
def test_reading_on_leaves_alone_what_is_not_its_own(num_seqs: int, padded: int) -> None:
    """A bucket may have room for more sequences than its tokens would serve."""
    rng = np.random.default_rng(num_seqs)
    num_tokens = NUM_REREAD * num_seqs
    sizes = dict.fromkeys(("tokens", "positions", "slots"), num_tokens)
    sizes |= {"starts": padded + 1, "tables": padded * TABLE_WIDTH}
    sizes |= dict.fromkeys(("contexts", "judged", "num_tokens", "last_tokens", "modes", "counters"), padded)
    sizes |= {"emitted_start": 1, "emitted_width": 1}
    layout = Layout(sizes)
    words = torch.from_numpy(rng.integers(0, 3, layout.num_words, dtype=np.int32))
    arrays = layout.views(words)
    arrays["judged"].fill_(-1)
    arrays["judged"][:num_seqs] = torch.arange(num_seqs)
    arrays["num_tokens"][:num_seqs] = torch.from_numpy(rng.integers(1, (TABLE_WIDTH - 1) * BLOCK_SIZE, num_seqs))
    arrays["emitted_start"][0], arrays["emitted_width"][0] = padded, 4
    verdict = torch.from_numpy(rng.integers(0, 4, padded * 5, dtype=np.int32))
    on_device = words.to(DEVICE, copy=True)
    advance(layout.views(on_device), verdict.to(DEVICE), TABLE_WIDTH)
    plain_kernels.advance(arrays, verdict, TABLE_WIDTH)
    assert torch.equal(on_device.cpu(), words)
