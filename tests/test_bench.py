"""Rounds on a real, tiny pair: turns, times, texts, interruptions, and what the results say afterwards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dsde import LLM
from dsde.bench.bench import Agenda, Bench, make_agenda, make_policy_contenders
from dsde.bench.contender import Advance, Contender, PolicyContender, Task, Turn
from dsde.bench.machine import describe_machine, describe_models
from dsde.bench.passages import Origin, passages
from dsde.bench.results import Results, load_results
from dsde.bench.setting import Setting
from dsde.bench.verdict import judge
from dsde.core.errors import InvalidInput
from tiny_pair import write_pair

SETTING = Setting(policies=("off", "static:3", "dsde", "svip"), num_requests=4, max_tokens=12, rounds=2)


class Watcher:
    def __init__(self, stop_after: int | None = None) -> None:
        self.total, self.done, self.doing = 0, 0, [""]
        self.stop_after = stop_after

    def begin(self, num_requests: int) -> None:
        self.total = num_requests

    def describe(self, doing: str) -> None:
        self.doing.append(doing)

    def advance(self) -> None:
        self.done += 1
        if self.done == self.stop_after:
            raise KeyboardInterrupt


class Altered:
    """A contender whose third answer has another fifth token: what a broken engine would look like."""

    def __init__(self, inner: Contender) -> None:
        self.inner, self.name, self.most_places = inner, inner.name, inner.most_places

    def take_turn(self, tasks: Sequence[Task], places: int, arrivals: Sequence[float] | None, advance: Advance) -> Turn:
        turn = self.inner.take_turn(tasks, places, arrivals, advance)
        if len(turn.answers) > 2:
            turn.answers[2][4] += 1
        return turn

    def close(self) -> None:
        self.inner.close()


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    target, draft = write_pair(tmp_path_factory.mktemp("pair"))
    return LLM(str(target), str(draft), "off", max_num_seqs=1, kv_cache_bytes=4 << 20)


def new_results(llm: LLM, setting: Setting) -> Results:
    return Results(setting, "dsde bench", describe_machine(llm), describe_models(llm), "0", "today")


def prepare(llm: LLM, results: Results) -> tuple[Agenda, list[Contender]]:
    agenda = make_agenda(results, llm)
    return agenda, make_policy_contenders(results, llm, agenda.longest)


@pytest.fixture(scope="module")
def results(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Two batch sizes and two temperatures, measured once for all tests that only look."""
    setting = replace(SETTING, batch_sizes=(1, 3), temperatures=(0.0, 1.0))
    path = tmp_path_factory.mktemp("out") / "results.json"
    results = new_results(llm, setting)
    watcher = Watcher()
    Bench(results, *prepare(llm, results), path, watcher).run()
    assert watcher.done == watcher.total
    assert load_results(path) == results
    return results


def test_everybody_answers_the_same_requests_in_every_round(results: Results) -> None:
    assert [cell.key for cell in results.cells] == list(results.setting.cells())
    for cell in results.cells:
        assert list(cell.contenders) == ["off", "static:3", "dsde", "svip"]
        for findings in cell.contenders.values():
            assert len(findings.rounds) == 2
            assert findings.differences == []
            assert findings.lossless
            assert {tuple(one.num_tokens) for one in findings.rounds} == {
                tuple(one.num_tokens) for one in cell.contenders["off"].rounds
            }
    verdict = judge(results)
    assert verdict.good
    assert verdict.sentence == "Lossless: all 64 texts of our policies are those of off."


def test_times_and_counts_add_up(results: Results) -> None:
    for cell in results.cells:
        for name, findings in cell.contenders.items():
            for one in findings.rounds:
                counts, num_requests = one.counts, len(cell.kinds)
                assert sum(one.shares_s) == pytest.approx(one.seconds, rel=1e-6)
                for first_s, total_s in zip(one.first_token_s, one.total_s, strict=True):
                    assert 0 < first_s <= total_s <= one.seconds
                # A step gives its own token and those accepted; an answer may end before all of them are used.
                assert sum(one.num_tokens) <= num_requests + counts.num_decodes + counts.num_accepted_tokens
                by_length = counts.drafts_by_length
                assert sum((k + 1) * count for k, count in enumerate(by_length)) == counts.num_draft_tokens
                assert sum(by_length) == counts.num_drafts
                if cell.batch_size == 1:
                    assert sum(one.total_s) == pytest.approx(one.seconds, rel=0.1)
                    assert counts.num_draft_passes is not None
                    assert counts.num_draft_tokens is not None
                    assert counts.num_draft_passes >= counts.num_draft_tokens
                if name == "off":
                    assert counts.num_draft_tokens == counts.num_draft_passes == 0
                    assert sum(one.num_tokens) == num_requests + counts.num_decodes
                else:
                    assert counts.num_accepted_tokens > 0


def test_a_batch_is_full_and_never_fuller(llm: LLM) -> None:
    results = new_results(llm, replace(SETTING, policies=("off",), batch_sizes=(3,), num_requests=9, rounds=1))
    agenda, [contender] = prepare(llm, results)
    assert isinstance(contender, PolicyContender)
    engine, sizes = contender.llm.engine, []
    step = engine.step

    def watched() -> object:
        sizes.append(len(engine.requests))
        return step()

    engine.step = watched  # type: ignore[method-assign, assignment]
    Bench(results, agenda, [contender], None, Watcher()).run()
    assert max(sizes) == 3
    assert sizes.count(3) > len(sizes) / 2


