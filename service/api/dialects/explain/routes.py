"""POST /v1/explain: explains a model's answer, for every task and method.

With `Accept: text/event-stream` the answer is a stream of events: `{"progress": 0.4}`, the share of the work that is
done, whenever it has grown, and the explanation at the end.  Errors have the format of the dialect that owns /v1.
`service.explain.explain_response` writes the explanation.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ....core.errors import NotFound
from ....core.request import ExplanationProgress
from ....explain.explain_request import TARGET_FIELDS
from ...shared.dialect import answer_threads, authorized_models, describe_body, read_body, record_model, server
from ...shared.encoding_calls import INLINE_NUMBERS, json_response, run_off_loop
from ...shared.explain_calls import (
    EXPLAIN_OFF,
    ExplainCall,
    ExplainInput,
    ExplainRequest,
    compute_explanation,
    follow_explanation,
    read_explain_input,
    read_subject,
)
from ...shared.explain_options import read_explain_options
from ...shared.openai_errors import write_openai_error
from ...shared.streaming import (
    EventStream,
    StreamWriter,
    dump_chunks,
    encode_events,
    frame_event,
    run_while_connected,
)

router = APIRouter(tags=["explanations"])


@router.post("/v1/explain", openapi_extra=describe_body(ExplainRequest), summary="Why a model answers so.")
async def explain(request: Request) -> Response:
    if not server(request).settings.explain:
        raise NotFound(EXPLAIN_OFF)
    wire = await read_body(request, ExplainRequest)
    return await run_while_connected(request, answer_explain(request, wire))


async def answer_explain(request: Request, wire: ExplainRequest) -> Response:
    model = record_model(request, authorized_models(request).resolve(wire.model, tuple(TARGET_FIELDS)))
    streams = EventStream.media_type in request.headers.get("accept", "")
    options = replace(read_explain_options(wire, wire.max_tokens), reports_progress=streams)
    explain_call, given = ExplainCall(request, wire, model, options), read_explain_input(wire, model)
    if streams:
        writer = StreamWriter(answer_threads(request), write_openai_error)
        return await EventStream.open(encode_events(stream_explanation(explain_call, given), writer))
    explanation = await compute_explanation(explain_call, await read_subject(explain_call, given))
    # weights are many numbers: write them on a thread
    return await json_response(request, INLINE_NUMBERS + 1, lambda: explanation)


async def stream_explanation(explain_call: ExplainCall, given: ExplainInput) -> AsyncGenerator[Any, None]:
    subject = await read_subject(explain_call, given)
    async with aclosing(follow_explanation(explain_call, subject)) as items:
        async for item in items:
            if isinstance(item, ExplanationProgress):
                yield {"progress": item.share}
            else:
                yield await run_off_loop(
                    explain_call.request, INLINE_NUMBERS + 1, partial(dump_chunks, item, *frame_event(item))
                )
