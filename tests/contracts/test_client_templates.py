"""No dialect accepts a chat template from a client: templates are programs, and only checkpoints may contain them."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.bad_values import ROUTES
from tests.support.scripted import Registry, application, ask, echo, model

TEMPLATE = "{{ messages[0].content }}"
TURN = [{"role": "user", "content": "a"}]
BODIES: dict[str, dict[str, Any]] = {
    **{path: dict(route.body) for path, route in ROUTES.items()},
    "/tokenize": {"model": "chat", "messages": TURN},
    "/models/chat/tokenize": {"messages": TURN},
    "/v1/chat/template": {"model": "chat", "messages": TURN},
    "/v1/messages/count_tokens": {"model": "chat", "messages": TURN},
    "/generate_stream": {"inputs": "a"},
    "/v2/models/chat/generate_stream": {"text_input": "a"},
    "/pipeline/text-generation": {"inputs": "a"},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_template_in_a_request_is_refused(path: str, tiny_generator: Path) -> None:
    app = application(Registry([model(tiny_generator, "chat", "generate")], echo))
    nested_body = {"parameters": {**BODIES[path].get("parameters", {}), "chat_template": TEMPLATE}}
    variables = {"chat_template_kwargs": {"messages": [], "chat_template": TEMPLATE}}
    plain, top_level, nested = ask(
        app,
        (path, BODIES[path]),
        (path, BODIES[path] | {"chat_template": TEMPLATE}),
        (path, BODIES[path] | nested_body),
    )
    assert plain.status_code == 200, plain.text
    assert top_level.status_code in (400, 422)
    assert "chat_template" in top_level.text
    assert nested.status_code in (400, 422)
    [kwargs] = ask(app, (path, BODIES[path] | variables))
    assert kwargs.status_code in (400, 422)
