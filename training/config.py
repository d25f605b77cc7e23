"""Every setting of a draft, in one place. Knows nothing of how any of them is used."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """What the target writes."""

    slots: int = 2048
    """sequences decoded side by side"""
    max_prompt: int = 1100
    max_new: int = 320
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.0, 0.3, 0.5, 0.7, 0.8, 1.0, 1.0)
    """drawn per sequence, all equally likely; 0 is greedy"""
    num_prompts: int = 46_000
    """prompts from files and templates, drawn at random"""
    num_asked: int = 18_000
    """user turns that the target writes itself, from an opening or from nothing (arXiv:2406.08464)"""
    max_asked: int = 96
    num_followups: int = 8_000
    """conversations that go on for another turn"""
    steps_between_refills: int = 16
    seed: int = 0


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """What is trained, and how."""

    layers: tuple[int, ...] = (0, 10, 19, 29)
    """layers of the target that the draft's layers start from"""
    vocab: int = 16_384
    """rows of the target's embedding that the draft's head has, the tokens the target writes most often"""
    seconds: float = 173.0
    """training time; the learning rate follows the clock"""
    batch_tokens: int = 49_152
    optimizer: str = "adamw"
    """adamw, or muon (matrices; arXiv:2502.16982) with adamw (norms)"""
    learning_rate: float = 1.5e-3
    warmup: float = 0.02
    """share of the time in which the learning rate rises"""
    weight_decay: float = 0.01
    clip: float = 1.0
    greedy_weight: float = 0.0
    """weight of the cross-entropy with the target's likeliest token, beside the KL divergence"""
    overlap_weight: float = 0.0
    """weight of the total variation, one minus the probability that a drafted token is accepted"""
    held_out: int = 1024
    """sequences kept apart for the training curve"""
    evaluations: int = 20
    """points of the training curve"""
    seed: int = 0
