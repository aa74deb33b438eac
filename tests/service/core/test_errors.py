"""Messages of errors for clients."""

import json

from polyhead.models.core.errors import CheckpointError
from polyhead.service.core.errors import client_message


def test_half_of_a_character_in_a_message_can_be_sent() -> None:
    message = client_message(CheckpointError("it is missing", file="a", tensor="half \ud800"))
    assert "half \\ud800" in message
    assert json.dumps(message, ensure_ascii=False).encode()
