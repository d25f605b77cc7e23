"""Logs: a line for every request, as text or as JSON. Nothing of a prompt or an answer, unless that is asked for."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

from dsde.server.records import Record
from dsde.server.settings import LogFormat

_QUIET = {"/health", "/ready", "/metrics"}
"""asked for every few seconds by machines"""

access = logging.getLogger("dsde.server.access")


def set_up_logs(form: LogFormat) -> None:
    """For a process that is a server: its own lines and uvicorn's go to standard error in one form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    )
    for name, level in (("dsde", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        facts = getattr(record, "facts", None)
        line |= {"message": record.getMessage()} if facts is None else facts
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_request(record: Record) -> None:
    facts = _facts(record)
    rest = " ".join(f"{name}={value}" for name, value in list(facts.items())[4:])
    message = f"{record.method} {record.path} {record.status} {record.total_s:.3f} s {rest}"
    # A path is the client's own words: as a line of text it must not make up lines of its own.
    level = logging.DEBUG if record.path in _QUIET else logging.INFO
    access.log(level, "%s", message.encode("unicode_escape").decode(), extra={"facts": facts})


def _facts(record: Record) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "total_s": round(record.total_s, 4),
        "request_id": record.request_id,
    }
    if record.num_prompt_tokens:
        facts["num_prompt_tokens"] = record.num_prompt_tokens
        facts["num_completion_tokens"] = record.num_completion_tokens
    if record.outputs:
        first = record.outputs[0].metrics
        facts["queue_s"] = round(first.queue_s, 4)
        facts["first_token_s"] = round(first.first_token_s, 4)
        facts["num_draft_tokens"] = sum(output.metrics.num_draft_tokens for output in record.outputs)
        facts["num_accepted_tokens"] = sum(output.metrics.num_accepted_tokens for output in record.outputs)
    if record.prompts is not None:
        facts["prompts"] = record.prompts
        facts["completions"] = [one.text for output in record.outputs for one in output.outputs]
    return facts
