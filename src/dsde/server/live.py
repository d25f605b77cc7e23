"""What the dashboard shows, as it happens."""

from __future__ import annotations

from fastapi import FastAPI

from dsde.engine.async_llm import AsyncLLM


def attach(app: FastAPI, llm: AsyncLLM) -> None:
    """Add the dashboard's routes."""
