"""OpenTelemetry: a span for every request, where its packages are installed and somebody says where spans go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dsde
from dsde.core.errors import InvalidInput
from dsde.server.records import Record

_OPERATIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat"}


def make_tracer(endpoint: str, model_name: str) -> tuple[Callable[[Record], None], Callable[[], None]]:
    """What to call with every record, and what to call at the end, so that no span is lost."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.propagate import extract
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode
    except ImportError:
        raise InvalidInput(
            'Traces need OpenTelemetry: pip install "dsde[tracing]", or leave the endpoint out.'
        ) from None

    resource = Resource.create({"service.name": "dsde", "service.version": dsde.__version__})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    tracer = provider.get_tracer("dsde.server", dsde.__version__)

    def trace(record: Record) -> None:
        if record.route not in _OPERATIONS:
            return
        began_ns = int(record.began_s * 1e9)
        span = tracer.start_span(
            f"{_OPERATIONS[record.route]} {model_name}",
            context=extract(dict(record.headers)),
            kind=SpanKind.SERVER,
            attributes=_attributes(record, model_name),
            start_time=began_ns,
        )
        if record.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        for output in record.outputs:
            span.add_event("first token", timestamp=began_ns + int(output.metrics.first_token_s * 1e9))
        span.end(began_ns + int(record.total_s * 1e9))

    return trace, provider.shutdown


def _attributes(record: Record, model_name: str) -> dict[str, Any]:
    metrics = [output.metrics for output in record.outputs]
    return {
        "http.request.method": record.method,
        "http.route": record.route,
        "http.response.status_code": record.status,
        "gen_ai.operation.name": _OPERATIONS[record.route],
        "gen_ai.request.model": model_name,
        "gen_ai.response.finish_reasons": [str(one.finish_reason) for o in record.outputs for one in o.outputs],
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_completion_tokens,
        "dsde.request_id": record.request_id,
        "dsde.queue_s": sum(m.queue_s for m in metrics),
        "dsde.num_steps": sum(m.num_steps for m in metrics),
        "dsde.num_draft_tokens": sum(m.num_draft_tokens for m in metrics),
        "dsde.num_accepted_tokens": sum(m.num_accepted_tokens for m in metrics),
        "dsde.num_preemptions": sum(m.num_preemptions for m in metrics),
    }
