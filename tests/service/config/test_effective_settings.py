"""`polyhead config`: the effective settings, the origin of each value, and the output as a valid settings file."""

import json
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from pydantic import SecretStr
from typer.testing import CliRunner

from polyhead.service.cli.main import app
from polyhead.service.config import yaml_file
from polyhead.service.config.flags import parse_flags
from polyhead.service.config.setting_types import MASK
from polyhead.service.config.settings import Settings, read_settings

EVERYTHING = """\
# every kind of value
models:
  chat: ./llama
  chat:legal: ./adapter
host: "::1"
port: 9000
deterministic: yes
weights: [chat=2]
key_share: 0.25
api_keys: {search: k1, mail: k2}
max_requests: 7
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("POLYHEAD_"):
            monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "polyhead.yaml").write_text(EVERYTHING)
    return str(tmp_path / "polyhead.yaml")


def config(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["config", *arguments])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def settings_of(*arguments: str) -> dict[str, tuple[Any, str]]:
    every = json.loads(config(*arguments, "--json"))["settings"]
    return {name: (each["value"], each["origin"]) for name, each in every.items()}


def test_every_value_has_its_origin(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYHEAD_PORT", "9001")
    monkeypatch.setenv("polyhead_host", "127.0.0.2")
    monkeypatch.setenv("POLYHEAD_MAX_REQUESTS", "8")
    found = settings_of("--config", file, "--max-requests", "9")
    assert found["max_requests"] == (9, "flag --max-requests")
    assert found["port"] == (9001, "environment POLYHEAD_PORT")
    assert found["host"] == ("127.0.0.2", "environment polyhead_host")
    assert found["models"] == ({"chat": "./llama", "chat:legal": "./adapter"}, f"{file}:2")
    assert found["key_share"] == (0.25, f"{file}:9")
    assert found["threads"] == (0, "default")
    assert found["config"] == (file, "flag --config")
    assert settings_of("a=x", "--config", file)["models"] == ({"a": "x"}, "arguments")
    assert found.keys() == Settings.model_fields.keys()


def test_text_output_has_origins_too(file: str) -> None:
    lines = config("--config", file, "--threads", "3").splitlines()
    assert [line.split("#")[0].strip() for line in lines if line.startswith(("port:", "threads:", "weights:"))] == [
        "port: 9000",
        "threads: 3",
        "weights:",
    ]
    origins = {line.partition(":")[0]: line.split(" # ")[-1] for line in lines}
    assert (origins["port"], origins["threads"], origins["device"]) == (f"{file}:6", "flag --threads", "default")


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--host", "yes"),
        ("--host", "1:30"),
        ("--host", "1e5"),
        ("--host", "null"),
        ("--host", "# a"),
        ("--host", "two\nlines"),
        ("--host", "a " * 100),
        ("--model-dir", "/tmp/ä: b"),
        ("--log-level", "debug", "--request-seconds", "0.5", "--key-share", "1e-3", "--max-requests", "1000000"),
    ],
)
def test_the_output_is_a_file_with_the_same_settings(file: str, tmp_path: Path, flags: tuple[str, ...]) -> None:
    again = tmp_path / "again.yaml"
    keyless = "".join(line for line in EVERYTHING.splitlines(keepends=True) if "api_keys" not in line)
    Path(file).write_text(keyless)
    again.write_text(config("--config", file, *flags))
    first = read_settings({"config": file, **parse_flags(flags)})
    assert read_settings({"config": str(again)}).model_dump(exclude={"config"}) == first.model_dump(exclude={"config"})


def test_keys_are_masked_and_a_mask_is_not_accepted_as_a_key(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYHEAD_API_KEY", "s3cret")
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"crawler: {{hash: 'sha256:{sha256(b'x').hexdigest()}', models: [chat], tokens_per_minute: 10}}\n")
    arguments = ("--config", file, "--admin-key", "b0ss", "--keys-file", str(keys))
    text, machine = config(*arguments), config(*arguments, "--json")
    for shown in (text, machine):
        assert not [key for key in ("s3cret", "b0ss", "k1", "k2", sha256(b"x").hexdigest()) if key in shown]
        assert shown.count(MASK) == 4
    assert "# api_key: '********'" in text
    assert "#   search: '********'" in text
    assert (
        "# key crawler: scopes inference models, models chat, requests_per_minute unlimited, tokens_per_minute 10"
        in text
    )
    found = json.loads(machine)
    assert found["settings"]["api_keys"]["value"] == {"search": MASK, "mail": MASK}
    assert found["keys"].keys() == {"default", "admin", "search", "mail", "crawler"}
    again = tmp_path / "again.yaml"
    again.write_text(text)
    fed = read_settings({"config": str(again)})
    assert fed.api_key == SecretStr("s3cret"), "the value of the environment is kept"
    assert fed.api_keys == {}
    again.write_text(text.replace("# api_key", "api_key"))
    monkeypatch.delenv("POLYHEAD_API_KEY")
    assert "is what is shown instead of a key" in config("--config", str(again), code=2)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--prot", "1"), "no setting is called 'prot'; did you mean port?"),
        (("--memory_mib", "1"), "no flag is called '--memory_mib'; did you mean --memory-mib?"),
        (("--port", "x"), "port: should be a valid integer"),
        (("--config", "/nowhere.yaml"), "config: /nowhere.yaml cannot be read"),
        (("--keys-file", "/nowhere.yaml"), "keys_file: /nowhere.yaml cannot be read"),
        (("--metrics-access", "key"), "metrics_access: no key has the scope metrics"),
    ],
)
def test_config_rejects_what_serve_rejects(arguments: tuple[str, ...], error: str) -> None:
    assert error in config(*arguments, code=2)


def test_unknown_names_of_any_place_are_refused_with_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "polyhead.yaml"
    path.write_text("port: 1\n\nthraeds: 1\nhots: x\n")
    refused = config("--config", str(path), code=2)
    assert f"{path}:3: no setting is called 'thraeds'; did you mean threads?" in refused
    assert f"{path}:4: no setting is called 'hots'; did you mean host?" in refused
    monkeypatch.setenv("polyhead_prot", "1")
    assert "polyhead_prot: no setting is called 'prot'; did you mean port?" in config(code=2)


# The settings file


def written(tmp_path: Path, text: str) -> dict[str, Any]:
    (tmp_path / "a.yaml").write_text(text)
    return yaml_file.read_yaml(str(tmp_path / "a.yaml")).values


def test_types_of_yaml_values(tmp_path: Path) -> None:
    text = "a: no\nb: 1:30\nc: 010\nd: 2026-11-22\n1: 2\n<<: x\ne: [1, -2, 0.5, 1.e+5, true, null, ~, '', '1']\nf:"
    assert written(tmp_path, text) == {
        "a": "no",
        "b": "1:30",
        "c": "010",
        "d": "2026-11-22",
        "1": 2,
        "<<": "x",
        "e": [1, -2, 0.5, 1e5, True, None, None, "", "1"],
        "f": None,
    }
    assert written(tmp_path, "# nothing\n") == written(tmp_path, "") == {}
    assert written(tmp_path, f"a: {'9' * 5000}") == {"a": "9" * 5000}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("port: 1\nport: 2", ":2: 'port' stands twice"),
        ("models:\n  a: x\n  a: y", ":3: 'a' stands twice"),
        ("a: &x 1\nb: *x", ":2: a reference is not read"),
        ("a: !!python/object/apply:os.system [ls]", ":1: a tag is not read"),
        ("? [a]\n: b", ":1: a name must be plain text"),
        ("a: 1\n---\nb: 2", ":2: but found another document"),
        ("a: 1\n\tb: 2", ":2: found character"),
        ("port = 1", " must be a mapping, lines of the form name: value"),
        ("[" * 600, " is nested too deeply"),
    ],
)
def test_ambiguous_yaml_is_rejected(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(yaml_file.YamlFileError) as caught:
        written(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'a.yaml'}{error}")


def test_invalid_utf8_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"a: \xff")
    with pytest.raises(yaml_file.YamlFileError, match="is not UTF-8 text"):
        yaml_file.read_yaml(str(tmp_path / "a.yaml"))


# The schema


@pytest.fixture(scope="module")
def schema() -> Draft202012Validator:
    described = json.loads(config("--schema"))
    Draft202012Validator.check_schema(described)
    return Draft202012Validator(described)


def test_the_schema_describes_every_setting_of_the_file(schema: Draft202012Validator) -> None:
    properties = schema.schema["properties"]
    assert properties.keys() == Settings.model_fields.keys() - {"config"}
    assert all(each["description"] for each in properties.values())
    assert properties["port"]["maximum"] == 65535
    assert properties["api_key"]["writeOnly"] is properties["admin_key"]["writeOnly"] is True
    assert properties["api_keys"]["anyOf"][0]["additionalProperties"]["writeOnly"] is True


def test_valid_files_match_the_schema(schema: Draft202012Validator, tmp_path: Path) -> None:
    for text in (EVERYTHING.replace("yes", "true"), config(), config("a=x", "--drain-seconds", "3")):
        schema.validate(written(tmp_path, text))
    for wrong in (
        "prot: 1",
        "port: 65536",
        "port: x",
        "config: a.yaml",
        "models: 7",
        "log_level: loud",
        "max_requests: 0",
    ):
        assert not schema.is_valid(written(tmp_path, wrong)), wrong


def test_printed_yaml_is_read_alike_by_other_parsers() -> None:
    assert yaml.safe_load(config("a=yes", "--host", "no"))["host"] == "no"
