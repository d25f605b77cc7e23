"""`LLM` with the real embedded pair."""

from __future__ import annotations

import pytest

from dsde import LLM, InvalidInput, RequestOutput, SamplingParams, StreamChunk
from dsde.engine.speculative_config import SpeculativeConfig
from dsde.models.embedded import embedded_target_path
from dsde.policies import Static

pytestmark = [
    pytest.mark.weights,
    pytest.mark.skipif(embedded_target_path() is None, reason="the embedded weights are not on this machine"),
]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPTS = ["The capital of France is", "def fibonacci(n):", "Once upon a time", "1, 2, 3, 4, 5, 6, 7, 8,"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(kv_cache_bytes=256 << 20)


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_the_embedded_pair_speculates(llm: LLM) -> None:
    assert (llm.target, llm.draft) == ("SmolLM2-135M-Instruct", "embedded")
    output = llm.generate(PROMPTS[3], GREEDY)[0]
    assert "9, 10, 11" in output.outputs[0].text
    assert output.prompt == PROMPTS[3]
    assert output.metrics.num_accepted_tokens > 0
    assert output.metrics.trace is None


def test_every_policy_gives_the_same_text(llm: LLM) -> None:
    expected = texts(llm.with_policy("off").generate(PROMPTS, GREEDY))
    assert texts(llm.generate(PROMPTS, GREEDY)) == expected
    for policy in ("static:1", "static:7", "dsde:release", "static:4|meancap", Static(2)):
        other = llm.with_policy(policy)
        assert texts(other.generate(PROMPTS, GREEDY)) == expected
        assert other.metrics.num_draft_tokens > 0


def test_a_seed_gives_the_same_text_in_any_company(llm: LLM) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=24, seed=42)
    alone = texts(llm.with_policy("off").generate(PROMPTS[0], params))[0]
    together = texts(llm.generate([*PROMPTS, PROMPTS[0]], params))
    assert together[0] == together[-1] == alone
    other = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=24, seed=43)
    assert texts(llm.generate(PROMPTS[0], other))[0] != alone


def test_stream_adds_up(llm: LLM) -> None:
    pieces: dict[str, str] = {}
    finished = []
    for event in llm.stream(PROMPTS, GREEDY):
        if isinstance(event, StreamChunk):
            pieces[event.request_id] = pieces.get(event.request_id, "") + event.text
        else:
            finished.append(event)
    assert {output.request_id: output.outputs[0].text for output in finished} == pieces
    assert len(pieces) == len(PROMPTS)


def test_leaving_a_stream_ends_its_requests(llm: LLM) -> None:
    for _ in llm.stream(PROMPTS, GREEDY):
        break
    assert not llm.engine.has_work


def test_calls_may_be_made_while_a_stream_is_open(llm: LLM) -> None:
    alone = texts(llm.generate(PROMPTS, GREEDY))
    streamed: dict[str, str] = {}
    others: list[str] = []
    for event in llm.stream(PROMPTS[:2], GREEDY):
        if isinstance(event, StreamChunk):
            streamed[event.request_id] = streamed.get(event.request_id, "") + event.text
        if not others:
            others = texts(llm.generate(PROMPTS[2:], GREEDY))
    assert [*streamed.values(), *others] == alone
    unused = llm.stream(PROMPTS, GREEDY)
    assert not llm.engine.has_work
    del unused


def test_chat_takes_one_conversation_or_several(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is two plus two?"}]
    one = llm.chat(question, GREEDY)
    several = llm.chat([question, question], GREEDY)
    assert len(one) == 1
    assert texts(several) == texts(one) * 2
    with pytest.raises(InvalidInput):
        llm.chat([{"role": "user"}], GREEDY)


def test_stop_strings_and_what_they_leave(llm: LLM) -> None:
    full = llm.generate(PROMPTS[3], GREEDY)[0].outputs[0]
    params = SamplingParams(temperature=0, max_tokens=24, stop=[" 11", "never"])
    output = llm.generate(PROMPTS[3], params)[0].outputs[0]
    assert output.text == full.text[: full.text.index(" 11")]
    assert (output.finish_reason, output.stop_reason) == ("stop", " 11")
    assert output.token_ids == full.token_ids[: len(output.token_ids)]


def test_prompt_forms(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(PROMPTS[0])
    expected = texts(llm.generate(PROMPTS[0], GREEDY))
    assert texts(llm.generate(ids, GREEDY)) == expected
    assert texts(llm.generate([ids, PROMPTS[0]], [GREEDY, GREEDY])) == expected * 2
    assert llm.generate([], GREEDY) == []
    assert texts(llm.generate({"prompt_token_ids": ids}, GREEDY)) == expected
    assert texts(llm.generate([{"prompt": PROMPTS[0]}], GREEDY)) == expected
    with pytest.raises(InvalidInput, match="2 prompts"):
        llm.generate(PROMPTS[:2], [GREEDY])
    with pytest.raises(InvalidInput, match="prompt_token_ids"):
        llm.generate({"text": "x"}, GREEDY)
    with pytest.raises(InvalidInput, match="sampling_params"):
        llm.generate(PROMPTS[0], {"temperature": 0})  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="Unicode"):
        llm.generate("\ud800", GREEDY)
    with pytest.raises(InvalidInput, match="policy"):
        llm.with_policy(4)  # type: ignore[arg-type]


def test_one_bad_prompt_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(InvalidInput):
        llm.generate([PROMPTS[0], []], GREEDY)
    assert not llm.engine.has_work


def test_logprobs_are_the_targets(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2, prompt_logprobs=1)
    with_draft = llm.generate(PROMPTS[0], params)[0]
    without = llm.with_policy("off").generate(PROMPTS[0], params)[0]
    for a, b in zip(with_draft.outputs[0].logprobs or [], without.outputs[0].logprobs or [], strict=True):
        assert list(a) == list(b)
        for token in a:
            assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-3)
    chosen = [next(iter(entry.values())) for entry in with_draft.outputs[0].logprobs or []]
    assert all(logprob.rank == 1 for logprob in chosen)
    assert "".join(logprob.decoded_token or "" for logprob in chosen) == with_draft.outputs[0].text
    assert with_draft.prompt_logprobs is not None
    assert len(with_draft.prompt_logprobs) == len(with_draft.prompt_token_ids)


def test_speculative_config() -> None:
    parsed = SpeculativeConfig.parse('{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5}')
    assert (parsed.draft, parsed.policy, parsed.prompt_lookup_max) == ("ngram", "static:3", 5)
    assert SpeculativeConfig.parse({"model": "x", "num_speculative_tokens": 0}).policy == "off"
    assert SpeculativeConfig.parse(None).over("d", "static:2") == SpeculativeConfig("d", "static:2")
    assert SpeculativeConfig.parse({"policy": "dsde"}).over(None, "static:2").policy == "dsde"
    for bad in ("[1]", '{"method": "magic"}', '{"num_speculative_tokens": -1}', '{"prompt_lookup_min": 9}'):
        with pytest.raises(InvalidInput, match="speculative_config"):
            SpeculativeConfig.parse(bad)


def test_perfect_draft() -> None:
    """Weights that have four bits already do not change when rounded to four."""
    llm = LLM(draft="round:4", policy="static:4", kv_cache_bytes=128 << 20)
    llm.generate(PROMPTS[:2], SamplingParams(temperature=0, max_tokens=41, ignore_eos=True))
    assert llm.metrics.acceptance_rate == 1.0
    assert llm.metrics.acceptance_length >= 4.5
