"""Commands on one checkpoint: `polyhead explain | heads | quality | calibrate | verify-determinism | quantize`.

They import their work late, as service.cli.main does.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer()
Method = Literal[
    "auto", "attention", "attention_rollout", "attention_flow", "gradient_x_input", "integrated_gradients", "occlusion"
]
Source = Annotated[str, typer.Argument(help="A checkpoint, or a quick-start model.", show_default=False)]
Plot = Annotated[Path | None, typer.Option(help="A figure to write: .svg, .pdf or .png.")]
AskedUrl = Annotated[str, typer.Option(help="A server to ask; by default the model is loaded in this process.")]
AskedKey = Annotated[str, typer.Option(envvar="POLYHEAD_API_KEY", help="Key to send, if the server requires one.")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON, to be read by programs.")]


def report_failure(message: object, code: int = 1) -> typer.Exit:
    from ..core.logs import write_lines

    write_lines(f"polyhead: {message}\n")
    return typer.Exit(code)


def print_text(text: str) -> None:
    """Print text that may contain labels and tokens of a model, with control characters escaped."""
    from ..core.logs import escape_for_terminal

    typer.echo(escape_for_terminal(text, sys.stdout))


@contextmanager
def exit_on_error() -> Iterator[None]:
    """End the command with a sentence and an exit code if settings or a checkpoint are wrong."""
    from polyhead.models.core.errors import ModelError

    from ..config.settings import SettingsError

    try:
        yield
    except SettingsError as error:
        raise report_failure(error, 2) from None
    except ModelError as error:
        raise report_failure(error) from None


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """End the command at Ctrl-C without a half line and without a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("\r\x1b[K", nl=False, err=True)
        raise report_failure("stopped; nothing is written", 130) from None


def print_progress(what: str, done: int, total: int) -> None:
    """Write progress as one line that is overwritten, to standard error."""
    typer.echo(f"\r\x1b[K{what}: {done} of {total}" if done < total else "\r\x1b[K", nl=False, err=True)


@app.command()
def explain(
    model: Source,
    text: Annotated[str, typer.Argument(help="The text that the model reads.", show_default=False)],
    second: Annotated[
        str, typer.Argument(help="The second text of a pair, or the text that a vector is compared with.")
    ] = "",
    method: Annotated[
        Method, typer.Option(help="The method of explanation; auto: the one that suits the model.")
    ] = "auto",
    target: Annotated[
        str, typer.Option(help="A label, a word, a text, or a JSON object; by default the most likely.")
    ] = "",
    layers: Annotated[str, typer.Option(help="Layers of attention, as in 0,5 or 0-3; by default all.")] = "",
    heads: Annotated[str, typer.Option(help="Heads of attention, in the same form.")] = "",
    steps: Annotated[int, typer.Option(min=1, help="Steps of integrated gradients.")] = 50,
    baseline: Annotated[str, typer.Option(help="The baseline input: auto, pad, mask, unk, eos or zero.")] = "auto",
    window: Annotated[int, typer.Option(min=1, help="Neighbouring tokens that occlusion hides together.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens that a generator writes.")] = 16,
    plot: Plot = None,
    as_json: AsJson = False,
    url: AskedUrl = "",
    key: AskedKey = "",
) -> None:
    """Explain an answer of a model: which tokens count, or where its heads attend.  No server is needed; with --url,
    MODEL is the name of a model there.

    With --json it prints the answer of POST /v1/explain. docs/explain.md says what each method shows, and what it does
    not.
    """
    from ..config import settings

    settings.set_library_defaults()
    from .explain_command import ExplainArguments
    from .explain_command import explain_model as work

    options = {"method": method, "steps": steps, "baseline": baseline, "window": window, "max_tokens": max_tokens}
    selections = {"target": target, "layers": layers, "heads": heads}
    options |= {name: value for name, value in selections.items() if value}
    with exit_on_error(), exit_on_interrupt():
        work(
            ExplainArguments(model, (text, second) if second else (text,), options, plot, as_json, url, key), print_text
        )


