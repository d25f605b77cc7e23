"""A real server on a real port, in this process: what the tests of the server talk to."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from dsde import LLM, AsyncLLM
from dsde.engine.engine import Engine
from dsde.models.embedded import embedded_target_path
from dsde.server.app import create_app
from dsde.server.lifecycle import Server, bind, url_of
from dsde.server.service import Service
from dsde.server.settings import ServerSettings

needs_weights = [
    pytest.mark.weights,
    pytest.mark.skipif(embedded_target_path() is None, reason="the embedded weights are not on this machine"),
]
MODEL = "smol"


@dataclass
class Served:
    url: str
    engine: Engine
    service: Service
    server: Server
    thread: threading.Thread
    http: httpx.Client

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def metric(self, name: str) -> float:
        """One sample of /metrics, by its name and labels."""
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[-1])
        raise AssertionError(f"no metric {name}")

    def wait_until_empty(self, timeout_s: float = 10.0) -> None:
        """Nothing runs, waits or holds a KV block."""
        wait_until(lambda: self.num_held == (0, 0, 0), timeout_s, lambda: f"still held: {self.num_held}")

    @property
    def num_held(self) -> tuple[int, int, int]:
        scheduler = self.engine.scheduler
        num_blocks = scheduler.pool.num_blocks - scheduler.pool.num_free
        return len(self.engine.requests), len(scheduler.running) + len(scheduler.waiting), num_blocks


def wait_until(condition: Any, timeout_s: float = 10.0, explain: Any = lambda: "not in time") -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.01)


@contextmanager
def serving(engine: Engine, **settings: Any) -> Iterator[Served]:
    chosen = ServerSettings(**{"port": 0, "model_name": MODEL, "dashboard": False, **settings})
    llm = AsyncLLM(engine)
    listener = bind(chosen)
    app = create_app(llm, chosen)
    server = Server(app, chosen)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    url = url_of(listener)
    try:
        with httpx.Client(base_url=url, timeout=60) as http:
            wait_until(lambda: server.started)
            yield Served(url, engine, app.state.service, server, thread, http)
    finally:
        server.end()
        thread.join(timeout=60)
        llm.shutdown()
        assert not thread.is_alive()


@contextmanager
def serving_embedded(llm: LLM, policy: str = "dsde", **settings: Any) -> Iterator[Served]:
    """The embedded pair with a KV cache of its own; `llm` stays free for comparing."""
    with serving(llm.with_policy(policy).engine, **settings) as served:
        yield served
