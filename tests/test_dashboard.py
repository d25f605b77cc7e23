"""The dashboard's feed: what viewers are told, what it costs when there are none, and who may look."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from importlib.resources import files
from typing import Any

import httpx
import numpy as np
import pytest

from dsde import RequestOutput, SamplingParams
from dsde.core.outputs import StepRecord
from dsde.engine.async_llm import AsyncLLM
from dsde.policies.base import Outcome
from dsde.policies.cost import CostModel
from dsde.server import live
from dsde.server.app import create_app
from dsde.server.dashboard import board
from dsde.server.dashboard.throughput import LEAST_STEPS, Throughput
from dsde.server.dashboard.words import explain
from dsde.server.settings import ServerSettings
from served import serving
from tiny import make_engine, tiny_model

TARGET = tiny_model(seed=7)
DRAFT = tiny_model(seed=7, noise=0.1)
PARAMS = SamplingParams(temperature=0, max_tokens=40)

STEP = StepRecord(
    request_id="a",
    index=0,
    step=9,
    num_tokens=50,
    num_decoding=1,
    num_pass_tokens=5,
    predicted=4.3,
    cap=None,
    planned=4,
    drafted=4,
    accepted=2,
    rejected_token_ids=[1, 2],
    klds=[0.1] * 4,
    signals={"scale_factor": 0.2, "wvir": 1.0, "mean_kld": 0.09, "sl_max": 6.0},
    draft_s=0.01,
    verify_s=0.04,
    step_s=0.05,
)
AUTO = {"outlook": 0.82, "gain_of_next": 0.4, "cost_of_token": 0.02, "cost_of_pass": 0.55}


@pytest.fixture
def llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(make_engine(TARGET, DRAFT, "dsde"))
    yield llm
    llm.shutdown()


async def finish(llm: AsyncLLM, prompt: list[int], params: SamplingParams = PARAMS) -> RequestOutput:
    output = None
    async for event in llm.generate(prompt, params, trace=True):
        output = event
    assert isinstance(output, RequestOutput)
    return output


class Picture:
    """What a viewer has after all frames so far, put together as the page does."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.last: dict[str, Any] = {}

    def take(self, frame: dict[str, Any]) -> None:
        self.last = frame
        if frame["whole"]:
            self.rows = {}
        for name in frame["removed"]:
            self.rows.pop(name, None)
        for row in frame["rows"]:
            old = {} if "prompt" in row else self.rows[row["id"]]
            lists = {name: [*old.get(name, []), *row[name]] for name in ("pieces", "points")}
            self.rows[row["id"]] = {**old, **row, **lists}

    async def follow(self, frames: AsyncIterator[bytes], until_ended: int) -> None:
        async with asyncio.timeout(30):
            async for frame in frames:
                assert frame.startswith(b"data: ")
                self.take(json.loads(frame[6:]))
                if sum(row["ended"] is not None for row in self.rows.values()) >= until_ended:
                    return


def tokens_of(row: dict[str, Any]) -> list[int]:
    """Without a tokenizer a token's text is its number."""
    kept = [text for kind, text in row["pieces"] if kind in ("accepted", "own")]
    return [int(text) for text in kept]


def test_a_viewer_sees_every_token_and_where_it_came_from(llm: AsyncLLM) -> None:
    async def watch() -> tuple[Picture, list[RequestOutput]]:
        feed, picture = live.Feed(llm, {}), Picture()
        async with aclosing(feed.view()) as frames:
            following = asyncio.create_task(picture.follow(frames, until_ended=3))
            while not picture.last:
                await asyncio.sleep(0.01)
            outputs = await asyncio.gather(*(finish(llm, [i, i + 1]) for i in range(3)))
            await following
        return picture, outputs

    picture, outputs = asyncio.run(watch())
    assert len(picture.rows) == 3
    for output in outputs:
        row = picture.rows[f"{output.request_id}/0"]
        trace = output.metrics.trace or []
        kinds = [kind for kind, _ in row["pieces"]]
        assert tokens_of(row) == output.outputs[0].token_ids
        assert row["ended"] == "length"
        assert row["num_tokens"] == 40
        assert kinds.count("rejected") == sum(record.drafted - record.accepted for record in trace) > 0
        assert kinds.count("own") == output.metrics.num_steps
        assert [(p["step"], p["drafted"], p["accepted"]) for p in row["points"]] == [
            (record.step, record.drafted, record.accepted) for record in trace
        ]
        assert row["why"] == explain(trace[-1], "on")
    assert picture.last["throughput"]["with"] > 0 < picture.last["throughput"]["without"]


