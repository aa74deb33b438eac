"""Many states in one call: a body of JSON lines, and a line for each answer.

The first line has the questions, each line after it a state: a text, or an object with `state` and perhaps an `id`.
An answer has the `index` of its state, since answers come as soon as they are known, in any order.
"""

from dataclasses import replace
from functools import partial

from fastapi import Request
from starlette.responses import Response

from ....core.errors import BadRequest, Overloaded, PolyheadError
from ...shared.bulk_calls import Line, LineWork, NoRoom, answer_lines, receive_lines
from ...shared.decision_calls import answer_numbers, answer_questions, check_batch, find_decision_model
from ...shared.dialect import authorized_models, fill_model, quote_json
from ...shared.encoding_calls import run_off_loop
from ...shared.json_body import JsonText, open_json
from ...shared.streaming import LineStream, dumps_sliced, encode_item, frame_line, run_while_connected
from .wire import StateLine, SystemOneBatch, count_options, read_questions, read_state
from .write import write_error, write_systemone


async def answer_batch(request: Request) -> Response:
    """The response for a body of lines. Raises what is wrong with the first line or its questions; errors of states are
    lines of the answer.
    """
    first, lines = await receive_lines(request)
    name = request.path_params.get("name", "")
    text = await open_json(request, first)
    wire = await text.run(lambda: SystemOneBatch.read(fill_model(text.parse("line 1"), name)))
    questions = await run_off_loop(request, count_options(wire), partial(read_questions, wire))
    model = find_decision_model(request, authorized_models(request), wire.model)
    await check_batch(request, wire, model, questions)

    async def answer(part: Request, line: Line) -> bytes:
        named = {}
        try:
            content = await open_json(part, line.content)
            given = await content.run(partial(read_line, content, line.number))
            named = {"id": given.id} if given.id != "" else {}
            decision = replace(questions, state=read_state(given.state))
            found = await answer_questions(part, wire, model, decision)
            written = partial(write_systemone, wire.model or model.name, decision, found)
            return await run_off_loop(
                part, answer_numbers(found), lambda: dumps_sliced({"index": line.index, **written(), **named}) + b"\n"
            )
        except PolyheadError as error:
            item = {"index": line.index, **named, "status": error.status, **write_error(error)}
            refused = encode_item(item, frame_line)
            if isinstance(error, Overloaded):
                raise NoRoom(refused) from None
            return refused

    work = LineWork(answer, lambda line: len(first) + len(questions.questions) * len(line.content))
    return await run_while_connected(request, LineStream.open(answer_lines(request, lines, work)))


def read_line(content: JsonText, number: int) -> StateLine:
    """Raises BadRequest for a line that is no JSON, and for one without a state."""
    match content.parse(f"line {number}"):
        case str(text):
            return StateLine(state=text)
        case dict(value):
            return StateLine.read(value)
        case value:
            message = f'must be a text, or an object as in {{"state": "a text"}}, got {quote_json(value)}'
            raise BadRequest(f"line {number}: {message}", param="state")
