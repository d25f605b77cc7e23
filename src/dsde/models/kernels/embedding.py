"""The first thing a pass does: look up which tokens it reads, and their embeddings. Knows nothing of layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsde.device.launch import programmatic_launch

_BLOCK = 1024


def embed(
    tokens: torch.Tensor, sources: torch.Tensor, drafted: torch.Tensor, embedding: torch.Tensor, scale: float
) -> torch.Tensor:
    """[num_tokens, hidden] scaled rows of `embedding`.

    Token i is drafted[sources[i]], or tokens[i] where the source is negative. A target may know tokens that its draft
    does not: those read the draft's last row, and whatever is drafted after one of them stays lossless.
    """
    vocab, width = embedding.shape
    out = torch.empty((len(tokens), width), dtype=embedding.dtype, device=embedding.device)
    pdl = programmatic_launch()
    _embed_kernel[(len(tokens), triton.cdiv(width, _BLOCK))](
        tokens,
        sources,
        drafted,
        embedding,
        out,
        vocab - 1,
        scale,
        WIDTH=width,
        BLOCK=_BLOCK,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out


@triton.jit(do_not_specialize=["last"], do_not_specialize_on_alignment=["tokens", "sources"])
def _embed_kernel(
    tokens: tl.tensor,
    sources: tl.tensor,
    drafted: tl.tensor,
    embedding: tl.tensor,
    out: tl.tensor,
    last: tl.tensor,
    scale: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        # In this order: attention reads lengths and tables without waiting, and they may be written right before this.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    source = tl.load(sources + row)
    token = tl.load(tokens + row).to(tl.int32)
    token = tl.where(source >= 0, tl.load(drafted + tl.maximum(source, 0)), token)
    token = tl.minimum(token, last).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    values = tl.load(embedding + token * WIDTH + columns, mask=inside)
    values = (values.to(tl.float32) * scale).to(values.dtype)
    tl.store(out + row.to(tl.int64) * WIDTH + columns, values, mask=inside)
