"""Whatever a client sends: one sentence and a 4xx, and the next request is answered as if nothing had happened."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from dsde import LLM
from served import Served, serving_beside, tiny_llm

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hi"}]
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tmp_path_factory.mktemp("tiny"), max_num_seqs=8)


@pytest.fixture(scope="module")
def served(llm: LLM) -> Iterator[Served]:
    with serving_beside(llm, max_queue=8, max_output_tokens=64) as served:
        yield served


@pytest.fixture(scope="module")
def impatient(llm: LLM) -> Iterator[Served]:
    with serving_beside(llm, body_timeout_s=0.5) as served:
        yield served


def completion(**fields: Any) -> tuple[str, bytes]:
    return COMPLETIONS, json.dumps({"prompt": "Hi", "max_tokens": 1, **fields}).encode()


def chat(**fields: Any) -> tuple[str, bytes]:
    return CHAT, json.dumps({"messages": HELLO, "max_tokens": 1, **fields}).encode()


def raw(body: bytes, path: str = COMPLETIONS) -> tuple[str, bytes]:
    return path, body


BAD: dict[str, tuple[tuple[str, bytes], int, str]] = {
    # what is no JSON, or not an object
    "empty body": (raw(b""), 400, "JSON object"),
    "no JSON": (raw(b"hello"), 400, "not valid JSON"),
    "half JSON": (raw(b'{"prompt": "Hi"'), 400, "not valid JSON"),
    "a list": (raw(b"[1, 2]"), 400, "must be a JSON object"),
    "null": (raw(b"null"), 400, "must be a JSON object"),
    "a number": (raw(b"5"), 400, "must be a JSON object"),
    "wrong UTF-8": (raw(b'{"prompt": "\xff\xfe"}'), 400, "UTF-8"),
    "Latin-1": (raw('{"prompt": "é"}'.encode("latin-1")), 400, "UTF-8"),
    "half a surrogate pair": (raw(b'{"prompt": "\\ud800", "max_tokens": 1}'), 400, "prompt"),
    "deep nesting": (raw(b'{"prompt": ' + b"[" * 100_000), 400, "nested too deeply"),
    "endless number": (raw(b'{"prompt": "Hi", "seed": ' + b"9" * 10_000 + b"}"), 400, "too many digits"),
    # the prompt
    "no prompt": (raw(b"{}"), 400, "prompt: field required"),
    "prompt null": (completion(prompt=None), 400, "prompt"),
    "prompt a number": (completion(prompt=5), 400, "prompt"),
    "prompt an object": (completion(prompt={"text": "Hi"}), 400, "prompt"),
    "prompt empty": (completion(prompt=""), 400, "The prompt is empty"),
    "prompt an empty list": (completion(prompt=[]), 400, "The prompt is empty"),
    "prompt of fractions": (completion(prompt=[1.5]), 400, "prompt must be a text, a list of token ids"),
    "prompt of booleans": (completion(prompt=[True]), 400, "prompt"),
    "prompt mixed": (completion(prompt=["Hi", 5]), 400, "prompt"),
    "token too large": (completion(prompt=[10**9]), 400, "token ids must be from 0 to"),
    "token negative": (completion(prompt=[-1]), 400, "token ids must be from 0 to"),
    "token beyond 64 bits": (completion(prompt=[2**70]), 400, "prompt"),
    "prompt longer than the context": (completion(prompt=[5] * 9000), 400, "9000 tokens"),
    "text longer than the context": (completion(prompt="word " * 20_000), 400, "tokens"),
    "more prompts than there is room for": (completion(prompt=["Hi"] * 17), 400, "17 completions at once"),
    # numbers
    "max_tokens zero": (completion(max_tokens=0), 400, "max_tokens"),
    "max_tokens negative": (completion(max_tokens=-5), 400, "max_tokens"),
    "max_tokens a text": (completion(max_tokens="ten"), 400, "max_tokens"),
    "max_tokens a fraction": (completion(max_tokens=1.5), 400, "max_tokens"),
    "max_tokens above the limit": (completion(max_tokens=65), 400, "at most 64 on this server"),
    "max_tokens huge": (completion(max_tokens=2**62), 400, "max_tokens"),
    "min_tokens above max_tokens": (completion(min_tokens=5), 400, "min_tokens"),
    "temperature NaN": (completion(temperature=float("nan")), 400, "temperature must be a finite number"),
    "temperature infinite": (completion(temperature=float("inf")), 400, "temperature must be a finite number"),
    "temperature 1e999": (raw(b'{"prompt": "Hi", "temperature": 1e999}'), 400, "temperature"),
    "temperature negative": (completion(temperature=-0.1), 400, "temperature"),
    "temperature a text": (completion(temperature="hot"), 400, "temperature"),
    "temperature a boolean": (completion(temperature=True), 400, "temperature"),
    "top_p above 1": (completion(top_p=1.1), 400, "top_p"),
    "top_p zero": (completion(top_p=0), 400, "top_p"),
    "top_k below -1": (completion(top_k=-2), 400, "top_k"),
    "min_p above 1": (completion(min_p=2), 400, "min_p"),
    "presence_penalty": (completion(presence_penalty=3), 400, "presence_penalty"),
    "frequency_penalty": (completion(frequency_penalty=-3), 400, "frequency_penalty"),
    "repetition_penalty": (completion(repetition_penalty=0), 400, "repetition_penalty"),
    "repetition_penalty next to nothing": (completion(repetition_penalty=5e-324), 400, "repetition_penalty"),
    "n zero": (completion(n=0), 400, "n must be"),
    "n huge": (completion(n=10**6), 400, "n must be"),
    "n more than there is room for": (completion(n=1000), 400, "1000 completions at once"),
    "seed a text": (completion(seed="lucky"), 400, "seed"),
    "seed huge": (completion(seed=2**80), 400, "seed"),
    "logprobs negative": (completion(logprobs=-1), 400, "logprobs"),
    "logprobs too many": (completion(logprobs=21), 400, "logprobs"),
    "slo_tpot_ms zero": (completion(slo_tpot_ms=0), 400, "slo_tpot_ms"),
    # the rest
    "logit_bias a list": (completion(logit_bias=[1]), 400, "logit_bias"),
    "logit_bias of a word": (completion(logit_bias={"cat": 1}), 400, "logit_bias"),
    "logit_bias too large": (completion(logit_bias={"5": 101}), 400, "logit_bias"),
    "logit_bias beyond the vocabulary": (completion(logit_bias={"999999": 1}), 400, "logit_bias"),
    "logit_bias NaN": (completion(logit_bias={"5": float("nan")}), 400, "logit_bias"),
    "stop empty": (completion(stop=""), 400, "stop"),
    "stop of numbers": (completion(stop=[5]), 400, "stop"),
    "too many stops": (completion(stop=[str(i) for i in range(17)]), 400, "at most 16 texts"),
    "stop_token_ids negative": (completion(stop_token_ids=[-1]), 400, "stop_token_ids"),
    "speculation unknown": (completion(speculation="always"), 400, "speculation"),
    "speculation too long": (completion(speculation=1000), 400, "speculation"),
    "speculation negative": (completion(speculation=-1), 400, "speculation"),
    "spec_decode_metrics unknown": (completion(spec_decode_metrics="all"), 400, "spec_decode_metrics"),
    "stream a text": (completion(stream="yes"), 400, "stream"),
    "stream_options a list": (completion(stream_options=[]), 400, "stream_options"),
    "unknown stream option": (completion(stream_options={"speed": 5}), 400, "speed is not a field"),
    "unknown field": (completion(max_tokns=5), 400, "max_tokns is not a field"),
    "too many fields": (completion(**{f"x{i}": 1 for i in range(100)}), 400, "102 fields"),
    "too many prompts": (completion(prompt=["Hi"] * 1025), 400, "at most 1024"),
    "too many stop_token_ids": (completion(stop_token_ids=[1] * 1025), 400, "stop_token_ids"),
    "too many biases": (completion(logit_bias={str(i): 1 for i in range(1025)}), 400, "logit_bias"),
    "unknown model": (completion(model="gpt-4"), 404, "There is no model 'gpt-4'"),
    "model a number": (completion(model=5), 400, "model"),
    "echo": (completion(echo=True), 400, "echo is not supported"),
    "suffix": (completion(suffix="the end"), 400, "suffix is not supported"),
    "best_of": (completion(best_of=2), 400, "best_of is not supported"),
    "bad streaming": (completion(stream=True, temperature=-1), 400, "temperature"),
    "streaming too much": (completion(stream=True, prompt=[5] * 9000), 400, "9000 tokens"),
    # chats
    "no messages": (raw(b"{}", CHAT), 400, "messages: field required"),
    "messages empty": (chat(messages=[]), 400, "messages must be a non-empty list"),
    "messages a text": (chat(messages="Hi"), 400, "messages"),
    "too many messages": (chat(messages=HELLO * 4097), 400, "at most 4096"),
    "a role that the template does not know": (
        chat(messages=[{"role": "wizard", "content": "Hi"}]),
        400,
        "no role wizard",
    ),
    "message without role": (chat(messages=[{"content": "Hi"}]), 400, "messages.0.role"),
    "message without content": (chat(messages=[{"role": "user"}]), 400, "messages[0].content"),
    "role a number": (chat(messages=[{"role": 5, "content": "Hi"}]), 400, "messages.0.role"),
    "content a number": (chat(messages=[{"role": "user", "content": 5}]), 400, "messages.0.content"),
    "an image": (
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        400,
        "messages.0.content",
    ),
    "tools": (chat(tools=[{"type": "function"}]), 400, "tools is not supported"),
    "response_format": (chat(response_format={"type": "json_object"}), 400, "response_format is not supported"),
    "two limits": (chat(max_completion_tokens=2), 400, "max_tokens and max_completion_tokens"),
    "top_logprobs alone": (chat(top_logprobs=2), 400, "top_logprobs needs logprobs"),
    "logprobs a number": (chat(logprobs=3), 400, "logprobs"),
    "a conversation too long": (chat(messages=[{"role": "user", "content": "word " * 20_000}]), 400, "tokens"),
    # tokens
    "nothing to tokenize": (raw(b"{}", "/tokenize"), 400, "Give either prompt or messages"),
    "nothing to detokenize": (raw(b"{}", "/detokenize"), 400, "tokens: field required"),
    "detokenize nonsense": (raw(b'{"tokens": [-5]}', "/detokenize"), 400, "tokens must be from 0"),
    # sizes
    "10 MB": (completion(prompt="x" * (10 * MEGABYTE)), 413, "at most"),
    "10 MB of something else": (raw(b"\0" * (10 * MEGABYTE)), 413, "at most"),
    "10 MB of tokens": (completion(prompt=[1] * (4 * MEGABYTE)), 413, "at most"),
}


@pytest.mark.parametrize(("request_", "status", "message"), BAD.values(), ids=BAD)
def test_bad_requests(served: Served, request_: tuple[str, bytes], status: int, message: str) -> None:
    path, body = request_
    answer = served.http.post(path, content=body, headers={"Content-Type": "application/json"})
    check_error(answer, status, message)
    check_good(served)


def check_error(answer: httpx.Response, status: int, message: str) -> None:
    assert answer.status_code == status, answer.text[:500]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert message in error["message"]
    assert error["message"].endswith((".", "?"))
    assert 10 < len(error["message"]) < 400
    assert "\n" not in error["message"]
    assert "Traceback" not in answer.text


def check_good(served: Served) -> None:
    answer = served.post(COMPLETIONS, prompt="The sky is", max_tokens=1, temperature=0)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "message"),
    [
        ("GET", COMPLETIONS, {}, 405, "cannot be used with GET"),
        ("DELETE", CHAT, {}, 405, "cannot be used with DELETE"),
        ("POST", "/v1/embeddings", {}, 404, "There is no /v1/embeddings here"),
        ("GET", "/v1/models/gpt-4", {}, 404, "There is no model"),
        ("POST", COMPLETIONS, {"Content-Type": "text/plain"}, 400, "Content-Type: application/json"),
        ("POST", COMPLETIONS, {"Content-Type": "application/x-www-form-urlencoded"}, 400, "application/json"),
        ("POST", COMPLETIONS, {"Host": "evil.example"}, 403, "localhost"),
    ],
)
def test_bad_ways(served: Served, method: str, path: str, headers: dict[str, str], status: int, message: str) -> None:
    body = b'{"prompt": "Hi", "max_tokens": 1}'
    headers = {"Content-Type": "application/json", **headers}
    check_error(served.http.request(method, path, content=body, headers=headers), status, message)
    check_good(served)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
TALK = {
    "a body that never comes": (HEAD + b"Content-Length: 50\r\n\r\n", 408),
    "half a body": (HEAD + b'Content-Length: 50\r\n\r\n{"prompt"', 408),
    "headers that never end": (HEAD + b"X-Slow: ", 408),
    "nothing": (b"", 408),
    "endless chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n", 408),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01hello\r\n\r\n", 400),
    "a length that is no number": (HEAD + b"Content-Length: many\r\n\r\n{}", 400),
    "headers of a megabyte": (HEAD + b"X-Large: " + b"x" * MEGABYTE, 431),
}


@pytest.mark.parametrize(("talk", "status"), TALK.values(), ids=TALK)
def test_bad_talkers(impatient: Served, talk: bytes, status: int) -> None:
    host, port = impatient.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        try:
            connection.sendall(talk)
            reply = _read_all(connection)
        except (ConnectionResetError, BrokenPipeError):  # refused before it had said everything
            reply = b""
    if reply or status == 408:
        assert reply.split(b" ")[1] == str(status).encode(), reply
        assert len(json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["message"]) > 10
    check_good(impatient)


def test_a_body_in_small_pieces(served: Served) -> None:
    body = b'{"prompt": "The sky is", "max_tokens": 1, "temperature": 0}'

    def pieces() -> Iterator[bytes]:
        for byte in body:
            time.sleep(0.002)
            yield bytes([byte])

    answer = served.http.post(COMPLETIONS, content=pieces(), headers={"Content-Type": "application/json"})
    assert answer.json()["usage"]["completion_tokens"] == 1


def test_nothing_is_left_behind(served: Served) -> None:
    served.wait_until_empty()
    assert served.service.admission.num_sequences == 0


def _read_all(connection: socket.socket) -> bytes:
    reply = b""
    while part := connection.recv(65536):
        reply += part
    return reply
