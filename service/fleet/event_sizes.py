"""How many values an event of a replica may have: as many as its request asks for.

A replica that sends more would fill the memory of the process that serves HTTP, and hold its event loop.  Only lengths
are compared, and numbers of tokens with the vocabulary.
"""

from collections.abc import Iterable, Mapping

from ..core.model import Model
from ..core.request import (
    Attribution,
    Encode,
    ExplainTextRequest,
    ExplanationResult,
    Generate,
    GeneratedToken,
    HeadOutput,
    OutputForm,
    PromptScores,
    Task,
    TokenCandidates,
    TokenOutputs,
)

MAX_TOKEN_COLUMNS = 1 << 14  # numbers of one token's vector, which is not always as long as an embedding
FORM_OUTPUTS: Mapping[str, type] = {"tokens": TokenOutputs, "words": TokenCandidates}
TASK_OUTPUTS: Mapping[Task, type] = {  # of other tasks: HeadOutput
    "tag": TokenOutputs,
    "span": TokenOutputs,
    "label_spans": TokenOutputs,
    "fill": TokenCandidates,
}
Layout = Mapping[str, tuple[int, int]]  # the layers and heads of each kind of attention
Pairs = tuple[tuple[int, float], ...]  # tokens, each with a number


def has_token_size(model: Model, request: Generate, event: GeneratedToken) -> bool:
    most = len(request.targets) or request.logprobs
    return 0 <= event.id < model.vocab_size and are_pairs(model, event.top, most)


def has_score_size(model: Model, request: Generate, event: PromptScores) -> bool:
    """Whether each token of the prompt but the first has a score, if scores are asked for."""
    most, scores = request.prompt_logprobs, event.scores
    has_size = most >= 0 and len(scores) == max(len(request.tokens) - 1, 0)
    return has_size and all(are_pairs(model, top, most) for _, top in scores)


def has_output_size(model: Model, request: Encode, form: OutputForm, event: object) -> bool:
    """Whether `event` is the output that `form` asks for."""
    expected = FORM_OUTPUTS[form] if form else TASK_OUTPUTS.get(model.task, HeadOutput)
    if not isinstance(event, expected):
        return False
    rows = len(request.rows or request.tokens)
    match event:
        case HeadOutput(values):
            return len(values) == output_width(model, request)
        case TokenOutputs(scores):
            shape = scores.shape or ()
            rows = len(request.text_rows) if model.task == "label_spans" and not form else rows
            return len(shape) == 2 and shape[0] <= rows and has_columns(model, request, form, shape[1])
        case TokenCandidates(candidates) if form:
            return len(candidates) == 1 and are_pairs(model, candidates[0], model.vocab_size)
        case TokenCandidates(candidates):
            most = min(request.top_k, len(request.targets) or request.top_k)
            return len(candidates) <= rows and all(are_pairs(model, some, most) for some in candidates)
    return False


def has_columns(model: Model, request: Encode, form: OutputForm, columns: int) -> bool:
    """Whether a table has as many numbers for each token, or each word."""
    if form:
        return columns <= MAX_TOKEN_COLUMNS
    match model.task:
        case "tag":
            return columns == len(model.labels)
        case "label_spans":
            return model.label_prompt is not None and columns == len(request.label_rows) * model.label_prompt.columns
        case _:
            return columns == 2  # of a span: its start and its end


def output_width(model: Model, request: Encode) -> int:
    """The number of values that a head answers with."""
    match model.task:
        case "embed":
            return min(request.dimensions or model.width, model.width)
        case "label_texts" | "decide":
            return len(request.label_rows) or 1
        case "classify":
            return len(model.labels)
        case _:
            return 1  # the score of a pair, or of a choice


def has_explanation_size(request: ExplainTextRequest, layout: Layout, event: ExplanationResult) -> bool:
    """Whether `event` has weights or attributions as `request` asks for; `layout` was stated before."""
    most, longest = request.prompt_tokens, max(len(request.source), len(request.tokens))
    if len(event.head_rows) > most or len({each.kind for each in event.weights}) < len(event.weights):
        return False
    if not request.method.startswith("attention"):
        few = len(event.attributions) <= max(len(request.goals), 1)
        return few and not event.weights and all(has_shape(each, most) for each in event.attributions)
    for each in event.weights:
        if request.method == "attention":
            layers, heads = layout.get(each.kind, (0, 0))
            limits = min(len(request.layers) or layers, layers), min(len(request.heads) or heads, heads)
        else:
            limits = 1, 1
        counts = len(each.layers), len(each.heads)
        shape = each.values.shape or ()
        if shape[:2] != counts or len(shape) != 4 or any(map(int.__gt__, shape, (*limits, longest, longest))):
            return False
    return not event.attributions


def has_shape(attribution: Attribution, most: int) -> bool:
    shape = attribution.values.shape or ()
    return len(shape) == 1 and shape[0] <= most


def are_pairs(model: Model, pairs: Pairs, most: int) -> bool:
    """Whether these are at most so many tokens of the vocabulary; -1: none."""
    return len(pairs) <= max(most, 0) and are_tokens(model, (token for token, _ in pairs))


def are_tokens(model: Model, tokens: Iterable[int]) -> bool:
    return all(0 <= token < model.vocab_size for token in tokens)