def test_nobody_looking_costs_nothing(llm: AsyncLLM) -> None:
    async def come_and_go() -> None:
        feed = live.Feed(llm, {})
        await finish(llm, [1])
        assert llm.listeners == []
        assert llm.engine.watched is False
        async with aclosing(feed.view()) as frames:
            await anext(frames)
            assert len(llm.listeners) == 1
        assert llm.listeners == []
        assert feed.num_viewers == 0
        await finish(llm, [1])
        assert llm.engine.watched is False

    asyncio.run(come_and_go())


def test_one_who_comes_later_sees_the_whole(llm: AsyncLLM) -> None:
    async def watch() -> tuple[Picture, Picture, RequestOutput]:
        feed, early, late = live.Feed(llm, {}), Picture(), Picture()
        long = replace(PARAMS, max_tokens=300)
        async with aclosing(feed.view()) as first, aclosing(feed.view()) as second:
            following = asyncio.create_task(early.follow(first, until_ended=1))
            while not early.last:
                await asyncio.sleep(0.01)
            running = asyncio.create_task(finish(llm, [3, 4], long))
            while not early.rows:
                await asyncio.sleep(0.01)
            await late.follow(second, until_ended=1)
            await following
            return early, late, await running

    early, late, output = asyncio.run(watch())
    assert len(tokens_of(early.rows[f"{output.request_id}/0"])) == 300
    [(name, seen)] = late.rows.items()
    for part in ("pieces", "points"):  # of what is long past only the end is kept
        assert seen[part] == early.rows[name][part][-len(seen[part]) :]
    assert len(seen["points"]) >= board.MOST_POINTS
    assert {**early.rows[name], "pieces": [], "points": []} == {**seen, "pieces": [], "points": []}


def test_what_was_said_before_anybody_looked_is_shown_as_such() -> None:
    engine = make_engine(TARGET, DRAFT, "dsde")
    engine.add([5, 6], PARAMS, "a")
    for _ in range(4):
        engine.step()
    before = engine.requests["a"].completions[0].sequence.num_output_tokens
    engine.watched = True
    output = engine.step()
    seen = board.Board(None)
    arrived = board.arrivals(engine, output, seen)
    assert arrived["a", 0].num_earlier == before
    seen.take(output, arrived, None)
    [row] = seen.whole()["rows"]
    kind, text = row["pieces"][0]
    assert kind == "earlier"
    assert len(text.split()) == before
    assert row["num_tokens"] == before + len(output.chunks[0].token_ids)


