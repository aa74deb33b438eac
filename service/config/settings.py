"""All settings of the server, read once: flags over environment over file over defaults. Frozen afterwards.

Only this module reads or sets the process environment. So everything that configures the server is a field below, with
its bounds.
"""

import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from ..core.addresses import URL_VARIABLE
from . import yaml_file
from .parallel_settings import ParallelSettings, check_pools
from .setting_types import (
    ApiKey,
    ApiKeys,
    CalibrationFiles,
    CollectorAddress,
    DraftSources,
    Hosts,
    ModelSources,
    ModelWeights,
    Proxies,
    WebOrigins,
    expand_home,
)
from .yaml_file import YamlDocument, YamlFileError

ENVIRONMENT_PREFIX = "POLYHEAD_"
# Kubernetes sets these in every pod of a namespace with a Service called "polyhead": addresses, not settings.
SERVICE_LINK_PATTERN = re.compile(r"POLYHEAD_(SERVICE_(HOST|PORT.*)|PORT_\d+_(TCP|UDP).*)")
LIBRARY_DEFAULTS = {
    # Texts are tokenised in our own thread pool; a second pool inside it would take cores from the engine.
    "TOKENIZERS_PARALLELISM": "false",
    # OpenMP threads wait for each other by spinning, by default for milliseconds. If a core is shared (with the event
    # loop or another process), the thread that they wait for does not get it, and steps take ten times as long.
    "GOMP_SPINCOUNT": "10000",
    # Ray gives its workers a low priority by default; a replica is the main process of its machine.
    "RAY_worker_niceness": "0",
}


class SettingsError(ValueError):
    """Invalid settings; the message has a line for each."""


