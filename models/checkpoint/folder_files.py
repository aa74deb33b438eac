"""The small files of a checkpoint folder: reads them and turns their errors into CheckpointError."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from ..architectures import Family, HeadSpec
from ..chat import ChatTemplate
from ..core.errors import CheckpointError, ModelError, UnsupportedError
from ..core.files import list_files
from ..core.json_files import LARGE_JSON, SMALL_JSON, JsonLimit, parse_json, read_json_bytes
from ..tokenizer import Tokenizer
from .tensor_files import TensorEntry

JsonObject = dict[str, Any]
Role = Literal["documents", "queries"]  # of the texts that a network reads
# Called with a folder, or a GGUF file and its metadata, before its tokenizer is read. Returns the bytes that it takes.
FolderCheck = Callable[[Path, JsonObject], int]
T = TypeVar("T")
MAX_STOP_TOKENS = 64  # stop tokens of a checkpoint; published models have up to ten


def accept_folder(source: Path, fields: JsonObject) -> int:  # noqa: ARG001
    """The default check: accepts every folder and GGUF file, and measures nothing."""
    return 0


@dataclass(frozen=True)
class FolderParts:
    """What a folder's files contain. An adapter may change any of it before it is described.

    `path` is the folder of the network; `root` the one that was named, which may have the network in a subfolder.
    `prompt` is that of a generator that ranks, a key of published_rerankers.RERANKERS; empty: it is none. `role`: the
    texts that the network reads, where a Router leads queries to another one than documents.
    """

    root: Path
    path: Path
    config: JsonObject
    family: Family
    spec: HeadSpec
    entries: Mapping[str, TensorEntry]
    prompt: str = ""
    role: Role = "documents"


def read_json(path: Path, default: JsonObject | None = None, kind: type = dict, limit: JsonLimit | None = None) -> Any:
    """A JSON object (or another `kind`) from a file; `default` is returned if the file is missing. CheckpointError for
    one beyond the limit (if none is given: LARGE_JSON of a config.json, SMALL_JSON of others), or that is no JSON."""
    limit = limit or (LARGE_JSON if path.name == "config.json" else SMALL_JSON)
    try:
        value = parse_json(read_json_bytes(path, limit))
    except FileNotFoundError:
        if default is not None:
            return default
        raise CheckpointError(missing_hint(path), file=str(path)) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"is no valid JSON: {error}", file=str(path)) from None
    if not isinstance(value, kind):
        raise CheckpointError(f"should hold a JSON {kind.__name__}, not {type(value).__name__}", file=str(path))
    return value


def missing_hint(path: Path) -> str:
    files = list_files(path.parent, {".gguf"})
    hint = f"; for a GGUF file name the file itself: {', '.join(files)}" if files else ""
    return f"is not there, and is needed{hint}"


def build_chat_template(file: str, sources: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template named "default", with the one named "tool_use". Errors name the file."""
    source, tool_use = sources.get("default"), sources.get("tool_use")
    if not isinstance(source, str):
        return None
    tools = tool_use if isinstance(tool_use, str) else ""
    try:
        return ChatTemplate(source, tool_use=tools, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    except ModelError as error:
        raise CheckpointError(str(error), file=file) from None


def valid_tokens(tokens: Iterable[object], vocab_size: int) -> frozenset[int]:
    """The token ids among these values; booleans are no ids. A size that is no number is refused with the network."""
    if type(vocab_size) is not int:
        return frozenset()
    return frozenset(token for token in tokens if type(token) is int and 0 <= token < vocab_size)


def parse_config(file: str, make: Callable[[], T]) -> T:
    """The result of `make`, which reads a configuration; its failures become CheckpointError."""
    try:
        return make()
    except KeyError as error:
        raise CheckpointError(f"{error.args[0]} is missing", file=file) from None
    except ModelError as error:
        raise UnsupportedError(str(error), file=file) from None
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise CheckpointError(f"a value is of the wrong kind: {error}", file=file) from None
