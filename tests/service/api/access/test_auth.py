"""Access rules: every route with every kind of key; rejections have the format of the dialect that owns the path."""

import asyncio
import re
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import httpx
import orjson
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import Route

from polyhead.service.api.access import middleware
from polyhead.service.api.access.access_log import RequestRecord
from polyhead.service.api.access.auth import ACCESS_RULES, Access, find_access_rule, required_access
from polyhead.service.api.access.authorized_models import AuthorizedModels, Resolver
from polyhead.service.api.access.recent_errors import KEPT_ERRORS
from polyhead.service.api.access.request_context import RequestContext
from polyhead.service.api.app import find_dialect
from polyhead.service.config.keys import SCOPES, Key
from polyhead.service.core.errors import Forbidden, PolyheadError, Unavailable
from polyhead.service.core.model import LoadState, Model
from polyhead.service.runtime.model_resolver import ModelResolver
from tests.support import scripted
from tests.support.scripted import Connection, Registry, application, ask, echo, model
from tests.support.steps import count_steps

TALK = [{"role": "user", "content": "The fox"}]
INFER = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["The fox"]}]}
FILL = {"name": "open", "alias": "open", "version": "1", "task": "text-generation"}
FILL |= {"file_id": "f", "batch_id": "b", "response_id": "r"}


def keys_file(folder: Path, **keys: dict[str, Any]) -> str:
    """A keys file in which each key is equal to its name."""
    said = {name: {"hash": "sha256:" + sha256(name.encode()).hexdigest(), **fields} for name, fields in keys.items()}
    (folder / "keys.yaml").write_bytes(orjson.dumps(said))  # JSON is YAML
    return str(folder / "keys.yaml")


@pytest.fixture(scope="module")
def served(tiny_generator: Path, tiny_classifier: Path, tiny_embedder: Path, tiny_ranker: Path) -> list[Model]:
    generator = [model(tiny_generator, name, "generate") for name in ("open", "shut", "shut:adapter")]
    return [
        *generator,
        model(tiny_classifier, "judge", "classify", labels=("bad", "good")),
        model(tiny_embedder, "vectors", "embed"),
        model(tiny_ranker, "ranker", "rank"),
        model(tiny_classifier, "words", "fill"),
    ]


@pytest.fixture
def app(served: list[Model], tmp_path: Path) -> FastAPI:
    """Each key lacks the scope that it is named after; one more key has all scopes, but not all models."""
    keys = {f"no-{scope}": {"scopes": [other for other in SCOPES if other != scope]} for scope in SCOPES}
    keys |= {"all": {"scopes": list(SCOPES)}, "narrow": {"scopes": list(SCOPES), "models": ["open", "nobody"]}}
    settings = {"keys_file": keys_file(tmp_path, **keys), "metrics_access": "key"}
    return application(Registry(served, echo), **settings)


def routes(app: FastAPI) -> Iterator[tuple[str, Route]]:
    """Every route, once for each method."""
    for route in scripted.routes(app):
        yield from ((method, route) for method in sorted(route.methods or ()))


def asked(app: FastAPI, *calls: tuple[str, str, dict[str, str]]) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
            return [await client.request(method, path, headers=headers) for method, path, headers in calls]

    return asyncio.run(run())


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def message(path: str, answer: httpx.Response) -> str:
    """The error message in the format of the dialect that owns the path; the body contains nothing else."""
    said = answer.json()
    match find_dialect(path).name:
        case "Anthropic":
            assert said.keys() == {"type", "error"}
            kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
            assert (said["type"], said["error"].pop("type")) == ("error", kinds[answer.status_code])
            return str(said["error"].pop("message"))
        case "rerank":
            assert said.keys() == {"message", "detail"}
            return str(said["message"])
        case "Ollama":
            assert said.keys() == {"error"}
            return str(said["error"])
        case "OpenAI" | "OpenAI responses" | "OpenAI moderations" | "OpenAI decisions" | "systemone":
            assert said.pop("detail", said["error"]["message"]) == said["error"]["message"]
            assert said["error"].keys() == {"message", "type", "param", "code"}
            codes = {401: "invalid_api_key", 403: "permission_denied", 429: "rate_limit_exceeded"}
            assert said["error"]["code"] == codes[answer.status_code]
            return str(said["error"]["message"])
        case "text-embeddings-inference":
            assert said.keys() == {"error", "error_type"}
        case _:
            assert said.keys() <= {"error", "error_type"}
    return str(said["error"])


