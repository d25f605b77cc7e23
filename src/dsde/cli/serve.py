"""`dsde serve`: models behind the OpenAI API."""

from __future__ import annotations

from dataclasses import replace

from dsde.cli.generate import ModelChoice
from dsde.engine.async_llm import AsyncLLM
from dsde.server.lifecycle import serve
from dsde.server.settings import ServerSettings


def run_serve(choice: ModelChoice, settings: ServerSettings, max_num_seqs: int) -> None:
    llm = choice.load(max_num_seqs)
    if settings.model_name == ServerSettings.model_name:
        settings = replace(settings, model_name=llm.target)
    engine = AsyncLLM(llm.engine)
    try:
        serve(engine, settings)
    finally:
        engine.shutdown()
