"""Why a length was chosen, in a sentence. Knows records of steps, the signals of DSDE and of auto; lists all others."""

from __future__ import annotations

from dsde.core.outputs import StepRecord
from dsde.core.params import Speculation

_NAMES = {"mean_kld": "KLD", "scale_factor": "SF", "wvir": "WVIR", "sl_max": "longest"}


def explain(record: StepRecord, speculation: Speculation) -> str:
    """What led to the length of this step."""
    if speculation == "off":
        return "Off: this request asked for no speculation."
    if isinstance(speculation, int):
        return f"{_tokens(record.planned)}: this request fixed its length." + _difference(record)
    if record.predicted is None:
        return "Off: this server has no draft."
    if record.cap == 0:
        return "Off in this step, for the whole batch: at this load drafting does not pay, or plain decoding is timed."
    return f"{_tokens(record.planned)}: {_wish(record)}." + _cap(record) + _difference(record)


def _wish(record: StepRecord) -> str:
    signals = record.signals
    outlook, token, shared = (signals.get(name) for name in ("outlook", "cost_of_token", "cost_of_pass"))
    if outlook is not None and token is not None and shared is not None:
        chance, price = _number(outlook), _number(token + shared)
        balance = f"the next token stands with a chance of {chance} and costs the time of {price} plain ones"
        if record.predicted:
            return f"{balance}, so {_length(record)} pay, more where they look sure"
        return f"{balance}, which is looked into" if record.planned else f"{balance}, so none pays"
    if "scale_factor" not in signals:
        reasons = [f"{_NAMES.get(name, name)} {_number(value)}" for name, value in signals.items() if value is not None]
        return f"the policy wants {_length(record)}" + (f" ({', '.join(reasons)})" if reasons else "")
    kld, wvir, longest = signals["mean_kld"], signals["wvir"], signals["sl_max"]
    if kld is None or wvir is None or longest is None:
        return "still calibrating, doubling while everything is accepted"
    return (
        f"draft and target {_agreement(kld)} (KLD {_number(kld)}), {_steadiness(wvir)} (WVIR {_number(wvir)}), "
        f"so {_length(record)} of at most {_number(longest)}"
    )


def _agreement(kld: float) -> str:
    if kld < 0.1:
        return "just agreed closely"
    return "just agreed roughly" if kld < 0.5 else "just disagreed"


def _steadiness(wvir: float) -> str:
    if wvir < 0.8:
        return "more steadily than before"
    return "as steadily as before" if wvir <= 1.25 else "less steadily than before"


def _cap(record: StepRecord) -> str:
    """Why less was planned than wished for."""
    assert record.predicted is not None
    if record.planned >= round(record.predicted):
        return ""
    if record.cap is not None and record.planned == int(record.cap):
        return f" The batch's cap is {_number(record.cap)}."
    return " No more are left to say."


def _difference(record: StepRecord) -> str:
    """Between what was planned and what was drafted."""
    if record.drafted == record.planned:
        return ""
    return f" Only {record.drafted} came: the draft ended early, or memory was short."


def _length(record: StepRecord) -> str:
    assert record.predicted is not None
    return _number(record.predicted)


def _tokens(count: int) -> str:
    return f"{count} token" if count == 1 else f"{count} tokens"


def _number(value: float) -> str:
    """Short: two digits behind the point for what is small, none for what is large."""
    if value >= 1e4:
        return f"{value:.0e}"
    return (
        f"{value:.0f}" if value >= 100 or value == round(value) else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    )