class Settings(ParallelSettings):
    """Built by `read_settings`; the constructor takes flags by keyword only and raises pydantic's errors."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX, frozen=True, extra="forbid", protected_namespaces=(), hide_input_in_errors=True
    )

    config: str = Field("", description="YAML file that sets any of these.")
    models: ModelSources = Field(
        default_factory=dict,
        description="Served models, name=source, separated by commas in the environment; none: the quick-start ones. "
        "base:name=folder lays a PEFT adapter over the served model base, beside others.",
    )
    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0 is every interface.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    probe_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port on which only probes are answered: there they never wait behind clients of the other "
        "port. 0: none.",
    )
    tls_cert: str = Field("", description="PEM file with the certificate and its chain: the port then speaks HTTPS.")
    tls_key: str = Field("", description="PEM file with the certificate's private key; empty: it is in tls_cert.")
    proxy_headers: Proxies = Field(
        (),
        description="Addresses or networks of proxies, as in 10.0.0.0/8, or * for any, that are believed when their "
        "X-Forwarded-For and X-Forwarded-Proto name a client's address and scheme. Empty: none.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where networks run; auto: a GPU if there is one."
    )
    executor: Literal["auto", "native", "torch"] = Field(
        "auto", description="What computes a network; auto: on a CPU the compiled step, where it can, else torch."
    )
    precision: Literal["auto", "float32", "bfloat16", "int8", "int4"] = Field(
        "auto",
        description="Format of weights and arithmetic; auto: bfloat16 on a GPU; on a CPU for each model int4 or int8 "
        "if its file is quantised, else float32. int4 takes what a file has in 4 bits as it is, and the rest in 8.",
    )
    max_kl: float = Field(
        0.01,
        gt=0,
        description="How far next-token distributions in the default precision may be from float32 of the same file, "
        "in nats (mean KL), or of a network that is no generator 1 - cosine of states; a model for which a self-test "
        "finds more is computed in float32.",
    )
    threads: int = Field(0, ge=0, le=1024, description="Compute threads; 0: as many as the machine has cores to give.")
    tensor_parallel: int = Field(
        1, ge=1, le=64, description="Processes that compute every model together, a share each, on a GPU each if any."
    )
    cache_tokens: int = Field(
        0, ge=0, le=1 << 30, description="Tokens a generator's cache holds; 0: from its context and the free memory."
    )
    block_size: int = Field(
        0,
        ge=0,
        le=1024,
        description="Tokens in a block of the cache; 0: 16.",
    )
    step_tokens: int = Field(512, ge=1, le=1 << 20, description="Tokens a generator computes in one step, at most.")
    max_running: int = Field(64, ge=1, le=4096, description="Sequences a generator advances in one step, at most.")
    max_tokens_default: int = Field(
        0, ge=0, le=1 << 30, description="Tokens of an answer where a request does not say; 0: as the dialect has it."
    )
    prefill_chunk: int = Field(
        256,
        ge=1,
        le=1 << 20,
        description="Tokens of one prompt computed in a step, at most; fewer after a long context.",
    )
    prefix_sharing: Literal["all", "key"] = Field(
        "all",
        description="Whose requests share cached prompts: those of all keys, or only those of the same key, so that "
        "response times reveal nothing of other clients' prompts.",
    )
    draft_tokens: int = Field(
        8,
        ge=0,
        le=64,
        description="Tokens of an answer that are drafted and verified in one step, at most, where that makes it "
        "faster; answers stay the same. 0: none.",
    )
    generation_config: bool = Field(
        True,
        description="Whether requests that do not set a sampling option have the one that the checkpoint suggests "
        "(generation_config.json; of a GGUF file its metadata, then NAME.generation_config.json). false: the defaults "
        "of the API.",
    )
    drafts: DraftSources = Field(
        default_factory=dict,
        description="Draft models for served models, smaller and with the same vocabulary, model=source.",
    )
    encoder_step_tokens: int = Field(
        2048,
        ge=1,
        le=1 << 20,
        description="Tokens an encoder reads in one step, at most (a longer text goes alone); no more than 512 where "
        "torch computes it on a CPU.",
    )
    explain: bool = Field(True, description="Whether answers are explained (/v1/explain, the option explain).")
    explain_tokens: int = Field(
        512, ge=1, le=1 << 20, description="Tokens of a text whose answer is explained, at most."
    )
    explain_gflop: int = Field(
        400,
        ge=1,
        le=1 << 40,
        description="Billions of floating-point operations that one explanation computes, at most, by an estimate from "
        "the network's shape; a core, which computes it alone, does some 50 a second.",
    )
    explain_idle_seconds: float = Field(
        600,
        ge=0,
        le=31_536_000,
        description="The network that explains a model is unloaded after so long without a request for it; 0: never.",
    )
    explain_mib: int = Field(16, ge=1, le=1 << 20, description="Size of an explanation's response in MiB, at most.")
    deterministic: bool = Field(
        False, description="Answers equal to the bit whatever else is computed beside them; costs speed in float32."
    )
    memory_mib: int = Field(
        0,
        ge=0,
        le=1 << 30,
        description="MiB for weights, caches and workspace together; 0: what is free at start.",
    )
    weights: ModelWeights = Field(
        default_factory=dict,
        description="Shares of the engine when several models are busy, model=weight; 1 for those not named.",
    )
    calibrations: CalibrationFiles = Field(
        default_factory=dict,
        description="Files of polyhead calibrate for the decisions of models, model=file, or none for no calibration; "
        "of a model that is not named here the file beside it, if there is one.",
    )
    load_seconds: float = Field(
        3600,
        ge=0,
        le=604_800,
        description="How long the load of one model may take, its download included; longer ones are ended, and the "
        "model is broken. 0: for ever.",
    )
    download_gib: int = Field(
        0,
        ge=0,
        le=1 << 20,
        description="Size in GiB of a model that is downloaded from the hub, at most; 0: what is free on the disk.",
    )
    max_requests: int = Field(256, ge=1, le=1_000_000, description="HTTP requests in flight; more are answered 429.")
    max_tokens_in_flight: int = Field(
        1 << 18, ge=1, le=1 << 40, description="Tokens of prompts and texts in flight; beyond that 429."
    )
    key_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Part of both bounds, and of the memory for requests, that one key may take, where there are "
        "several keys.",
    )
    request_seconds: float = Field(
        0,
        ge=0,
        le=86_400,
        description="How long a request may take unless it says so itself, and at most; 0: for ever.",
    )
    header_seconds: float = Field(
        10, gt=0, le=3600, description="A connection that sends no whole header for so long is closed."
    )
    body_seconds: float = Field(
        60,
        gt=0,
        le=86_400,
        description="A body must be whole so long after its header; 8 MiB in 60 s are "
        "1.2 Mbit/s, a slower line needs more.",
    )
    keep_alive_seconds: float = Field(
        75,
        gt=0,
        le=86_400,
        description="An idle connection is kept so long: longer than clients keep theirs, so that they close first.",
    )
    max_connections: int = Field(
        4096,
        ge=1,
        le=1_000_000,
        description="Open connections; beyond that the longest idle one is closed. Fewer where the system allows "
        "a process fewer files, or where memory is small.",
    )
    write_seconds: float = Field(
        30, gt=0, le=3600, description="A client that takes less than 64 KiB, or than the rest, in so long is cut off."
    )
    stall_seconds: float = Field(
        8, gt=0, le=3600, description="Not ready once work has waited so long without a step being finished."
    )
    hang_seconds: float = Field(
        60, gt=0, le=86_400, description="Not live, to be restarted, once work has waited so long without a step."
    )
    max_body_bytes: int = Field(8 << 20, ge=1024, le=1 << 30, description="Largest body of a request.")
    max_batch_texts: int = Field(16384, ge=1, le=100_000, description="Texts in one request, at most.")
    files_dir: str = Field(
        "",
        description="Folder for the files of batches (/v1/files, /v1/batches), of this server alone; empty: none are "
        "kept.",
    )
    files_mib: int = Field(
        1024, ge=1, le=1 << 30, description="MiB of all files in files_dir, at most; of one key its key_share of them."
    )
    responses_mib: int = Field(
        0,
        ge=0,
        le=1 << 20,
        description="MiB of responses that are kept in memory (store, previous_response_id of /v1/responses), at most; "
        "of one key its key_share of them; a quarter of the memory for requests at most. 0: none are kept.",
    )
    responses_seconds: int = Field(
        86_400, ge=1, le=31_536_000, description="How long a response is kept, unless others need its room."
    )
    tokenizer_threads: int = Field(2, ge=1, le=64, description="Threads that turn text into tokens.")
    drain_seconds: int = Field(30, ge=0, le=3600, description="How long a stopping server finishes what it has begun.")
    api_key: ApiKey = Field(
        SecretStr(""), description="Key that clients must send as a bearer token; empty: none is asked for."
    )
    api_keys: ApiKeys = Field(
        default_factory=dict,
        description="Further keys with a name each, name=key; the engine is shared fairly between them.",
    )
    admin_key: ApiKey = Field(
        SecretStr(""),
        description="Key of the routes under /admin, where models are loaded and unloaded; empty: no such routes.",
    )
    keys_file: str = Field(
        "",
        description="YAML file of further keys, as hashes, with what each may do and how much; read again when it "
        "changes. polyhead key NAME makes one.",
    )
    metrics_access: Literal["public", "key"] = Field(
        "public",
        description="Who may read /metrics: everybody, or clients with a key of the scope metrics (as api_key has). A "
        "page that everybody may read counts all keys together, without their names.",
    )
    allowed_hosts: Hosts = Field(
        (),
        description="Names under which clients reach the server (the header Host, any port), beside localhost and its "
        "own address; *.example.com for all below, * for any. Other names are answered 421. Empty: any name, or, bound "
        "to a loopback address, none other.",
    )
    cors_origins: WebOrigins = Field(
        (),
        description="Origins of web pages that may use the server from a browser (CORS), as in https://app.example.com "
        "or * for any. Pages of other origins are answered 403.",
    )
    playground: bool = Field(True, description="Whether browsers find a page at / to try the models on.")
    model_dir: Path = Field(default_factory=lambda: default_model_dir(), description="Where fetched models are kept.")
    vllm_metrics: bool = Field(
        False, description="Generators' metrics also under vLLM's names on /metrics, for dashboards that read those."
    )
    model_root: str = Field(
        "", description="Folder in which models named over HTTP must lie, hub ids aside; empty: model_dir."
    )
    log_format: Literal["console", "json"] = Field("console", description="One line a message, for people or machines.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged.")

    otlp_endpoint: CollectorAddress = Field(
        "",
        description="Address of an OpenTelemetry collector that takes OTLP over HTTP, as in http://collector:4318; "
        "empty: no traces.",
    )
    trace_ratio: float = Field(
        1.0, ge=0, le=1, description="Part of the requests that are traced, of those that come without a trace."
    )

    @model_validator(mode="after")
    def check_consistency(self) -> Self:
        """Check what involves several fields."""
        if self.step_tokens <= self.max_running:
            raise ValueError(
                f"step_tokens: {self.step_tokens} tokens a step for max_running {self.max_running} sequences leave "
                "none for prompts while all of them decode; it must be larger"
            )
        if self.tls_key and not self.tls_cert:
            raise ValueError("tls_key: is the key of a certificate; give tls_cert too")
        check_pools(self.pools, self.models)
        if self.drafts and not self.draft_tokens:
            raise ValueError("drafts: with draft_tokens 0 nothing is drafted; it must be at least 1")
        if self.hang_seconds < self.stall_seconds:
            raise ValueError("hang_seconds: must not be less than stall_seconds: not ready comes before dead")
        return self

    @field_validator("model_dir")
    @classmethod
    def expand_model_dir(cls, value: Path) -> Path:
        return expand_home(value)

    @field_validator("model_root", "files_dir", "keys_file", "tls_cert", "tls_key")
    @classmethod
    def check_home(cls, value: str) -> str:
        expand_home(Path(value))
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, YamlSource(settings_cls)


class YamlSource(PydanticBaseSettingsSource):
    """The file that a flag or the environment names as `config`."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:  # noqa: ARG002
        return None, field_name, False  # the whole file is read at once, below

    def __call__(self) -> dict[str, Any]:
        path = str(self.current_state.get("config", ""))
        return read_config_file(path).values if path else {}


