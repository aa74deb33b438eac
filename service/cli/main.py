"""The command line: `polyhead serve | config | key | chat | classify | embed | models | train | check | ...`.

Imports are inside functions here and in service.cli.checkpoint_commands, so that `--help` does not import torch.
"""

import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..core.addresses import DEFAULT_URL, URL_VARIABLE
from . import checkpoint_commands as cli_checkpoint
from .checkpoint_commands import exit_on_error, print_text, report_failure

app = typer.Typer(
    help="Encoder classifiers and decoder generators behind one HTTP server.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
Url = Annotated[str, typer.Option(envvar=URL_VARIABLE, help="Address of the server.")]
Key = cli_checkpoint.AskedKey
ModelName = Annotated[str, typer.Option("--model", help="Name of the model; by default the first for this task.")]
Texts = Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", show_default=False)]
PIPED_TOKENS = 1024  # of the answer to one question, which may be part of a script
bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")
app.add_typer(cli_checkpoint.app)


def show_version(requested: bool) -> None:
    if requested:
        from ..core.version import VERSION

        typer.echo(f"polyhead {VERSION}")
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=show_version, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def serve(ctx: typer.Context) -> None:
    """Serve models, NAME=SOURCE each; without any, the quick-start ones."""
    from ..config import flags, settings
    from ..core import logs

    with exit_on_error():
        chosen = settings.read_settings(flags.parse_flags(ctx.args))
        settings.set_library_defaults()
        status = run_server(chosen)
    # At once: a thread of a library that still computes would use what the interpreter frees at its end, and crash.
    logs.exit_process(status)


def run_server(chosen: Any) -> int:
    gc.disable()  # imports make no garbage, and collecting takes a tenth of their time; serving enables it again
    from ..core import logs
    from ..resources import capacity

    if why := capacity.explain_shortage():  # else the process is killed while torch is imported
        raise report_failure(why)
    logs.configure_logging(chosen.log_format, chosen.log_level)
    logging.getLogger(__name__).info("starting: torch and the other libraries are imported, which can take 15 s")
    return int(choose_server(chosen)(chosen, traces=choose_tracing(chosen)))


def choose_server(chosen: Any) -> Any:
    """Return the function that serves: in one process, or by replicas on Ray."""
    if not chosen.ray:
        from ..config.settings import SettingsError
        from ..server.assembly import serve

        if chosen.pools or chosen.replicas != "1":
            setting = "pools" if chosen.pools else "replicas"
            raise SettingsError(f"{setting}: one process serves all models once; --ray serves replicas of them")
        return serve
    try:
        from ..fleet import ray_app as scale
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise report_failure("ray: Ray is not installed here; pip install 'polyhead[ray]' does it") from None
    return scale.serve_on_ray


def choose_tracing(chosen: Any) -> Any:
    """Return the tracing of requests.  Without an endpoint, OpenTelemetry is not imported."""
    if not chosen.otlp_endpoint:
        from ..api.access.access_log import NO_TRACING

        return NO_TRACING
    from ..server.traces import OtelTraces

    return OtelTraces(chosen)


@contextmanager
def connect_client(url: str, key: str) -> Iterator[Any]:
    """A client of the server at `url`.  Its errors end the command."""
    from .client import ApiClient, ClientError

    client = ApiClient(url, key)
    try:
        yield client
    except ClientError as error:
        raise report_failure(error) from None
    finally:
        client.close()


@app.command()
def chat(
    text: Texts = None,
    model: ModelName = "",
    url: Url = DEFAULT_URL,
    key: Key = "",
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Longest answer in tokens; 0: up to the context's end. "
            f"By default {PIPED_TOKENS} for one question, else 0.",
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, help="0 is greedy; by default as the checkpoint suggests.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Tokens to sample from; by default as the checkpoint suggests.")
    ] = None,
    system: Annotated[str, typer.Option(help="System message of the conversation.")] = "",
    markdown: Annotated[bool, typer.Option(help="Render Markdown in a terminal.")] = True,
) -> None:
    """Chat with a generator, or answer one question: a text, or standard input.

    A line that ends in a backslash is continued, and three double quotes begin and end a text of several lines.
    Ctrl-C stops an answer, Ctrl-D leaves.
    """
    from .chat_options import ChatOptions

    chosen = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens or None}
    sampling = {name: value for name, value in chosen.items() if value is not None}
    options = ChatOptions(model, system, sampling, markdown, PIPED_TOKENS if max_tokens is None else 0)
    with connect_client(url, key) as client:
        if not text and sys.stdin.isatty():
            from . import conversation

            conversation.hold_conversation(client, options)
        else:
            from . import terminal

            terminal.answer_question(client, options, " ".join(text or [sys.stdin.read().removesuffix("\n")]))


@app.command()
def classify(text: Texts = None, model: ModelName = "", url: Url = DEFAULT_URL, key: Key = "") -> None:
    """Label texts, or the lines of standard input."""
    from . import terminal

    with connect_client(url, key) as client:
        terminal.classify(client, model, text or [])


