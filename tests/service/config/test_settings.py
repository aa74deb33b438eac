"""Settings: precedence, the messages of errors, and secrets that are never shown."""

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from polyhead.service.config.flags import build_parser, parse_flags
from polyhead.service.config.settings import (
    LIBRARY_DEFAULTS,
    Settings,
    SettingsError,
    read_settings,
    set_library_defaults,
)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("POLYHEAD_"):
            monkeypatch.delenv(name)


def refused(flags: dict[str, object]) -> str:
    with pytest.raises(SettingsError) as caught:
        read_settings(flags)
    return str(caught.value)


def test_defaults_listen_on_this_machine_only() -> None:
    settings = read_settings({})
    assert (settings.host, settings.port, settings.precision, settings.device) == ("127.0.0.1", 8000, "auto", "auto")
    assert settings.api_key.get_secret_value() == ""
    assert settings.models == {}


def test_flags_over_environment_over_file_over_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "polyhead.yaml"
    file.write_text("port: 1\nhost: 1.1.1.1\nthreads: 3\n")
    monkeypatch.setenv("POLYHEAD_CONFIG", str(file))
    monkeypatch.setenv("POLYHEAD_PORT", "2")
    monkeypatch.setenv("POLYHEAD_HOST", "2.2.2.2")
    settings = read_settings({"host": "3.3.3.3"})
    assert (settings.host, settings.port, settings.threads, settings.step_tokens) == ("3.3.3.3", 2, 3, 512)


def test_the_file_of_a_flag_wins_over_that_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, port in (("a", 1), ("b", 2)):
        (tmp_path / name).write_text(f"port: {port}")
    monkeypatch.setenv("POLYHEAD_CONFIG", str(tmp_path / "a"))
    assert read_settings({"config": str(tmp_path / "b")}).port == 2


@pytest.mark.parametrize(
    "given",
    [["a=./x", "b=./y=z"], "a=./x, b=./y=z", {"a": "./x", "b": "./y=z"}],
    ids=["list", "string", "mapping"],
)
def test_models_keep_their_order_and_their_equals_signs(given: object) -> None:
    assert list(read_settings({"models": given}).models.items()) == [("a", "./x"), ("b", "./y=z")]


def test_models_from_environment_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "polyhead.yaml"
    file.write_text("models:\n  chat: ./llama\n")
    assert read_settings({"config": str(file)}).models == {"chat": "./llama"}
    monkeypatch.setenv("POLYHEAD_MODELS", "a=b,c=d")
    assert read_settings({"config": str(file)}).models == {"a": "b", "c": "d"}


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (["./llama"], "'./llama' is not of the form name=source"),
        (["chat="], "'chat=' is not of the form name=source"),
        (["a=x", "a=y"], "'a' is named twice"),
        (["a b=x"], "'a b' is no name"),
        (["../x=y"], "'../x' is no name"),
        ([f"{'a' * 129}=y"], "is no name"),
        (7, "models: "),
    ],
)
def test_invalid_models_are_rejected(models: object, message: str) -> None:
    assert message in refused({"models": models})


@pytest.mark.parametrize(
    ("name", "value"),
    [("port", 65536), ("port", "http"), ("precision", "float16"), ("max_requests", 0), ("drain_seconds", -1)],
)
def test_errors_name_the_setting_and_its_origin(name: str, value: object) -> None:
    message = refused({name: value})
    assert message.startswith(f"{name}: should be ")
    assert f"--{name.replace('_', '-')}, POLYHEAD_{name.upper()} or {name} in the file" in message


def test_all_errors_are_reported_together() -> None:
    assert len(refused({"port": -1, "threads": -1, "host": ""}).splitlines()) == 3


def test_unknown_names_are_refused_with_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "polyhead.yaml"
    file.write_text("threads: 1\nprot: 1\n")
    assert "no setting is called 'prot'; did you mean port?" in refused({"prot": 1})
    assert f"{file}:2: no setting is called 'prot'; did you mean port?" in refused({"config": str(file)})
    monkeypatch.setenv("POLYHEAD_MAX_REQUEST", "1")
    assert "POLYHEAD_MAX_REQUEST: no setting is called 'max_request'; did you mean max_requests?" in refused({})


