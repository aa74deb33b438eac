"""Keys: the keys file, the command that makes keys, and the limits for each minute."""

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from polyhead.service.api.access import auth as security
from polyhead.service.api.access.auth import Keys
from polyhead.service.api.access.rate_limit import (
    Quota,
    Quotas,
    RateBucket,
    anthropic_headers,
    count_spent_tokens,
    openai_headers,
)
from polyhead.service.cli.main import app
from polyhead.service.config import keys, yaml_file
from polyhead.service.config.keys import Key
from polyhead.service.config.setting_types import MASK
from polyhead.service.config.settings import SettingsError, read_settings
from polyhead.service.core.errors import Forbidden, RateLimited, Unauthorized
from polyhead.service.core.request import Encode, Generate, Terms
from polyhead.service.engine.worker import RequestEnd

HASH = "sha256:" + sha256(b"ph-a").hexdigest()
OTHER = "sha256:" + sha256(b"ph-b").hexdigest()
File = Callable[[str], str]


@pytest.fixture
def file(tmp_path: Path) -> File:
    def write(text: str) -> str:
        (tmp_path / "keys.yaml").write_text(text)
        return str(tmp_path / "keys.yaml")

    return write


def keys_of(**settings: Any) -> Keys:
    return Keys(read_settings(settings))


def refused(path: str) -> str:
    with pytest.raises(SettingsError) as caught:
        keys.read_keys(path)
    return str(caught.value)


# The file


def test_a_file_has_the_permissions_of_each_key(file: File) -> None:
    text = f"""
search:
  hash: {HASH}
mail:
  hash: {OTHER}
  scopes: [inference, metrics]
  models: [chat, "chat:*"]
  requests_per_minute: 60
  tokens_per_minute: 1000
"""
    search, mail = keys.read_keys(file(text))
    assert search == Key("search", sha256(b"ph-a").digest(), frozenset({"inference", "models"}), (), 0, 0)
    assert mail == Key(
        "mail", sha256(b"ph-b").digest(), frozenset({"inference", "metrics"}), ("chat", "chat:*"), 60, 1000
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: {hash: ph-a-key-in-the-open}", ":1: a: hash: should be sha256: and 64 hexadecimal digits, of the key"),
        (f"a: {{hash: {HASH}00}}", ":1: a: hash: should be sha256:"),
        (f"a: {{hash: {HASH.upper()}}}", ":1: a: hash: should be sha256:"),
        ("\na: {scopes: [models]}", ":2: a: hash: is required"),
        (f"a: {{hash: {HASH}, scope: [models]}}", ":1: a: scope: is not known here; did you mean scopes?"),
        (f"a: {{hash: {HASH}, xyz: 1}}", "xyz: is not known here; there are: hash, scopes, models"),
        (f"a: {{hash: {HASH}, scopes: [all]}}", "scopes: should be 'inference', 'models', 'metrics' or 'admin'"),
        (f"a: {{hash: {HASH}, scopes: []}}", "a: scopes: "),
        (f"a: {{hash: {HASH}, scopes: [models, models]}}", "scopes: should name each once"),
        (f"a: {{hash: {HASH}, models: chat}}", "models: should be a valid list"),
        (f"a: {{hash: {HASH}, models: ['chat[a-z]']}}", "a: models: "),
        (f"a: {{hash: {HASH}, tokens_per_minute: 0}}", "tokens_per_minute: should be greater than or equal to 1"),
        (f"a: {{hash: {HASH}, requests_per_minute: many}}", "requests_per_minute: should be a valid integer"),
        (f"a: {HASH}", "a: should be a mapping, hash, scopes"),
        (f"a b: {{hash: {HASH}}}", "'a b' is no name"),
        (f"a: {{hash: {HASH}}}\nb: {{hash: {HASH}}}", ":2: b: the same key as a"),
        (f"a: {{hash: {HASH}}}\na: {{hash: {OTHER}}}", ":2: 'a' stands twice"),
        (f"a: &x {{hash: {HASH}}}\nb: *x", ":2: a reference is not read"),
        (f"a: {{hash: !!str {HASH}}}", ":1: a tag is not read"),
        ("- a", "must be a mapping"),
        ("# none yet", "has no keys; polyhead key NAME makes one"),
        ("{" * 600, "is nested too deeply"),
        ("a: \0", "is not a YAML file"),
        ("a: {" + " " * (1 << 20), "has more than 1048576 bytes"),
        ('"\\UFFFFFFFF": 1', "is not a YAML file that can be read"),
        ('a: "\\U00110000"', "is not a YAML file that can be read"),
    ],
)
def test_errors_in_a_file_have_their_place(file: File, text: str, said: str) -> None:
    found = refused(file(text))
    assert said in found
    assert "keys.yaml" in found
    assert "in-the-open" not in found


