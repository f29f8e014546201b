"""llm-comply, a conformance suite: its requests, and answers held to the published schemas of Open Responses, OpenAI's
Chat Completions and Anthropic's Messages. What is said is scripted: a text, or a call where the request has tools."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serving import KEY, Scripted, running, use_template
from tiermoe.serve.app import create_app
from tiermoe.serve.served import Served

llm_comply = pytest.importorskip("llm_comply")

from llm_comply.config import ComplianceConfig  # noqa: E402
from llm_comply.result import TestStatus as Status  # noqa: E402
from llm_comply.runner import TestRunner as Runner  # noqa: E402
from llm_comply.schema import SpecLoader  # noqa: E402
from llm_comply.test_case import TestCategory as Category  # noqa: E402
from llm_comply.tests import get_tests  # noqa: E402

TEMPLATE = (
    '{# {"name": <function-name>, "arguments": <args-json-object>} #}'
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
)
CALL = 'Let me look.<tool_call>{"name": "get_weather", "arguments": {"location": "San Francisco"}}</tool_call>'
TEXT = "one two three"
SCHEMAS = {"open-responses": "openresponses.json", "openai-chat": "openai_chat.json", "anthropic": "anthropic.json"}
EXCEPTIONS = {
    # texts alone are read
    "image-input", "chat-image-input", "anth-image-input",
    # they leave out the model, and the server has but one
    "error-handling", "chat-error-handling",
}  # fmt: skip


@pytest.fixture
def addresses(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[bool, str]]:
    """Whether the answer is a call → where it is given."""
    use_template(monkeypatch, served, TEMPLATE)
    workers: list[Any] = [Scripted(served, TEXT), Scripted(served, CALL)]
    text, call = (create_app(replace(served, worker=worker), [KEY]) for worker in workers)
    with running(text) as said, running(call) as called:
        yield {False: said, True: called}


@pytest.mark.filterwarnings("ignore:jsonschema.RefResolver")
@pytest.mark.parametrize("form", SCHEMAS)
def test_answers_conform(addresses: dict[bool, str], form: str) -> None:
    spec = SpecLoader(str(Path(llm_comply.__file__).parent / "specs" / SCHEMAS[form]))
    cases = get_tests(form)
    if form == "open-responses":  # the schema has the events of a call, too
        (tools,) = (case for case in cases if case.category is Category.TOOLS)
        cases = [*cases, replace(tools, id="streamed-call", streaming=True)]
    failed = {}
    for case in cases:
        address = addresses[case.category is Category.TOOLS]
        config = ComplianceConfig(base_url=f"{address}/v1", api_key=KEY, model="tiny")
        result = Runner(config, [case], spec).run_one(case)
        if result.status is Status.FAILED:
            failed[case.id] = result.errors
    assert failed.keys() == EXCEPTIONS & {case.id for case in cases}, failed
