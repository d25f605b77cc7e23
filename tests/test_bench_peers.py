"""Other programs beside ours: transformers for real, vLLM and specdec_bench by how they are called and call."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dsde import LLM, SamplingParams
from dsde.bench.bench import Bench, make_agenda, make_policy_contenders
from dsde.bench.contender import Task
from dsde.bench.machine import describe_machine, describe_models
from dsde.bench.peers import make_peers
from dsde.bench.peers.vllm import PeerFailed, VllmContender
from dsde.bench.results import Results
from dsde.bench.setting import Setting
from dsde.bench.specdec import SpecDecModel
from dsde.bench.summary import summarise
from dsde.core.errors import InvalidInput
from test_bench import Watcher
from tiny_pair import write_pair

VLLM = '''
"""A stand-in that answers as vLLM does: requests by id, outputs that grow, at most so many at once."""
from types import SimpleNamespace

__version__ = "stand-in"


class SamplingParams:
    def __init__(self, temperature, max_tokens, seed, stop_token_ids, detokenize):
        assert detokenize is False
        self.max_tokens = max_tokens


class LLM:
    def __init__(self, **options):
        if options["model"] == "broken":
            raise RuntimeError("no such model")
        self.llm_engine = Engine(options)


class Engine:
    def __init__(self, options):
        drafting = options.get("speculative_config", {"num_speculative_tokens": 0})
        self.gain = 1 + drafting["num_speculative_tokens"]
        self.most = options["max_num_seqs"]
        self.requests = {}

    def add_request(self, request_id, prompt, params):
        self.requests[request_id] = ([], prompt["prompt_token_ids"], params)
        assert len(self.requests) <= self.most

    def step(self):
        outputs = []
        for request_id, (tokens, prompt, params) in list(self.requests.items()):
            for _ in range(self.gain):
                if len(tokens) < params.max_tokens:
                    tokens.append(len(prompt) + len(tokens))
            finished = len(tokens) == params.max_tokens
            if finished:
                del self.requests[request_id]
            completion = SimpleNamespace(token_ids=list(tokens))
            outputs.append(SimpleNamespace(request_id=request_id, outputs=[completion], finished=finished))
        return outputs
'''


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def llm(pair: tuple[Path, Path]) -> LLM:
    return LLM(str(pair[0]), str(pair[1]), "off", max_num_seqs=1, kv_cache_bytes=4 << 20)


def test_transformers_takes_its_turn_and_gives_the_same_texts(llm: LLM, pair: tuple[Path, Path]) -> None:
    setting = Setting(
        policies=("off",),
        batch_sizes=(1, 2),
        temperatures=(0.0, 1.0),
        num_requests=2,
        max_tokens=16,
        rounds=1,
        target=str(pair[0]),
        peers=("transformers",),
    )
    results = Results(setting, "", describe_machine(llm), describe_models(llm), "0", "today")
    agenda = make_agenda(results, llm)
    contenders = make_policy_contenders(results, llm, agenda.longest)
    contenders += make_peers(results, llm, agenda.longest)
    Bench(results, agenda, contenders, None, Watcher()).run()
    names = {cell.key: list(cell.contenders) for cell in results.cells}
    both = ["off", "transformers", "transformers+draft"]
    assert list(names.values()) == [both, both, ["off"], ["off"]]  # it does one request at a time
    greedy, sampled = results.cells[:2]
    assert all(not findings.differences for findings in greedy.contenders.values())
    assert not sampled.contenders["transformers"].compared
    plain, assisted = (greedy.contenders[name].rounds[0].counts for name in both[1:])
    assert plain.num_target_passes == sum(greedy.contenders["off"].rounds[0].num_tokens)
    assert plain.num_draft_tokens == 0
    assert 0 < assisted.num_target_passes < plain.num_target_passes
    assert assisted.num_draft_tokens is not None
    assert 0 < assisted.num_accepted_tokens <= assisted.num_draft_tokens
    row = summarise(results)[0].row("transformers+draft")
    assert row is not None
    assert 0 < row.first_token_s[0] < row.latency_s


def test_a_draft_that_transformers_does_not_know_is_said(pair: tuple[Path, Path]) -> None:
    llm = LLM(str(pair[0]), "skip:1-1", "off", max_num_seqs=1, kv_cache_bytes=4 << 20)
    setting = Setting(target=str(pair[0]), draft="skip:1-1", peers=("transformers",))
    results = Results(setting, "", {}, {}, "0", "today")
    assert [peer.name for peer in make_peers(results, llm, 100)] == ["transformers"]
    assert results.notes == ["transformers has no draft here: it does not know skip:1-1."]


def test_vllm_is_driven_in_its_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    drafting = {"speculative_config": {"num_speculative_tokens": 3}}
    contender = VllmContender("vllm:3", {"model": "m", "max_num_seqs": 2} | drafting, [0])
    tasks = [
        Task("code", "", [5] * length, SamplingParams(max_tokens=9, temperature=0, seed=1)) for length in (3, 4, 5)
    ]
    watcher = Watcher()
    turn = contender.take_turn(tasks, 2, None, watcher.advance)
    contender.close()
    assert watcher.done == 3
    assert turn.answers == [list(range(length, length + 9)) for length in (3, 4, 5)]
    assert turn.round.num_tokens == [9, 9, 9]
    assert turn.round.counts.num_target_passes == 6  # two requests in 3 steps, then the third
    assert turn.round.counts.num_draft_tokens is None
    assert sum(turn.round.shares_s) == pytest.approx(turn.round.seconds, rel=1e-6)
    with pytest.raises(PeerFailed, match="vllm ended: RuntimeError: no such model"):
        VllmContender("vllm", {"model": "broken", "max_num_seqs": 2}, [0])


class SpecDecRunner:
    """Calls a model class as the runner of specdec_bench does, and computes what its metrics do."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.records: list[dict[str, Any]] = []

    async def run(self, prompt: list[int], max_length: int, end_id: int, request_id: int, turn_id: int) -> list[int]:
        output = await self.model.run(prompt, max_length, end_id, request_id, turn_id)
        self.records.append(output)
        [tokens] = output["output_ids"]
        return list(tokens)

    def acceptance_lengths(self) -> list[float]:
        found = []
        for record in self.records:
            [lengths] = record["chunk_lengths"]
            inner = lengths[1 if lengths[0] == 1 else 0 : -1]
            found.append(sum(inner) / len(inner))
        return found