def test_all_errors_of_a_file_are_reported_together(file: File) -> None:
    assert len(refused(file("a: {hash: x}\nb: {hash: y, scopes: [z]}")).splitlines()) == 3


def test_a_missing_file_and_a_pipe(tmp_path: Path) -> None:
    assert refused("/nowhere.yaml") == "keys_file: /nowhere.yaml cannot be read: No such file or directory"
    os.mkfifo(tmp_path / "pipe")
    assert "is no regular file" in refused(str(tmp_path / "pipe"))  # and is not waited for


# Owners of keys


def owner_of(of: Keys, shown: str, path: str = "/v1/completions", method: str = "POST") -> str:
    scope = of.required_scope(path, method)
    key = of.authenticate(scope, shown)
    of.authorize(key, scope)
    return key.name


def test_keys_of_settings_and_of_the_file_are_both_accepted(file: File) -> None:
    of = keys_of(api_key="one", api_keys=f"b={OTHER}", admin_key="boss", keys_file=file(f"a: {{hash: {HASH}}}"))
    assert [owner_of(of, f"Bearer {key}") for key in ("one", "ph-a", "ph-b")] == ["default", "a", "b"]
    assert owner_of(of, "bearer boss", "/admin/models") == "admin"
    assert set(of.names) == {"default", "a", "b", "admin"}
    assert of.owners == {"default", "a", "b"}, "an administrator has no share of the engine"


@pytest.mark.parametrize("shown", ["", "Bearer", "Bearer ", "Bearer on", "Bearer onee", "Basic one", "one"])
def test_a_part_of_a_key_is_not_accepted(shown: str) -> None:
    with pytest.raises(Unauthorized):
        owner_of(keys_of(api_key="one"), shown)


def test_a_hash_is_not_accepted_as_a_key(file: File) -> None:
    """A client that reads the file cannot use the hash as a key."""
    of = keys_of(api_keys=f"b={OTHER}", keys_file=file(f"a: {{hash: {HASH}}}"))
    for shown in (HASH, OTHER, HASH.removeprefix("sha256:")):
        with pytest.raises(Unauthorized):
            owner_of(of, f"Bearer {shown}")


def test_keys_are_compared_as_bytes() -> None:
    assert owner_of(keys_of(api_key="ключ"), f"Bearer {'ключ'.encode().decode('latin-1')}") == "default"


def test_an_admin_key_alone_protects_only_admin_routes() -> None:
    of = keys_of(admin_key="boss")
    assert owner_of(of, "") == ""
    assert owner_of(of, "", "/v1/models", "GET") == ""
    with pytest.raises(Unauthorized):
        owner_of(of, "", "/admin/models", "GET")


def test_a_keys_file_protects_all_routes(file: File) -> None:
    of = keys_of(keys_file=file(f"a: {{hash: {HASH}, scopes: [metrics]}}"))
    with pytest.raises(Forbidden, match=r"the key 'a' may not use models: that needs the scope inference, it has metr"):
        owner_of(of, "Bearer ph-a")
    assert not of.has_admin_key
    assert of.required_scope("/admin/models", "GET") == of.required_scope("/nowhere", "GET") == "inference"


def test_a_path_with_two_slashes_is_not_the_root() -> None:
    of = keys_of(api_key="one")
    assert of.required_scope("/", "GET") == "public"
    assert (
        of.required_scope("//", "GET")
        == of.required_scope("//metrics", "GET")
        == of.required_scope("//v1/models", "GET")
        == "inference"
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"api_key": "x", "api_keys": "default=y"}, "the name 'default' is used twice"),
        ({"admin_key": "x", "api_keys": "admin=y"}, "the name 'admin' is used twice"),
        ({"metrics_access": "key"}, "metrics_access: no key has the scope metrics"),
        ({"metrics_access": "key", "api_keys": "a=x"}, "metrics_access: no key has the scope metrics"),
        ({"api_key": MASK}, "is what is shown instead of a key"),
        ({"api_keys": f"a={MASK}"}, "is what is shown instead of a key"),
        ({"api_keys": {"a": ""}}, "the key of 'a' is empty"),
        ({"admin_key": "sha256:123"}, "after sha256: there must be the hash of a key"),
    ],
)
def test_invalid_keys_are_rejected(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said.replace("*", r"\*")):
        keys_of(**settings)


