"""Valid bodies of every route, and values of unusual types for every place inside them."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Place = tuple[str | int, ...]  # the keys and indexes that lead to a value inside a body

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 3, (1 << 64) - 1, 1e308),
    *("", "odd", "x" * 5000),
    *([], {}, [[]], [{}], [None], ["odd"], {"type": {}}, {"type": []}, {"odd": [{}]}),
)
LONG = "y" * 20_000 + "\U0001f600"
LONG_VALUES: tuple[Any, ...] = (LONG, {LONG: LONG}, [{LONG: "a"}], {"a": {LONG: 1}}, {"type": LONG})
UNHASHABLE: tuple[Any, ...] = ({}, [[]], {"type": {}})
TEXT = "a film"
SAID = [{"role": "user", "content": TEXT}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
TENSOR = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a [MASK]"]}
WRITING = {"max_new_tokens": 2, "stop": ["x"], "bad_words_ids": [[5]], "logit_bias": {"5": 1}}


@dataclass(frozen=True)
class Route:
    """Paths that take the same bodies, and these bodies. The first path is tested with all values."""

    addresses: Mapping[str, str]  # as in /openapi.json, with the parameters filled in
    bodies: tuple[Mapping[str, Any], ...]
    method: str = "POST"


def route(*addresses: str, bodies: tuple[Mapping[str, Any], ...], method: str = "POST", **values: str) -> Route:
    """`values` fill the names in the paths."""
    asked = {}
    for address in addresses:
        path = address
        for name, value in values.items():
            path = path.replace(f"{{{name}}}", value)
        asked[address] = path
    return Route(asked, bodies, method)


def of_models(path: str, name: str, *bodies: Mapping[str, Any]) -> Route:
    return route(f"/models/{{name}}{path}", path, bodies=bodies, name=name)


def of_named(path: str, name: str, bodies: tuple[Mapping[str, Any], ...]) -> Route:
    """A route whose bodies name a model; it also stands below the path of the model."""
    return route(path, f"/models/{{name}}{path}", bodies=bodies, name=name)


def of_tensors(name: str, *inputs: str, **parameters: Any) -> Route:
    body = {
        "id": "1",
        "inputs": [TENSOR | {"name": each} for each in inputs],
        "outputs": [],
        "parameters": {"binary_data_output": False, **parameters},
    }
    places = ("/v2/models/{name}/infer", "/v2/models/{name}/versions/{version}/infer")
    return route(*places, bodies=(body,), name=name, version="1")


CHAT = {"model": "chat", "messages": SAID, "max_tokens": 2}
OLLAMA = {"model": "chat", "options": {"num_predict": 2}}
CALLED = [
    {"role": "system", "content": [{"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}]},
    {"role": "user", "content": "a", "name": "b"},
    {
        "role": "assistant",
        "content": [{"type": "refusal", "refusal": "a"}],
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}, "index": 0}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "b"},
]
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "a", "signature": "b"},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"a": [1]}},
        ],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "c"}]}],
    },
]
CLAUDE = {"model": "chat", "messages": BLOCKS, "system": [{"type": "text", "text": "a"}]}
CLAUDE_TOOLS = {
    "model": "chat",
    "messages": SAID,
    "tools": [{"type": "custom", "name": "f", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "f"},
    "output_config": {"effort": "high"},
}
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "logprobs": []}]},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'},
    {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "b"}]},
]
RESPONSE = {"model": "chat", "input": "a", "max_output_tokens": 2}
NAMED = {"type": "function", "function": {"name": "f"}}
LIKENESS = {"inputs": {"source_sentence": TEXT, "sentences": [TEXT]}}
EXPLAINING = {"method": "attention", "layers": [0], "heads": [0]}
OF_TASKS = ("/models/{name}", "/models/{name}/pipeline/{task}", "/pipeline/{task}")

ASKED = {"model": "chat", "state": {"a": "b"}}
DECIDED = {"model": "chat", "input": "a", "questions": [{"type": "predicate", "instructions": "a"}]}

BATCH = {"input_file_id": f"file-{0:024x}", "endpoint": "/v1/embeddings", "completion_window": "24h"}
KEPT = {"anchor": "created_at", "seconds": 3600}
ROUTES: tuple[Route, ...] = (
    of_named(
        "/v1/completions",
        "chat",
        bodies=(
            {"model": "chat", "prompt": TEXT, "max_tokens": 2, "stop": ["x"], "logit_bias": {"5": 1}},
            {"model": "chat", "prompt": [[5, 6]], "max_tokens": 2, "stream": True, "stream_options": {}},
            {"model": "chat", "prompt": TEXT, "max_tokens": 2, "structured_outputs": {"choice": ["a", "b"]}},
            {"model": "chat", "prompt": TEXT, "max_tokens": 1, "explain": EXPLAINING},
        ),
    ),
    of_named(
        "/v1/chat/completions",
        "chat",
        bodies=(
            CHAT | {"messages": CALLED},
            CHAT | {"tools": [TOOL], "tool_choice": NAMED},
            CHAT
            | {
                "tools": [TOOL],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
            },
            CHAT
            | {
                "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
                "documents": [{"title": "a", "text": "b"}],
                "chat_template_kwargs": {"enable_thinking": False},
                "metadata": {"a": "b"},
            },
        ),
    ),
    route(
        "/v1/chat/template",
        bodies=({"model": "chat", "messages": SAID, "documents": [{"text": "b"}], "chat_template_kwargs": {"a": 1}},),
    ),
    of_models("/tokenize", "chat", {"messages": CALLED}, {"messages": SAID, "tools": [TOOL]}, {"prompt": TEXT}),
    of_models("/tokenize", "judge", {"inputs": [TEXT], "add_special_tokens": True}),
    route("/detokenize", bodies=({"model": "chat", "tokens": [5, 6]},)),
    of_named(
        "/v1/messages",
        "chat",
        bodies=(CLAUDE | {"max_tokens": 2, "stop_sequences": ["x"]}, CLAUDE_TOOLS | {"max_tokens": 2}),
    ),
    of_named("/v1/messages/count_tokens", "chat", bodies=(CLAUDE, CLAUDE_TOOLS)),
    of_named(
        "/v1/systemone",
        "chat",
        bodies=(
            ASKED | {"questions": {"q": {"type": "noul", "instructions": {"a": 1}, "criteria": {"true": "b"}}}},
            ASKED | {"questions": {"q": {"type": "choice", "criteria": {"a": None, "b": "c"}, "permutations": 2}}},
            ASKED | {"questions": {"q": {"type": "score", "instructions": "a", "criteria": ["low", "high"]}}},
            {"model": "judge", "state": TEXT, "questions": {"q": {"type": "noul", "instructions": "good"}}},
        ),
    ),
    of_named(
        "/v1/decisions",
        "chat",
        bodies=(
            DECIDED | {"questions": [{"type": "predicate", "instructions": TEXT, "name": "a"}], "min_confidence": 0.1},
            DECIDED
            | {"questions": [{"type": "choice", "instructions": TEXT, "choices": [{"value": True}, {"value": "b"}]}]},
            DECIDED
            | {"questions": [{"type": "score", "instructions": TEXT, "levels": [{"label": "a"}, {"label": "b"}]}]},
            DECIDED
            | {
                "input": [
                    {"role": "user", "content": [{"type": "input_json", "data": {"a": 1}}]},
                    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "1", "output": "b"},
                ]
            },
        ),
    ),
    route("/v1/batches", bodies=(BATCH | {"metadata": {"a": "b"}, "output_expires_after": KEPT},)),
    of_named("/v1/moderations", "judge", bodies=({"model": "judge", "input": [TEXT], "thresholds": {}},)),
    route(
        "/api/chat",
        bodies=(
            OLLAMA | {"messages": SAID, "options": {"num_predict": 2, "stop": ["x"]}, "think": False},
            OLLAMA | {"messages": SAID, "tools": [TOOL], "stream": False},
            OLLAMA | {"messages": SAID, "format": SCHEMA, "stream": False},
        ),
    ),
    route("/api/generate", bodies=(OLLAMA | {"prompt": TEXT, "raw": True},)),
    route("/api/embed", bodies=({"model": "embedder", "input": [TEXT], "truncate": True, "dimensions": 2},)),
    route("/api/embeddings", bodies=({"model": "embedder", "prompt": TEXT, "keep_alive": "5m"},)),
    route("/api/show", bodies=({"model": "chat", "verbose": True},)),
    of_named(
        "/v1/responses",
        "chat",
        bodies=(
            RESPONSE | {"input": ITEMS, "store": True},
            RESPONSE | {"tools": [{"type": "function", "name": "f", "parameters": SCHEMA}], "tool_choice": "required"},
            RESPONSE
            | {
                "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
                "include": ["message.output_text.logprobs"],
                "reasoning": {"effort": ""},
            },
        ),
    ),
    of_named(
        "/v1/embeddings",
        "embedder",
        bodies=({"model": "embedder", "input": [TEXT]}, {"model": "embedder", "input": [[5, 6]]}),
    ),
    of_named(
        "/v1/rerank", "ranker", bodies=({"model": "ranker", "query": TEXT, "documents": [{"text": TEXT}], "top_n": 1},)
    ),
    route(
        "/v1/explain",
        bodies=(
            {"model": "judge", "input": TEXT, "target": {"label": 0}, **EXPLAINING},
            {"model": "chat", "input": SAID, "target": {"text": "b"}, "method": "gradient_x_input"},
        ),
    ),
    of_models("/predict", "judge", {"inputs": [[TEXT, TEXT]], "raw_scores": True, "truncate": True}),
    of_models("/embed", "embedder", {"inputs": [TEXT], "normalize": True, "truncation_direction": "Right"}),
    of_models("/embed_all", "embedder", {"inputs": [[5, 6]], "prompt_name": ""}),
    of_models("/embed_sparse", "filler", {"inputs": TEXT}),
    of_models("/rerank", "ranker", {"query": TEXT, "texts": [TEXT], "return_text": True}),
    of_models("/similarity", "embedder", LIKENESS | {"parameters": {"truncate": True}}),
    of_models("/decode", "judge", {"ids": [[5, 6]], "skip_special_tokens": True}),
    route(
        "/models/{name}/generate",
        "/generate",
        "/models/{name}/generate_stream",
        "/generate_stream",
        bodies=({"inputs": TEXT, "parameters": WRITING | {"grammar": {"type": "json", "value": SCHEMA}}},),
        name="chat",
    ),
    route(
        *OF_TASKS,
        bodies=({"inputs": [TEXT], "parameters": WRITING, "options": {"use_cache": True}},),
        name="chat",
        task="text-generation",
    ),
    route(
        *OF_TASKS,
        bodies=({"inputs": TEXT, "parameters": {"generate_parameters": WRITING}},),
        name="writer",
        task="translation",
    ),
    route(
        *OF_TASKS,
        "/",
        bodies=({"inputs": {"text": TEXT, "text_pair": TEXT}, "parameters": {"top_k": 1}, "explain": EXPLAINING},),
        name="judge",
        task="text-classification",
    ),
    route(
        *OF_TASKS,
        bodies=({"inputs": [TEXT], "parameters": {"candidate_labels": ["a", "b"], "multi_label": True}},),
        name="judge",
        task="zero-shot-classification",
    ),
    route(
        *OF_TASKS,
        bodies=({"inputs": [{"text": TEXT, "choices": [TEXT]}], "parameters": {"truncate": True}},),
        name="chooser",
        task="multiple-choice",
    ),
    route(
        *OF_TASKS,
        bodies=({"inputs": [TEXT], "parameters": {"aggregation_strategy": "simple", "ignore_labels": ["O"]}},),
        name="tagger",
        task="token-classification",
    ),
    route(
        *OF_TASKS,
        bodies=({"inputs": [{"question": TEXT, "context": TEXT}], "parameters": {"top_k": 1}},),
        name="reader",
        task="question-answering",
    ),
    route(
        *OF_TASKS,
        bodies=({"inputs": "a [MASK]", "parameters": {"targets": ["film"]}},),
        name="filler",
        task="fill-mask",
    ),
    route(
        *OF_TASKS,
        bodies=({"inputs": [TEXT], "parameters": {"normalize": True}},),
        name="embedder",
        task="feature-extraction",
    ),
    route(*OF_TASKS, bodies=(LIKENESS,), name="embedder", task="sentence-similarity"),
    of_tensors("judge", "text", "text_pair", raw=True, truncate=True),
    of_tensors("embedder", "text", normalize=True),
    of_tensors("tagger", "text", ignore_labels=["O"]),
    of_tensors("reader", "question", "context", top_k=1),
    of_tensors("filler", "text", top_k=1),
    of_tensors("chat", "text", **WRITING),
    route(
        "/v2/models/{name}/generate",
        "/v2/models/{name}/versions/{version}/generate",
        "/v2/models/{name}/generate_stream",
        "/v2/models/{name}/versions/{version}/generate_stream",
        bodies=({"id": "1", "text_input": TEXT, "parameters": {"max_tokens": 2, "stop": ["x"]}},),
        name="chat",
        version="1",
    ),
    route("/admin/models", bodies=({"name": "new", "source": "odd", "merge": False, "stream": False},)),
    route("/admin/models/{name}/reload", bodies=({"source": "odd", "drain_seconds": 0, "stream": False},), name="gone"),
    route("/admin/aliases/{alias}", bodies=({"model": "gone"},), method="PUT", alias="other"),
    route("/v2/repository/index", bodies=({"ready": True},)),
    route(
        "/v2/repository/models/{name}/load",
        bodies=(
            {"parameters": {"source": "odd"}},
            {"parameters": {"config": '{"parameters": {"source": {"string_value": "odd"}}}'}},
        ),
        name="gone",
    ),
    route("/v2/repository/models/{name}/unload", bodies=({"parameters": {"unload_dependents": False}},), name="gone"),
)


def places(value: Any, before: Place = ()) -> Iterator[Place]:
    """Every place inside `value` that has a value, containers too."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*before, key)
        yield from places(each, (*before, key))


def replaced(body: Any, place: Place, value: Any) -> Any:
    """A copy of `body` with `value` at `place`."""
    changed = copy.deepcopy(body)
    inside(changed, place[:-1])[place[-1]] = value
    return changed


def inside(body: Any, place: Place) -> Any:
    """The value at `place`."""
    for key in place:
        body = body[key]
    return body


def is_named(place: Place, said: str) -> bool:
    """Whether an error names the place of the odd value: its field, or the object that has the field."""
    names = [key for key in place if isinstance(key, str)]
    return any(name in said for name in names[-2:])
