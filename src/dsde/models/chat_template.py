"""Renders a conversation to text with the Jinja template that a model brings.

Knows what Hugging Face templates expect to find. Knows nothing of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dsde.core.errors import InvalidInput, ModelError

Message = Mapping[str, Any]


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; here its body stands for itself."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it this way)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        # A template is somebody else's program: the sandbox keeps it from anything but text.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now, **special_tokens}
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(f"The model's chat template is not valid Jinja ({_one_line(error)}).") from error

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        check_messages(messages)
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise InvalidInput(f"The model's chat template refuses these messages: {_one_line(error)}.") from error


def check_messages(messages: Sequence[Message]) -> None:
    """Raise `InvalidInput` unless `messages` is a non-empty list of {role, content} with texts in them."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise InvalidInput('messages must be a non-empty list such as [{"role": "user", "content": "Hello"}].')
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidInput(f"messages[{index}] must be an object whose role is a text such as user.")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise InvalidInput(f"messages[{index}].content must be a text.")


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes for HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
