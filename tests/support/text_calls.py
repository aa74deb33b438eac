"""Calls of the text room as one request makes them, in an event loop of their own."""

import asyncio
from typing import Any

from polyhead.service.core.model import Model
from polyhead.service.core.request import Encode, Generate, Sampling
from polyhead.service.text.encoder_inputs import EncodedInput, EncodingRequest
from polyhead.service.text.generation_request import GenerationRequest
from polyhead.service.text.tokenization import TextProcessor


def prompts(model: Model, *given: Any, **asked: Any) -> list[Generate]:
    """The requests of a generation with these prompts."""
    asked = {"field": "prompt", "sampling": Sampling()} | asked
    requests: list[Generate] = run(TextProcessor.read_prompts, model, GenerationRequest(prompts=given, **asked))
    return requests


def inputs(model: Model, *given: Any, **asked: Any) -> list[Encode]:
    """The requests of an encoding with these inputs."""
    request = EncodingRequest(field="inputs", inputs=given, **asked)
    reads: list[EncodedInput] = run(TextProcessor.read_inputs, model, request)
    return [request for read in reads for request in read.requests]


def run(method: Any, model: Model, asked: Any, times: list[tuple[str, str, float]] | None = None) -> Any:
    """Call a method of a text processor; `times` gets what it records."""
    recorded = times if times is not None else []
    text = TextProcessor(threads=1, batch_limit=4, on_tokenised=lambda *call: recorded.append(call))
    try:
        return asyncio.run(method(text, model, asked, "call"))
    finally:
        text.close()