def test_specdec_bench_can_drive_us(pair: tuple[Path, Path], llm: LLM) -> None:
    model = SpecDecModel(
        str(pair[0]),
        max_concurrent_requests=2,
        sampling_kwargs={"temperature": 0},
        speculative_algorithm="DRAFT_TARGET",
        draft_model_dir=str(pair[1]),
        speculative_num_steps=3,
        tensor_parallel_size=1,
        moe_expert_parallel_size=1,
        parallel_drafting=False,
        trust_remote_code=False,
        kv_cache_bytes=4 << 20,
    )
    runner = SpecDecRunner(model)
    prompts = [[9, 8, 7, 6], [20, 21, 22, 23, 24]]

    async def run_all() -> list[list[int]]:
        turns = [runner.run(prompt, 30, -1, number, 0) for number, prompt in enumerate(prompts)]
        return await asyncio.gather(*turns)

    answers = asyncio.run(run_all())
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    assert answers == [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    for record in runner.records:
        [lengths], times = record["chunk_lengths"], record["token_times"]
        assert sum(lengths) == 30
        assert len(times) == len(lengths) + 1
        assert times == sorted(times)
        assert max(lengths) <= 4
    assert all(length > 1 for length in runner.acceptance_lengths())
    ended = asyncio.run(runner.run(prompts[0], 30, answers[0][3], 2, 0))
    assert ended[-1] == answers[0][3]
    assert len(ended) <= 4
    model.stop()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"speculative_algorithm": "EAGLE3"}, "DRAFT_TARGET, NGRAM, NONE, not 'EAGLE3'"),
        ({"speculative_algorithm": "DRAFT_TARGET"}, "needs a draft"),
        ({"sampling_kwargs": {"beam_width": 4}}, "no beam search"),
    ],
)
def test_what_specdec_bench_may_not_ask_for(wrong: dict[str, Any], message: str, pair: tuple[Path, Path]) -> None:
    given: dict[str, Any] = {"max_concurrent_requests": 1, "sampling_kwargs": {}, "kv_cache_bytes": 4 << 20, **wrong}
    with pytest.raises(InvalidInput, match=message):
        SpecDecModel(str(pair[0]), **given)