def test_rounds_change_their_order_and_begin_cold(llm: LLM) -> None:
    results = new_results(llm, replace(SETTING, rounds=2))
    agenda, contenders = prepare(llm, results)
    watcher = Watcher()
    Bench(results, agenda, contenders, None, watcher).run()
    turns = [doing.rpartition(": ")[2] for doing in watcher.doing if "round" in doing]
    first, second = (
        [turn.partition(",")[0] for turn in turns if turn.endswith(f"round {number}")] for number in (1, 2)
    )
    assert first == ["off", "static:3", "dsde", "svip"]
    assert second == ["static:3", "dsde", "svip", "off"]
    for contender in contenders:
        assert isinstance(contender, PolicyContender)
        metrics = contender.llm.metrics
        # Prompts share a first block or two within a round; none is found from the round before.
        assert metrics.num_cached_prompt_tokens < 0.5 * metrics.num_prompt_tokens


def test_requests_that_arrive_later_wait_for_their_time(llm: LLM) -> None:
    setting = replace(SETTING, policies=("off",), batch_sizes=(2,), arrival="poisson:20", num_requests=6, rounds=1)
    results = new_results(llm, setting)
    Bench(results, *prepare(llm, results), None, Watcher()).run()
    [one] = results.cells[0].contenders["off"].rounds
    assert one.seconds > 0.15  # five gaps of 50 ms on average, whatever the engine needs
    assert sum(one.shares_s) == pytest.approx(one.seconds, rel=1e-6)
    assert sum(one.total_s) < 6 * one.seconds / 2  # from arrival, not from the start


def test_an_interrupted_run_goes_on_where_it_was(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results = new_results(llm, replace(SETTING, rounds=3))
    warmups, a_round = 4, 4 * 4
    with pytest.raises(KeyboardInterrupt):
        Bench(results, *prepare(llm, results), path, Watcher(stop_after=warmups + 2 * a_round + 3)).run()
    kept = load_results(path)
    assert kept.cells[0].num_rounds == 2
    assert not kept.finished
    before = json.dumps([one.num_tokens for one in kept.cells[0].contenders["dsde"].rounds])
    watcher = Watcher()
    Bench(kept, *prepare(llm, kept), path, watcher).run()
    assert watcher.done == watcher.total == warmups + a_round + 3  # and the traces of three policies
    done = load_results(path)
    assert done.finished
    assert [len(findings.rounds) for findings in done.cells[0].contenders.values()] == [3] * 4
    assert json.dumps([one.num_tokens for one in done.cells[0].contenders["dsde"].rounds[:2]]) == before
    assert done.elapsed_s > 0
    assert judge(done).good


def test_an_engine_is_fit_for_use_after_an_interruption(llm: LLM) -> None:
    results = new_results(llm, SETTING)
    agenda, contenders = prepare(llm, results)
    tasks = next(iter(agenda.tasks.values()))
    expected = contenders[1].take_turn(tasks, 2, None, lambda: None).answers
    with pytest.raises(KeyboardInterrupt):
        contenders[1].take_turn(tasks, 2, None, Watcher(stop_after=2).advance)
    assert contenders[1].take_turn(tasks, 2, None, lambda: None).answers == expected


def test_another_text_is_found_and_fails_the_run(llm: LLM) -> None:
    results = new_results(llm, SETTING)
    agenda, contenders = prepare(llm, results)
    contenders[1] = Altered(contenders[1])
    Bench(results, agenda, contenders, None, Watcher()).run()
    [difference] = results.cells[0].contenders["static:3"].differences
    assert (difference.request, difference.position) == (2, 4)
    assert difference.gap is not None
    assert difference.gap > 0
    verdict = judge(results)
    assert not verdict.good
    assert verdict.sentence.startswith("NOT LOSSLESS: of 16 texts 1 greedy texts differ")
    assert "static:3, mixed, batch 1, temperature 0, request 3, token 5" in verdict.sentence
    results.models["dtype"] = "bfloat16"
    verdict = judge(results)
    assert verdict.good
    assert "1 greedy texts differ" in verdict.sentence
    assert "near ties" in verdict.sentence


def test_a_lossy_rule_is_called_lossy_and_not_compared(llm: LLM) -> None:
    results = new_results(llm, replace(SETTING, policies=("off", "static:4|consultant:30"), rounds=1, max_tokens=40))
    Bench(results, *prepare(llm, results), None, Watcher()).run()
    findings = results.cells[0].contenders["static:4|consultant:30"]
    assert not findings.lossless
    assert judge(results).sentence == "Lossless: all 4 texts of our policies are those of off."


def test_a_trace_says_where_every_token_came_from(results: Results) -> None:
    assert {trace.contender for trace in results.traces} == {"static:3", "dsde", "svip"}
    for trace in results.traces:
        parts = passages(trace)
        kept = [piece.text for part in parts for piece in part if piece.origin is not Origin.REJECTED]
        assert kept == trace.pieces
        for step, part in zip(trace.steps, parts[1:], strict=True):
            origins = [piece.origin for piece in part]
            assert origins.count(Origin.ACCEPTED) == step["accepted"]
            assert origins.count(Origin.REJECTED) == step["drafted"] - step["accepted"]
            assert len(step["klds"]) == len(step["entropies"]) == step["drafted"]
            assert all(entropy >= 0 for entropy in step["entropies"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "schema is None"),
        ('{"schema": 99}', "schema is 99"),
        ('{"schema": 1}', "damaged"),
    ],
)
def test_files_that_are_no_results_are_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(InvalidInput, match=message):
        load_results(path)


@pytest.mark.parametrize(
    "wrong",
    [{"rounds": 0}, {"batch_sizes": (0,)}, {"temperatures": (-1.0,)}, {"workloads": ()}, {"arrival": "sometimes"}],
)
def test_a_setting_that_cannot_be_measured_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        replace(SETTING, **wrong)  # type: ignore[arg-type]
