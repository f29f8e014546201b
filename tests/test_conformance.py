"""Cases that schemathesis makes of `/openapi.json`: whatever is asked, the answer is one that is documented."""

from __future__ import annotations

from typing import Any

import hypothesis
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from tiermoe.serve.app import create_app
from tiermoe.serve.served import Served

CASES = 6  # of each endpoint
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]


def test_every_answer_is_documented(served: Served) -> None:
    schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(served))
    tried = set()
    for found in schema.get_all_operations():
        operation = found.ok()
        modes = list(schemathesis.GenerationMode)

        @hypothesis.settings(
            max_examples=CASES,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=hypothesis.strategies.one_of([operation.as_strategy(mode) for mode in modes]))
        def check(case: Any) -> None:
            case.call_and_validate(checks=CHECKS)
            tried.add(case.operation.label)

        check()
    assert {"POST /v1/chat/completions", "POST /v1/messages", "POST /v1/responses"} <= tried
