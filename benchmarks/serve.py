"""The server under load, and what it costs.

    python benchmarks/serve.py load [--seconds 180] [--settle 120] [--clients 200]
    python benchmarks/serve.py overhead [--clients 32] [--tokens 64] [--rounds 3]

`load` starts `dsde serve` and lets many clients stream at once: random prompts, lengths and parameters, some leaving
midway. Every answer that was finished must equal what `LLM.generate` gives for the same seed, afterwards nothing may
run, wait or hold memory, the process must not have grown, and nobody may have waited longer than everybody needs once.
Then, in the middle of new load, SIGTERM: whoever was let in gets a whole answer, and the process ends with 0.

`overhead` runs the same work through `LLM.generate` and through HTTP streams, in turn; the best round of each counts,
since other work on the machine can only make one slower.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsde import LLM, SamplingParams
from dsde.core.params import DEFAULT_POLICY

TEXT = (
    "the a of and to in is rain sun colour number server model why how what blue three garden stone letter music "
    "story river simple question answer city night paper window green light water people work great small"
)
WORDS = TEXT.split()
QUIET = {
    "dsde_sequences_running": 0.0,
    "dsde_sequences_waiting": 0.0,
    "dsde_requests_in_flight": 0.0,
    "dsde_kv_blocks_used": 0.0,
}
Body = dict[str, Any]


@dataclass
class Process:
    """A server of its own, and what it logs."""

    process: subprocess.Popen[str]
    port: int
    log: Path

    @property
    def rss_mb(self) -> float:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
        raise RuntimeError("no VmRSS")

    def logged(self) -> Iterator[Body]:
        for line in self.log.read_text().splitlines()[1:]:
            yield json.loads(line)


@contextmanager
def started(*arguments: str) -> Iterator[Process]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "dsde", "serve", "--port", "0", "--log-format", "json", *arguments]
        with log.open("w") as file:
            process = subprocess.Popen(command, stderr=file, text=True)
        try:
            while "Serving" not in (text := log.read_text()) or "\n" not in text:
                if process.poll() is not None:
                    raise SystemExit(f"the server did not start: {text}")
                time.sleep(0.1)
            port = int(text.split(" at http://")[1].split("/")[0].split(":")[1])
            yield Process(process, port, log)
        finally:
            process.kill()
            process.wait()


class Refused(Exception):
    """An answer that is none, with its status."""


async def stream(port: int, path: str, body: Body) -> AsyncIterator[Body]:
    """Events of one streamed request. A plain socket: a comfortable client takes more CPU than the server."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        status = int((await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1])
        if status != 200:
            raise Refused(status)
        rest = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            rest += (await reader.readexactly(size + 2))[:-2]
            while b"\n\n" in rest:
                line, _, rest = rest.partition(b"\n\n")
                if line == b"data: [DONE]":
                    return
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                yield event
        raise RuntimeError("the stream ended without [DONE]")
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def metric_values(port: int) -> dict[str, float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#") and " " in line]
    return {name: float(value) for name, value in lines if value.replace(".", "").replace("e+", "").isdigit()}


def draw_request(rng: random.Random) -> Body:
    """Reproducible: greedy, or with a seed."""
    prompt = " ".join(rng.choices(WORDS, k=rng.choice((3, 10, 30, 120))))
    body: Body = {"prompt": prompt, "max_tokens": rng.randint(1, 48), "n": rng.choice((1, 1, 1, 2)), "stream": True}
    if rng.random() < 0.4:
        body["temperature"] = 0
    else:
        body |= {"temperature": rng.choice((0.5, 0.8, 1.0)), "seed": rng.getrandbits(32)}
    extras: list[Body] = [
        {"top_p": 0.9},
        {"top_k": 20},
        {"min_p": 0.05},
        {"presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"repetition_penalty": 1.1},
        {"logit_bias": {"28": -100}},
        {"stop": [" and", "\n\n"]},
        {"logprobs": 2},
        {"speculation": "off"},
        {"speculation": rng.randint(1, 6)},
        {"ignore_eos": True},
        {"stream_options": {"include_usage": True}},
    ]
    for extra in rng.sample(extras, k=rng.choice((0, 1, 2))):
        body |= extra
    return body


@dataclass
class Tally:
    """What became of all requests."""

    finished: list[tuple[Body, list[str]]] = field(default_factory=list)
    num_left: int = 0
    """clients that went away, as they were meant to"""
    num_broken: int = 0
    """let in, and not answered as a whole"""
    refused: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)


async def ask(port: int, body: Body, patience: float, tally: Tally) -> None:
    """One request; with `patience` its client leaves after about so many events."""
    texts = [""] * body["n"]
    let_in = False
    try:
        events = stream(port, "/v1/completions", body)
        async for event in events:
            let_in = True
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
            patience -= 1
            if patience < 0:
                await events.aclose()  # type: ignore[attr-defined]
                tally.num_left += 1
                return
        tally.finished.append((body, texts))
    except Refused as refusal:
        tally.refused[str(refusal)] += 1
    except (ConnectionError, asyncio.IncompleteReadError, RuntimeError) as error:
        if let_in:
            tally.num_broken += 1
        tally.refused[type(error).__name__] += not let_in
        tally.reasons[f"{type(error).__name__}: {error}"] += 1


async def client(port: int, rng: random.Random, until: float, tally: Tally) -> None:
    while time.monotonic() < until:
        leaves = rng.random() < 0.2
        await ask(port, draw_request(rng), rng.randint(0, 10) if leaves else float("inf"), tally)


async def run_load(server: Process, options: argparse.Namespace) -> tuple[Tally, list[float], dict[str, float]]:
    tally, memory = Tally(), []
    settled = time.monotonic() + options.settle
    until = settled + options.seconds
    clients = [
        asyncio.create_task(client(server.port, random.Random(f"{options.seed}-{i}"), until, tally))
        for i in range(options.clients)
    ]
    while time.monotonic() < until:
        await asyncio.sleep(1)
        if time.monotonic() > settled:
            memory.append(server.rss_mb)
    await asyncio.gather(*clients)
    quiet: dict[str, float] = {}
    for _ in range(50):  # the last client may have left this very moment
        values = await metric_values(server.port)
        quiet = {name: values[name] for name in QUIET}
        if quiet == QUIET:
            break
        await asyncio.sleep(0.1)
    return tally, memory, quiet


async def run_end(server: Process, options: argparse.Namespace) -> tuple[Tally, int, float]:
    """SIGTERM while everybody streams: whoever was let in must get a whole answer."""
    tally = Tally()
    until = time.monotonic() + 600
    rngs = [random.Random(f"end-{options.seed}-{i}") for i in range(options.clients)]
    clients = [asyncio.create_task(ask(server.port, draw_request(rng), float("inf"), tally)) for rng in rngs]
    while (await metric_values(server.port))["dsde_requests_in_flight"] < options.clients * 0.9:
        assert time.monotonic() < until
        await asyncio.sleep(0.1)
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    late = [asyncio.create_task(ask(server.port, draw_request(rng), float("inf"), tally)) for rng in rngs[:10]]
    await asyncio.gather(*clients, *late)
    code = await asyncio.to_thread(server.process.wait, 60)
    return tally, code, time.monotonic() - began


def expected_texts(llm: LLM, bodies: list[Body]) -> list[list[str]]:
    names = set(SamplingParams.__dataclass_fields__)
    params = []
    for body in bodies:
        given = {name: value for name, value in body.items() if name in names}
        given["logit_bias"] = {int(token): bias for token, bias in body.get("logit_bias", {}).items()}
        params.append(SamplingParams(**given))
    outputs = llm.generate([body["prompt"] for body in bodies], params)
    return [[one.text for one in output.outputs] for output in outputs]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else 0.0


def models(options: argparse.Namespace) -> list[str]:
    chosen = {"--target": options.target, "--draft": options.draft, "--policy": options.policy}
    return [part for name, value in chosen.items() if value for part in (name, value)]


def load(options: argparse.Namespace) -> int:
    places = ("--max-num-seqs", str(options.max_num_seqs), "--kv-cache-bytes", str(options.kv_cache_mb << 20))
    with started(*models(options), *places, "--drain-timeout", "300") as server:
        tally, memory, quiet = asyncio.run(run_load(server, options))
        end, code, drain_s = asyncio.run(run_end(server, options))
        logged = list(server.logged())
    queues = [line["queue_s"] for line in logged if "queue_s" in line]
    finished = tally.finished + end.finished
    llm = LLM(options.target, "none", max_num_seqs=options.max_num_seqs)
    expected = expected_texts(llm, [body for body, _ in finished])
    wrong = [(body, texts, right) for (body, texts), right in zip(finished, expected, strict=True) if texts != right]
    third = max(len(memory) // 3, 1)
    first, last = sum(memory[:third]) / third, sum(memory[-third:]) / third
    rate = len(tally.finished) / (options.settle + options.seconds)
    longest_s = 2 * options.clients / rate
    result = {
        "clients": options.clients,
        "seconds": options.seconds,
        "finished": len(tally.finished),
        "left": tally.num_left,
        "broken": tally.num_broken + end.num_broken,
        "refused": dict(tally.refused),
        "wrong": len(wrong),
        "still held": quiet,
        "memory_mb": {"first third": round(first), "last third": round(last), "most": round(max(memory))},
        "queue_s": {"p50": percentile(queues, 0.5), "p99": percentile(queues, 0.99), "bound": round(longest_s, 1)},
        "at the end": {
            "finished": len(end.finished),
            "refused": dict(end.refused),
            "drain_s": round(drain_s, 1),
            "exit": code,
        },
        "broken why": dict(tally.reasons + end.reasons),
        "errors logged": sum(line.get("level") == "error" for line in logged),
    }
    print(json.dumps(result, indent=1))
    for body, texts, right in wrong[:3]:
        print(f"WRONG {body}\n  got      {texts}\n  expected {right}")
    checks = {
        "every finished answer is what generate gives": not wrong and len(tally.finished) > 0,
        "nobody who was let in went without an answer": not tally.num_broken and not end.num_broken,
        "nothing is held afterwards": quiet == QUIET,
        "memory is flat": last < 1.03 * first or not options.settle,
        "nobody waits longer than everybody needs twice": result["queue_s"]["p99"] < longest_s,  # type: ignore[index]
        "whoever was let in before SIGTERM was answered": len(end.finished) >= options.clients * 0.9,
        "exit 0": code == 0,
        "no error in the log": result["errors logged"] == 0,
    }
    for name, is_good in checks.items():
        print(f"{'ok  ' if is_good else 'FAIL'} {name}")
    return 0 if all(checks.values()) else 1


async def stream_all(port: int, prompts: list[str], tokens: int) -> int:
    body = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}

    async def one(prompt: str) -> int:
        usage = {"stream_options": {"include_usage": True}}
        *_, last = [event async for event in stream(port, "/v1/completions", {**body, **usage, "prompt": prompt})]
        return int(last["usage"]["completion_tokens"])

    return sum(await asyncio.gather(*map(one, prompts)))


def overhead(options: argparse.Namespace) -> int:
    rng = random.Random(options.seed)
    llm = LLM(options.target, options.draft, options.policy, max_num_seqs=options.clients)
    params = SamplingParams(max_tokens=options.tokens, temperature=0, ignore_eos=True)
    best = {"generate": 0.0, "http": 0.0}
    with started(*models(options), "--max-num-seqs", str(options.clients)) as server:
        for number in range(options.rounds + 1):
            # New prompts every round, so that nothing comes from a prefix cache.
            prompts = [" ".join(rng.choices(WORDS, k=16)) for _ in range(options.clients)]
            speeds = {}
            for side in best if number % 2 else reversed(best):
                began = time.perf_counter()
                if side == "http":
                    num_tokens = asyncio.run(stream_all(server.port, prompts, options.tokens))
                else:
                    num_tokens = sum(len(o.outputs[0].token_ids) for o in llm.generate(prompts, params))
                assert num_tokens == options.clients * options.tokens
                speeds[side] = num_tokens / (time.perf_counter() - began)
            if number:  # the first round only warms up
                best = {side: max(best[side], speed) for side, speed in speeds.items()}
                print(f"round {number}: " + ", ".join(f"{side} {speed:.1f} tokens/s" for side, speed in speeds.items()))
    ratio = best["http"] / best["generate"]
    print(f"{options.clients} clients: HTTP {best['http']:.1f}, generate {best['generate']:.1f} tokens/s: {ratio:.3f}")
    return 0 if ratio >= options.least else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("load", "overhead"))
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument(
        "--settle",
        type=float,
        default=120,
        help="seconds of load before memory is looked at: until then KV memory is touched for the first time, and "
        "oneDNN keeps a prepared product (0.6 MB) for each of the first thousand sizes it meets; 0: do not look",
    )
    parser.add_argument("--clients", type=int, help="default: 200, or 32 for overhead")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--kv-cache-mb", type=int, default=256)
    parser.add_argument("--target", help="default: the embedded pair")
    parser.add_argument("--draft")
    parser.add_argument("--policy", default=DEFAULT_POLICY)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--least", type=float, default=0.93, help="ratio that overhead must reach")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.clients = options.clients or (200 if options.what == "load" else 32)
    return load(options) if options.what == "load" else overhead(options)


if __name__ == "__main__":
    sys.exit(main())
