"""Questions to generators: the prompts, and the reads of the probabilities of labels after them.

Nothing is generated. All questions of a call begin with the same text, which is computed once and found in the cache by
the others.
"""

import math
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..core.errors import BadRequest, TooMany
from ..core.model import Model
from ..core.request import Generate, Sampling, Terms
from ..core.text_limits import check_characters, check_token_ids
from ..resources.request_memory import BYTES_PER_SHARED_TOKEN, BYTES_PER_TEXT, BYTES_PER_TOKEN
from ..text.answer_delta import Usage
from ..text.chat_prompt import template_variables
from ..text.generation_request import ChatMessages, ReasoningSettings
from ..text.prompts import check_length, encode_chat, reasoning_state, render_chat
from .label_tree import LETTERS, LabelTree, Path, Spellings, choose_labels, log_sum
from .option_orders import Order, choose_orders
from .question import DecisionRequest, OptionScores, Question

ANSWER_HINTS = {
    "predicate": "Answer only Yes or No.",
    "choice": "Answer only with the letter of the right option.",
    "score": "Answer only with the number of the right level.",
}
MAX_READS = 4096  # of one call
MAX_CALL_TOKENS = 1 << 22  # tokens of all prompts of one call
TAIL_TOKENS = 8  # the last tokens of a prompt, with which labels are tokenised
NO_REASONING = ReasoningSettings(mode="off")
ANSWER = "Answer:"  # begins the answer
GREEDY = Sampling(temperature=0)


@dataclass(frozen=True, slots=True)
class LabelRead:
    """The reads of one question in one order of its options: `order[i]` is the option with the i-th label. `requests`
    are those of the tree's reads, in their order.
    """

    question: Question
    order: Order
    tree: LabelTree
    requests: tuple[Generate, ...]

    def score_options(self, tops: Sequence[Mapping[int, float]], likeliest: int, usage: Usage) -> OptionScores:
        """The probabilities of the options in the question's own order, from the log-probabilities of each read."""
        labels = self.tree.label_logprobs(dict(zip(self.tree.reads, tops, strict=True)))
        whole = log_sum(labels)
        if whole == -math.inf:
            shares = [1 / len(labels)] * len(labels)
        else:
            shares = [math.exp(label - whole) for label in labels]
        found = dict(zip(self.order, shares, strict=True))
        is_label = self.tree.is_first_token(likeliest)
        return OptionScores(
            tuple(found[option] for option in range(len(found))), min(math.exp(whole), 1.0), is_label, usage
        )


def read_labels(
    model: Model, request: DecisionRequest, call: str, terms: Terms, claim: Callable[[int], None]
) -> list[list[LabelRead]]:
    """The reads of each question, one for each order of its options.

    `claim` is called with the bytes of the reads of each prompt before they are made, and stops the work by raising.
    Raises BadRequest for a model whose vocabulary
    does not have the labels, and TooLong.
    """
    check_read_count(request)
    check_characters(model, len(request.instructions) + len(request.state), request.field)
    shared = Generate("", (), 1, sampling=GREEDY, terms=terms, adapter=model.adapter, salt=request.salt)
    prompts, tokens, reads, total = QuestionPrompts(model, request), LabelTokens(model), list[list[LabelRead]](), 0
    for number, question in enumerate(request.questions):
        orders = list[LabelRead]()
        for place, order in enumerate(choose_orders(len(question.options), count_orders(question))):
            prompt = prompts.encode(question, order)
            check_length(model, len(prompt) + 1, question.field)
            tree = tokens.find_tree(prompt, choose_labels(question.kind, len(question.options)), question.field)
            total += len(prompt) * len(tree.reads)
            if total > MAX_CALL_TOKENS:
                message = f"the questions, each with the text before it, have more than {MAX_CALL_TOKENS} tokens"
                raise TooMany(f"questions: {message}; ask fewer in a call", param="questions")
            own = BYTES_PER_TOKEN * (len(prompt) - prompts.shared_tokens)
            claim((BYTES_PER_TEXT + BYTES_PER_SHARED_TOKEN * len(prompt)) * len(tree.reads) + own)
            common = replace(shared, id=f"{call}-{number}-{place}")
            orders.append(LabelRead(question, order, tree, build_reads(common, model, prompt, tree)))
        reads.append(orders)
    return reads


def count_orders(question: Question) -> int:
    """How many orders of the options are asked for. Yes and No are not listed in an order, and stay what they mean."""
    return 1 if question.kind == "predicate" else question.permutations