# The rule of a path


def rule_of_longest_prefix(path: str, method: str) -> Access | None:
    """The definition: all prefixes of `path` in whole segments, the longest first."""
    prefix = path
    while prefix and (prefix != "/" or path == "/"):
        for line in (f"{method} {prefix}", prefix):
            if line in ACCESS_RULES:
                return ACCESS_RULES[line]
        prefix = prefix.rpartition("/")[0]
    return None


def test_a_path_has_the_rule_of_its_longest_prefix() -> None:
    parts = ["", *(rule.rpartition(" ")[2].strip("/") for rule in ACCESS_RULES), "x", "health", "models"]
    paths = {"*", ""} | {f"/{a}/{b}" for a in parts for b in parts} | {f"/{a}/{b}//{b}" for a in parts for b in parts}
    paths |= (
        {f"/{a}" for a in parts} | {f"/{a}/" for a in parts} | {f"/{a}x" for a in parts} | {f"//{a}" for a in parts}
    )
    for path in paths:
        for method in ("GET", "POST", "PUT"):
            assert find_access_rule(path, method) == rule_of_longest_prefix(path, method), (method, path)


def test_a_path_with_a_line_break_is_refused_in_the_dialect_of_its_route(app: FastAPI) -> None:
    """Before any key is asked for."""
    openai, oip = asked(app, ("GET", "/metrics/errors%0A", {}), ("GET", "/v2/models/a%0Ab", {}))
    assert (openai.status_code, openai.json()["error"]["message"]) == (400, "the path has a line break in it")
    assert (oip.status_code, oip.json()["error"]) == (400, "the path has a line break in it")


def test_a_line_break_at_the_end_of_a_path_changes_no_rule(app: FastAPI) -> None:
    """A route's pattern, which ends in $, matches before such a line break, too."""
    for method, route in routes(app):
        path = re.sub(r"{[^}]*}", "x", route.path)
        assert find_access_rule(f"{path}\n", method) == find_access_rule(path, method)


@pytest.mark.parametrize("start", ["", "/v1/models", "/models", "/v2/repository"])
@pytest.mark.parametrize("part", ["/", "/a", "//a"])
def test_the_cost_of_a_rule_does_not_grow_with_the_path(start: str, part: str) -> None:
    short, long = (count_steps(lambda path=start + part * count: find_access_rule(path)) for count in (4, 4000))  # type: ignore[misc]
    assert long <= short + 20


