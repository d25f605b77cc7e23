"""The API's own description, tried out: whatever it allows is answered as it says, and what it forbids is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from served import Served, serving_beside, tiny_llm

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
OPERATIONS = {
    "POST /v1/completions",
    "POST /v1/chat/completions",
    "POST /tokenize",
    "POST /detokenize",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "GET /health",
    "GET /ready",
    "GET /version",
    "GET /metrics",
}

TRIALS = [
    *((operation, GenerationMode.POSITIVE) for operation in sorted(OPERATIONS)),
    # Nothing about the others can be of a wrong type.
    *((operation, GenerationMode.NEGATIVE) for operation in sorted(OPERATIONS) if operation.startswith("POST")),
]
BOUNDED = settings(
    max_examples=50,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    llm = tiny_llm(tmp_path_factory.mktemp("tiny"))
    with serving_beside(llm, max_output_tokens=8) as served:
        yield served


@pytest.fixture(scope="module")
def api(served: Served) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{served.url}/openapi.json")


def test_everything_is_described(api: schemathesis.BaseSchema) -> None:
    assert {result.ok().label for result in api.get_all_operations()} == OPERATIONS


@pytest.mark.parametrize(("operation", "mode"), TRIALS)
def test_the_description_is_true(
    api: schemathesis.BaseSchema, served: Served, operation: str, mode: GenerationMode
) -> None:
    method, path = operation.split()

    @BOUNDED
    @given(case=api[path][method].as_strategy(generation_mode=mode))
    def try_out(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CHECKS)

    try_out()
    served.wait_until_empty()
    assert served.http.get("/health").status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_whatever_makes_sense_is_answered(api: schemathesis.BaseSchema, served: Served, path: str) -> None:
    """Drawn as described, less what no description can know: names, sizes, and tokens there are."""

    @BOUNDED
    @given(case=api[path]["POST"].as_strategy())
    def try_out(case: schemathesis.Case) -> None:
        body = case.body
        for field in ("model", "logit_bias", "stop_token_ids", "min_tokens", "max_completion_tokens", "top_logprobs"):
            body.pop(field, None)
        body["max_tokens"] = 1 + (body.get("max_tokens") or 0) % 8
        body["n"] = 1 + (body.get("n") or 0) % 4
        if "messages" in body:
            body["messages"] = [{"role": "user", "content": "Hello!"}]
        else:
            body["prompt"] = ["Once upon", "a time"] if isinstance(body["prompt"], list) else [5, 6, 7]
        response = case.call_and_validate(checks=CHECKS)
        assert response.status_code == 200, response.text
        assert b"error" not in response.content if body.get("stream") else True

    try_out()
    served.wait_until_empty()