def test_a_slow_viewer_loses_frames_and_nobody_waits_for_it(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_FRAMES", 3)
    monkeypatch.setattr(live, "FRAME_S", 0.001)

    async def watch() -> tuple[Picture, int, list[RequestOutput]]:
        feed, picture = live.Feed(llm, {}), Picture()
        async with aclosing(feed.view()) as frames:
            picture.take(json.loads((await anext(frames))[6:]))
            outputs = [await finish(llm, [i]) for i in range(4)]
            most_waiting = max(len(viewer.frames) for viewer in feed._viewers)
            await picture.follow(frames, until_ended=4)
        return picture, most_waiting, outputs

    picture, most_waiting, outputs = asyncio.run(watch())
    assert most_waiting <= 3
    for output in outputs:
        assert tokens_of(picture.rows[f"{output.request_id}/0"]) == output.outputs[0].token_ids


def test_dropped_frames_are_counted(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_FRAMES", 2)

    async def drop() -> list[dict[str, Any]]:
        feed = live.Feed(llm, {})
        async with aclosing(feed.view()) as frames:
            await anext(frames)
            for _ in range(4):
                feed._send()
            return [json.loads(frame[6:]) for frame in feed._viewers[0].frames]

    waiting = asyncio.run(drop())
    assert [frame["whole"] for frame in waiting] == [True, False]
    assert waiting[0]["num_dropped"] == 2


def test_closing_lets_viewers_go(llm: AsyncLLM) -> None:
    async def close() -> None:
        feed = live.Feed(llm, {})

        async def look() -> int:
            return len([frame async for frame in feed.view()])

        looking = asyncio.create_task(look())
        await asyncio.sleep(0.1)
        feed.close()
        assert await asyncio.wait_for(looking, 2) > 0
        assert await look() == 0

    asyncio.run(close())


def test_a_server_ends_though_somebody_looks() -> None:
    with serving(make_engine(TARGET, DRAFT, "dsde"), dashboard=True) as served:
        with served.http.stream("GET", "/dashboard/events") as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith('data: {"whole":true')
            served.server.end()
            for _ in lines:
                pass
        served.thread.join(timeout=3)
        assert not served.thread.is_alive()


def test_rows_are_bounded_and_the_ended_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "MOST_ROWS", 3)
    engine = make_engine(TARGET, DRAFT, "dsde")
    engine.watched = True
    seen, picture = board.Board(None), Picture()
    for i in range(6):
        engine.add([i], replace(PARAMS, max_tokens=8 if i < 2 else 30), f"r{i}")
    most = 0
    while engine.has_work:
        output = engine.step()
        seen.take(output, board.arrivals(engine, output, seen), None)
        picture.take(seen.frame())
        most = max(most, len(picture.rows))
        assert sorted(picture.rows) == sorted(row["id"] for row in seen.whole()["rows"])
    assert most == 3
    assert "r5/0" in picture.rows


def test_who_leaves_early_does_not_stay_on_the_board() -> None:
    engine = make_engine(TARGET, DRAFT, "dsde")
    engine.watched = True
    seen = board.Board(None)
    engine.add([1], PARAMS, "a")
    output = engine.step()
    seen.take(output, board.arrivals(engine, output, seen), None)
    engine.abort("a")
    seen.end_missing(engine.requests, now_s=5.0)
    assert seen.frame()["rows"][0]["ended"] is None  # it may have finished, and its last step be on the way
    seen.end_missing(engine.requests, now_s=5.0 + board.MISSING_S)
    assert seen.frame()["rows"][0]["ended"] == "abort"


def observe_steps(throughput: Throughput, delays: list[float]) -> None:
    """Passes cost 20 ms and 2 ms a token, drafting 10 ms; lengths vary, so that the line can be found. Steps take as
    many times longer as `delays` says, in turn."""
    for i, (drafted, accepted) in enumerate(STEPS * 50):
        tokens, delay = 3 * (1 + drafted), delays[i % len(delays)]
        verify_s = delay * (0.020 + 0.002 * tokens)
        changes = {"drafted": drafted, "accepted": accepted, "num_pass_tokens": tokens, "verify_s": verify_s}
        throughput.observe([replace(STEP, num_decoding=3, step_s=delay * 0.01 + verify_s, **changes)] * 3)


STEPS = [(4, 2), (2, 0), (6, 6), (4, 1)]
NUM_EMITTED = 3 * sum(accepted + 1 for _, accepted in STEPS)
TOOK_S = sum(0.030 + 0.002 * 3 * (1 + drafted) for drafted, _ in STEPS)
PLAIN_RATE = 3 / 0.026


def test_throughput_knows_what_plain_decoding_would_have_taken() -> None:
    throughput = Throughput([])
    observe_steps(throughput, [1.0])
    rates = throughput.now()
    assert rates is not None
    assert rates[0] == pytest.approx(NUM_EMITTED / TOOK_S, rel=0.02)
    assert rates[1] == pytest.approx(PLAIN_RATE, rel=1e-6)


def test_a_machine_that_stumbles_does_so_with_and_without() -> None:
    throughput = Throughput([])
    observe_steps(throughput, [1.0] * 6 + [8.0])
    rates = throughput.now()
    assert rates is not None
    assert rates[0] < 0.6 * NUM_EMITTED / TOOK_S
    assert rates[0] / rates[1] == pytest.approx(NUM_EMITTED / TOOK_S / PLAIN_RATE, rel=0.1)


def test_throughput_asks_the_cost_model_where_it_has_measured() -> None:
    model = CostModel()
    for num_drafted, verify_s in [(0, 0.025), (4, 0.04)] * 3:
        drafted, nothing = np.full(1, num_drafted), np.zeros(1, dtype=np.int64)
        model.observe(Outcome(nothing, drafted, nothing, np.empty(0), np.ones(1), verify_s=verify_s, num_decoding=1))
    throughput = Throughput([model])
    for _ in range(LEAST_STEPS):
        assert throughput.now() is None
        throughput.observe([STEP])
    rates = throughput.now()
    assert rates is not None
    assert rates == pytest.approx((3 / 0.05, 1 / 0.025), rel=0.03)  # sizes come in buckets there


@pytest.mark.parametrize(
    ("changes", "speculation", "expected"),
    [
        ({}, "on", "4 tokens: draft and target just agreed closely (KLD 0.09), as steadily as before (WVIR 1)"),
        ({"signals": {**STEP.signals, "mean_kld": 2.0, "wvir": 1.6}}, "on", "just disagreed (KLD 2), less steadily"),
        ({"cap": 2.0, "planned": 2, "drafted": 2}, "on", "The batch's cap is 2."),
        ({"planned": 1, "drafted": 1}, "on", "1 token: draft and target"),
        ({"planned": 1, "drafted": 1}, "on", "No more are left to say."),
        ({"signals": dict.fromkeys(STEP.signals)}, "on", "still calibrating"),
        ({"drafted": 3}, "on", "Only 3 came"),
        ({"cap": 0.0, "planned": 0, "drafted": 0}, "on", "Off in this step, for the whole batch"),
        ({"signals": {"gamma": 3.5}}, "on", "the policy wants 4.30 (gamma 3.50)"),
        ({"signals": AUTO, "predicted": 3.0}, "on", "chance of 0.82 and costs the time of 0.57 plain ones, so 3 pay"),
        ({"signals": AUTO, "predicted": 0.0, "planned": 0, "drafted": 0}, "on", "0.57 plain ones, so none pays."),
        ({"signals": AUTO, "predicted": 0.0, "planned": 1, "drafted": 1}, "on", "1 token: the next token"),
        ({"signals": AUTO, "predicted": 0.0, "planned": 1, "drafted": 1}, "on", "plain ones, which is looked into."),
        ({"predicted": None}, "off", "Off: this request asked for no speculation."),
        ({"predicted": None}, 4, "4 tokens: this request fixed its length."),
        ({"predicted": None, "planned": 0, "drafted": 0}, "on", "Off: this server has no draft."),
    ],
)
def test_reasons_in_words(changes: dict[str, Any], speculation: Any, expected: str) -> None:
    assert expected in explain(replace(STEP, **changes), speculation)


def get(llm: AsyncLLM, settings: ServerSettings, path: str, **headers: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(llm, settings))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(ask())


def test_the_page_has_a_strict_policy_and_needs_nothing_from_elsewhere(llm: AsyncLLM) -> None:
    page = get(llm, ServerSettings(), "/dashboard")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    texts = {path.name: path.read_text() for path in files("dsde.server.dashboard").iterdir() if path.is_file()}
    for name in re.findall(r'(?:src|href)="dashboard/([^"]+)"', page.text):
        assert get(llm, ServerSettings(), f"/dashboard/{name}").text == texts[name]
    shipped = [text for name, text in texts.items() if name.endswith((".html", ".js", ".css"))]
    assert {url for text in shipped for url in re.findall(r"https?://[^\"'\s]+", text)} == {
        "http://www.w3.org/2000/svg"
    }
    assert get(llm, ServerSettings(), "/dashboard/board.py").status_code == 404


def test_texts_are_shown_only_on_this_machine_or_for_a_key(llm: AsyncLLM) -> None:
    public = ServerSettings(host="0.0.0.0")
    for path in ("/dashboard", "/dashboard/events", "/dashboard/rows.js"):
        answer = get(llm, public, path)
        assert answer.status_code == 403
        assert "API key" in answer.json()["error"]["message"]
        assert get(llm, ServerSettings(dashboard=False), path).status_code == 404
    locked = ServerSettings(host="0.0.0.0", api_keys=("secret",))
    assert get(llm, locked, "/dashboard").status_code == 200
    assert get(llm, locked, "/dashboard/events").status_code == 401
    assert get(llm, locked, "/dashboard/events", Authorization="Bearer wrong").status_code == 401
    assert get(llm, ServerSettings(), "/dashboard/events", Host="elsewhere.example").status_code == 403
