"""The OpenAI API as its clients use it: the official one, LangChain's and curl, against a real server."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import subprocess
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

import dsde
from dsde import LLM, SamplingParams
from served import MODEL, Served, serving_beside, tiny_llm

QUESTION = [{"role": "user", "content": "Name three colours."}]
PROMPT = "The three primary colours are"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def served(llm: LLM) -> Iterator[Served]:
    with serving_beside(llm) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def text_of(llm: LLM, prompt: Any, **params: Any) -> str:
    [output] = llm.generate(prompt, SamplingParams(**params))
    return output.outputs[0].text


def test_a_completion_is_what_generate_gives(llm: LLM, client: openai.OpenAI) -> None:
    for params in ({"temperature": 0}, {"temperature": 0.8, "seed": 7}, {"temperature": 1, "seed": 8, "top_p": 0.9}):
        answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=16, **params)
        [output] = llm.generate(PROMPT, SamplingParams(max_tokens=16, **params))
        [choice], [expected] = answer.choices, output.outputs
        assert choice.text == expected.text
        assert choice.finish_reason == expected.finish_reason
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(output.prompt_token_ids)
        assert answer.usage.completion_tokens == len(expected.token_ids)
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_chat_is_what_chat_gives(llm: LLM, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0.7, seed=3, max_completion_tokens=24
    )
    [expected] = llm.chat(QUESTION, SamplingParams(temperature=0.7, seed=3, max_tokens=24))
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == expected.outputs[0].text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.object == "chat.completion"


def test_streams_add_up(llm: LLM, client: openai.OpenAI) -> None:
    params: dict[str, Any] = {"temperature": 0.8, "seed": 5}
    with client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=24, stream=True, stream_options={"include_usage": True}, **params
    ) as stream:
        chunks = list(stream)
    [expected] = llm.chat(QUESTION, SamplingParams(max_tokens=24, **params))
    assert chunks[0].choices[0].delta.role == "assistant"
    *pieces, last = chunks
    text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
    assert text == expected.outputs[0].text
    assert [chunk.choices[0].finish_reason for chunk in pieces if chunk.choices[0].finish_reason] == [
        expected.outputs[0].finish_reason
    ]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len(expected.outputs[0].token_ids)
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(chunks) > 4


def test_many_at_once_with_the_asynchronous_client(llm: LLM, served: Served) -> None:
    prompts = [f"{i} is a number that" for i in range(12)]

    async def one(client: openai.AsyncOpenAI, index: int) -> str:
        stream = await client.completions.create(
            model=MODEL, prompt=prompts[index], max_tokens=8 + index, seed=index, temperature=0.9, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def everybody() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(one(client, index) for index in range(len(prompts))))

    params = [SamplingParams(max_tokens=8 + i, seed=i, temperature=0.9) for i in range(len(prompts))]
    assert asyncio.run(everybody()) == [output.outputs[0].text for output in llm.generate(prompts, params)]


def test_langchain(llm: LLM, served: Served) -> None:
    langchain = pytest.importorskip("langchain_openai")
    settings: dict[str, Any] = {"base_url": f"{served.url}/v1", "api_key": "none", "model": MODEL, "temperature": 0}
    chat = langchain.ChatOpenAI(max_tokens=12, **settings)
    [expected] = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=12))
    assert chat.invoke("Name three colours.").content == expected.outputs[0].text
    assert "".join(piece.content for piece in chat.stream("Name three colours.")) == expected.outputs[0].text
    plain = langchain.OpenAI(max_tokens=12, **settings)
    assert plain.invoke(PROMPT) == text_of(llm, PROMPT, temperature=0, max_tokens=12)


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
def test_curl(llm: LLM, served: Served) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "stream": True})
    command = ["curl", "-sN", f"{served.url}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == text_of(llm, PROMPT, temperature=0, max_tokens=8)


def test_several_prompts_and_completions(llm: LLM, client: openai.OpenAI, served: Served) -> None:
    prompts = [PROMPT, "Once upon a time"]
    request: dict[str, Any] = {"model": MODEL, "prompt": prompts, "n": 2, "max_tokens": 8, "seed": 1}
    answer = client.completions.create(**request)
    params = SamplingParams(n=2, max_tokens=8, seed=1)
    expected = [one.text for output in llm.generate(prompts, params) for one in output.outputs]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == expected
    assert len(set(expected)) == 4
    texts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(**request, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == expected
    served.wait_until_empty()


def test_token_ids_as_a_prompt(llm: LLM, client: openai.OpenAI) -> None:
    assert llm.tokenizer is not None
    tokens = llm.tokenizer.encode(PROMPT)
    answer = client.completions.create(model=MODEL, prompt=tokens, max_tokens=6, temperature=0)
    assert answer.choices[0].text == text_of(llm, PROMPT, max_tokens=6, temperature=0)


def test_everything_that_shapes_a_text(llm: LLM, served: Served) -> None:
    cases: list[dict[str, Any]] = [
        {"stop": ["blue", "yellow"]},
        {"stop": " and"},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.3},
        {"logit_bias": {"28": 50}},
        {"min_p": 0.2, "temperature": 1.0, "seed": 2},
        {"top_k": 3, "temperature": 1.5, "seed": 4},
        {"min_tokens": 12, "stop_token_ids": [28]},
        {"speculation": "off"},
        {"speculation": 3},
        {"slo_tpot_ms": 30.0},
    ]
    for case in cases:
        wanted = {"max_tokens": 16, "temperature": 0, **case}
        answer = served.post("/v1/completions", prompt=PROMPT, **wanted).json()
        params = {**wanted, "logit_bias": {int(k): v for k, v in wanted.get("logit_bias", {}).items()}}
        [expected] = llm.generate(PROMPT, SamplingParams(**params))
        [choice] = answer["choices"]
        assert choice["text"] == expected.outputs[0].text, case
        assert choice["finish_reason"] == expected.outputs[0].finish_reason, case
        assert choice["stop_reason"] == expected.outputs[0].stop_reason, case


def test_a_stop_string_is_never_shown(llm: LLM, client: openai.OpenAI) -> None:
    whole = text_of(llm, PROMPT, temperature=0, max_tokens=24)
    stop = whole[12:20]
    stream = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=24, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole[: whole.index(stop)]


def test_completion_logprobs(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 10, "temperature": 0, "logprobs": 3}
    choice = client.completions.create(**request).choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:i])) for i in range(10)]
    for token, own, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert len(top) == 3
        assert top[token] == own == max(top.values())  # greedy
        assert sum(math.exp(value) for value in top.values()) <= 1 + 1e-5
    streamed: list[str] = []
    offsets: list[int] = []
    for chunk in client.completions.create(**request, stream=True):
        part = chunk.choices[0].logprobs
        assert part is not None
        streamed += part.tokens or []
        offsets += part.text_offset or []
    assert streamed == logprobs.tokens
    assert offsets == logprobs.text_offset


def test_chat_logprobs(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 8, "logprobs": True, "seed": 4}
    for num_top in (None, 0, 2):
        more = {} if num_top is None else {"top_logprobs": num_top}
        choice = client.chat.completions.create(**request, **more).choices[0]
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        content = choice.logprobs.content
        assert "".join(entry.token for entry in content) == choice.message.content
        for entry in content:
            assert bytes(entry.bytes or ()).decode() == entry.token
            assert len(entry.top_logprobs) == (num_top or 0)
            ordered = [top.logprob for top in entry.top_logprobs]
            assert ordered == sorted(ordered, reverse=True)
        streamed = client.chat.completions.create(**request, **more, stream=True)
        parts = [chunk.choices[0].logprobs for chunk in streamed]
        tokens = [entry.token for part in parts if part and part.content for entry in part.content]
        assert tokens == [entry.token for entry in content]


def test_metrics_of_speculation_in_an_answer(served: Served) -> None:
    request: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 32, "temperature": 0}
    assert "metrics" not in served.post("/v1/completions", **request).json()
    answer = served.post("/v1/completions", **request, spec_decode_metrics="detailed").json()
    metrics = answer["metrics"]["speculative_decoding"]
    drafted, accepted = metrics["per_step_drafted"], metrics["per_step_accepted"]
    assert metrics["num_spec_steps"] == len(drafted) == len(accepted) > 0
    assert metrics["num_draft_tokens"] == sum(drafted)
    assert metrics["num_accepted_draft_tokens"] == sum(accepted)
    assert metrics["num_spec_tokens"] == max(drafted)
    histogram = [0] * (max(drafted) + 1)
    for value, group in groupby(sorted(accepted)):
        histogram[value] = len(list(group))
    assert metrics["acceptance_histogram"] == histogram
    assert metrics["mean_acceptance_length"] == pytest.approx(1 + sum(accepted) / len(accepted))
    assert metrics["draft_acceptance_rate"] == pytest.approx(sum(accepted) / sum(drafted))
    summary = served.post("/v1/completions", **request, spec_decode_metrics="summary").json()
    assert "per_step_drafted" not in summary["metrics"]["speculative_decoding"]
    several = served.post("/v1/completions", **request, n=2, spec_decode_metrics="summary").json()
    assert several["metrics"] == {"speculative_decoding": None}
    with served.http.stream(
        "POST", "/v1/completions", json={**request, "stream": True, "spec_decode_metrics": "summary"}
    ) as stream:
        *_, last, done = [line for line in stream.iter_lines() if line]
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["metrics"] == summary["metrics"]


def test_speculation_can_be_turned_off(served: Served) -> None:
    before = served.metric("spec_decode_num_draft_tokens_total")
    wanted: dict[str, Any] = {"speculation": "off", "spec_decode_metrics": "summary"}
    answer = served.post("/v1/completions", prompt=PROMPT, max_tokens=16, **wanted)
    assert answer.json()["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert served.metric("spec_decode_num_draft_tokens_total") == before


def test_fields_without_effect_are_taken(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]}],
        max_tokens=4,
        user="somebody",
        metadata={"a": "b"},
        store=False,
        response_format={"type": "text"},
        tool_choice="none",
        parallel_tool_calls=True,
    )
    assert answer.choices[0].finish_reason == "length"


def test_models(client: openai.OpenAI, served: Served) -> None:
    [model] = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="There is no model 'other' here"):
        client.models.retrieve("other")
    assert served.http.get("/version").json() == {"version": dsde.__version__}
    assert served.http.get("/health").json() == {"status": "ok"}
    assert served.http.get("/ready").json() == {"status": "ready"}


def test_tokens(llm: LLM, served: Served) -> None:
    assert llm.tokenizer is not None
    tokens = llm.tokenizer.encode(PROMPT)
    answer = served.post("/tokenize", prompt=PROMPT, return_token_strs=True).json()
    assert answer["tokens"] == tokens
    assert answer["count"] == len(tokens)
    assert "".join(answer["token_strs"]) == PROMPT
    assert served.post("/detokenize", tokens=tokens).json() == {"prompt": PROMPT}
    chat = served.post("/tokenize", messages=QUESTION).json()["tokens"]
    assert chat == llm.chat_prompt(QUESTION)
    assert "user: Name three colours. assistant:" in served.post("/detokenize", tokens=chat).json()["prompt"]


def test_errors_reach_clients_as_their_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature must be") as caught:
        client.completions.create(model=MODEL, prompt="Hi", temperature=-1)
    assert caught.value.code == "invalid_value"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="Hi")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt=[5] * 10_000)
    assert long.value.code == "context_length_exceeded"


def test_metrics_are_valid_and_explained(served: Served) -> None:
    served.post("/v1/completions", prompt=PROMPT, max_tokens=16, temperature=0)
    answer = served.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    assert all(family.documentation for family in families.values())
    for name in (
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
        "dsde_speculation_length",
        "dsde_kld",
        "dsde_length_cap",
        "dsde_kv_usage_ratio",
        "dsde_preemptions",
        "dsde_lengths_lowered",
        "dsde_sequences_waiting",
        "dsde_request_queue_seconds",
        "dsde_time_to_first_token_seconds",
    ):
        assert families[name].samples, name
    metrics = served.engine.metrics
    lengths = {s.labels.get("le", s.name): s.value for s in families["dsde_speculation_length"].samples}
    assert lengths["+Inf"] == metrics.num_drafts
    assert lengths["dsde_speculation_length_sum"] == metrics.num_draft_tokens
    assert lengths["128.0"] == metrics.num_drafts
    kld = {sample.name: sample.value for sample in families["dsde_kld"].samples}
    assert kld["dsde_kld_count"] == metrics.num_draft_tokens
    positions = {s.labels["position"]: s.value for s in families["spec_decode_num_accepted_tokens_per_pos"].samples}
    assert positions == {str(i): n for i, n in enumerate(metrics.num_accepted_tokens_per_pos)}
    assert sum(positions.values()) == metrics.num_accepted_tokens


def test_the_cost_model_is_a_metric(llm: LLM) -> None:
    with serving_beside(llm, policy="dsde|gate") as served:
        served.post("/v1/completions", prompt=PROMPT, max_tokens=8)
        assert served.metric('dsde_cost_model_seconds{pass="draft",size="1"}') > 0
        small, large = (served.metric(f'dsde_cost_model_seconds{{pass="verify",size="{n}"}}') for n in (1, 1024))
        assert small < large


def test_a_long_prompt_stops_nobody(served: Served) -> None:
    """Tokenising takes long; those who come meanwhile are served, tokens and all."""

    async def both() -> tuple[httpx.Response, float, list[float]]:
        clock = asyncio.get_running_loop().time
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:
            began = clock()
            long = asyncio.create_task(http.post("/v1/completions", json={"prompt": "many words " * 100_000}))
            waits = []
            while not long.done():
                asked = clock()
                await http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})
                waits.append(clock() - asked)
            return await long, clock() - began, waits

    answer, total_s, waits = asyncio.run(both())
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert len(waits) > 4
    assert max(waits) < total_s / 2