def test_a_key_name_of_the_settings_is_rejected_in_the_file(file: File) -> None:
    path = file(f"a: {{hash: {HASH}}}")
    with pytest.raises(SettingsError, match="the name 'a' is used twice"):
        keys_of(api_keys="a=x", keys_file=path)


def test_an_invalid_new_file_changes_nothing(file: File) -> None:
    of = keys_of(api_keys="b=x", keys_file=file(f"a: {{hash: {HASH}}}"))
    with pytest.raises(SettingsError):
        of.replace_file_keys([Key("b", sha256(b"y").digest())])
    assert (owner_of(of, "Bearer ph-a"), owner_of(of, "Bearer x")) == ("a", "b")
    of.replace_file_keys([Key("c", sha256(b"y").digest())])
    assert (owner_of(of, "Bearer y"), owner_of(of, "Bearer x"), of.owners) == ("c", "b", {"b", "c"})
    with pytest.raises(Unauthorized):
        owner_of(of, "Bearer ph-a")


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def followed(of: Keys, act: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        following = asyncio.create_task(security.watch_keys_file(of))
        await act()
        assert not following.done()
        following.cancel()

    asyncio.run(run())


@pytest.mark.parametrize("fault", [SettingsError("no keys"), OverflowError("too large"), AssertionError("ours")])
def test_after_any_read_error_the_next_file_is_read(
    file: File, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: Exception
) -> None:
    """If the task ended at the first error, a key that is removed later would stay valid for ever."""
    monkeypatch.setattr(security, "KEYS_POLL_S", 0.01)
    of, whole = keys_of(keys_file=file(f"a: {{hash: {HASH}}}")), keys.read_keys

    def fail(_: str) -> tuple[Key, ...]:
        raise fault

    async def act() -> None:
        monkeypatch.setattr(keys, "read_keys", fail)
        file("# an edit")
        await until(lambda: "the keys are unchanged" in caplog.text)
        assert owner_of(of, "Bearer ph-a") == "a"
        monkeypatch.setattr(keys, "read_keys", whole)
        file(f"b: {{hash: {OTHER}}}")
        await until(lambda: list(of.names) == ["b"])

    followed(of, act)


def open_no_file(*_: Any) -> int:
    raise OSError(errno.EMFILE, "Too many open files")


def start_no_thread(*_: Any) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("owner", "name", "fail"),
    [(yaml_file, "open_without_waiting", open_no_file), (yaml_file, "read_file_text", start_no_thread)],
)
def test_a_file_that_cannot_be_read_for_a_moment_is_read_later(
    file: File,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: Any,
    name: str,
    fail: Callable[..., Any],
) -> None:
    """It was read again only once it changed again: a key that it revoked stayed valid."""
    monkeypatch.setattr(security, "KEYS_POLL_S", 0.01)
    of, attempts = keys_of(keys_file=file(f"a: {{hash: {HASH}}}")), list[str]()

    def count_and_fail(*arguments: Any) -> Any:
        attempts.append("attempt")
        return fail(*arguments)

    async def act() -> None:
        with monkeypatch.context() as broken:
            broken.setattr(owner, name, count_and_fail)
            file(f"b: {{hash: {OTHER}}}")
            await until(lambda: len(attempts) > 3)
        assert list(of.names) == ["a"]
        await until(lambda: list(of.names) == ["b"])

    followed(of, act)
    assert caplog.text.count("the keys are unchanged") == 1


