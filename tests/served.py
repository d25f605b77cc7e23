"""A real server on a real port, in this process, over a tiny pair: what the tests of the server talk to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import tokenizers
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

from dsde import LLM, AsyncLLM
from dsde.engine.engine import Engine
from dsde.server.app import create_app
from dsde.server.lifecycle import Server, bind, url_of
from dsde.server.service import Service
from dsde.server.settings import ServerSettings
from tiny import tiny_tensors

MODEL = "tiny"
TEXT = """The three primary colours are red, yellow and blue. Once upon a time there was a server that answered every
question: what is rain, why is the sky blue, and how do numbers such as 0 1 2 3 4 5 6 7 8 9 work? It said: "Hello!" (*)
You are a helpful assistant; user and system know it. Name JKQXZ UVWLP jkqxz"""
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('there is no role ' + m.role) }}{% endif %}{{ m.role + ': ' + m.content + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


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


def tiny_llm(folder: Path, **settings: Any) -> LLM:
    """A pair of random models with a tokenizer and a chat template, loaded from files as any other."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    vocab = tokenizer.get_vocab_size()
    config = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
    }
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "chat_template": TEMPLATE}))
    save_file(tiny_tensors(vocab, seed=3), folder / "model.safetensors")
    options: dict[str, Any] = {"max_num_seqs": 16, "kv_cache_bytes": 16 << 20, "dtype": "float32", **settings}
    return LLM(str(folder), "noise:0.1", **options)


@contextmanager
def serving_beside(llm: LLM, policy: str = "dsde", **settings: Any) -> Iterator[Served]:
    """The same weights with a KV cache of its own, so that `llm` stays free for comparing."""
    with serving(llm.with_policy(policy).engine, **settings) as served:
        yield served
