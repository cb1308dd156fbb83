"""Requests made from the server's own description of itself, right ones and wrong ones: none of them is the server's fault.

Every answer is one that the description lists, of a type and a shape that it lists.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import requests

from radixrt.server.openapi import description
from tests.server.threaded import on_a_thread

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
checks = pytest.importorskip("schemathesis.specs.openapi.checks")

OPERATIONS = [found.ok() for found in schemathesis.openapi.from_dict(description()).get_all_operations()]
CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
SETTINGS = hypothesis.settings(
    max_examples=10,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)


@pytest.fixture(scope="module")
def address(local_client: Any) -> Iterator[str]:
    with on_a_thread(local_client, served_model_name=("tiny",)) as address:
        yield address


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
def test_no_request_is_the_servers_fault(operation: Any, mode: Any, address: str) -> None:
    if mode is schemathesis.GenerationMode.NEGATIVE and not operation.body:
        pytest.skip("has no body that could be wrong")
    session = requests.Session()

    @SETTINGS
    @hypothesis.given(operation.as_strategy(generation_mode=mode))
    def holds(case: Any) -> None:
        case.call_and_validate(base_url=address, session=session, checks=CHECKS, timeout=20)

    with session:
        holds()
        assert session.get(f"{address}/health", timeout=20).status_code == 200