def test_variables_of_a_kubernetes_service_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_8000_TCP", "PORT_8000_TCP_ADDR"):
        monkeypatch.setenv(f"POLYHEAD_{name}", "10.0.0.1")
    monkeypatch.setenv("POLYHEAD_URL", "http://127.0.0.1:9")  # of commands that ask a server
    assert read_settings({}).port == 8000


@pytest.mark.parametrize("content", ["port:", "port: x", "config: b.yaml", "port = 1", "- port"])
def test_a_file_that_cannot_be_used(tmp_path: Path, content: str) -> None:
    file = tmp_path / "polyhead.yaml"
    file.write_text(content)
    assert any(name in refused({"config": str(file)}) for name in (str(file), "port"))


def test_a_missing_file() -> None:
    assert refused({"config": "/nowhere.yaml"}) == "config: /nowhere.yaml cannot be read: No such file or directory"


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        read_settings({}).port = 1  # type: ignore[misc]


def test_the_key_is_never_shown() -> None:
    settings = read_settings({"api_key": "s3cret"})
    assert settings.api_key.get_secret_value() == "s3cret"
    assert "s3cret" not in f"{settings!r} {settings} {settings.model_dump_json()}"


def test_the_default_model_folder_is_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert read_settings({}).model_dir == tmp_path / "polyhead" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # relative paths are ignored, as the specification requires
    assert read_settings({}).model_dir == Path.home() / ".cache" / "polyhead" / "models"
    assert read_settings({"model_dir": "~/m"}).model_dir == Path.home() / "m"


@pytest.mark.parametrize("name", ["model_dir", "model_root", "keys_file", "config"])
def test_a_missing_home_folder_is_an_error(name: str) -> None:
    message = refused({name: "~no-such-user/x"})
    assert message.startswith(f"{name}: ")
    assert "name of no user of this machine" in message


def test_variables_of_libraries_set_by_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LIBRARY_DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    set_library_defaults()
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    assert os.environ["GOMP_SPINCOUNT"] == LIBRARY_DEFAULTS["GOMP_SPINCOUNT"]


def test_every_setting_is_described_and_a_flag() -> None:
    text = " ".join(build_parser().format_help().split())
    for name, field in Settings.model_fields.items():
        assert field.description, name
        if name != "models":
            assert f"--{name.replace('_', '-')} VALUE" in text
    assert "secret" not in text.lower()


def test_flags_are_read_in_any_order() -> None:
    assert parse_flags(["a=x", "--port", "1", "b=y", "--max-requests=2"]) == {
        "models": ["a=x", "b=y"],
        "port": "1",
        "max_requests": "2",
    }
    assert parse_flags([]) == {}


def test_a_flag_of_several_values_may_be_given_several_times() -> None:
    """No value is lost, a key least of all."""
    flags = ["--api-keys", "a=1,b=2", "--api-keys", "c=3", "--weights=x=1", "--weights=y=2", "--port", "1", "--port=2"]
    given = parse_flags([*flags, "--allowed-hosts=one", "--allowed-hosts=two"])
    joined = {"api_keys": "a=1,b=2,c=3", "weights": "x=1,y=2", "port": "2", "allowed_hosts": "one,two"}
    assert given == joined
    with pytest.raises(SettingsError, match="'a' is named twice"):
        read_settings(parse_flags(["--api-keys", "a=1", "--api-keys", "a=2"]))


def test_unknown_flags_are_refused_with_the_nearest() -> None:
    with pytest.raises(SettingsError, match="no setting is called 'prot'; did you mean port"):
        parse_flags(["a=x", "--prot", "1"])
    with pytest.raises(SettingsError, match="did you mean max_requests"):
        parse_flags(["--max-request=1"])


def test_step_tokens_leave_room_for_prompts() -> None:
    assert "step_tokens: 64 tokens a step for max_running 64" in refused({"step_tokens": 64})


def test_errors_do_not_contain_keys() -> None:
    message = refused({"api_keys": "s3cret"})
    assert "not of the form name=key" in message
    assert "s3cret" not in message


def test_pairs_of_weights_and_keys() -> None:
    chosen = read_settings({"models": ["a=x"], "weights": "a=2.5", "api_keys": "search=abc,mail=def"})
    assert chosen.weights == {"a": 2.5}
    assert {name: key.get_secret_value() for name, key in chosen.api_keys.items()} == {"search": "abc", "mail": "def"}
    assert "must be between" in refused({"weights": "a=0"})
