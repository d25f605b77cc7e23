"""Trains a draft to predict what the target would have said, on texts that the target wrote.

The loss is the KL divergence from the target's distribution to the draft's over the draft's own vocabulary
(arXiv:2310.08461 compares such losses). The target itself is not run: its hidden states were kept when it wrote.
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from training.config import DraftConfig
from training.llama import Llama, draft_from, logits
from training.sampling import Corpus

Curve = list[dict[str, float]]
_CHUNK = 8192
"""positions whose scores over the vocabulary are held at once"""
_PADDING = 64
"""texts are padded to multiples of this"""


@dataclass(slots=True)
class Batch:
    """Sequences of like length, padded on the right, and where in them the target's choices are."""

    tokens: Tensor
    """[rows, width]"""
    places: Tensor
    """[choices] indices into the flattened tokens, of the token before each one that the target wrote"""
    states: Tensor
    """[choices] rows of the corpus' hidden states"""


class Texts:
    """A corpus laid out for training."""

    def __init__(self, corpus: Corpus) -> None:
        self.texts = [np.array(p + c) for p, c in zip(corpus.prompts, corpus.completions, strict=True)]
        self.written = np.array([len(completion) for completion in corpus.completions])
        self.lengths = np.array([len(text) for text in self.texts])
        self.first_state = np.cumsum(self.written) - self.written
        self.hidden = corpus.hidden

    def batch(self, indices: list[int]) -> Batch:
        width = max(map(self._width, indices))
        tokens = np.zeros((len(indices), width), dtype=np.int64)
        places, states = [], []
        for row, i in enumerate(indices):
            length, written = self.lengths[i], self.written[i]
            tokens[row, :length] = self.texts[i]
            places.append(np.arange(length - written - 1, length - 1) + row * width)
            states.append(np.arange(written) + self.first_state[i])
        parts = (tokens, np.concatenate(places), np.concatenate(states))
        device = self.hidden.device
        if device.type == "cuda":
            return Batch(*(torch.from_numpy(part).pin_memory().to(device, non_blocking=True) for part in parts))
        return Batch(*map(torch.from_numpy, parts))

    def batches(self, indices: list[int], batch_tokens: int, rng: random.Random) -> Iterator[Batch]:
        """One pass over the texts in random order. Few shapes, so that the device's memory is laid out only once."""
        by_width: dict[int, list[int]] = defaultdict(list)
        for i in indices:
            by_width[self._width(i)].append(i)
        groups = []
        for width, members in by_width.items():
            rng.shuffle(members)
            rows = max(1, batch_tokens // width)
            groups += [members[start : start + rows] for start in range(0, len(members), rows)]
        rng.shuffle(groups)
        yield from map(self.batch, groups)

    def _width(self, index: int) -> int:
        return -(-int(self.lengths[index]) // _PADDING) * _PADDING


def frequent_tokens(corpus: Corpus, vocab_size: int, always: list[int]) -> tuple[Tensor, Tensor]:
    """All token ids, those the target wrote most often first, and how often each was written."""
    counts = np.bincount(np.concatenate([np.array(c) for c in corpus.completions]), minlength=vocab_size)
    ranked = counts.copy()
    ranked[always] = counts.max() + 1
    order = np.argsort(-ranked, kind="stable")
    return torch.from_numpy(order), torch.from_numpy(counts[order])


class Distillation:
    """One training run. `vocab` lists the tokens of the draft's head."""

    def __init__(self, target: Llama, texts: Texts, vocab: Tensor, config: DraftConfig) -> None:
        self.config, self.texts = config, texts
        torch.manual_seed(config.seed)
        self.rng = random.Random(config.seed)
        self.draft = draft_from(target, config.layers)
        self.rows = target.embedding[vocab.to(target.embedding.device)]
        self.dtype = target.embedding.dtype
        order = list(range(len(texts.texts)))
        self.rng.shuffle(order)
        held = min(config.held_out, len(order) // 10)
        self.held_out, self.training = order[:held], order[held:]
        self.optimizers = make_optimizers(self.draft, config)
        is_cuda = self.rows.is_cuda
        self.loss = torch.compile(loss_and_gradient, dynamic=False) if is_cuda else loss_and_gradient

    def run(self, log: Callable[[str], None]) -> Curve:
        curve: Curve = []
        started, num_tokens, num_steps, next_point = time.perf_counter(), 0, 0, 0.0
        batches = self._forever()
        while True:
            share = (time.perf_counter() - started) / self.config.seconds
            if share >= next_point or share >= 1:
                seconds = time.perf_counter() - started
                point = {"step": num_steps, "seconds": seconds, "tokens": num_tokens, **self.measure()}
                curve.append(point)
                log(", ".join(f"{key} {value:.4g}" for key, value in point.items()))
                started += time.perf_counter() - started - seconds  # measuring does not count as training
                next_point += 1 / self.config.evaluations
            if share >= 1:
                return curve
            self._set_rate(share)
            batch = next(batches)
            self.step(batch)
            num_tokens += batch.tokens.numel()
            num_steps += 1

    def step(self, batch: Batch) -> Tensor:
        hidden = self.draft(batch.tokens).flatten(0, 1)[batch.places]
        loss, gradient, _ = self._loss(hidden.detach(), batch.states)
        hidden.backward(gradient)
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), self.config.clip, foreach=True)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Loss, greedy agreement and overlap on texts that are not trained on."""
        total, count = torch.zeros(3), 0
        for batch in self.texts.batches(self.held_out, self.config.batch_tokens, random.Random(0)):
            hidden = self.draft(batch.tokens).flatten(0, 1)[batch.places]
            _, _, sums = self._loss(hidden, batch.states)
            total += sums.cpu()
            count += len(batch.places)
        loss, greedy, overlap = (total / count).tolist()
        return {"loss": loss, "greedy": greedy, "overlap": overlap}

    @torch.no_grad()
    def _loss(self, hidden: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean loss, its gradient by `hidden`, and the sums of loss, agreement and overlap.

        The scores over the vocabulary are never held for all positions at once, and chunks have one size, so that the
        compiled loss sees one shape: the last chunk is padded with positions that weigh nothing.
        """
        config, count = self.config, len(hidden)
        gradient, sums = torch.empty_like(hidden), torch.zeros(3, device=hidden.device)
        for start in range(0, count, _CHUNK):
            own = hidden[start : start + _CHUNK]
            target = self.texts.hidden[states[start : start + _CHUNK]]
            size = len(own)
            if size < _CHUNK:
                own = torch.nn.functional.pad(own, (0, 0, 0, _CHUNK - size))
                target = torch.nn.functional.pad(target, (0, 0, 0, _CHUNK - size))
            weight = (torch.arange(_CHUNK, device=own.device) < size).float()
            ours, theirs = logits(own, self.rows), logits(target, self.rows)
            slope, part = self.loss(ours, theirs, weight, config.greedy_weight, config.overlap_weight)
            gradient[start : start + size] = (slope.to(self.dtype) @ self.rows)[:size] / count
            sums += part
        return sums[0] / count, gradient, sums

    def _forever(self) -> Iterator[Batch]:
        while True:
            yield from self.texts.batches(self.training, self.config.batch_tokens, self.rng)

    def _set_rate(self, share: float) -> None:
        config = self.config
        rate = config.learning_rate * min(1.0, share / config.warmup) * (0.5 + 0.5 * math.cos(math.pi * min(share, 1)))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = max(rate, 1e-8)


def loss_and_gradient(
    ours: Tensor, theirs: Tensor, weight: Tensor, greedy_weight: float, overlap_weight: float
) -> tuple[Tensor, Tensor]:
    """The gradient by our scores; and the sums of loss, greedy agreement and overlap, positions weighted."""
    log_q, log_p = ours.log_softmax(-1), theirs.log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    loss = (p * (log_p - log_q)).sum(-1)
    slope = q - p
    overlap = torch.minimum(p, q).sum(-1)
    likeliest = theirs.argmax(-1, keepdim=True)
    agree = (ours.argmax(-1, keepdim=True) == likeliest).float()[:, 0]
    if greedy_weight:
        loss = loss - greedy_weight * log_q.gather(-1, likeliest)[:, 0]
        is_likeliest = torch.arange(ours.shape[-1], device=ours.device) == likeliest
        slope = slope + greedy_weight * (q - is_likeliest.float())
    if overlap_weight:
        loss = loss + overlap_weight * (1 - overlap)
        side = torch.sign(q - p) / 2
        slope = slope + overlap_weight * q * (side - (q * side).sum(-1, keepdim=True))
    sums = torch.stack([(value * weight).sum() for value in (loss, agree, overlap)])
    return slope * weight[:, None], sums


def make_optimizers(draft: Llama, config: DraftConfig) -> list[torch.optim.Optimizer]:
    parameters = list(draft.parameters())
    matrices = [p for p in parameters if p.ndim == 2]
    vectors = [p for p in parameters if p.ndim == 1]
    rate, decay = config.learning_rate, config.weight_decay
    if config.optimizer == "adamw":
        groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
        return [torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), foreach=True)]
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(vectors, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)]