def test_the_rule_of_a_request_is_found_once(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def count_calls(path: str, method: str) -> Access:
        found.append(path)
        return required_access(path, method)

    monkeypatch.setattr(middleware, "required_access", count_calls)
    monkeypatch.setattr("polyhead.service.api.access.auth.required_access", count_calls)
    for path in ("/livez", "/v1/models", "/nowhere"):
        asked(app, ("GET", path, bearer("all")))
        assert found == [path]
        found.clear()


# Scopes


def test_the_table_has_exactly_the_routes_of_the_application(app: FastAPI) -> None:
    """A new route has to be added to the table here."""
    public = {"/", "/livez", "/startupz", "/readyz", "/health", "/healthz", "/ping", "/docs", "/docs/{name}"}
    public |= {"/v2/health/live", "/v2/health/ready", "/web/{name:path}", "/redoc"}
    found = {(method, route.path): required_access(route.path, method) for method, route in routes(app)}
    assert {path for (method, path), kind in found.items() if kind == "public"} == public
    for (method, path), kind in found.items():
        if kind == "public":
            assert method in ("GET", "HEAD")
        elif path.startswith(("/admin", "/v2/repository")):
            assert kind == "admin"
        elif path in ("/metrics", "/metrics/history"):
            assert kind == "metrics"
        else:
            contents = path.startswith(("/v1/files", "/v1/batches", "/v1/responses"))  # of requests and answers
            assert kind == ("models" if method in ("GET", "HEAD") and not contents else "inference"), (method, path)
    prefixes = {line.rpartition(" ")[2] for line in ACCESS_RULES}
    used = {prefix for prefix in prefixes for _, path in found if path == prefix or path.startswith(f"{prefix}/")}
    assert used == prefixes, "a line of the table has no route"


def test_every_route_with_no_key_a_wrong_one_one_of_other_scopes_and_its_own(app: FastAPI) -> None:
    probed = 0
    for method, route in routes(app):
        path, kind = route.path.replace(":path", "").format(**FILL), required_access(route.path, method)
        keys = ({}, bearer("wrong"), bearer(f"no-{kind}"), bearer("all"))
        answers = asked(app, *((method, path, headers) for headers in keys))
        statuses = [answer.status_code for answer in answers]
        if kind == "public":
            assert not {401, 403} & set(statuses), (method, path)
            continue
        assert statuses[:3] == [401, 401, 403], (method, path)
        assert statuses[3] not in (401, 403), (method, path)
        probed += 1
        if method == "HEAD":
            continue
        assert "needs a key" in message(path, answers[0])
        assert "not this server's" in message(path, answers[1])
        assert f"the key 'no-{kind}' may not" in message(path, answers[2])
        assert f"that needs the scope {kind}, it has" in message(path, answers[2])
        assert [answer.headers.get("www-authenticate") for answer in answers[:3]] == ["Bearer", "Bearer", None]
    assert probed > 50


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_anthropics_header_opens_its_own_paths_alone(app: FastAPI, path: str) -> None:
    answers = asked(
        app,
        ("POST", path, {"x-api-key": "all"}),
        ("POST", path, {"x-api-key": "no-inference"}),
        ("POST", path, {"x-api-key": "wrong"}),
        ("POST", "/v1/completions", {"x-api-key": "all"}),
        ("GET", "/v1/models", {"x-api-key": "all"}),
        ("GET", "/v1/models/open", {"x-api-key": "wrong"}),
    )
    assert [answer.status_code for answer in answers] == [400, 403, 401, 401, 200, 401]


@pytest.mark.parametrize("key", ["", "wrong", "no-inference"])
def test_a_request_without_permission_is_rejected_before_the_body_is_read(app: FastAPI, key: str) -> None:
    async def run() -> Connection:
        connection = Connection("/v1/completions", b"{", key=key)
        await connection.run(app)
        assert connection.incoming.qsize() == 1, "the body was read"
        return connection

    assert asyncio.run(run()).sent[0]["status"] in (401, 403)


def test_metrics_need_no_key_unless_it_is_set(served: list[Model], tmp_path: Path) -> None:
    path = keys_file(tmp_path, a={}, m={"scopes": ["metrics"]})
    for settings, statuses in (({}, [200, 200, 200]), ({"metrics_access": "key"}, [401, 403, 200])):
        app = application(Registry(served, echo), keys_file=path, **settings)
        calls = [("GET", "/metrics", headers) for headers in ({}, bearer("a"), bearer("m"))]
        assert [answer.status_code for answer in asked(app, *calls)] == statuses


def test_admin_routes_exist_if_a_key_of_the_file_has_the_scope(served: list[Model], tmp_path: Path) -> None:
    for scopes, status in ((["inference", "models"], 404), (["models", "inference", "admin"], 500)):
        app = application(Registry(served, echo), keys_file=keys_file(tmp_path, a={"scopes": scopes}))
        [answer, described] = asked(app, ("GET", "/admin/models", bearer("a")), ("GET", "/v2", bearer("a")))
        assert answer.status_code == status  # this registry supports no changes
        assert ("model_repository" in described.json()["extensions"]) is (status == 500)


# Models

TEXT = {"inputs": "The fox"}
PASSAGES = {"query": "a", "texts": ["b"]}
SENTENCES = {"inputs": {"source_sentence": "a", "sentences": ["b"]}}
TALKED: dict[str, Any] = {"messages": TALK, "max_tokens": 2}
ASKED = {"state": "The fox", "questions": {"q": {"type": "noul", "instructions": "a"}}}
DECIDED = {"input": "The fox", "questions": [{"type": "predicate", "instructions": "a"}]}
BODIES: dict[str, Any] = {
    "/v1/completions": {"model": "shut", "prompt": "The fox"},
    "/models/shut/v1/completions": {"prompt": "The fox"},
    "/models/shut/v1/chat/completions": TALKED,
    "/models/shut/v1/responses": {"input": "The fox"},
    "/models/shut/v1/messages": TALKED,
    "/models/shut/v1/messages/count_tokens": {"messages": TALK},
    "/models/vectors/v1/embeddings": {"input": "The fox"},
    "/models/ranker/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v1/chat/completions": {"model": "shut", **TALKED},
    "/v1/chat/template": {"model": "shut", **TALKED},
    "/v1/responses": {"model": "shut", "input": "The fox"},
    "/v1/messages": {"model": "shut", **TALKED},
    "/v1/messages/count_tokens": {"model": "shut", "messages": TALK},
    "/v1/embeddings": {"model": "vectors", "input": "The fox"},
    "/v1/rerank": {"model": "ranker", "query": "a", "documents": ["b"]},
    "/v1/moderations": {"model": "judge", "input": "The fox"},
    "/models/judge/v1/moderations": {"input": "The fox"},
    "/v1/systemone": {"model": "shut", **ASKED},
    "/models/shut/v1/systemone": ASKED,
    "/v1/decisions": {"model": "shut", **DECIDED},
    "/models/shut/v1/decisions": DECIDED,
    "/v1/explain": {"model": "shut", "input": "The fox"},
    "/api/chat": {"model": "shut", "messages": TALK},
    "/api/generate": {"model": "shut", "prompt": "The fox"},
    "/api/embed": {"model": "vectors", "input": "The fox"},
    "/api/embeddings": {"model": "vectors", "prompt": "The fox"},
    "/api/show": {"model": "shut"},
    "/detokenize": {"model": "shut", "tokens": [5]},
    "/tokenize": {"model": "shut", "prompt": "The fox"},
    "/models/judge/tokenize": TEXT,
    "/models/judge/decode": {"ids": [5]},
    "/models/judge/predict": TEXT,
    "/models/vectors/embed": TEXT,
    "/models/vectors/embed_all": TEXT,
    "/models/words/embed_sparse": TEXT,
    "/models/ranker/rerank": PASSAGES,
    "/models/vectors/similarity": SENTENCES,
    "/generate": {"inputs": "The fox", "parameters": {"adapter_id": "shut:adapter"}},
    "/models/shut/generate": TEXT,
    "/generate_stream": {"inputs": "The fox", "parameters": {"adapter_id": "shut:adapter"}},
    "/models/shut/generate_stream": TEXT,
    "/v2/models/judge/infer": INFER,
    "/v2/models/judge/versions/1/infer": INFER,
    "/v2/models/shut/generate": {"text_input": "The fox"},
    "/v2/models/shut/versions/1/generate": {"text_input": "The fox"},
    "/v2/models/shut/generate_stream": {"text_input": "The fox"},
    "/v2/models/shut/versions/1/generate_stream": {"text_input": "The fox"},
    "/models/judge/pipeline/text-classification": TEXT,
    "/models/judge": TEXT,
    "/models/open": {"inputs": "The fox", "parameters": {"adapter_id": "shut:adapter"}},
}
NAMELESS: dict[str, tuple[str, Any]] = {  # without a model name: the only model answers
    "/": ("shut", TEXT),
    "/decode": ("shut", {"ids": [5]}),
    "/generate": ("shut", TEXT),
    "/generate_stream": ("shut", TEXT),
    "/pipeline/text-generation": ("shut", TEXT),
    "/predict": ("judge", TEXT),
    "/embed": ("vectors", TEXT),
    "/embed_all": ("vectors", TEXT),
    "/embed_sparse": ("words", TEXT),
    "/rerank": ("ranker", PASSAGES),
    "/similarity": ("vectors", SENTENCES),
}
READ_ONLY = (
    "/v1/models/shut",
    "/models/shut/v1/models",
    "/models/judge/info",
    "/v2/models/shut",
    "/v2/models/shut/ready",
)
READ_ONLY += ("/v2/models/shut/versions/1", "/v2/models/shut/versions/1/ready")
READ_ONLY += ("/models/shut/v1/decisions/calibration",)


def posted(app: FastAPI, key: str, bodies: dict[str, Any]) -> dict[str, httpx.Response]:
    async def run() -> dict[str, httpx.Response]:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver", headers=bearer(key)) as client:
            return {path: await client.post(path, json=body) for path, body in bodies.items()}

    return asyncio.run(run())


def status_of(path: str) -> int:
    """The status of the answer. This registry's model returns numbers in place of words and cannot be explained."""
    if path == "/v1/explain":
        return 409
    return 500 if path.endswith("embed_sparse") else 200


def test_no_dialect_answers_for_a_model_that_the_key_may_not_use(app: FastAPI) -> None:
    for path, answer in posted(app, "narrow", BODIES).items():
        assert answer.status_code == 403, (path, answer.text)
        assert "the key 'narrow' may not use the model" in message(path, answer)
        assert "it may use open, nobody" in message(path, answer)
    for path, answer in posted(app, "all", BODIES).items():
        assert answer.status_code == status_of(path), (path, answer.text)


def test_the_only_model_needs_permission_too(served: list[Model], tmp_path: Path) -> None:
    keys = keys_file(tmp_path, narrow={"models": ["open"]}, all={"models": ["*"]})
    for only in served:
        app = application(Registry([only], echo), keys_file=keys)
        bodies = {path: body for path, (name, body) in NAMELESS.items() if name == only.name}
        assert all(answer.status_code == 403 for answer in posted(app, "narrow", bodies).values()) or not bodies
        for path, answer in posted(app, "all", bodies).items():
            assert answer.status_code == status_of(path), (path, answer.text)
        shut, seen = asked(app, ("GET", "/info", bearer("narrow")), ("GET", "/info", bearer("all")))
        assert (shut.status_code, seen.status_code) == (200 if only.name == "open" else 403, 200)


def test_every_route_that_asks_a_model_is_tried_above(app: FastAPI) -> None:
    tried = {route.path for path in (*BODIES, *NAMELESS) for route in matching(app, "POST", path)}
    every = {r.path for m, r in routes(app) if m == "POST" and required_access(r.path, m) == "inference"}
    every -= {route for route in every if route.startswith(("/v1/files", "/v1/batches"))}  # these ask for files
    assert every == tried


def matching(app: FastAPI, method: str, path: str) -> Iterator[Route]:
    """The first route that matches, as in the router."""
    scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
    for verb, route in routes(app):
        if verb == method and isinstance(route, APIRoute) and route.matches(scope)[0].value == 2:
            yield route
            return


def test_a_key_sees_its_own_models(app: FastAPI) -> None:
    one, every = asked(app, ("GET", "/v1/models", bearer("narrow")), ("GET", "/v1/models", bearer("all")))
    assert [found["id"] for found in one.json()["data"]] == ["open"]
    assert len(every.json()["data"]) == 7
    for path in READ_ONLY:
        shut, seen = asked(app, ("GET", path, bearer("narrow")), ("GET", path, bearer("all")))
        assert (shut.status_code, seen.status_code) == (403, 200), path
        assert "may not use the model" in message(path, shut)


def test_a_key_sees_the_errors_of_its_own_models(app: FastAPI) -> None:
    for name in ("open", "shut"):
        posted(app, "all", {"/v1/chat/completions": {"model": name, **TALKED, "stream_options": {}}})
    some, every = (asked(app, ("GET", "/metrics/errors", bearer(key)))[0].json()["errors"] for key in ("narrow", "all"))
    assert [each["model"] for each in some] == ["open"]
    assert [each["model"] for each in every] == ["shut", "open"]


def test_requests_of_strangers_and_of_another_key_push_out_no_error_of_the_server(app: FastAPI) -> None:
    errors = app.state.server.recent_errors
    context = RequestContext("it-failed", outcome="failed", reason="step_failed", model="open")
    errors.add(RequestRecord(context, "POST", "/v1/completions", "/v1/completions", 500, 0.0))
    posted(app, "all", {"/v1/chat/completions": {"model": "open", **TALKED, "top_p": 7}})
    foreign = {"Origin": "https://elsewhere.example"}
    strange = [("GET", "/v1/models", {}), ("GET", "/admin/x", bearer("wrong")), ("GET", "/v1/models", foreign)]
    asked(app, *strange * KEPT_ERRORS, *[("GET", "/nowhere.php", bearer("all"))] * KEPT_ERRORS)
    [answer] = asked(app, ("GET", "/metrics/errors", bearer("all")))
    assert [each["code"] for each in answer.json()["errors"]] == ["invalid_request", "step_failed"]
    for _ in range(KEPT_ERRORS + 1):
        posted(app, "all", {"/v1/chat/completions": {"model": "open", **TALKED, "top_p": 7}})
    [answer] = asked(app, ("GET", "/metrics/errors", bearer("all")))
    assert [each["code"] for each in answer.json()["errors"]] == ["invalid_request"] * KEPT_ERRORS + ["step_failed"]


def test_a_key_of_some_models_sees_only_its_own_errors_without_a_model(app: FastAPI) -> None:
    """The ids of their requests are those that clients chose."""
    for key in ("all", "narrow"):
        posted(app, key, {"/v1/chat/completions": {"model": "shut", "wrong": 1}})
    some, every = (asked(app, ("GET", "/metrics/errors", bearer(key)))[0].json()["errors"] for key in ("narrow", "all"))
    assert (len(some), len(every)) == (1, 2)
    assert some[0]["request_id"] == every[0]["request_id"]


def test_unknown_models_are_reported_only_for_names_that_the_key_may_use(app: FastAPI) -> None:
    calls = [("GET", f"/v1/models/{name}", bearer("narrow")) for name in ("nobody", "somebody", "open")]
    assert [answer.status_code for answer in asked(app, *calls)] == [404, 403, 200]


def test_an_error_names_only_models_that_the_key_may_use(served: list[Model], tmp_path: Path) -> None:
    """On every route, with the name of every model, with an unknown name, and without a name."""
    keys = keys_file(tmp_path, some={"models": ["open", "words", "nobody*"]}, all={})
    app = application(Registry(served, echo), keys_file=keys)
    others = [model.name for model in served if model.name not in ("open", "words")]

    def said(key: str) -> list[tuple[str, str]]:
        answers: list[tuple[str, httpx.Response]] = []
        for name in ("words", "open", "nobody-here"):
            own = {path: body for path, body in BODIES.items() if "adapter_id" not in str(body)}
            paths = {path: re.sub("/models/[a-z]+", f"/models/{name}", path) for path in own}
            answers += posted(app, key, {paths[path]: body | {"model": name} for path, body in own.items()}).items()
        answers += posted(app, key, {path: body for path, (_, body) in NAMELESS.items()}).items()
        answers += [("/info", answer) for answer in asked(app, ("GET", "/info", bearer(key)))]
        return [(path, answer.text) for path, answer in answers if answer.is_error]

    some, every = said("some"), said("all")
    for wanted in ("models that can: open", "there are: open, words", "/models/NAME/...: open"):
        assert any(wanted in text for _, text in some), wanted
    for path, text in some:
        assert not [name for name in others if re.search(rf"\b{name}\b", text)], (path, text)
    assert any("there are: open, shut, shut:adapter" in text for _, text in every)


def test_while_models_load_their_names_are_hidden_from_other_keys(served: list[Model]) -> None:
    def unavailable(name: str) -> PolyheadError:
        return Unavailable(f"{name} is not ready yet", retry_after=7)

    offer = ModelResolver({"open": LoadState("ready", 1.0), "shut": LoadState("loading")}, served[:1], unavailable)
    with pytest.raises(Unavailable, match="not all models are loaded yet") as caught:
        AuthorizedModels(cast(Resolver, offer), Key("some", models=("open",))).resolve_only(["generate"])
    assert caught.value.retry_after == 7
    with pytest.raises(Unavailable, match="shut is not ready yet"):
        AuthorizedModels(cast(Resolver, offer), Key("all")).resolve_only(["generate"])


@pytest.mark.parametrize("name", ["", "default", "dummy", "tei", "tgi"])
def test_a_placeholder_opens_no_model_that_the_key_may_not_use(served: list[Model], name: str) -> None:
    model = served[0]

    def permitted(offer: ModelResolver, *names: str) -> AuthorizedModels:
        return AuthorizedModels(cast(Resolver, offer), Key("some", models=names))

    def unavailable(name: str) -> PolyheadError:
        return Unavailable(f"{name} is not ready yet", retry_after=7)

    ready = ModelResolver({model.name: LoadState("ready", 1.0)}, [model], unavailable)
    loading = ModelResolver({model.name: LoadState("loading")}, [], unavailable)
    tasks = [model.task]
    for offer in (ready, loading):
        with pytest.raises(Forbidden) as caught:
            permitted(offer, "d*", "t*", "?").resolve(name, tasks)
        assert model.name not in caught.value.message
    assert permitted(ready, model.name).resolve(name, tasks) is model
    with pytest.raises(Unavailable):
        permitted(loading, model.name).resolve(name, tasks)
    alias = ModelResolver({model.name: LoadState("ready", 1.0)}, [model], unavailable, {name: model.name})
    if name:
        assert permitted(alias, name).resolve(name, tasks) is model


def test_an_alias_that_the_key_may_use_leads_to_its_model(served: list[Model], tmp_path: Path) -> None:
    registry = Registry(served, echo)
    registry.served["prod"] = registry.served["shut"]  # as the registry resolves an alias
    keys = keys_file(tmp_path, alias={"models": ["prod"]}, own={"models": ["shut"]}, other={"models": ["open"]})
    app = application(registry, keys_file=keys)
    calls = [("GET", "/v1/models/prod", bearer(key)) for key in ("alias", "own", "other")]
    assert [answer.status_code for answer in asked(app, *calls)] == [200, 200, 403]
    assert asked(app, ("GET", "/v1/models/shut", bearer("alias")))[0].status_code == 403


# Limits


def test_a_key_over_its_limit_gets_retry_after(served: list[Model], tmp_path: Path) -> None:
    keys = keys_file(tmp_path, slow={"requests_per_minute": 1}, thrifty={"tokens_per_minute": 3}, free={})
    app = application(Registry(served, echo), keys_file=keys)
    one = {"/v1/completions": {"model": "open", "prompt": list(range(5, 35)), "max_tokens": 1}}
    for key, what in (("slow", "1 requests a minute"), ("thrifty", "3 tokens a minute")):
        first = posted(app, key, one)["/v1/completions"]
        assert first.status_code == 200
        left = {name: value for name, value in first.headers.items() if name.startswith("x-ratelimit-remaining")}
        assert left == {f"x-ratelimit-remaining-{what.split()[1]}": "0"}
        for path, answer in posted(app, key, BODIES).items():
            assert answer.status_code == 429, path
            assert f"the key {key!r} may spend {what}, and has none left" in message(path, answer)
            assert 1 <= int(answer.headers["retry-after"]) <= 600
            prefix = "anthropic-ratelimit" if "/v1/messages" in path else "x-ratelimit"
            assert any(name.startswith(prefix) for name in answer.headers)
        [listed] = asked(app, ("GET", "/v1/models", bearer(key)))
        assert listed.status_code == 200, "routes without a key are not limited"
    free = posted(app, "free", one)["/v1/completions"]
    assert free.status_code == 200
    assert not [name for name in free.headers if "ratelimit" in name]
    page = app.state.server.metrics.render("")[0].decode()
    assert f'polyhead_rejections_total{{code="rate_limit_exceeded"}} {2.0 * len(BODIES)}' in page


def test_a_rejected_request_takes_no_permit_and_no_quota(served: list[Model], tmp_path: Path) -> None:
    keys = keys_file(tmp_path, slow={"requests_per_minute": 2}, metrics={"scopes": ["metrics"]})
    app = application(Registry(served, echo), keys_file=keys)
    body = {"/v1/completions": {"model": "open", "prompt": "a"}}
    assert [
        posted(app, key, body)["/v1/completions"].status_code for key in ("metrics", "x", "slow", "slow", "slow")
    ] == [
        403,
        401,
        200,
        200,
        429,
    ]
    assert app.state.server.admission.in_flight == 0
    assert set(app.state.server.quotas._quotas) == {"slow"}


def test_without_keys_every_route_is_open(served: list[Model]) -> None:
    app = application(Registry(served, echo))
    assert ask(app, ("/v1/completions", {"model": "shut", "prompt": "a"}))[0].status_code == 200


def test_beside_other_keys_a_high_priority_must_be_permitted(served: list[Model], tmp_path: Path) -> None:
    body = {"model": "open", "prompt": "a", "max_tokens": 1}
    alone = application(Registry(served, echo), keys_file=keys_file(tmp_path, a={}))
    assert asked_priorities(alone, "a", body, (100,)) == [200]
    several = {"a": {}, "b": {"max_priority": 10}}
    app = application(Registry(served, echo), keys_file=keys_file(tmp_path, **several))
    assert asked_priorities(app, "a", body, (-100, 0, 1)) == [200, 200, 403]
    assert asked_priorities(app, "b", body, (10, 11)) == [200, 403]


def asked_priorities(app: FastAPI, key: str, body: dict[str, Any], priorities: Sequence[int]) -> list[int]:
    bodies = [body | {"priority": priority} for priority in priorities]
    answers = [posted(app, key, {"/v1/completions": each})["/v1/completions"] for each in bodies]
    for answer in answers:
        assert answer.status_code == 200 or "priority: the key" in answer.text
    return [answer.status_code for answer in answers]
