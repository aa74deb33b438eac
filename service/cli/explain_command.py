"""`polyhead explain`: explains an answer, in this process or by a server that runs already.

In this process it sends a request to the application over ASGI, without a socket, so its result and its checks are
those of POST /v1/explain.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from polyhead.models.core.errors import ModelError

from ..config.settings import read_settings
from ..core.names import is_name
from ..runtime import quickstart
from . import explain_figures as figures
from . import plotting as canvas
from .checkpoint_source import REFERENCE_SETTINGS
from .client import error_message, expected_form
from .explain_figures import JsonObject
from .local_server import OPEN_SETTINGS, serve_locally, silence_logs
from .remote_server import connect_server

LOCAL_SETTINGS = {  # limits that protect other clients are lifted
    **REFERENCE_SETTINGS,
    **OPEN_SETTINGS,
    "explain": True,
    "explain_gflop": 1 << 40,
    "explain_idle_seconds": 0,
    "explain_mib": 1 << 10,
}
# The field of the target, by task.
TARGET_FIELDS = {"classify": "label", "tag": "label", "fill": "word", "embed": "text", "generate": "text"}
NO_OUTPUT = (
    "the model writes nothing after this text, so there is nothing to explain; give a text that it can continue, as in "
    '"The capital of Japan is"'
)
TOP_TOKENS = 5  # tokens shown for each row
RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class ExplainArguments:
    """The arguments of `polyhead explain`.  `options` are the fields of the request that were given.  `url` "": the
    model is loaded in this process; else `model` is what the server there calls it.
    """

    model: str
    texts: tuple[str, ...]
    options: Mapping[str, Any]
    plot: Path | None
    as_json: bool
    url: str
    key: str


@dataclass(frozen=True)
class AskedModel:
    """A served model, as far as a request needs to know it."""

    name: str
    task: str


def explain_model(arguments: ExplainArguments, print_text: Callable[[str], object]) -> None:
    """Print the explanation, and write the figure.  Raises ModelError if it cannot be computed, SettingsError if
    settings are wrong.
    """
    if arguments.plot:
        canvas.check_plot_path(arguments.plot)
    with silence_logs():
        answer = asyncio.run(post_explain(arguments))
    # The answer of this process has the form that is read here: an error there is a fault of the program.
    with expected_form(arguments.url) if arguments.url else nullcontext():
        print_text(json.dumps(answer, ensure_ascii=False) if arguments.as_json else format_answer(answer))
        if arguments.plot:
            canvas.save_figure(figures.draw_answer(answer), arguments.plot)


async def post_explain(arguments: ExplainArguments) -> dict[str, Any]:
    """Send the request once the model is loaded, and return the answer.  Raises ModelError."""
    async with connect(arguments) as (model, client):
        answer = await client.post("/v1/explain", json=build_body(arguments, model))
    if answer.is_success:
        with expected_form(client.base_url):
            return dict(answer.json())
    raise ModelError(error_message(answer))


@asynccontextmanager
async def connect(arguments: ExplainArguments) -> AsyncIterator[tuple[AskedModel, httpx.AsyncClient]]:
    """The model, and a client of the server that has it."""
    if arguments.url:
        async with connect_server(arguments.url, arguments.key) as client:
            yield await find_model(client, arguments.model), client
        return
    name = figures.short_name(arguments.model)
    name = name if is_name(name) else "model"
    source = quickstart.resolve_source(arguments.model, read_settings({}).model_dir)
    async with serve_locally(read_settings({**LOCAL_SETTINGS, "models": {name: source}})) as ([model, *_], client):
        yield AskedModel(model.name, model.task), client


async def find_model(client: httpx.AsyncClient, name: str) -> AskedModel:
    """The model that the server calls `name`.  Raises ModelError."""
    listed = await client.get("/v1/models")
    if listed.is_error:
        raise ModelError(error_message(listed))
    try:
        served = [AskedModel(str(each["id"]), str(each["task"])) for each in listed.json()["data"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ModelError(f"{client.base_url} is no Polyhead server: its list of models has another form") from None
    if found := next((each for each in served if each.name == name), None):
        return found
    names = ", ".join(each.name for each in served) or "none is ready yet"
    raise ModelError(f"{client.base_url} serves no model that is called {name!r}; it serves: {names}")


def build_body(arguments: ExplainArguments, model: AskedModel) -> dict[str, Any]:
    """Build the request's body.  The second text of an embedder is the target to compare with."""
    first, *second = arguments.texts
    body: dict[str, Any] = {"model": model.name, "input": first, **arguments.options}
    if second and model.task == "embed":
        body["target"] = {"text": second[0]}
    elif second:
        body["input"] = [first, *second]
    if target := arguments.options.get("target"):
        body["target"] = parse_target(target, model.task)
    for name in ("layers", "heads"):
        if name in body:
            body[name] = parse_numbers(f"--{name}", body[name])
    return body if arguments.as_json else body | {"encoding": "base64"}


