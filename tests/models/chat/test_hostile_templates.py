"""A template is a program, and only checkpoints bring those: no dialect takes one from a client."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.bad_values import ROUTES
from tests.support.scripted import Registry, application, ask, echo, model

TEMPLATE = "{{ messages[0].content }}"
TURN = [{"role": "user", "content": "a"}]
TALKS: dict[str, dict[str, Any]] = {
    **{path: dict(route.body) for path, route in ROUTES.items()},
    "/tokenize": {"model": "chat", "messages": TURN},
    "/models/chat/tokenize": {"messages": TURN},
    "/v1/chat/template": {"model": "chat", "messages": TURN},
    "/v1/messages/count_tokens": {"model": "chat", "messages": TURN},
    "/generate_stream": {"inputs": "a"},
    "/v2/models/chat/generate_stream": {"text_input": "a"},
    "/pipeline/text-generation": {"inputs": "a"},
}


@pytest.mark.parametrize("path", TALKS)
def test_a_client_brings_no_template(path: str, tiny_generator: Path) -> None:
    app = application(Registry([model(tiny_generator, "chat", "generate")], echo))
    inside = {"parameters": {**TALKS[path].get("parameters", {}), "chat_template": TEMPLATE}}
    variables = {"chat_template_kwargs": {"messages": [], "chat_template": TEMPLATE}}
    fine, outside, within = ask(
        app, (path, TALKS[path]), (path, TALKS[path] | {"chat_template": TEMPLATE}), (path, TALKS[path] | inside)
    )
    assert fine.status_code == 200, fine.text
    assert outside.status_code in (400, 422)
    assert "chat_template" in outside.text
    assert within.status_code in (400, 422)
    [other] = ask(app, (path, TALKS[path] | variables))
    assert other.status_code in (400, 422)