def test_a_file_that_is_not_valid_is_read_once(
    file: File, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(security, "KEYS_POLL_S", 0.005)
    of, reads, polls = keys_of(keys_file=file(f"a: {{hash: {HASH}}}")), list[str](), list[str]()
    read, stamp = keys.read_keys, security.file_stamp

    def count_read(path: str) -> tuple[Key, ...]:
        reads.append(path)
        return read(path)

    def count_poll(path: str) -> tuple[int, ...]:
        polls.append(path)
        return stamp(path)

    async def act() -> None:
        monkeypatch.setattr(keys, "read_keys", count_read)
        file("b: nothing")
        await until(lambda: "the keys are unchanged" in caplog.text)
        monkeypatch.setattr(security, "file_stamp", count_poll)
        await until(lambda: len(polls) > 5)

    followed(of, act)
    assert len(reads) == 1


def test_unexpected_errors_of_the_parser_are_errors_of_the_file(
    file: File, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(security, "KEYS_POLL_S", 0.01)
    of = keys_of(keys_file=file(f"a: {{hash: {HASH}}}"))

    async def act() -> None:
        file('"\\UFFFFFFFF": 1')
        await until(lambda: "is not a YAML file that can be read" in caplog.text)
        file(f"b: {{hash: {OTHER}}}")
        await until(lambda: list(of.names) == ["b"])

    followed(of, act)


def test_a_file_is_read_after_two_checks_without_a_change(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is still being written is read when it is complete."""
    monkeypatch.setattr(security, "KEYS_POLL_S", 0)
    of = keys_of(keys_file=file(f"a: {{hash: {HASH}}}"))
    stamps = iter([(1,), (2,), (3,), (4,), (4,), (4,)])
    looks: list[tuple[int, ...]] = []
    read_at: list[int] = []

    def stamp(_: str) -> tuple[int, ...]:
        looks.append(next(stamps, (4,)))
        return looks[-1]

    def read_file(_: str) -> tuple[Key, ...]:
        read_at.append(len(looks))
        return (Key("b", sha256(b"y").digest()),)

    async def act() -> None:
        monkeypatch.setattr(security, "file_stamp", stamp)
        monkeypatch.setattr(keys, "read_keys", read_file)
        await until(lambda: list(of.names) == ["b"])
        await until(lambda: len(looks) > 12)
        assert read_at == [5]

    followed(of, act)


def test_a_file_that_changes_while_it_is_read_is_read_again(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "KEYS_POLL_S", 0.01)
    of, whole = keys_of(keys_file=file(f"a: {{hash: {HASH}}}")), keys.read_keys
    counted: list[tuple[str, ...]] = []
    replace = of.replace_file_keys

    def rewrite(path: str) -> tuple[Key, ...]:
        found = whole(path)
        if found[0].name == "half":
            file(f"whole: {{hash: {OTHER}, scopes: [metrics]}}")
        return found

    def count(filed: Iterable[Key]) -> None:
        there = tuple(filed)
        counted.append(tuple(key.name for key in there))
        replace(there)

    async def act() -> None:
        monkeypatch.setattr(keys, "read_keys", rewrite)
        monkeypatch.setattr(of, "replace_file_keys", count)
        file(f"half: {{hash: {OTHER}}}")
        await until(lambda: list(of.names) == ["whole"])
        assert counted == [("whole",)]

    followed(of, act)


def test_models_by_name_and_by_pattern() -> None:
    assert Key("a").allows_model("anything")
    narrow = Key("a", models=("chat", "team/*", "base:*"))
    assert [
        name for name in ("chat", "chats", "team/x", "team", "base", "base:x", "chat:x") if narrow.allows_model(name)
    ] == [
        "chat",
        "team/x",
        "base:x",
    ]


# Limits for each minute


class ManualClock:
    """A clock that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def enter(quota: Quota) -> int:
    """Return 0, or the seconds to wait."""
    try:
        quota.take_request()
    except RateLimited as error:
        return error.retry_after
    return 0


def test_requests_of_a_minute_and_the_wait_for_the_next() -> None:
    clock = ManualClock()
    quota = Quota(Key("a", requests_per_minute=6), clock)
    assert [enter(quota) for _ in range(8)] == [0] * 6 + [10] * 2
    clock.now += 9
    assert enter(quota) == 1
    clock.now += 1
    assert [enter(quota), enter(quota)] == [0, 10]
    clock.now += 3600
    assert [enter(quota) for _ in range(7)] == [0] * 6 + [10], "unused quota is saved for one minute only"


def test_tokens_beyond_the_quota_delay_the_next_request() -> None:
    clock, key = ManualClock(), Key("a", tokens_per_minute=60)
    quotas = Quotas(clock)
    quota = quotas.quota_of(key)
    assert enter(quota) == 0
    quotas.add_submitted("a", [Generate("1", (1,) * 50, 100)])
    assert enter(quota) == 0, "some quota is left"
    quotas.add_ended(RequestEnd("chat", "generate", "done", 1.0, 50, 40, terms=Terms("a")))
    assert enter(quota) == 31  # a debt of thirty, and one token must be left
    clock.now += 31
    assert enter(quota) == 0
    quotas.add_submitted("b", [Generate("1", (1,) * 50, 100)])
    assert enter(quotas.quota_of(key)) == 0, "other keys have their own quota"


def test_a_key_without_limits_is_never_rejected_and_has_no_bucket() -> None:
    quotas = Quotas(ManualClock())
    for number in range(100):
        key = Key(f"a{number}")
        quotas.quota_of(key).take_request()
        quotas.add_submitted(key.name, [Encode("1", (1,) * 50)])
        assert not quotas.quota_of(key).headers(openai_headers)
    assert not quotas._quotas


def test_a_key_whose_limits_change_begins_anew_and_another_does_not() -> None:
    clock = ManualClock()
    quotas = Quotas(clock)
    key = Key("a", requests_per_minute=1)
    assert (enter(quotas.quota_of(key)), enter(quotas.quota_of(key))) == (0, 60)
    assert enter(quotas.quota_of(Key("a", digest=b"new", requests_per_minute=1))) == 60
    assert enter(quotas.quota_of(Key("a", requests_per_minute=2))) == 0


def test_several_answers_to_one_prompt_count_its_tokens_once() -> None:
    alike = [Generate(f"{n}", (1, 2, 3), 4, group="g") for n in range(5)]
    assert (
        count_spent_tokens([*alike, Generate("x", (1, 2), 4), Generate("y", (1, 2), 4), Encode("z", (1,))])
        == 3 + 2 + 2 + 1
    )


def test_limits_of_a_bucket() -> None:
    clock = ManualClock()
    bucket = RateBucket(7, clock)
    bucket.spend(7)
    assert (bucket.remaining, bucket.wait_seconds()) == (0, 9)
    clock.now += 60 / 7
    assert bucket.wait_seconds() == 0


def test_the_remaining_quota_has_the_headers_of_both_clients() -> None:
    clock = ManualClock()
    quota = Quota(Key("a", requests_per_minute=6, tokens_per_minute=100), clock)
    quota.take_request()
    quota.tokens.spend(250)
    assert quota.headers(openai_headers) == {
        "x-ratelimit-limit-requests": "6",
        "x-ratelimit-remaining-requests": "5",
        "x-ratelimit-reset-requests": "10s",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "150s",
    }
    output = quota.headers(anthropic_headers)
    assert output["anthropic-ratelimit-requests-remaining"] == "5"
    assert output["anthropic-ratelimit-tokens-reset"].endswith("Z")


# polyhead key


def made(*arguments: str, given: str = "") -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["key", *arguments], input=given)
    return result.exit_code, result.stdout, result.stderr


def test_a_new_key_is_accepted(file: File) -> None:
    code, entry, said = made("search", "--models", "chat,chat:*", "--tokens-per-minute", "100")
    assert code == 0
    key = said.split()[-1]
    assert key.startswith("ph-")
    assert len(key) >= 40
    assert key not in entry
    of = keys_of(keys_file=file(entry + made("mail", "--scopes", "admin")[1]))
    found = of.authenticate("inference", f"Bearer {key}")
    assert (found.name, found.models, found.tokens_per_minute) == ("search", ("chat", "chat:*"), 100)
    assert of.has_admin_key
    assert made("search")[1] != entry


def test_an_own_key_is_hashed_if_it_is_long_enough() -> None:
    code, entry, said = made("search", "--stdin", given="k" * 32 + "\n")
    assert (code, said) == (0, "")
    assert yaml.safe_load(entry)["search"]["hash"] == "sha256:" + sha256(b"k" * 32).hexdigest()
    for short in ("k" * 31, "", "ä" * 40, "a " * 40):
        code, entry, said = made("search", "--stdin", given=short)
        assert (code, entry) == (2, "")
        assert "must have 32 characters or more" in said
        assert not short or short not in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a b"], "'a b' is no name"),
        (["a", "--scopes", "all"], "scopes: should be 'inference'"),
        (["a", "--scopes", ""], "scopes: "),
        (["a", "--models", "[a]"], "models: "),
        (["a", "--requests-per-minute", "2000000"], "requests_per_minute: should be less than"),
    ],
)
def test_invalid_key_names_are_rejected(arguments: list[str], said: str) -> None:
    code, entry, error = made(*arguments)
    assert (code, entry) == (2, "")
    assert said in error
    assert "ph-" not in error