@app.command()
def heads(
    model: Source,
    data: Annotated[Path, typer.Argument(help="Labelled texts: .jsonl, .csv, .tsv or .txt.", show_default=False)],
    plot: Plot = None,
    limit: Annotated[int, typer.Option(min=0, help="Rows to take, evenly over the file; 0: all.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure how much worse a model is without each of its heads, one at a time, on labelled texts.

    Fields of a row: text and label, and text_pair where pairs are read; tokens and tags; question, context and answer;
    text and translation; text alone for generation and filling in; text, text_pair and score for vectors.  A label is a
    name or an index.
    """
    from ..config import settings

    settings.set_library_defaults()
    from .head_importance import HeadsArguments, rank_heads

    with exit_on_error(), exit_on_interrupt():
        rank_heads(HeadsArguments(model, data, limit, plot, as_json), print_text, print_progress)


@app.command()
def quality(
    source: Source,
    text: Annotated[str, typer.Option(help="A file of text to read instead of the one that comes with polyhead.")] = "",
    precision: Annotated[
        Literal["auto", "float32", "int8", "int4"],
        typer.Option(help="The precision that is compared; auto: as it would be served."),
    ] = "auto",
    tokens: Annotated[
        int, typer.Option(min=0, max=8192, help="Tokens of the text to read; 0: 448 for a generator, else about 2,048.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure how far a model as it would be served is from float32 of the same file.

    For a generator: KL divergence of next-token distributions, how often the most likely token is the same, perplexity
    of both.  For a classifier, a ranker or a token head: how often labels are the same, the largest change of a
    probability.  For an embedder: the cosine of vectors.  For all of them: the layer that adds most error.
    """
    from ..config import settings

    settings.set_library_defaults()
    from .quality import QualityArguments
    from .quality import measure_quality as work

    with exit_on_error(), exit_on_interrupt():
        work(QualityArguments(source, text, precision, tokens, as_json), print_text, print_progress)


@app.command()
def calibrate(
    model: Source,
    rows: Annotated[
        Path,
        typer.Argument(help="Labelled questions, as JSON lines with state, questions, answers.", show_default=False),
    ],
    questions: Annotated[Path | None, typer.Option(help="A YAML file of questions for rows without their own.")] = None,
    method: Annotated[
        Literal["auto", "temperature", "platt", "isotonic", "bias"],
        typer.Option(help="The method; auto: the one with the lowest cross-validated log loss."),
    ] = "auto",
    by: Annotated[Literal["type", "question"], typer.Option(help="What gets a calibration of its own.")] = "type",
    precision: Annotated[
        list[float] | None,
        typer.Option(help="A share of right answers, as 0.99: above which confidence, and for how many decisions."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="The file to write; by default beside the model.")] = None,
    url: AskedUrl = "",
    name: Annotated[str, typer.Option(help="The model's name on that server; by default its only one.")] = "",
    key: AskedKey = "",
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Calibrate the probabilities of a model's decisions on labelled rows, and write a file that serve applies.

    A row is {"state": ..., "questions": {...}, "answers": {...}}, questions as /v1/systemone has them. An answer is
    true or false, the name of an option, or a level from 0. Half of the texts is for fitting, the other half for
    measuring: accuracy, Brier score, expected calibration error (15 bins of as many answers) and log loss, before and
    after.
    """
    from ..config import settings

    settings.set_library_defaults()
    from .calibrate_command import CalibrateArguments, calibrate_model

    arguments = CalibrateArguments(
        model, rows, questions, method, by, precision or (), output, url, name, key, plot, as_json
    )
    with exit_on_error(), exit_on_interrupt():
        calibrate_model(arguments, print_text, print_progress)


@app.command("verify-determinism")
def verify_determinism(
    source: Annotated[str, typer.Argument(help="A checkpoint, as for serve.", show_default=False)],
    deterministic: Annotated[bool, typer.Option(help="Use the mode that guarantees equal answers.")] = True,
    precision: Annotated[str, typer.Option(help="auto, float32, bfloat16, int8 or int4.")] = "auto",
    count: Annotated[int, typer.Option(min=2, help="Number of prompts of random tokens.")] = 200,
    prompts: Annotated[Path | None, typer.Option(help="A file of prompts to use instead, one per line.")] = None,
) -> None:
    """Compare answers computed in batches with those computed alone, bit by bit."""
    from ..config import settings

    settings.set_library_defaults()
    from . import determinism

    chosen = {"deterministic": deterministic, "precision": precision}
    with exit_on_error():
        read = settings.read_settings({"models": {"verified": source}, **chosen})
        loaded = determinism.load_checkpoint(read)
        requests = determinism.read_requests(loaded, prompts) if prompts else determinism.random_requests(loaded, count)
        verdicts = determinism.verify(loaded, read, requests, print_progress)
    print_text(determinism.format_table(verdicts))
    if deterministic and any(verdict.equal < verdict.total for verdict in verdicts):
        raise report_failure("answers depend on the batch")


@app.command()
def quantize(
    source: Annotated[str, typer.Argument(help="A folder of safetensors, or an id on the hub.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="The folder to write, new or empty.", show_default=False)],
    precision: Annotated[Literal["int8", "int4"], typer.Option(help="Precision of the matrices.")] = "int8",
    text: Annotated[
        Path | None, typer.Option(help="For int4: a file of text similar to the model's input; 100 KB are enough.")
    ] = None,
) -> None:
    """Write a checkpoint with smaller weights in the compressed-tensors format; serve it like any other.

    int8 takes 9 bits per weight and gives the same bits as --precision int8 does at load time. int4 takes 4.5 bits and
    costs some quality: SmolLM2-135M's next-token distributions then differ from float32's by 0.10 nats (KL), by 0.002
    with int8.  It takes minutes, longer for larger models.  Embeddings, and an output layer that shares them, stay
    unchanged.
    """
    from ..config import settings

    settings.set_library_defaults()
    from .quantize_command import quantize as work

    with exit_on_error():
        print_text(work(source, out, precision, text, print_progress))
