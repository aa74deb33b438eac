"""Keys on a real server: what the official clients raise, what is counted, and a keys file that changes meanwhile."""

import logging
import time
from collections.abc import Iterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import orjson
import pytest

from polyhead.service.config.settings import Settings, SettingsError
from polyhead.service.server import process
from polyhead.service.server.assembly import assemble
from polyhead.service.server.process import bind_socket
from tests.support.processes import Process
from tests.support.scripted import Registry, application, echo

TALK: Any = {"model": "chat", "messages": [{"role": "user", "content": "What is Paris?"}]}
COUNTED = {"model": "chat", "prompt": [40] * 30, "max_tokens": 50, "ignore_eos": True}  # 80 tokens


class Served(Process):
    """A server whose keys are equal to their names."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.file = folder / "keys.yaml"
        self.write(KEYS)
        super().__init__(*arguments, "--keys-file", str(self.file))

    def write(self, keys: dict[str, dict[str, Any]]) -> None:
        said = {name: {"hash": "sha256:" + sha256(name.encode()).hexdigest(), **each} for name, each in keys.items()}
        new = self.file.with_suffix(".new")
        new.write_bytes(orjson.dumps(said))
        new.replace(self.file)

    def ask(self, key: str, **body: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(f"{self.url}/v1/completions", json=COUNTED | body, headers=headers, timeout=60, verify=False)


KEYS: dict[str, dict[str, Any]] = {
    "full": {},
    "looker": {"scopes": ["models"]},
    "narrow": {"models": ["vectors"]},
    "slow": {"requests_per_minute": 1},
    "thrifty": {"tokens_per_minute": 100},
    "boss": {"scopes": ["admin"]},
}


@pytest.fixture(scope="module")
def server(long_generator: Path, tiny_embedder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    process = Served(tmp_path_factory.mktemp("keys"), f"chat={long_generator}", f"vectors={tiny_embedder}")
    process.ready()
    yield process
    assert process.stop() == 0, process.log


def claude(server: Served, key: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


def gpt(server: Served, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def test_errors_have_the_openai_client_s_exception_classes(server: Served) -> None:
    assert gpt(server, "full").chat.completions.create(**TALK, max_tokens=1).choices
    with pytest.raises(openai.AuthenticationError):
        gpt(server, "wrong").chat.completions.create(**TALK)
    with pytest.raises(openai.PermissionDeniedError, match="'looker' may not use models"):
        gpt(server, "looker").chat.completions.create(**TALK)
    with pytest.raises(openai.PermissionDeniedError, match="'narrow' may not use the model chat") as caught:
        gpt(server, "narrow").chat.completions.create(**TALK)
    assert (caught.value.code, caught.value.param) == ("permission_denied", "model")
    with pytest.raises(openai.PermissionDeniedError):
        gpt(server, "narrow").responses.create(model="chat", input="x")
    assert [each.id for each in gpt(server, "looker").models.list()] == ["chat", "vectors"]
    assert [each.id for each in gpt(server, "narrow").models.list()] == ["vectors"]


def test_errors_have_the_anthropic_client_s_exception_classes(server: Served) -> None:
    assert claude(server, "full").messages.create(**TALK, max_tokens=1).content
    with pytest.raises(anthropic.AuthenticationError) as unknown:
        claude(server, "wrong").messages.create(**TALK, max_tokens=1)
    with pytest.raises(anthropic.PermissionDeniedError, match="'looker' may not use models") as scoped:
        claude(server, "looker").messages.create(**TALK, max_tokens=1)
    with pytest.raises(anthropic.PermissionDeniedError, match="'narrow' may not use the model chat") as shut:
        claude(server, "narrow").messages.count_tokens(**TALK)
    assert [each.value.type for each in (unknown, scoped, shut)] == [
        "authentication_error",
        "permission_error",
        "permission_error",
    ]


def test_both_clients_get_the_rate_limit_error(server: Served) -> None:
    first = claude(server, "slow").messages.with_raw_response.create(**TALK, max_tokens=1)
    assert first.headers["anthropic-ratelimit-requests-limit"] == "1"
    assert first.headers["anthropic-ratelimit-requests-remaining"] == "0"
    with pytest.raises(anthropic.RateLimitError, match="may spend 1 requests a minute") as theirs:
        claude(server, "slow").messages.create(**TALK, max_tokens=1)
    with pytest.raises(openai.RateLimitError, match="may spend 1 requests a minute") as caught:
        gpt(server, "slow").chat.completions.create(**TALK)
    assert (theirs.value.type, caught.value.code) == ("rate_limit_error", "rate_limit_exceeded")
    for error in (theirs.value, caught.value):
        assert 1 <= int(error.response.headers["retry-after"]) <= 60


def test_tokens_of_prompts_and_answers_count_towards_the_quota(server: Served) -> None:
    """80 tokens of 100, twice: the second request is admitted by what is left, and leaves a debt."""
    began = time.monotonic()
    assert server.ask("thrifty").is_success
    assert server.ask("thrifty", stream=True).is_success
    refused = server.ask("thrifty")
    assert refused.status_code == 429
    assert refused.headers["x-ratelimit-limit-tokens"] == "100"
    assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
    earned = (time.monotonic() - began) * 100 / 60
    assert 61 - earned - 2 <= int(refused.headers["retry-after"]) * 100 / 60 <= 61 + 2


def test_administration_is_for_its_key(server: Served) -> None:
    answers = {key: server_get(server, "/admin/models", key) for key in ("boss", "full", "wrong")}
    assert {key: answer.status_code for key, answer in answers.items()} == {"boss": 200, "full": 403, "wrong": 401}


def server_get(server: Served, path: str, key: str) -> httpx.Response:
    return httpx.get(server.url + path, headers={"Authorization": f"Bearer {key}"}, timeout=60, verify=False)


def plain(line: dict[str, Any]) -> set[Any]:
    return {value for value in line.values() if isinstance(value, str | int)}


def test_the_log_has_the_names_of_keys_and_no_key(server: Served) -> None:
    secret = "never-to-be-seen-in-a-log-0123456789"
    server.write(KEYS | {"full": {"hash": "sha256:" + sha256(secret.encode()).hexdigest()}})
    server.until(lambda: server_get(server, "/v1/models", secret).is_success)
    assert server.ask("looker").status_code == 403
    for key, status in (("full", 200), ("looker", 403)):
        wanted = {key, status}
        server.until(lambda wanted=wanted: [line for line in list(server.lines) if wanted <= plain(line)])
    assert secret not in str(server.lines)
    assert sha256(secret.encode()).hexdigest() not in str(server.lines)


def test_the_file_is_read_again_when_it_changes_and_only_if_it_can_be_used(server: Served) -> None:
    server.write({"next": {}})
    server.until(lambda: server_get(server, "/v1/models", "next").is_success)
    assert server_get(server, "/v1/models", "full").status_code == 401
    server.file.write_text("next: {hash: x}")
    server.until(lambda: "the keys are unchanged: " in server.log)
    assert server_get(server, "/v1/models", "next").is_success
    server.file.unlink()
    server.until(lambda: "No such file or directory" in server.log)
    assert server_get(server, "/v1/models", "next").is_success
    server.write(KEYS)
    server.until(lambda: server_get(server, "/v1/models", "full").is_success)
    assert server_get(server, "/v1/models", "next").status_code == 401
    assert server_get(server, "/admin/models", "boss").is_success


@pytest.mark.parametrize(
    ("host", "key", "address", "warned"),
    [
        ("127.0.0.1", "", "for this machine only", False),
        ("0.0.0.0", "", "for all machines that reach it", True),
        ("0.0.0.0", "x", "for all machines that reach it", False),
    ],
)
def test_the_log_has_the_address_and_a_warning_for_an_open_server(
    caplog: pytest.LogCaptureFixture, host: str, key: str, address: str, warned: bool
) -> None:
    app = application(Registry([], echo), api_key=key)
    app.state.stop = None
    with closing(bind_socket(host, 0)) as listener, caplog.at_level(logging.INFO, "polyhead"):
        process.ServerProcess(Settings(host=host), app, listener).log_address()
    assert f"{address}; loading models" in caplog.text
    assert ("no key is required: every client that reaches it may use the models" in caplog.text) is warned


def test_a_server_whose_keys_cannot_be_read_does_not_begin(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text("a: {hsh: x}\n")
    with pytest.raises(SettingsError, match=r"keys.yaml:1: a: hsh: is not known here; did you mean hash\?"):
        assemble(Settings(keys_file=str(tmp_path / "keys.yaml")), print)
