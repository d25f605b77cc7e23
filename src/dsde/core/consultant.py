"""Consultant Decoding as data: how far drafted tokens may be from what the target would say. Not lossless."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Consultant:
    """A drafted token stands while the moving average of the target's surprise at the draft, in nats, is at most
    `epsilon`."""

    epsilon: float
    decay: float
    """share of the past in the average"""