@app.command()
def embed(text: Texts = None, model: ModelName = "", url: Url = DEFAULT_URL, key: Key = "") -> None:
    """Turn texts, or the lines of standard input, into vectors."""
    from . import terminal

    with connect_client(url, key) as client:
        terminal.embed(client, model, text or [])


@app.command()
def decide(
    questions: Annotated[
        Path, typer.Argument(help="YAML or JSON: questions, perhaps model and instructions.", show_default=False)
    ],
    rows: Annotated[
        Path, typer.Argument(help=".jsonl, .csv, .tsv, or lines of text; - is standard input.", show_default=False)
    ],
    output: Annotated[Path | None, typer.Option(help="File of answers; by default standard output.")] = None,
    field: Annotated[str, typer.Option(help="Field of a row to ask about; by default state, or the whole row.")] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Continue the file of --output.")] = False,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Rows that are asked at a time.")] = 32,
    url: Url = DEFAULT_URL,
    key: Key = "",
) -> None:
    """Ask questions about each row of a file; a line with the answers for each row, in order.

    Progress and a summary go to standard error. The exit code is 1 if rows failed.
    """
    from .client import ClientError
    from .decide_command import DecideArguments
    from .decide_command import decide as work

    arguments = DecideArguments(questions, rows, output, field, resume, concurrency, url, key)
    with exit_on_error():
        try:
            code = work(arguments)
        except ClientError as error:
            raise report_failure(error) from None
    raise typer.Exit(code)


@app.command()
def models() -> None:
    """Fetch the quick-start models, and print their sources."""
    from ..config import settings
    from ..runtime import quickstart

    with exit_on_error():
        folder = settings.read_settings({}).model_dir
        quickstart.fetch_all(folder)
    for name, source in quickstart.sources(folder).items():
        typer.echo(f"{name}={source}")


@app.command()
def download(
    source: Annotated[
        list[str],
        typer.Argument(
            help="ORGANIZATION/NAME, with @REVISION, :QUANTISATION or /FILE.gguf after it.", show_default=False
        ),
    ],
) -> None:
    """Download models from the hub into its cache, and print where they are.  Only files that are read are downloaded.

    An interrupted download is continued.  HF_ENDPOINT names a mirror, HF_TOKEN a token, HF_HOME the cache's folder.
    """
    from ..config import settings

    settings.set_library_defaults()
    from polyhead.models.checkpoint.hub import DownloadOptions
    from polyhead.models.checkpoint.source_policy import ANY_SOURCE

    with exit_on_error(), cli_checkpoint.exit_on_interrupt():
        max_bytes = settings.read_settings({}).download_gib << 30
        for each in source:
            options = DownloadOptions(partial(cli_checkpoint.print_progress, f"{each}, bytes"), max_bytes)
            print_text(str(replace(ANY_SOURCE, downloads=options).locate(each)))


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A TOML file, as in training/recipes.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Folder for the result; by default runs/NAME.")] = None,
    smoke: Annotated[
        bool, typer.Option(help="A test of seconds: a tiny network, a few generated texts, no downloads.")
    ] = False,
    resume: Annotated[bool, typer.Option(help="Continue the run that is saved in that folder.")] = False,
) -> None:
    """Train by a recipe."""
    with import_training() as follow:
        from .checkpoint_source import try_tokenizer_apart

        folder = out or Path("runs") / recipe.stem
        result = follow.train(recipe, folder, smoke=smoke, resume=resume, folder_check=try_tokenizer_apart)
    for name, value in result.items():
        print_text(f"{name}: {value}")


@app.command()
def evaluate(
    folder: Annotated[Path, typer.Argument(help="A checkpoint, or an adapter's folder.", show_default=False)],
    data: Annotated[Path, typer.Argument(help="A recipe, for its held-out part; or a text.", show_default=False)],
) -> None:
    """Measure a checkpoint on texts."""
    with import_training() as follow:
        from .checkpoint_source import try_tokenizer_apart

        figures = follow.evaluate(folder, data, try_tokenizer_apart)
    for name, value in figures.items():
        print_text(f"{name}: {value:.4f}")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The folder of a training run.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="The folder to write, new or empty.", show_default=False)],
) -> None:
    """Write the current result of a training run as a folder that can be served."""
    with import_training() as follow:
        from .checkpoint_source import try_tokenizer_apart

        follow.export(run, out, try_tokenizer_apart)
    print_text(str(out))


@contextmanager
def import_training() -> Iterator[Any]:
    """Import the training commands.  A wrong recipe ends the command."""
    from ..config import settings

    settings.set_library_defaults()
    from polyhead.training.loop.errors import RecipeError
    from polyhead.training.recipes import commands as follow

    with exit_on_error():
        try:
            yield follow
        except RecipeError as error:
            raise report_failure(error) from None