def parse_target(value: str, task: str) -> Any:
    """Read --target: a JSON object, or the one word that the task needs."""
    if value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except ValueError as error:
            raise ModelError(f"--target: is not JSON: {error}") from None
    if task not in TARGET_FIELDS:
        raise ModelError(f'--target: for the task {task} an object is expected, as in {{"start": 0, "end": 4}}')
    return {TARGET_FIELDS[task]: value}


def parse_numbers(option: str, value: str) -> list[int]:
    """Read a list of numbers and ranges, as in 0,5 or 0-3."""
    chosen = list[int]()
    for part in value.split(","):
        if not (match := RANGE.fullmatch(part.strip())):
            raise ModelError(f"{option}: numbers are expected, as in 0,5 or 0-3, not {value!r}")
        first = int(match[1])
        chosen += range(first, int(match[2] or first) + 1)
    return chosen


# Output


def format_answer(answer: JsonObject) -> str:
    """Format the answer as text: a line per token, or the strongest few tokens per row."""
    head = [f"wrote {answer['output']!r}"] if answer["output"] else []
    return "\n".join([*head, *format_lines(answer)]) or NO_OUTPUT


def format_lines(answer: JsonObject) -> list[str]:
    every, tokens = answer["attributions"], [escape_text(text) for text in figures.token_texts(answer)]
    if len(every) == 1 and every[0]["target"]["kind"] != "token":
        return [
            escape_text(figures.describe_target_score(answer, every[0]["target"])),
            *token_score_lines(tokens, every[0]),
            *figures.describe_completeness(every),
        ]
    if every:
        names = [escape_text(figures.target_label(answer, each["target"])) for each in every]
        rows = [
            strongest_tokens(tokens, *named) for named in zip(names, (each["tokens"] for each in every), strict=True)
        ]
        return [*rows, *figures.describe_completeness(every)]
    return [line for entry in answer["attention"] for line in attention_lines(tokens, entry)]


def token_score_lines(tokens: Sequence[str], each: JsonObject) -> list[str]:
    width = max(map(len, tokens))
    return [f"{token:<{width}}  {score:+.4f}" for token, score in zip(tokens, each["tokens"], strict=True)]


def attention_lines(tokens: Sequence[str], entry: JsonObject) -> list[str]:
    """Format the columns with the largest weights of each row.  A row of cross-attention is named by the token it
    predicts.
    """
    mean, columns = figures.attention_weights(entry).mean((0, 1)), [tokens[index] for index in entry["columns"]]
    names = [*tokens[1:], figures.END_LABEL] if entry["kind"] == "cross" else tokens
    rows = [strongest_tokens(columns, names[index], row) for index, row in zip(entry["rows"], mean, strict=True)]
    return [f"{entry['kind']} attention, {figures.describe_heads(entry)}", *rows]


def strongest_tokens(tokens: Sequence[str], name: str, values: Sequence[float]) -> str:
    array = np.asarray(values)
    indexes = [index for index in np.argsort(-np.abs(array), kind="stable")[:TOP_TOKENS].tolist() if array[index]]
    return f"{name}: " + ", ".join(f"{tokens[index]} {array[index]:+.3f}" for index in indexes)


def escape_text(text: str) -> str:
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
