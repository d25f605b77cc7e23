"""Many callers, one engine thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from dsde import InvalidInput, RequestOutput, SamplingParams, StreamChunk
from dsde.core.errors import OutOfMemory
from dsde.engine.async_llm import AsyncLLM, EngineStopped, Submission
from dsde.engine.engine import StepOutput
from tiny import complete, make_engine, tiny_model

TARGET = tiny_model(seed=7)
DRAFT = tiny_model(seed=7, noise=0.15)
GREEDY = SamplingParams(temperature=0, max_tokens=20)
LONG = SamplingParams(temperature=0, max_tokens=400)


@pytest.fixture
def llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(make_engine(TARGET, DRAFT, "dsde"))
    yield llm
    llm.shutdown()


async def collect(stream: AsyncIterator[StreamChunk | RequestOutput]) -> tuple[list[int], RequestOutput]:
    tokens: list[int] = []
    async for event in stream:
        if isinstance(event, RequestOutput):
            return tokens, event
        tokens += event.token_ids
    raise AssertionError("the stream ended without a finished request")


def test_callers_at_once_get_what_they_would_get_alone(llm: AsyncLLM) -> None:
    prompts = [[i, i + 1, i + 2] for i in range(12)]

    async def everybody() -> list[tuple[list[int], RequestOutput]]:
        return await asyncio.gather(*(collect(llm.generate(prompt, GREEDY)) for prompt in prompts))

    alone = complete(make_engine(TARGET, None), prompts, GREEDY)
    for (streamed, output), expected in zip(asyncio.run(everybody()), alone, strict=True):
        assert streamed == output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_bad_request_fails_alone(llm: AsyncLLM) -> None:
    async def both() -> RequestOutput:
        good = asyncio.create_task(collect(llm.generate([1], GREEDY)))
        with pytest.raises(InvalidInput, match="empty"):
            await collect(llm.generate([], GREEDY))
        return (await good)[1]

    assert asyncio.run(both()).finished


def test_nonsense_fails_alone_and_nobody_hangs(llm: AsyncLLM) -> None:
    async def several() -> list[object]:
        bad = [llm.generate(prompt, GREEDY) for prompt in (None, 5, [1.5], {"a": 1})]  # type: ignore[arg-type]
        good = llm.generate([1], GREEDY)
        calls = [collect(stream) for stream in (*bad, good)]
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), timeout=30)

    *bad, good = asyncio.run(several())
    assert all(isinstance(error, InvalidInput) for error in bad)
    assert isinstance(good, tuple)


def test_leaving_early_ends_the_request(llm: AsyncLLM) -> None:
    async def leave() -> None:
        stream = llm.generate([1, 2, 3], LONG)
        async for _ in stream:
            break
        await stream.aclose()
        await collect(llm.generate([4], GREEDY))

    asyncio.run(leave())
    assert llm.engine.metrics.num_aborted == 1
    assert not llm.engine.requests


def test_cancellation_ends_the_request(llm: AsyncLLM) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(collect(llm.generate([1, 2, 3], LONG)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await collect(llm.generate([4], GREEDY))

    asyncio.run(cancel())
    assert not llm.engine.requests


def test_shutdown_tells_those_who_wait() -> None:
    llm = AsyncLLM(make_engine(TARGET, None, "off"))

    async def wait() -> None:
        task = asyncio.create_task(collect(llm.generate([1], LONG)))
        await asyncio.sleep(0.02)
        await asyncio.to_thread(llm.shutdown)
        with pytest.raises(EngineStopped):
            await task
        with pytest.raises(EngineStopped):
            await collect(llm.generate([1], GREEDY))

    asyncio.run(wait())


def test_a_failing_engine_tells_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = AsyncLLM(make_engine(TARGET, None, "off"))

    def fail() -> None:
        raise MemoryError("no memory left")

    monkeypatch.setattr(llm.engine, "step", fail)
    with pytest.raises(EngineStopped, match="no memory left"):
        asyncio.run(collect(llm.generate([1], GREEDY)))
    llm.shutdown()


def test_short_memory_fails_those_who_run_and_nobody_after(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, failures = llm.engine.step, [OutOfMemory("too little")] * 2

    def failing_step() -> StepOutput:
        if failures:
            raise failures.pop()
        return step()

    async def in_turn() -> RequestOutput:
        monkeypatch.setattr(llm.engine, "step", failing_step)
        with pytest.raises(OutOfMemory, match="too little"):
            await collect(llm.generate([1, 2], GREEDY))
        failures.append(OutOfMemory("once is bad luck"))
        return (await collect(llm.generate([1, 2], GREEDY)))[1]

    [expected] = complete(make_engine(TARGET, None), [[1, 2]], GREEDY)
    assert asyncio.run(in_turn()).outputs[0].token_ids == expected.outputs[0].token_ids


def test_requests_that_belong_together_are_taken_together_or_not_at_all(llm: AsyncLLM) -> None:
    prompts = [[1, 2], [3, 4], [5, 6]]

    async def together() -> dict[str, list[int]]:
        submissions = [Submission(prompt, GREEDY, f"part-{i}") for i, prompt in enumerate(prompts)]
        events = [event async for event in llm.generate_all(submissions)]
        return {e.request_id: e.outputs[0].token_ids for e in events if isinstance(e, RequestOutput)}

    async def with_a_bad_one() -> None:
        submissions = [Submission([1], LONG, "good"), Submission([], LONG, "bad")]
        with pytest.raises(InvalidInput, match="empty"):
            await anext(llm.generate_all(submissions))

    alone = complete(make_engine(TARGET, None), prompts, GREEDY)
    expected = {f"part-{i}": output.outputs[0].token_ids for i, output in enumerate(alone)}
    assert asyncio.run(together()) == expected
    asyncio.run(with_a_bad_one())
    assert not llm.engine.requests


def test_questions_are_answered_between_steps(llm: AsyncLLM) -> None:
    async def ask() -> None:
        stream = llm.generate([1, 2, 3], LONG)
        await anext(stream)
        seen = await llm.ask(lambda engine: (threading.current_thread().name, len(engine.requests)))
        assert seen == ("dsde-engine", 1)
        with pytest.raises(ZeroDivisionError):
            await llm.ask(lambda engine: 1 // len(engine.intake.eos_token_ids))
        await stream.aclose()
        await asyncio.to_thread(llm.shutdown)
        with pytest.raises(EngineStopped):
            await llm.ask(lambda engine: 1)

    asyncio.run(ask())
