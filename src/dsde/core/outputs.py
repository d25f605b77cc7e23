"""What a request gets back. Plain data; written by the engine, read by users."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(slots=True)
class Logprob:
    """One token's log-probability under the target, from its raw logits."""

    logprob: float
    rank: int
    """1 is the most likely token"""
    decoded_token: str | None = None
    """how the token reads on its own; None without a tokenizer"""


@dataclass(slots=True)
class StepRecord:
    """What one step did for one sequence, and why: the line of a trace."""

    request_id: str
    index: int
    step: int
    """number of the engine's step"""
    num_tokens: int
    """tokens of the sequence before the step"""
    num_decoding: int
    """sequences that decoded in the same step"""
    num_pass_tokens: int
    """tokens that the target read in that step: everybody's newest, all drafts, and prompts"""
    predicted: float | None
    """length the policy wanted; None where the request fixed its own"""
    cap: float | None
    planned: int
    """after caps and room"""
    drafted: int
    """after look-ahead memory and what the draft had to offer"""
    accepted: int
    rejected_token_ids: list[int] | None
    """what was drafted and did not stand; None where drafts never leave the device"""
    klds: list[float]
    signals: dict[str, float | None]
    """the policy's own reasons (DSDE: scale_factor, wvir, mean_kld, sl_max); None where there is none yet"""
    draft_s: float
    """what a device waited for the host before it included"""
    verify_s: float
    step_s: float
    expected_draft_s: float | None = None
    """what the policy's cost model expected of drafting as much, nobody having to catch up; None: it has none"""
    expected_verify_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class SpeculationCounts:
    """What drafting brought. Positions that were not drafted are unobserved, not rejected."""

    num_drafts: int = 0
    """sequence-steps in which something was drafted"""
    num_draft_tokens: int = 0
    num_draft_tokens_per_pos: list[int] = field(default_factory=list)
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_emitted_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_catch_up_tokens: int = 0
    """tokens the draft read because it had not seen them: prompts, pauses, preemptions"""
    num_preemptions: int = 0

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted"""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """tokens emitted by a step that had drafted something, the bonus token included"""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    def count_step(self, drafted: int, accepted: int, emitted: int) -> None:
        """Add one step of one sequence."""
        self.num_emitted_tokens += emitted
        if drafted:
            self.num_drafts += 1
            self.num_draft_tokens += drafted
            self.num_accepted_tokens += accepted
            _count_positions(self.num_draft_tokens_per_pos, drafted)
            _count_positions(self.num_accepted_tokens_per_pos, accepted)


def _count_positions(totals: list[int], length: int) -> None:
    totals.extend([0] * (length - len(totals)))
    for position in range(length):
        totals[position] += 1


@dataclass(slots=True)
class RequestMetrics(SpeculationCounts):
    """Counts and times of one request, all its completions together."""

    num_steps: int = 0
    """target passes that emitted a token for this request"""
    lossless: bool = True
    """False: a rule was asked for that accepts tokens which the target would not have said"""
    queue_s: float = 0.0
    first_token_s: float = 0.0
    """from arrival to the first token"""
    total_s: float = 0.0
    trace: list[StepRecord] | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a request."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason | None
    """None while it is still running"""
    stop_reason: int | str | None = None
    """which of the request's own stop strings or token ids ended it; None for the model's end of sequence"""


@dataclass(slots=True)
class RequestOutput:
    """A request with all its completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    finished: bool


@dataclass(slots=True)
class StreamChunk:
    """What one step added to one completion."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    logprobs: list[dict[int, Logprob]] | None = None
    """of these tokens, if the request asked for them"""