def read_config_file(path: str) -> YamlDocument:
    """Read the settings file. Raises SettingsError for unknown settings."""
    try:
        document = yaml_file.read_yaml(path)
    except YamlFileError as error:
        raise SettingsError(f"config: {error}") from None
    unknown = [key for key in document.values if key not in Settings.model_fields or key == "config"]
    if unknown:
        raise SettingsError("\n".join(f"{document.location(key)}: {describe_unknown_setting(key)}" for key in unknown))
    return document


def read_settings(flags: Mapping[str, Any]) -> Settings:
    """Read the settings of this process. Raises SettingsError with a line for each invalid setting."""
    unknown = [describe_unknown_setting(key) for key in flags if key not in Settings.model_fields]
    found = environment_variables()
    unknown += [
        f"{found[key]}: {describe_unknown_setting(key)}" for key in sorted(found.keys() - Settings.model_fields.keys())
    ]
    if unknown:
        raise SettingsError("\n".join(unknown))
    try:
        return Settings(**flags)
    except ValidationError as error:
        raise SettingsError("\n".join(describe_setting_error(one) for one in error.errors(include_url=False))) from None


def environment_variables() -> dict[str, str]:
    """Return the environment variables with the prefix, by what follows it, in lower case."""
    names = [
        name
        for name in os.environ
        if name.upper().startswith(ENVIRONMENT_PREFIX)
        and name.upper() != URL_VARIABLE
        and not SERVICE_LINK_PATTERN.fullmatch(name.upper())
    ]
    return {name[len(ENVIRONMENT_PREFIX) :].lower(): name for name in names}


def set_library_defaults() -> None:
    """Set variables that libraries read when they are imported; must be called before that. Existing values remain."""
    for name, value in LIBRARY_DEFAULTS.items():
        os.environ.setdefault(name, value)


def default_model_dir() -> Path:
    """Return the folder for data that can be fetched again, by the XDG base directory specification."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if Path(cache).is_absolute() else Path.home() / ".cache") / "polyhead" / "models"


def describe_unknown_setting(key: str) -> str:
    close = get_close_matches(key, Settings.model_fields, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(Settings.model_fields)}"
    return f"no setting is called {key!r}; {hint}"


def describe_setting_error(error: ErrorDetails) -> str:
    """Say which setting is wrong and what would be right. Never quotes a value, which may be a key."""
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if not error["loc"]:  # several fields together: the message names them
        return message
    name = str(error["loc"][0])
    given = "NAME=SOURCE" if name == "models" else f"--{name.replace('_', '-')}"
    return f"{name}: {message} (given as {given}, {ENVIRONMENT_PREFIX}{name.upper()} or {name} in the file)"