@app.command()
def families(
    every: Annotated[bool, typer.Option("--all", help="Also what is not loaded, and what it needs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, to be read by programs.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="As the page docs/families.md.")] = False,
) -> None:
    """List the families of checkpoints that are loaded, and their heads."""
    from ..config import settings

    settings.set_library_defaults()
    from . import families as work

    if markdown:
        typer.echo(work.as_markdown(), nl=False)
    elif as_json:
        typer.echo(work.as_json(every=every))
    else:
        typer.echo(work.format_architectures() if every else work.format_families())


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    options_metavar="[FLAGS OF SERVE]",
    epilog="Takes [NAME=]SOURCE... and the flags of serve; serve --help lists them.",
)
def check(ctx: typer.Context) -> None:
    """Show what models would take in memory, and what to change if it is too much.  No weights are read."""
    from ..config import flags, settings
    from ..resources import capacity

    if why := capacity.explain_shortage():
        raise report_failure(why)
    from ..runtime import quickstart
    from .check import check_models, parse_sources

    with exit_on_error():
        values = flags.parse_flags(ctx.args)
        if "models" not in values:
            raise settings.SettingsError("name a model to check: polyhead check SOURCE")
        chosen = settings.read_settings(values | {"models": parse_sources(values["models"])})
        result = check_models(quickstart.with_sources(chosen))
    if result.report:
        print_text(result.report)
    for sentence in result.errors:
        report_failure(sentence)
    if not result.fits:
        raise typer.Exit(1)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    options_metavar="[OPTIONS] [FLAGS OF SERVE]",
    epilog="Takes NAME=SOURCE... and the flags of serve; serve --help lists them.",
)
def doctor(
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, to be read by programs.")] = False,
) -> None:
    """Show what is installed, what computes, what is slow or keeps a server from starting, and what to change."""
    from ..config import flags, settings

    settings.set_library_defaults()
    from . import doctor as work

    with exit_on_error():
        findings = work.examine(settings.read_settings(flags.parse_flags(ctx.args)))
    print_text(work.as_json(findings) if as_json else work.as_text(findings))
    if not work.is_healthy(findings):
        raise typer.Exit(1)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    options_metavar="[OPTIONS] [FLAGS OF SERVE]",
    epilog="Takes NAME=SOURCE... and the flags of serve; serve --help lists them.",
)
def config(
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, to be read by programs.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="The JSON schema of the file of --config instead.")] = False,
) -> None:
    """Show the settings of serve, and where each value comes from.

    The output is a settings file with the same values, without its keys.
    """
    from ..api.access.auth import Keys
    from ..config import effective_settings as effective
    from ..config import flags, settings

    if schema:
        typer.echo(effective.settings_schema())
        return
    with exit_on_error():
        values = flags.parse_flags(ctx.args)
        chosen = settings.read_settings(values)
        origins, keys = effective.find_origins(values, chosen), Keys(chosen).all
    typer.echo((effective.as_json if as_json else effective.as_yaml)(chosen, origins, keys))


@app.command()
def key(
    name: Annotated[str, typer.Argument(help="Name of the key's owner, for logs and metrics.", show_default=False)],
    scopes: Annotated[str, typer.Option(help="Of inference, models, metrics and admin.")] = "inference,models",
    models: Annotated[str, typer.Option(help="Models it may use; * matches any characters.")] = "*",
    requests: Annotated[int, typer.Option("--requests-per-minute", min=0, help="0: no limit.")] = 0,
    tokens: Annotated[int, typer.Option("--tokens-per-minute", min=0, help="Of prompts and answers; 0: no limit.")] = 0,
    priority: Annotated[
        int | None,
        typer.Option(
            "--max-priority", min=0, max=100, help="That its requests may ask for; by default 0 beside other keys."
        ),
    ] = None,
    stdin: Annotated[
        bool, typer.Option("--stdin", help="Read the key from standard input instead of generating one.")
    ] = False,
) -> None:
    """Generate a key: its entry for the file of --keys-file goes to standard output, the key itself to standard error.

    polyhead key search >> keys.yaml adds one.  The key is shown only once: the file has its hash.
    """
    import yaml

    from ..config import keys

    given = sys.stdin.readline().strip() if stdin else keys.generate_key()
    limits = {"requests_per_minute": requests, "tokens_per_minute": tokens}
    permissions = {"scopes": split_list(scopes), "models": split_list(models)} | {
        what: most for what, most in limits.items() if most
    }
    permissions |= {} if priority is None else {"max_priority": priority}
    with exit_on_error():
        entry = keys.make_key_entry(name, given, permissions)
    if not stdin:
        typer.echo(f"the key of {name}, shown this once: {given}", err=True)
    typer.echo(yaml.safe_dump(entry, sort_keys=False), nl=False)


def split_list(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


@bench.callback()
def bench_options() -> None:
    pass


@bench.command("machine")
def bench_machine(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, to be read by programs.")] = False,
) -> None:
    """Measure bytes and operations a second of this machine, by threads: the bounds of any model here."""
    from ..config import settings

    settings.set_library_defaults()
    from .machine_bench import measure_machine

    report = measure_machine()
    typer.echo(report.as_json() if as_json else report.as_text())


def main() -> None:
    """The console script.  Its log and tracebacks are escaped for a terminal here, in one place for all commands."""
    from ..core import logs

    logs.configure_commands()
    typer.main.get_command(app)()  # app() would replace the hook for tracebacks with one of its own
