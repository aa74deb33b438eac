"""Generators that were trained to answer whether a document fits a query, in the prompts of their model cards.

A folder shows by its name alone that it is one: its weights are those of any generator. What is after `#` in a source
says it too, and is needed where the name says nothing:

| source | what is served |
|---|---|
| `folder` | a reranker if its name is one of a published reranker, else a generator |
| `folder#rank` | a reranker, in the prompt that belongs to its name |
| `folder#rank=qwen3` | a reranker, in that prompt |
| `folder#generate` | a generator |
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..chat.pair_prompt import PairTemplate
from ..core.errors import CheckpointError, UnsupportedError, show_value
from ..core.files import read_beginning
from ..tokenizer import Tokenizer
from .folder_files import JsonObject

TASK_MARK = "#"
MAX_NAME = 1000  # characters of a name in which that of a reranker is looked for
CARD, CARD_TASK = "README.md", re.compile(r"^pipeline_tag:\s*[\"']?text-ranking\b", re.MULTILINE)
CARD_BYTES = 1 << 20  # of a card's beginning, in which its fields are looked for


@dataclass(frozen=True)
class PublishedReranker:
    """`names` matches the names of its folders. A prompt consists of `before`, `texts` and `after`, whose pieces are
    tokenised each on its own; only texts have {query} and {document}, and no control tokens. With `begins` the begin
    token is the first, if the vocabulary has one other than padding.

    The score is the logit of the first of `answers` at the last token, less that of the second if there are two.
    """

    names: re.Pattern[str]
    before: tuple[str, ...]
    texts: tuple[str, ...]
    after: tuple[str, ...]
    answers: tuple[str, ...]
    begins: bool = False


RERANKERS: Mapping[str, PublishedReranker] = {
    "qwen3": PublishedReranker(  # Zhang et al. 2025, arXiv:2506.05176
        names=re.compile(r"qwen3-reranker", re.IGNORECASE),
        before=(
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
            'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
        ),
        texts=(
            "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
            "<Query>: {query}\n<Document>: {document}",
        ),
        after=("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",),
        answers=("yes", "no"),
    ),
    "bge": PublishedReranker(  # of the package FlagEmbedding: FlagLLMReranker
        names=re.compile(r"bge-reranker-v2-gemma", re.IGNORECASE),
        before=(),
        texts=("A: {query}", "\n", "B: {document}"),
        after=(
            "\n",
            "Given a query A and a passage B, determine whether the passage contains an answer to the query by "
            "providing a prediction of either 'Yes' or 'No'.",
        ),
        answers=("Yes",),
        begins=True,
    ),
    "mxbai": PublishedReranker(  # of the package mxbai-rerank: MxbaiRerankV2
        names=re.compile(r"mxbai-rerank-\w+-v2", re.IGNORECASE),
        before=(
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
            "<|im_start|>user\n",
        ),
        texts=("query: {query}", "\n", "document: {document}"),
        after=(
            "\n",
            "You are a search relevance expert who evaluates how well documents match search queries. For each "
            "query-document pair, carefully analyze the semantic relationship between them, then provide your binary "
            "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:",
            "<|im_end|>\n<|im_start|>assistant\n",
        ),
        answers=("1", "0"),
    ),
}


@dataclass(frozen=True)
class WantedTask:
    """What a source says a generator is to do; empty: what follows from its folder. `prompt` is a key of RERANKERS."""

    task: Literal["", "generate", "rank"] = ""
    prompt: str = ""


FOLDER_TASK = WantedTask()
WANTED_TASKS: Mapping[str, WantedTask] = {
    "generate": WantedTask("generate"),
    "rank": WantedTask("rank"),
    **{f"rank={name}": WantedTask("rank", name) for name in RERANKERS},
}


def split_task(source: str, exists: Callable[[str], bool]) -> tuple[str, WantedTask]:
    """A source without what says its task, and that task. A folder whose own name has the mark is that folder.
    CheckpointError for a task that is not known."""
    base, mark, name = source.rpartition(TASK_MARK)
    if not mark or exists(source):
        return source, FOLDER_TASK
    if name not in WANTED_TASKS:
        known = ", ".join(f"{TASK_MARK}{task}" for task in WANTED_TASKS)
        raise CheckpointError(f"{TASK_MARK}{name[:MAX_NAME]} after a source is not known; known are {known}")
    return base, WANTED_TASKS[name]


def find_prompt(root: Path, config: JsonObject, wanted: WantedTask) -> str:
    """The prompt of a generator that ranks, a key of RERANKERS; empty: it generates. UnsupportedError if it is to rank
    and its prompt is not known."""
    if wanted.task == "generate" or wanted.prompt:
        return wanted.prompt
    found = [key for key, each in RERANKERS.items() if any(map(each.names.search, list_names(root, config)))]
    if len(found) == 1:
        return found[0]
    if wanted.task == "rank":
        problem = f"its name is that of {' and of '.join(found)}" if found else "its name is that of no known reranker"
        message = f"{problem}, so its prompt must be named after the source: {describe_choices()}"
        raise UnsupportedError(message, file=str(root))
    return ""


def describe_choices() -> str:
    return " or ".join(f"{TASK_MARK}rank={name}" for name in RERANKERS)


def list_names(root: Path, config: JsonObject) -> Iterator[str]:
    """The names of a folder: its own, that of its repository if it is in the cache of the hub, and that of its
    configuration."""
    yield root.resolve().name
    yield next((folder.name for folder in root.parents if folder.name.startswith("models--")), "")
    stored = config.get("_name_or_path")
    yield stored[:MAX_NAME] if isinstance(stored, str) else ""


def is_ranking_card(root: Path) -> bool:
    """Whether a folder's model card says that the model ranks texts. Nothing but a warning depends on it: a card that
    cannot be read says nothing, and of a long one the beginning is read."""
    try:
        head = read_beginning(root / CARD, CARD_BYTES).replace(b"\r", b"\n").partition(b"\n---")[0]
    except (OSError, CheckpointError):
        return False
    return bool(CARD_TASK.search(head.decode(errors="replace")))


def build_pair_template(key: str, tokenizer: Tokenizer) -> PairTemplate:
    """The prompt of a reranker as the tokens around a query and a document."""
    reranker = RERANKERS[key]
    begin = tokenizer.bos_id if reranker.begins and tokenizer.bos_id != tokenizer.pad_id else None
    before, after = (
        tuple(id for piece in pieces for id in tokenizer.encode(piece, special=False).ids)
        for pieces in (reranker.before, reranker.after)
    )
    return PairTemplate(before if begin is None else (begin, *before), reranker.texts, after)


def find_answer_tokens(file: Path, key: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens whose logits are the score. UnsupportedError if an answer is no token of the vocabulary."""
    tokens = []
    for answer in RERANKERS[key].answers:
        ids = tokenizer.encode(answer, special=False).ids
        if len(ids) != 1:
            message = f"its prompt asks for the answer {show_value(answer)}, which is {len(ids)} tokens, not one"
            raise UnsupportedError(f"{message}; the prompt {key} does not belong to this vocabulary", file=str(file))
        tokens.append(ids[0])
    return tuple(tokens)