def check_read_count(request: DecisionRequest) -> None:
    """Raise TooMany if the questions of a call need too many reads."""
    count = sum(
        min(count_orders(question), len(question.options) ** 2) * (1 + len(question.options) // len(LETTERS))
        for question in request.questions
    )
    if count > MAX_READS:
        message = f"they need {count} reads of the model, at most {MAX_READS} a call; ask fewer, or in fewer orders"
        raise TooMany(f"questions: {message}", param="questions")


def write_question(question: Question, order: Order) -> str:
    """The question as the model reads it after the text."""
    labels = choose_labels(question.kind, len(question.options))
    lines = [f"Question: {question.instructions}"] if question.instructions else []
    lines += ["Options:"] if question.kind != "predicate" else []
    for (label, *_), option in zip(labels, (question.options[index] for index in order), strict=True):
        if question.kind == "predicate":
            lines += [f"{label}: {option.description}"] if option.description else []
        else:
            lines.append(f"{label}: {option.text}")
    return "\n".join((*lines, ANSWER_HINTS[question.kind]))


class QuestionPrompts:
    """The prompts of a call: its text, then one of the questions. The text is rendered and tokenised once.

    Nothing in the texts of the request is read as a control token. A template that opens a thought gets an empty one,
    so that a label comes next. The format is the best of those that `benchmarks/decision_formats.py` compares.
    """

    def __init__(self, model: Model, request: DecisionRequest) -> None:
        self._model, mark = model, f"QUESTION{uuid.uuid4().hex}"
        text = "\n\n".join(filter(None, (request.instructions, request.state, mark)))
        if model.chat is None:
            begin, _ = model.tokenizer.boundary_tokens
            written = model.tokenizer.quote(f"{text}\n")
        else:
            begin = []
            chat = ChatMessages(({"role": "user", "content": text},))
            chat = replace(chat, variables=template_variables(NO_REASONING, chat))
            written = render_chat(model, chat, request.field)
            written += close_thought(model, chat, self._encode(written.rpartition(mark)[2], request.field))
        written += ANSWER
        if written.count(mark) != 1:
            message = f"the chat template of {model.name} does not write a message once, so no question can follow it"
            raise BadRequest(f"{request.field}: {message}", param=request.field)
        before, _, self._after = written.partition(mark)
        self._before = [*begin, *self._encode(before, request.field)]
        check_length(model, len(self._before) + 1, request.field)

    @property
    def shared_tokens(self) -> int:
        """How many tokens all prompts have in common."""
        return len(self._before)

    def encode(self, question: Question, order: Order) -> list[int]:
        """The tokens of the prompt that ends where the label of an option follows."""
        written = self._model.tokenizer.quote(write_question(question, order))
        return [*self._before, *self._encode(written + self._after, question.field)]

    def _encode(self, written: str, where: str) -> list[int]:
        parts = encode_chat(self._model, written, where)
        return check_token_ids(self._model, [id for part in parts for id in part.ids], where)


def close_thought(model: Model, chat: ChatMessages, ids: Sequence[int]) -> str:
    """What ends the reasoning with which the answer would begin after a prompt that ends with `ids`; empty if it begins
    with none.
    """
    begin, end = model.chat_format.begin, model.chat_format.end
    match reasoning_state(model, chat, ids):
        case "does":
            return f"\n{end}\n\n"
        case "may":
            return f"{begin}\n\n{end}\n\n"
        case "":
            return ""


def build_reads(common: Generate, model: Model, prompt: Sequence[int], tree: LabelTree) -> tuple[Generate, ...]:
    """The requests for the probabilities of the tokens that may follow at each inner node of the tree."""
    defaults = model.generation_defaults
    before, source = (tuple(prompt), ()) if defaults is None else (defaults.decoder_prompt, tuple(prompt))
    return tuple(
        replace(common, id=f"{common.id}-{node}", tokens=(*before, *path), source=source, targets=targets)
        for node, (path, targets) in enumerate(tree.reads.items())
    )


@dataclass(slots=True)
class LabelTokens:
    """The tokens that labels become after the prompts of a call."""

    model: Model
    _trees: dict[tuple[tuple[int, ...], tuple[Spellings, ...]], LabelTree] = field(default_factory=dict)

    def find_tree(self, prompt: Sequence[int], labels: tuple[Spellings, ...], where: str) -> LabelTree:
        """The tree of `labels` after `prompt`. BadRequest if the vocabulary cannot tell them apart there."""
        tail = tuple(find_tail(self.model, prompt))
        if (tree := self._trees.get((tail, labels))) is None:
            try:
                tree = LabelTree.build([list(self._encode(tail, spellings)) for spellings in labels])
            except ValueError as error:
                shown = ", ".join(spellings[0] for spellings in labels[:3])
                message = f"{self.model.name} cannot answer with labels ({shown}, ...) after its prompt: {error}"
                raise BadRequest(f"{where}: {message}", param=where) from None
            self._trees[tail, labels] = tree
        return tree

    def _encode(self, tail: tuple[int, ...], spellings: Spellings) -> Iterator[Path]:
        """The tokens of each spelling after the tail, if they are added to it."""
        before = self.model.tokenizer.decode(tail)
        texts = [f"{before} {spelling}" for spelling in spellings]
        found = 0
        for encoding in self.model.tokenizer.encode_batch(texts, special=False, untrusted=True, offsets=False):
            ids = check_token_ids(self.model, encoding.ids, "labels")
            if tuple(ids[: len(tail)]) == tail and len(ids) > len(tail):
                found += 1
                yield tuple(ids[len(tail) :])
        if not found:
            raise ValueError(f"{spellings[0]} changes the tokens before it")


def find_tail(model: Model, prompt: Sequence[int]) -> Sequence[int]:
    """The last tokens of a prompt: those after the last control token, or a few that are tokenised to the same again.

    An encoder-decoder begins its answer with nothing before it.
    """
    if model.generation_defaults is not None:
        return ()
    last = range(len(prompt) - 1, max(len(prompt) - TAIL_TOKENS, 0) - 1, -1)
    if (control := next((place for place in last if model.tokenizer.is_special(prompt[place])), None)) is not None:
        return prompt[control + 1 :]
    for place in last:
        tail = list(prompt[place:])
        if model.tokenizer.encode(model.tokenizer.decode(tail), special=False, untrusted=True).ids == tail:
            return tail
    return prompt[-1:]
