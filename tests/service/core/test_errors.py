"""Messages of errors for clients."""

import json

from polyhead.models.core.errors import CheckpointError
from polyhead.service.core.errors import (
    MAX_MESSAGE_CHARS,
    MAX_PARAM_CHARS,
    BadRequest,
    UnreadableRequest,
    client_message,
)


def test_a_message_and_its_field_are_cut() -> None:
    text = "y" * 8_000_000
    error = BadRequest(f"{text}: is wrong", param=text).with_names(["judge"])
    assert error.message == str(error) == f"{text[:MAX_MESSAGE_CHARS]}... judge"
    assert error.param == f"{text[:MAX_PARAM_CHARS]}..."
    assert len(str(UnreadableRequest(400, text))) < MAX_MESSAGE_CHARS + 10
    assert len(client_message(CheckpointError(text))) < MAX_MESSAGE_CHARS + 10


def test_half_of_a_character_in_a_message_can_be_sent() -> None:
    message = client_message(CheckpointError("it is missing", file="a", tensor="half \ud800"))
    assert "half \\ud800" in message
    assert json.dumps(message, ensure_ascii=False).encode()
