"""What happens around requests: clients that leave, queues that fill, keys, logs, and how a server ends."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import openai
import pytest

from dsde import LLM, SamplingParams, cli
from dsde.core.errors import InvalidInput
from dsde.engine.engine import StepOutput
from dsde.models.embedded import embedded_target_path
from dsde.server.lifecycle import bind
from dsde.server.logs import JsonFormatter
from dsde.server.settings import ServerSettings
from served import MODEL, Served, serving_beside, tiny_llm, wait_until

PROMPT = "Once upon a time"
LONG: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tmp_path_factory.mktemp("tiny"), max_num_seqs=2)


@contextmanager
def slowed(served: Served, seconds: float = 0.02) -> Iterator[None]:
    """Steps that take a while, so that something can happen meanwhile."""
    step = served.engine.step

    def slow_step() -> StepOutput:
        time.sleep(seconds)
        return step()

    served.engine.step = slow_step  # type: ignore[method-assign]
    try:
        yield
    finally:
        served.engine.step = step  # type: ignore[method-assign]


def raw_request(served: Served, body: dict[str, Any]) -> socket.socket:
    """A connection over which a request has been sent; whether its answer is read is up to the caller."""
    host, port = served.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection((host, int(port)), timeout=30)
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_sequences_at_once(llm: LLM, stream: bool) -> None:
    with serving_beside(llm) as served, slowed(served):
        # Two run, the third and fourth wait.
        clients = [raw_request(served, {**LONG, "stream": stream, "n": 2}) for _ in range(2)]
        wait_until(lambda: len(served.engine.scheduler.running) == 2 and len(served.engine.scheduler.waiting) == 2)
        assert served.metric("dsde_requests_in_flight") == 2
        for client in clients:
            client.close()
        served.wait_until_empty(timeout_s=2)
        assert served.engine.metrics.num_aborted == 2
        wait_until(lambda: served.service.admission.num_sequences == 0)
        assert served.metric("dsde_kv_blocks_used") == 0
        assert served.metric("dsde_requests_in_flight") == 0
        assert served.metric('dsde_http_requests_total{method="POST",route="/v1/completions",status="499"}') == 2


def test_a_client_that_does_not_read_stops_nobody(llm: LLM) -> None:
    with serving_beside(llm, request_timeout_s=2.0) as served:
        with raw_request(served, {**LONG, "stream": True, "logprobs": 20}) as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            answer = served.post("/v1/completions", prompt=PROMPT, max_tokens=4)
            assert answer.status_code == 200
            served.wait_until_empty()
        wait_until(lambda: served.service.admission.num_requests == 0)


def test_a_full_queue_says_when_to_come_back(llm: LLM) -> None:
    with serving_beside(llm, max_queue=1) as served, slowed(served):
        clients = [raw_request(served, LONG) for _ in range(3)]
        wait_until(lambda: served.service.admission.num_sequences == 3)
        answer = served.post("/v1/completions", prompt=PROMPT, max_tokens=1)
        assert answer.status_code == 429
        assert 1 <= int(answer.headers["Retry-After"]) <= 60
        error = answer.json()["error"]
        assert error["code"] == "queue_full"
        assert error["type"] == "rate_limit_error"
        assert served.metric("dsde_requests_refused_total") == 1
        for client in clients[1:]:
            client.close()
        # The official client waits for as long as it is told, and tries again.
        patient = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=2)
        assert patient.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1).choices
        clients[0].close()


@pytest.mark.parametrize("stream", [True, False])
def test_time_limits(llm: LLM, stream: bool) -> None:
    with serving_beside(llm, request_timeout_s=0.3) as served, slowed(served):
        answer = served.post("/v1/completions", **LONG, stream=stream)
        if stream:
            assert answer.status_code == 200
            last = [line for line in answer.text.split("\n\n") if line][-1]
            error = json.loads(last.removeprefix("data: "))["error"]
            client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
            with pytest.raises(openai.APIError, match="longer than this server allows"):
                list(client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1500, stream=True))
        else:
            assert answer.status_code == 504
            error = answer.json()["error"]
        assert error["code"] == "timeout"
        served.wait_until_empty()


def test_keys(llm: LLM) -> None:
    with serving_beside(llm, api_keys=("first", "zweiter-schlüssel")) as served:
        for header in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic first"},
            {"Authorization": "first"},
        ):
            for path in ("/v1/models", "/docs", "/nothing"):
                answer = served.http.get(path, headers=header)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["WWW-Authenticate"] == "Bearer"
            # Nothing of a body is read from those who may not ask.
            assert served.http.post("/tokenize", content=b"{", headers=header).status_code == 401
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert served.http.get(path).status_code == 200
        for key in ("first", "zweiter-schlüssel"):
            header = {"Authorization": f"Bearer {key}".encode()}
            assert served.http.get("/v1/models", headers=header).status_code == 200
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="first")
        assert client.models.list().data[0].id == MODEL
        # With a key, the name it is called by does not matter.
        assert served.http.get("/v1/models", headers={**header, "Host": "any.example"}).status_code == 200


def test_browsers_are_kept_out_unless_invited(llm: LLM) -> None:
    asking = {
        "Origin": "https://page.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    with serving_beside(llm) as served:
        assert served.http.options("/v1/completions", headers=asking).status_code == 405
        answer = served.http.get("/health", headers=asking)
        assert "access-control-allow-origin" not in answer.headers
    with serving_beside(llm, cors_origins=("https://page.example",)) as served:
        answer = served.http.options("/v1/completions", headers=asking)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        other = served.http.options("/v1/completions", headers={**asking, "Origin": "https://evil.example"})
        assert other.status_code == 400


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append({**json.loads(self.format(record)), "text": record.getMessage()})


@pytest.fixture
def log() -> Iterator[list[dict[str, Any]]]:
    handler, logger = Lines(), logging.getLogger("dsde.server")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.lines
    logger.removeHandler(handler)


def test_logs_tell_no_secrets(llm: LLM, log: list[dict[str, Any]]) -> None:
    with serving_beside(llm, api_keys=("secret-key",)) as served:
        headers = {"Authorization": "Bearer secret-key", "X-Request-Id": "mine-1"}
        answer = served.http.post("/v1/completions", json={"prompt": "blue colours", "max_tokens": 8}, headers=headers)
        assert answer.headers["X-Request-Id"] == "mine-1"
        evil = served.http.get("/health%0Aline of my own", headers={"X-Request-Id": "a\tb c"})
        assert evil.headers["X-Request-Id"] not in ("a\tb c", "")
        served.http.post("/v1/completions", json={"prompt": "blue colours", "temperature": -1}, headers=headers)
        served.http.get("/health")
    first = log[0]
    assert (first["method"], first["path"], first["status"]) == ("POST", "/v1/completions", 200)
    assert first["request_id"] == "mine-1"
    assert first["num_completion_tokens"] == answer.json()["usage"]["completion_tokens"]
    assert first["num_draft_tokens"] > 0
    assert first["total_s"] > first["first_token_s"] > first["queue_s"] >= 0
    everything = json.dumps(log)
    assert "blue colours" not in everything
    assert answer.json()["choices"][0]["text"] not in everything
    assert "secret-key" not in everything
    assert all("\n" not in line["text"] for line in log)
    assert not any(line.get("path") == "/health" for line in log)


def test_logs_tell_prompts_when_asked(llm: LLM, log: list[dict[str, Any]]) -> None:
    with serving_beside(llm, log_prompts=True) as served:
        answer = served.post("/v1/completions", prompt="blue colours", max_tokens=8)
    assert log[0]["prompts"] == ["blue colours"]
    assert log[0]["completions"] == [answer.json()["choices"][0]["text"]]


def test_traces_arrive(llm: LLM) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            message = ExportTraceServiceRequest.FromString(body)
            spans.extend(s for r in message.resource_spans for scope in r.scope_spans for s in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with serving_beside(llm, otlp_endpoint=f"http://127.0.0.1:{collector.server_port}/v1/traces") as served:
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        answer = served.http.post("/v1/chat/completions", json=body, headers={"traceparent": parent})
        served.http.get("/health")
    collector.shutdown()
    collector.server_close()
    [span] = spans
    assert span.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    attributes = {a.key: a.value for a in span.attributes}
    assert attributes["gen_ai.operation.name"].string_value == "chat"
    assert attributes["gen_ai.usage.output_tokens"].int_value == answer.json()["usage"]["completion_tokens"]
    assert span.start_time_unix_nano < span.events[0].time_unix_nano <= span.end_time_unix_nano


def test_an_end_lets_everybody_finish(llm: LLM) -> None:
    params: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "temperature": 0}
    [expected] = llm.generate(PROMPT, SamplingParams(**params))
    with serving_beside(llm) as served, slowed(served), ThreadPoolExecutor(8) as pool:
        futures = [
            pool.submit(served.post, "/v1/completions", prompt=PROMPT, stream=bool(i % 2), **params) for i in range(6)
        ]
        wait_until(lambda: served.service.admission.num_requests == 6)
        served.server.end()
        wait_until(lambda: served.service.admission.is_closed)
        refused = served.post("/v1/completions", prompt=PROMPT)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert served.http.get("/ready").status_code == 503
        assert served.http.get("/health").status_code == 200
        for number, future in enumerate(futures):
            answer = future.result()
            assert answer.status_code == 200
            text = joined(answer) if number % 2 else answer.json()["choices"][0]["text"]
            assert text == expected.outputs[0].text
        served.thread.join(timeout=10)
        assert not served.thread.is_alive()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{served.url}/health")


def joined(answer: httpx.Response) -> str:
    *lines, done = [line for line in answer.text.split("\n\n") if line]
    assert done == "data: [DONE]"
    return "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines)


def test_an_end_does_not_wait_for_ever(llm: LLM) -> None:
    with serving_beside(llm, drain_timeout_s=0.2) as served, slowed(served), ThreadPoolExecutor(1) as pool:
        whole = pool.submit(served.post, "/v1/completions", **LONG)
        wait_until(lambda: served.service.admission.num_requests == 1)
        served.server.end()
        answer = whole.result()
        assert answer.status_code == 503
        assert "shut down" in answer.json()["error"]["message"]
        served.thread.join(timeout=10)
        assert not served.thread.is_alive()


def test_an_engine_that_fails_ends_the_server(llm: LLM) -> None:
    with serving_beside(llm) as served, ThreadPoolExecutor(1) as pool:

        def fail() -> StepOutput:
            time.sleep(0.05)
            raise MemoryError("no memory left")

        served.engine.step = fail  # type: ignore[method-assign]
        answer = pool.submit(served.post, "/v1/completions", **LONG).result()
        assert answer.status_code == 503
        assert "no memory left" in answer.json()["error"]["message"]
        served.thread.join(timeout=10)
        assert not served.thread.is_alive()


def test_what_nobody_expected_is_not_told(llm: LLM, log: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_beside(llm) as served:

        def fail(*_: Any) -> None:
            raise RuntimeError("a secret")

        monkeypatch.setattr(served.service, "check_model", fail)
        answer = served.post("/v1/completions", prompt=PROMPT)
        assert answer.status_code == 500
        assert "a secret" not in answer.text
        assert answer.headers["X-Request-Id"]
    assert any("a secret" in line.get("exception", "") for line in log)


def test_listeners_see_every_step_and_cost_nothing_when_gone(llm: LLM) -> None:
    seen: list[StepOutput] = []

    def bad(_: StepOutput) -> None:
        raise RuntimeError("a viewer's own trouble")

    with serving_beside(llm) as served:
        listeners = served.service.llm.listeners
        listeners += [bad, seen.append]
        answer = served.post("/v1/completions", prompt=PROMPT, max_tokens=20, ignore_eos=True, temperature=0).json()
        assert answer["usage"]["completion_tokens"] == 20
        assert listeners == [seen.append]
        records = [record for output in seen for record in output.records]
        tokens = [token for output in seen for chunk in output.chunks for token in chunk.token_ids]
        assert len(tokens) == 20
        assert 1 + sum(record.accepted + 1 for record in records) >= 20
        assert all(len(record.klds) == record.drafted for record in records)
        # Somebody who leaves is noticed even if nothing else happens.
        listeners[:] = [seen.append]
        with slowed(served):
            client = raw_request(served, LONG)
            wait_until(lambda: bool(served.engine.requests))
            client.close()
            wait_until(lambda: seen[-1] == StepOutput() and not served.engine.requests)
        listeners.clear()
        served.post("/v1/completions", prompt=PROMPT, max_tokens=4)
        assert served.engine.watched is False


def test_a_port_in_use_is_known_before_models_are_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.run(["serve", "--port", str(port), "--target", "/no/such/model"]) == 2
    assert f"Cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err


def test_what_is_missing_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("uvicorn", "dsde.server.", "dsde.cli.serve"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert cli.run(["serve"]) == 1
    assert 'pip install "dsde[server]"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "99999"], "port must be a whole number between 0 and 65535"),
        (["--max-queue", "-1"], "max_queue must be"),
        (["--request-timeout", "-1"], "request_timeout_s must be"),
        (["--log-format", "xml"], "log_format must be one of text, json"),
        (["--api-key", ""], "An API key must not be empty"),
        (["--host", "no.such.host.example", "--port", "0"], "Cannot listen on no.such.host.example"),
        (["--per-request-spec-decode-metrics", "all"], "spec_decode_metrics must be one of"),
    ],
)
def test_wrong_settings(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["serve", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_loopback_is_known_by_its_address() -> None:
    hosts = {"127.0.0.1": True, "localhost": True, "::1": True, "0.0.0.0": False, "192.168.0.1": False, "box": False}
    assert {host: ServerSettings(host=host).is_loopback for host in hosts} == hosts
    with pytest.raises(InvalidInput, match="Cannot listen on"):
        bind(ServerSettings(host="192.0.2.1", port=0))


@pytest.mark.weights
@pytest.mark.skipif(embedded_target_path() is None, reason="the embedded weights are not on this machine")
def test_the_command_serves_drains_and_ends_with_zero() -> None:
    places = ["--max-num-seqs", "4", "--kv-cache-bytes", str(64 << 20)]
    command = [sys.executable, "-m", "dsde", "serve", "--port", "0", "--log-format", "json", *places]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DSDE_API_KEY": "k"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        assert "Serving SmolLM2-135M-Instruct" in first
        url = first.split(" at ")[1].split("/v1")[0]

        async def chats() -> list[str]:
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:

                async def one() -> str:
                    stream = await client.chat.completions.create(
                        model="SmolLM2-135M-Instruct",
                        messages=[{"role": "user", "content": "Name three colours."}],
                        temperature=0,
                        max_tokens=16,
                        stream=True,
                    )
                    pieces = []
                    async for chunk in stream:
                        if not started.is_set() and chunk.choices[0].delta.content:
                            started.set()
                        pieces.append(chunk.choices[0].delta.content or "")
                    return "".join(pieces)

                started = asyncio.Event()
                answers = asyncio.gather(*(one() for _ in range(6)))
                await started.wait()
                process.send_signal(signal.SIGTERM)
                return await answers

        texts = asyncio.run(chats())
        rest = process.stderr.read()
        assert process.wait(timeout=30) == 0
    assert len(texts[0]) > 10
    assert set(texts) == {texts[0]}
    assert "Traceback" not in rest
    lines = [json.loads(line) for line in rest.splitlines()]
    assert sum(line.get("status") == 200 for line in lines) == 6
