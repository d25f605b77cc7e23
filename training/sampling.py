"""Lets the target write: many sequences side by side in fixed slots, refilled as they end, one CUDA graph per step.

A step touches no host memory: tokens, lengths, ends and the target's hidden states stay on the device until a slot is
emptied. Knows nothing of what prompts mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from training.decode_attention import decode_attention
from training.llama import Llama, causal, logits, rms_norm

Log = Callable[[str], None]


@dataclass(slots=True)
class Request:
    """One text to write; `tag` is the caller's own."""

    prompt: list[int]
    temperature: float
    tag: str = ""


@dataclass(slots=True)
class Corpus:
    """Texts that the target wrote, and the normed hidden state from which it chose each token."""

    prompts: list[list[int]] = field(default_factory=list)
    completions: list[list[int]] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    hidden: Tensor | None = None
    """[tokens of all completions, hidden size]"""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.completions))

    def extend(self, other: Corpus) -> None:
        self.prompts += other.prompts
        self.completions += other.completions
        self.temperatures += other.temperatures
        self.tags += other.tags
        parts = [part for part in (self.hidden, other.hidden) if part is not None]
        self.hidden = torch.cat(parts) if parts else None


class Sampler:
    """Slots for sequences of up to `context` tokens, of which `max_new` are written."""

    def __init__(
        self, model: Llama, slots: int, context: int, max_new: int, eos: Sequence[int], seed: int, keep_hidden: bool
    ) -> None:
        self.model, self.slots, self.context, self.max_new = model, slots, context, max_new
        embedding, shape = model.embedding, model.shape
        device = embedding.device
        cache = (len(model.layers), slots, shape.num_kv_heads, context, shape.head_dim)
        self.keys = torch.zeros(cache, dtype=embedding.dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.rows = torch.arange(slots, device=device)
        self.tokens = torch.zeros((slots, context), dtype=torch.long, device=device)
        self.lengths = torch.ones(slots, dtype=torch.long, device=device)
        self.prompt_lengths = torch.ones_like(self.lengths)
        self.limits = torch.ones_like(self.lengths)
        self.temperatures = torch.ones(slots, device=device)
        self.active = torch.zeros(slots, dtype=torch.bool, device=device)
        self.eos = torch.tensor(list(eos), device=device)
        # One column more than is ever kept: slots that have ended go on writing there.
        size = (slots, max_new + 1 if keep_hidden else 1, embedding.shape[1])
        self.hidden = torch.zeros(size, dtype=embedding.dtype, device=device)
        self.keep_hidden = keep_hidden
        self.owner: list[Request | None] = [None] * slots
        torch.manual_seed(seed)
        self.step = self._graph() if device.type == "cuda" else self._step

    @torch.inference_mode()
    def run(self, requests: Sequence[Request], steps_between_refills: int, log: Log) -> Corpus:
        """Write all of them; long prompts first, so that prompts of like length are read together."""
        waiting = sorted(requests, key=lambda request: len(request.prompt))
        corpus, kept = Corpus(), []
        started, reported = time.perf_counter(), time.perf_counter()
        while True:
            kept.append(self._harvest(corpus))
            free = [slot for slot, owner in enumerate(self.owner) if owner is None]
            if waiting and len(free) >= min(self.slots // 8, len(waiting)):
                self._fill(free, waiting)
            elif len(free) == self.slots:
                break
            for _ in range(steps_between_refills):
                self.step()
            if time.perf_counter() - reported > 10:
                reported = time.perf_counter()
                rate = corpus.num_tokens / (reported - started)
                log(f"{len(corpus.prompts)}/{len(requests)} texts, {rate:,.0f} tokens/s")
        corpus.hidden = torch.cat(kept) if self.keep_hidden else None
        took = time.perf_counter() - started
        log(f"{len(requests)} texts, {corpus.num_tokens:,} tokens in {took:.1f} s: {corpus.num_tokens / took:,.0f}/s")
        return corpus

    def _fill(self, free: list[int], waiting: list[Request]) -> None:
        """Read prompts into free slots, a few at a time so that the work area stays small."""
        while free and waiting:
            width = len(waiting[-1].prompt)
            count = min(len(free), len(waiting), max(1, 131_072 // width))
            batch = [waiting.pop() for _ in range(count)]
            slots, free = free[:count], free[count:]
            for slot, request in zip(slots, batch, strict=True):
                self.owner[slot] = request
            self._read(torch.tensor(slots, device=self.rows.device), batch, width)

    def _read(self, slots: Tensor, batch: list[Request], width: int) -> None:
        device = slots.device
        padded = torch.tensor([request.prompt + [0] * (width - len(request.prompt)) for request in batch])
        padded = padded.to(device)
        lengths = torch.tensor([len(request.prompt) for request in batch], device=device)
        self.tokens[slots, :width] = padded
        self.lengths[slots] = lengths
        self.prompt_lengths[slots] = lengths
        self.limits[slots] = (lengths + self.max_new).clamp(max=self.context)
        self.temperatures[slots] = torch.tensor([request.temperature for request in batch], device=device)
        self.active[slots] = True
        x = F.embedding(padded, self.model.embedding)
        cos, sin = self.model.angles(torch.arange(width, device=device), x.dtype)
        for index, layer in enumerate(self.model.layers):

            def attend(q: Tensor, k: Tensor, v: Tensor, index: int = index) -> Tensor:
                self.keys[index, slots, :, :width] = k.transpose(1, 2)
                self.values[index, slots, :, :width] = v.transpose(1, 2)
                return causal(q, k, v)

            x = layer(x, cos, sin, attend)

    @torch.inference_mode()
    def _step(self) -> None:
        """One token more for every slot; the newest token's keys and values are written on the way."""
        model, rows = self.model, self.rows
        at = self.lengths - 1
        x = F.embedding(self.tokens[rows, at], model.embedding)[:, None]
        cos, sin = model.angles(at[:, None], x.dtype)
        for index, layer in enumerate(model.layers):

            def attend(q: Tensor, k: Tensor, v: Tensor, index: int = index) -> Tensor:
                self.keys[index][rows, :, at] = k[:, 0]
                self.values[index][rows, :, at] = v[:, 0]
                return decode_attention(q[:, 0], self.keys[index], self.values[index], self.lengths)[:, None]

            x = layer(x, cos, sin, attend)
        state = rms_norm(x[:, 0], model.norm, model.shape.eps)
        if self.keep_hidden:
            self.hidden[rows, self.lengths - self.prompt_lengths] = state
        chosen = _choose(logits(state, model.embedding), self.temperatures)
        place = self.lengths.clamp(max=self.context - 1)
        self.tokens[rows, place] = torch.where(self.active, chosen, self.tokens[rows, place])
        self.lengths += self.active
        self.active &= (self.lengths < self.limits) & ~torch.isin(chosen, self.eos)

    def _graph(self) -> Callable[[], None]:
        with torch.inference_mode():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self._step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step()
        return graph.replay

    def _harvest(self, corpus: Corpus) -> Tensor:
        """Take the texts that have ended out of their slots."""
        active = self.active.tolist()
        ended = [slot for slot, owner in enumerate(self.owner) if owner is not None and not active[slot]]
        slots = torch.tensor(ended, dtype=torch.long, device=self.rows.device)
        lengths, tokens = self.lengths[slots].tolist(), self.tokens[slots].cpu().numpy()
        for slot, length, row in zip(ended, lengths, tokens, strict=True):
            request = self.owner[slot]
            self.owner[slot] = None
            corpus.prompts.append(request.prompt)
            corpus.completions.append(row[len(request.prompt) : length].tolist())
            corpus.temperatures.append(request.temperature)
            corpus.tags.append(request.tag)
        if not self.keep_hidden or not ended:
            return self.hidden[:0, 0]
        written = (self.lengths - self.prompt_lengths)[slots]
        mask = torch.arange(self.hidden.shape[1], device=slots.device) < written[:, None]
        return self.hidden[slots][mask]


def _choose(scores: Tensor, temperatures: Tensor) -> Tensor:
    """Exact samples: the largest of log-probabilities plus Gumbel noise; without noise at temperature 0."""
    noise = -torch.empty_like(scores).exponential_().clamp_min_(1e-30).log()
    return torch.addcmul(scores, noise, temperatures[:, None]).argmax(-1)
