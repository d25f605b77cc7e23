"""`benchmarks/auto_live.py` with tiny models: whether its turns are fair, not how fast anything is."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton")

import plain_kernels
from dsde.device import backend
from dsde.engine import device_executor, rehearsal
from dsde.policies import Policy, make_policy
from dsde.policies.static import Static

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import auto_live

OPTIONS = "--device cpu --shapes tiny,tiny --context-tokens 64 --turn-s 0 --learn-s 0"


@pytest.fixture(params=["host", "graphs"])
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> auto_live.Bench:
    if request.param == "graphs":
        monkeypatch.setattr(backend, "has_kernels", lambda _: True)
        plain_kernels.install(monkeypatch, with_graphs=True)
        # Plain kernels toss no coins; what stands is then what models of different weights agree on, next to nothing.
        monkeypatch.setattr(device_executor, "judge", lambda *args: plain_kernels.judge(*args[:-1]))
        monkeypatch.setattr(rehearsal, "WAYS", rehearsal.WAYS[:1])  # all requests are greedy
    return make_bench(monkeypatch, "--batches 4,1 --acceptance 0.5,0.9", tmp_path)


def make_bench(monkeypatch: pytest.MonkeyPatch, more: str, folder: Path) -> auto_live.Bench:
    files = f"--out {folder / 'out.json'} --costs-out {folder / 'costs.json'}"
    monkeypatch.setattr(sys, "argv", ["auto_live.py", *f"{OPTIONS} {more} {files}".split()])
    options = auto_live.parse_options()
    return auto_live.Bench(options, auto_live.Report(options, cells=[], catch_up=[]))


def test_every_turn_begins_alike(bench: auto_live.Bench) -> None:
    requests, rates = bench.requests, (0.5, 0.9)
    requests.renew(4, rates, auto_live.Past.none(4))
    bench.turns.current = Static(2)
    requests.step(0.0, 6)
    contexts = []
    for spec in ("off", "static:3", "off", "auto"):
        requests.renew(4, rates, auto_live.Past.none(4))
        contexts.append([sequence.num_tokens for sequence in requests.sequences])
        # All that is left to read for the draft is what was written since.
        assert requests.past().num_missed.max() <= 3
        bench.turns.current = make_policy(spec)
        requests.step(0.0, 2)
        before = bench.engine.metrics.num_draft_passes
        requests.step(0.0, 6)
        passes = bench.engine.metrics.num_draft_passes - before
        assert passes == {"off": 0, "static:3": 18}.get(spec, passes)
    assert contexts[1:] == contexts[:-1]


def test_a_policy_pays_for_its_own_pause(bench: auto_live.Bench) -> None:
    requests = bench.requests
    for missed in (0, 0, 40):  # the first time nobody has read the prompts
        requests.renew(4, (0.5, 0.9), auto_live.Past.none(4, missed))
        policy = auto_live.CatchUp()
        bench.turns.current = policy
        before = bench.engine.metrics.num_catch_up_tokens
        requests.step(0.0, 3)
        caught_up = bench.engine.metrics.num_catch_up_tokens - before
    assert 4 * 39 <= caught_up <= 4 * 43


def test_to_a_policy_its_requests_go_on(bench: auto_live.Bench) -> None:
    """Or else it would take them for short ones, whose prompts a draft had better not read."""
    past, told, num_turns = auto_live.Past.none(4), [], 3
    policy = Static(1)
    plan = policy.plan
    policy.plan = lambda batch: (told.append(batch.num_left.copy()), plan(batch))[1]  # type: ignore[assignment]
    for _ in range(num_turns):
        bench.requests.renew(4, (0.5, 0.9), past)
        bench.turns.current = policy
        bench.requests.step(0.0, 6)
        past = bench.requests.past()
    left = np.array(told)
    assert len(left) >= 6 * num_turns
    assert (np.diff(left, axis=0) <= 0).all()
    # A step may be under way, or made while others were asked.
    assert np.abs(left[0] - left[-1] - past.num_got).max() <= 4 * num_turns


def test_a_batch_larger_than_the_last(bench: auto_live.Bench) -> None:
    for batch in (1, 4, 1):
        bench.requests.renew(batch, (0.5, 0.9), auto_live.Past.none(batch))
        before = bench.turns.expected
        bench.requests.step(0.0, 1)
        assert bench.turns.expected - before == batch
        assert bench.turns.rates.tolist() == [0.5, 0.9, 0.5, 0.9][:batch]


def test_cells_and_costs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(auto_live, "LEAST_STEPS", 4)
    bench = make_bench(monkeypatch, "--batches 4,1 --acceptance 0.5;0.9,0.2;0.8@1 --rounds 2", tmp_path)
    bench.run()
    report, costs = (json.loads((tmp_path / name).read_text()) for name in ("out.json", "costs.json"))
    cells = [(row["batch"], row["acceptance"]) for row in report["cells"]]
    assert list(dict.fromkeys(cells)) == [(4, "0.5"), (1, "0.5"), (4, "0.9/0.2"), (1, "0.8")]
    for row in report["cells"]:
        assert len(row["vs_off_rounds"]) == len(row["vs_static_rounds"]) == 2
        assert row["plain_share"] == {"off": 1.0, "auto": row["plain_share"]}.get(row["policy"], 0.0)
        assert row["policy"] != "off" or row["vs_off"] == 1.0
        assert row["policy"] != row["best_static"] or row["vs_static"] == 1.0
    assert {tuple(row[:2]) for row in costs["verify"]} >= {(1, 1), (1, 2), (4, 4), (4, 8)}
    assert all(size > 0 and seconds > 0 for size, seconds in costs["catch_up"])
    assert capsys.readouterr().out.count("auto") == 4


def test_from_one_cell_to_the_next_only_costs_are_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bench = make_bench(monkeypatch, "--batches 4 --acceptance 0.9;0.1 --rounds 1", tmp_path)
    made, known = [], []

    def make(spec: str) -> Policy:
        policy = make_policy(spec)
        if spec == "auto":
            made.append(policy)
            begin = policy.cost_model.restore
            policy.cost_model.restore = lambda saved: (known.append(saved), begin(saved))
        return policy

    monkeypatch.setattr(auto_live, "make_policy", make)
    bench.run()
    assert len(made) == 2
    assert made[0] is not made[1]
    assert len(known) == 1
    assert known[0]["verify"]


def test_out_of_time_nothing_more_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bench = make_bench(monkeypatch, "--batches 1 --acceptance 0.5;0.9 --rounds 1 --time-limit 1e9", tmp_path)
    measured = []
    monkeypatch.setattr(bench, "_measure", lambda batch, rates: measured.append(rates))
    monkeypatch.setattr(bench, "_measure_catching_up", lambda batch, rates: None)
    bench.run()
    assert measured == [(0.5,), (0.9,)]
    bench.cell_s[1] = 1e9
    bench.run()
    assert len(measured) == 2
