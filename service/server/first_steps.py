"""What a server prints when it is ready: the page, the models, a request to copy, and a command for the terminal."""

import json
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.addresses import DEFAULT_URL
from ..core.model import Model
from ..core.request import Task

# Addresses that a server listens on, and those by which this machine reaches it.
REACHED_BY = {"://0.0.0.0:": "://127.0.0.1:", "://[::]:": "://[::1]:"}
SHOWN_TASKS: Sequence[Task] = ("generate", "classify", "embed")  # those with a short example, the first one first
QUESTION, SENTENCE = "What is the capital of Japan?", "A warm, funny, beautifully acted film."
COMMANDS: Mapping[str, str] = {
    "generate": "chat",
    "classify": f'classify "{SENTENCE}"',
    "embed": f'embed "{SENTENCE}"',
    "": "--help",
}


@dataclass(frozen=True)
class ServerAddress:
    """The address in the log. `requires_key`: requests need a key. `has_page`: the playground is at /."""

    url: str
    requires_key: bool
    has_page: bool

    @property
    def local_url(self) -> str:
        """The address by which clients on this machine reach the server."""
        for listening, reached in REACHED_BY.items():
            if listening in self.url:
                return self.url.replace(listening, reached)
        return self.url


def describe_first_steps(address: ServerAddress, models: Sequence[Model], program: str) -> str:
    """Return the lines that a person needs after the start. `program` is how the command line was called."""
    shown = choose_example(models)
    rows = {"page": f"{address.local_url}/"} if address.has_page else {}
    rows |= {
        "models": ", ".join(f"{model.name} ({model.task.replace('_', ' ')})" for model in models),
        "request": example_request(address, shown),
        "terminal": example_command(address, shown, program),
    }
    width = max(map(len, rows)) + 2
    return "".join(f"  {label:<{width}}{text}\n" for label, text in rows.items())


def choose_example(models: Sequence[Model]) -> Model | None:
    """Return the model of the examples; None if none of them has a task with an example."""
    shown = [model for model in models if model.task in SHOWN_TASKS]
    return min(shown, key=lambda model: SHOWN_TASKS.index(model.task), default=None)


def example_request(address: ServerAddress, model: Model | None) -> str:
    """Return a curl command that `model` answers, or that lists the models."""
    key = ' -H "Authorization: Bearer $POLYHEAD_API_KEY"' if address.requires_key else ""
    if model is None:
        return f"curl -s{key} {address.local_url}/v1/models"
    path, body = example_body(model)
    content = shlex.quote(json.dumps(body))
    return f"curl -s{key} {address.local_url}{path} -H 'content-type: application/json' -d {content}"


def example_body(model: Model) -> tuple[str, dict[str, Any]]:
    """Return a path and a body."""
    if model.task == "classify":
        return f"/models/{model.name}/predict", {"inputs": SENTENCE}
    if model.task == "embed":
        return "/v1/embeddings", {"model": model.name, "input": SENTENCE}
    if model.chat is None:
        return "/v1/completions", {"model": model.name, "prompt": SENTENCE, "max_tokens": 30}
    question = {"role": "user", "content": QUESTION}
    return "/v1/chat/completions", {"model": model.name, "temperature": 0, "messages": [question]}


def example_command(address: ServerAddress, model: Model | None, program: str) -> str:
    """Return a call of the command line that `model` answers."""
    task = model.task if model and (model.task != "generate" or model.chat) else ""
    greedy = " --temperature 0" if task == "generate" and model and "temperature" not in model.sampling else ""
    url = f" --url {address.local_url}" if task and address.local_url != DEFAULT_URL else ""
    return f"{program} {COMMANDS[task]}{greedy}{url}"


def program_name(started: str, folder: Path) -> str:
    """Return how the command line is called from `folder`, if it was started by the path `started`.

    It is the bare name where the search path leads to the same file, else a path.
    """
    path = Path(started)
    if path.name == "__main__.py":
        return f"{relative_path(Path(sys.executable), folder)} -m polyhead"
    found = shutil.which(path.name)
    if found and (path.name == started or Path(found).resolve() == path.resolve()):
        return path.name
    return relative_path(path.absolute(), folder)


def relative_path(path: Path, folder: Path) -> str:
    return shlex.quote(str(path.relative_to(folder) if path.is_relative_to(folder) else path))
