"""`dsde serve`: models behind the OpenAI API."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from rich.console import Console

from dsde.cli.generate import ModelChoice
from dsde.engine.async_llm import AsyncLLM
from dsde.engine.llm import LLM
from dsde.server.lifecycle import bind, serve, url_of
from dsde.server.logs import set_up_logs
from dsde.server.settings import ServerSettings

T = TypeVar("T")


def run_serve(choice: ModelChoice, settings: ServerSettings, limits: dict[str, int | None], warm_up: bool) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    with bind(settings) as listener:
        llm = _elsewhere(lambda: _load(choice, limits, warm_up, console))
        if settings.model_name == ServerSettings.model_name:
            settings = replace(settings, model_name=llm.target)
        set_up_logs(settings.log_format)
        if not settings.is_loopback and not settings.api_keys:
            console.print("Everybody who can reach this machine can use this server: consider --api-key.")
        url = url_of(listener)
        page = f", dashboard at {url}/dashboard" if settings.dashboard else ""
        console.print(f"Serving {settings.model_name} (draft {llm.draft}, policy {choice.policy}) at {url}/v1{page}")
        engine = AsyncLLM(llm.engine)
        try:
            serve(engine, settings, listener)
        finally:
            engine.shutdown()


def _load(choice: ModelChoice, limits: dict[str, int | None], warm_up: bool, console: Console) -> LLM:
    llm = choice.load(**limits)
    if warm_up:
        try:
            llm.warm_up()
        except Exception as error:  # what made-up requests could not have real ones may not need
            console.print(f"Warming up failed, and first requests will take longer: {error}")
    return llm


def _elsewhere(load: Callable[[], T]) -> T:
    """The result of `load` on a thread that ends with it.

    Whoever multiplies matrices gets threads of GNU OpenMP of its own, and as soon as there are more of these than
    cores, all of them go to sleep between any two products. Only the engine's thread may have some: a step on two
    cores takes 10 % longer beside those of a thread that has loaded models and never needs them again.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="dsde-load") as pool:
        return pool.submit(load).result()
