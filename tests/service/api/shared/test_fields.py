"""docs/dialects.md lists every field of every dialect with its effect; each row of its tables is tested here.

The fields come from the wire objects and from the types of the official clients."""

import copy
import dataclasses
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import huggingface_hub.inference._generated.types as hub
import ollama._types as ollama_types
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import (
    batch_create_params,
    completion_create_params,
    decision_create_params,
    embedding_create_params,
    moderation_create_params,
)
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from polyhead.service.api.dialects.anthropic import read as anthropic_read
from polyhead.service.api.dialects.anthropic import wire as anthropic_wire
from polyhead.service.api.dialects.batches import wire as batches_wire
from polyhead.service.api.dialects.decisions import read as decisions_read
from polyhead.service.api.dialects.decisions import wire as decisions_wire
from polyhead.service.api.dialects.hf import wire as hf_wire
from polyhead.service.api.dialects.moderations import routes as moderations
from polyhead.service.api.dialects.oip import wire as oip_wire
from polyhead.service.api.dialects.ollama import read as ollama_read
from polyhead.service.api.dialects.ollama import wire as ollama_wire
from polyhead.service.api.dialects.openai import wire as openai_wire
from polyhead.service.api.dialects.rerank import routes as rerank
from polyhead.service.api.dialects.responses import read as responses_read
from polyhead.service.api.dialects.responses import wire as responses_wire
from polyhead.service.api.dialects.systemone import wire as systemone_wire
from polyhead.service.api.dialects.tei import wire as tei_wire
from polyhead.service.api.dialects.tgi import routes as tgi
from polyhead.service.api.dialects.tokens import routes as tokens
from polyhead.service.api.shared import explain_calls as explaining
from polyhead.service.api.shared import explain_options as explain_wire
from polyhead.service.api.shared import head_options as options
from polyhead.service.api.shared import hf_generation as generation_wire
from polyhead.service.api.shared import question_fields
from polyhead.service.api.shared import response_formats as forms
from polyhead.service.api.shared.dialect import EngineRequest, Wire
from polyhead.service.api.shared.openai_sampling import SampledRequest
from polyhead.service.api.shared.sampling_options import HfSamplingOptions
from polyhead.service.core.errors import BadRequest
from polyhead.service.core.model import GenerationDefaults
from polyhead.service.core.request import BeamSearchOptions, Sampling
from tests.support.places import ROOT

PAGE = ROOT / "docs" / "dialects.md"
SPLIT = re.compile(r"(?<!\\)\|")
EXAMPLE = re.compile(r"^`(?P<value>.*?)`(?: with `(?P<beside>\{.*\})`)?$")
NOT_HERE = (
    "polyhead.service.api.operations.admin",
    "polyhead.service.api.dialects.oip.repository",
)  # the error message to administrators
STATES = ("done", "harmless", "refused", "not applicable")


def unread(wire: Wire) -> object:
    return wire


@dataclass(frozen=True)
class Section:
    """A table: the fields of `kind` without those that are in the table of its base.

    `wire` and `body` are used to test them, `kind` itself if there is no `wire`; the fields are in the object `inside`,
    if that has a name.  `read` is the dialect's reader.  `official` are fields that the dialect's client has.
    """

    kind: type[Wire]
    body: Mapping[str, Any]
    read: Callable[[Any], object] = unread
    wire: type[Wire] | None = None
    inside: str = ""
    official: Collection[str] = ()

    def tried(self, body: Any) -> object:
        return self.read((self.wire or self.kind).read(body))


@dataclass(frozen=True)
class Row:
    section: str
    field: str
    value: Any
    beside: Mapping[str, Any]
    state: str
    words: str

    def __str__(self) -> str:
        return f"{self.section}: {self.field}"


def read_tensors(wire: oip_wire.OipGenerateRequest) -> object:
    return oip_wire.read_oip_generate(wire, ["a"])


def read_write(wire: hf_wire.Text2TextRequest) -> object:
    return hf_wire.read_text2text(
        wire,
        GenerationDefaults(
            decoder_prompt=(1,), max_tokens=9, sampling=Sampling(temperature=0), beams=BeamSearchOptions(1)
        ),
    )


def streamed(wire: oip_wire.TextRequest) -> object:
    return oip_wire.read_text_request(wire, stream=True)


def hub_fields(kind: Any) -> set[str]:
    return {each.name for each in dataclasses.fields(kind)}


def typed(*kinds: Any) -> set[str]:
    return {name for kind in kinds for name in kind.__annotations__}


def inner(kind: type[Wire], wire: type[Wire], read: Callable[[Any], object], body: Any = None) -> Section:
    """The class of the parameters of `wire`."""
    return Section(kind, {"parameters": {}} | (body or TASK), read, wire, "parameters")


PREDICATE = {"type": "predicate", "instructions": "a"}
NOUL = {"type": "noul", "instructions": "a"}
MESSAGES = [{"role": "user", "content": "a"}]
TENSORS = [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}]
COMPLETION = (
    completion_create_params.CompletionCreateParamsBase,
    completion_create_params.CompletionCreateParamsStreaming,
)
CHAT = chat_create_params.CompletionCreateParamsBase, chat_create_params.CompletionCreateParamsStreaming
MESSAGE = (
    message_create_params.MessageCreateParamsBase,
    message_create_params.MessageCreateParamsStreaming,
    beta_create_params.MessageCreateParamsBase,
    beta_create_params.MessageCreateParamsStreaming,
)
COUNT = message_count_tokens_params.MessageCountTokensParams, beta_count_params.MessageCountTokensParams
RESPONSE = response_create_params.ResponseCreateParamsBase, response_create_params.ResponseCreateParamsStreaming
CLAUDE = {"model": "m", "max_tokens": 9, "messages": MESSAGES}
USE = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
COMMON = {"model": "m", "prompt": "a"}
TASK = {"inputs": "a"}
SHORT_CHAT = {"model": "m", "messages": MESSAGES}
LABELLED: Mapping[str, Any] = {**TASK, "parameters": {"candidate_labels": ["a"]}}

SECTIONS: Mapping[str, Section] = {
    "Every dialect that asks for work": Section(EngineRequest, {}),
    "OpenAI: completions and chat": Section(
        SampledRequest, COMMON, openai_wire.read_completion, wire=openai_wire.CompletionRequest
    ),
    "OpenAI: completions": Section(
        openai_wire.CompletionRequest, COMMON, openai_wire.read_completion, official=typed(*COMPLETION)
    ),
    "OpenAI: chat": Section(
        openai_wire.ChatRequest, {"model": "m", "messages": MESSAGES}, openai_wire.read_chat, official=typed(*CHAT)
    ),
    "OpenAI: embeddings": Section(
        openai_wire.EmbeddingRequest,
        {"model": "m", "input": "a"},
        openai_wire.read_embedding,
        official=typed(embedding_create_params.EmbeddingCreateParams),
    ),
    "OpenAI: response_format": Section(
        forms.ResponseFormat,
        {**COMMON, "response_format": {"type": "text"}},
        openai_wire.read_completion,
        openai_wire.CompletionRequest,
        "response_format",
    ),
    "vLLM: structured_outputs": Section(
        forms.StructuredOutputs,
        {**COMMON, "structured_outputs": {}},
        openai_wire.read_completion,
        openai_wire.CompletionRequest,
        "structured_outputs",
    ),
    "OpenAI: text.format of responses": Section(
        forms.TextFormat, {"type": "text"}, lambda wire: forms.convert_format(wire, "text.format")
    ),
    "Parameters of drawing": inner(HfSamplingOptions, hf_wire.HfGenerateRequest, hf_wire.read_hf_generate),
    "Parameters of text generation": Section(
        generation_wire.GenerateParameters,
        {**TASK, "parameters": {}},
        hf_wire.read_hf_generate,
        hf_wire.HfGenerateRequest,
        "parameters",
        hub_fields(hub.TextGenerationInputGenerateParameters),
    ),
    "text-generation-inference": Section(
        tgi.TgiGenerateRequest, TASK, official=hub_fields(hub.TextGenerationInput) - {"stream"}
    ),
    "Hugging Face: every task": Section(
        hf_wire.PipelineRequest, TASK, hf_wire.read_classify, wire=hf_wire.ClassifyRequest
    ),
    "OpenAI: moderations": Section(
        moderations.ModerationRequest,
        {"input": "a"},
        moderations.read_moderation,
        official=typed(moderation_create_params.ModerationCreateParams),
    ),
    "OpenAI: batches": Section(
        batches_wire.BatchRequest,
        {"input_file_id": "f", "endpoint": "/v1/embeddings", "completion_window": "24h"},
        official=typed(batch_create_params.BatchCreateParams),
    ),
    "OpenAI: a line of a batch": Section(
        batches_wire.LineRequest, {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {}}
    ),
    "OpenAI: decisions": Section(
        decisions_wire.DecisionsRequest,
        {"model": "m", "input": "a", "questions": [PREDICATE]},
        decisions_read.read_decisions,
        official=typed(decision_create_params.DecisionCreateParams),
    ),
    "OpenAI: predicate of decisions": Section(
        decisions_wire.PredicateQuestion,
        PREDICATE,
        official=typed(decision_create_params.QuestionQuestionParamPredicate),
    ),
    "OpenAI: choice of decisions": Section(
        decisions_wire.ChoiceQuestion,
        {"type": "choice", "instructions": "a", "choices": [{"value": "a"}, {"value": "b"}]},
        official=typed(decision_create_params.QuestionQuestionParamChoice),
    ),
    "OpenAI: score of decisions": Section(
        decisions_wire.ScoreQuestion,
        {"type": "score", "instructions": "a", "levels": [{"label": "a"}, {"label": "b"}]},
        official=typed(decision_create_params.QuestionQuestionParamScore),
    ),
    "OpenAI: a message of decisions": Section(
        decisions_wire.MessageItem,
        MESSAGES[0],
        official=typed(decision_create_params.InputUnionMember1DecisionInputAssistantMessage),
    ),
    "OpenAI: a tool call of decisions": Section(
        decisions_wire.ToolCall,
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        official=typed(
            decision_create_params.InputUnionMember1DecisionInputFunctionCall,
            decision_create_params.InputUnionMember1DecisionInputCustomToolCall,
        ),
    ),
    "OpenAI: a tool output of decisions": Section(
        decisions_wire.ToolOutput,
        {"type": "function_call_output", "call_id": "1", "output": "a"},
        official=typed(decision_create_params.InputUnionMember1DecisionInputFunctionCallOutput),
    ),
    "TypeSafe: systemone": Section(
        systemone_wire.SystemOneRequest, {"state": "a", "questions": {"q": NOUL}}, systemone_wire.read_systemone
    ),
    "TypeSafe: noul": Section(systemone_wire.NoulQuestion, NOUL),
    "TypeSafe: choice": Section(systemone_wire.ChoiceQuestion, {"type": "choice", "criteria": {"a": None}}),
    "TypeSafe: score": Section(systemone_wire.ScoreQuestion, {"type": "score", "criteria": ["a", "b"]}),
    "Decisions: explain of a question": Section(question_fields.QuestionExplain, {}),
    "Ollama: every request": Section(
        ollama_wire.OllamaRequest, SHORT_CHAT, ollama_read.read_chat, ollama_wire.OllamaChatRequest
    ),
    "Ollama: options": Section(
        ollama_wire.OllamaOptions,
        SHORT_CHAT | {"options": {}},
        ollama_read.read_chat,
        ollama_wire.OllamaChatRequest,
        "options",
        set(ollama_types.Options.model_fields),
    ),
    "Ollama: generate and chat": Section(
        ollama_wire.OllamaGenerationRequest, SHORT_CHAT, ollama_read.read_chat, ollama_wire.OllamaChatRequest
    ),
    "Ollama: generate": Section(
        ollama_wire.OllamaGenerateRequest,
        {"model": "m"},
        official=set(ollama_types.GenerateRequest.model_fields),
    ),
    "Ollama: chat": Section(
        ollama_wire.OllamaChatRequest,
        SHORT_CHAT,
        ollama_read.read_chat,
        official=set(ollama_types.ChatRequest.model_fields),
    ),
    "Ollama: a message": Section(ollama_wire.OllamaMessage, {"role": "assistant"}),
    "Ollama: tools": Section(ollama_wire.OllamaTool, {"function": {"name": "f"}}),
    "Ollama: embed": Section(
        ollama_wire.OllamaEmbedRequest,
        {"model": "m", "input": "a"},
        ollama_read.read_embed,
        official=set(ollama_types.EmbedRequest.model_fields),
    ),
    "Ollama: embeddings": Section(
        ollama_wire.OllamaEmbeddingsRequest,
        {"model": "m", "prompt": "a"},
        ollama_read.read_embeddings,
        official=set(ollama_types.EmbeddingsRequest.model_fields),
    ),
    "Ollama: show": Section(ollama_wire.OllamaShowRequest, {}, official=set(ollama_types.ShowRequest.model_fields)),
    "Explanations": Section(explaining.ExplainRequest, {"model": "m", "input": "a"}),
    "Explanations: how": Section(explain_wire.ExplainFields, {}, explain_wire.read_explain_options),
    "Explanations: target": Section(
        explain_wire.TargetFields,
        {"target": {}},
        explain_wire.read_explain_options,
        explain_wire.ExplainFields,
        "target",
    ),
    "Hugging Face: text-generation": Section(
        hf_wire.HfGenerateRequest, TASK, hf_wire.read_hf_generate, official=hub_fields(hub.TextGenerationInput)
    ),
    "Hugging Face: text2text-generation, translation, summarization": Section(
        hf_wire.Text2TextRequest, TASK, read_write, official=hub_fields(hub.TranslationInput)
    ),
    "Parameters of writing": Section(
        hf_wire.Text2TextParameters,
        {**TASK, "parameters": {}},
        read_write,
        hf_wire.Text2TextRequest,
        "parameters",
        hub_fields(hub.TranslationParameters),
    ),
    "Hugging Face: text-classification": Section(
        hf_wire.ClassifyRequest, TASK, hf_wire.read_classify, official=hub_fields(hub.TextClassificationInput)
    ),
    "Parameters of classifying": inner(options.ClassifyOptions, hf_wire.ClassifyRequest, hf_wire.read_classify),
    "Hugging Face: zero-shot-classification": Section(hf_wire.ZeroShotRequest, LABELLED, hf_wire.read_zero_shot),
    "Parameters of classes": inner(
        hf_wire.ZeroShotParameters,
        hf_wire.ZeroShotRequest,
        hf_wire.read_zero_shot,
        LABELLED,
    ),
    "Parameters of given labels": inner(
        hf_wire.LabelParameters, hf_wire.LabelTextRequest, hf_wire.read_label_texts, LABELLED
    ),
    "Hugging Face: zero-shot-classification by GLiClass": Section(
        hf_wire.LabelTextRequest, LABELLED, hf_wire.read_label_texts
    ),
    "Hugging Face: token-classification by GLiNER": Section(
        hf_wire.LabelSpanRequest, LABELLED, hf_wire.read_label_spans
    ),
    "Parameters of spans": inner(
        hf_wire.LabelSpanParameters, hf_wire.LabelSpanRequest, hf_wire.read_label_spans, LABELLED
    ),
    "Hugging Face: multiple-choice": Section(
        hf_wire.MultipleChoiceRequest, {"inputs": {"text": "a", "choices": ["b"]}}, hf_wire.read_multiple_choice
    ),
    "Hugging Face: token-classification": Section(hf_wire.TokenClassifyRequest, TASK, hf_wire.read_token_classify),
    "Parameters of labelling": inner(
        options.TokenClassifyOptions, hf_wire.TokenClassifyRequest, hf_wire.read_token_classify
    ),
    "Hugging Face: question-answering": Section(
        hf_wire.QuestionRequest, {"inputs": {"question": "a", "context": "b"}}, hf_wire.read_question
    ),
    "Parameters of answering": Section(
        options.QuestionOptions,
        {"inputs": {"question": "a", "context": "b"}, "parameters": {}},
        hf_wire.read_question,
        hf_wire.QuestionRequest,
        "parameters",
    ),
    "Hugging Face: fill-mask": Section(hf_wire.FillMaskRequest, TASK, hf_wire.read_fill_mask),
    "Parameters of filling": inner(options.FillMaskOptions, hf_wire.FillMaskRequest, hf_wire.read_fill_mask),
    "Hugging Face: feature-extraction": Section(
        hf_wire.FeatureRequest, TASK, hf_wire.read_feature, official=hub_fields(hub.FeatureExtractionInput)
    ),
    "Parameters of embedding": inner(options.EmbeddingOptions, hf_wire.FeatureRequest, hf_wire.read_feature),
    "Hugging Face: sentence-similarity": Section(
        hf_wire.SentenceSimilarityRequest,
        {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
        hf_wire.read_sentence_similarity,
    ),
    "Parameters of cutting": inner(options.HfTruncateOptions, hf_wire.FillMaskRequest, hf_wire.read_fill_mask),
    "text-embeddings-inference: many texts": Section(
        tei_wire.BatchRequest, TASK, tei_wire.read_predict, wire=tei_wire.PredictRequest
    ),
    "text-embeddings-inference: predict": Section(tei_wire.PredictRequest, TASK, tei_wire.read_predict),
    "text-embeddings-inference: embed": Section(tei_wire.EmbedRequest, TASK, tei_wire.read_embed),
    "text-embeddings-inference: embed_all": Section(tei_wire.EmbedAllRequest, TASK),
    "text-embeddings-inference: embed_sparse": Section(tei_wire.EmbedSparseRequest, TASK),
    "text-embeddings-inference: rerank": Section(
        tei_wire.TeiRerankRequest, {"query": "a", "texts": ["b"]}, tei_wire.read_rerank_pairs
    ),
    "text-embeddings-inference: similarity": Section(
        tei_wire.SimilarityRequest,
        {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
        tei_wire.read_similarity,
    ),
    "text-embeddings-inference: tokenize": Section(tei_wire.TokenizeRequest, TASK),
    "text-embeddings-inference: decode": Section(tei_wire.DecodeRequest, {"ids": [5]}),
    "Open Inference: every request": Section(oip_wire.InferRequest, {"inputs": TENSORS}),
    "Open Inference: parameters": inner(oip_wire.OipParameters, oip_wire.InferRequest, unread, {"inputs": TENSORS}),
    "Open Inference: parameters of tensors": inner(
        oip_wire.TensorParameters, oip_wire.InferRequest, unread, {"inputs": TENSORS}
    ),
    "Open Inference: classifiers and rankers": Section(oip_wire.ScoreRequest, {"inputs": TENSORS}),
    "Open Inference: embedders": Section(oip_wire.OipEmbedRequest, {"inputs": TENSORS}),
    "Open Inference: taggers": Section(oip_wire.LabelRequest, {"inputs": TENSORS}),
    "Open Inference: readers": Section(oip_wire.AnswerRequest, {"inputs": TENSORS}),
    "Open Inference: fillers": Section(oip_wire.FillRequest, {"inputs": TENSORS}),
    "Open Inference: generators": Section(oip_wire.OipGenerateRequest, {"inputs": TENSORS}, read_tensors),
    "Open Inference: parameters of generators": inner(
        oip_wire.OipSamplingOptions, oip_wire.OipGenerateRequest, read_tensors, {"inputs": TENSORS}
    ),
    "Open Inference: generate and generate_stream": Section(oip_wire.TextRequest, {"text_input": "a"}, streamed),
    "Rerank": Section(rerank.RerankRequest, {"model": "m", "query": "a", "documents": ["b"]}),
    "vLLM: tokenize a prompt": Section(tokens.PromptRequest, {"prompt": "a"}),
    "vLLM: tokenize a conversation, and its template": Section(
        tokens.ConversationRequest, {"messages": MESSAGES}, openai_wire.read_chat
    ),
    "Anthropic messages and count_tokens": Section(
        anthropic_wire.Conversation, CLAUDE, anthropic_read.read_messages, anthropic_wire.MessagesRequest
    ),
    "Anthropic messages": Section(
        anthropic_wire.MessagesRequest,
        CLAUDE,
        anthropic_read.read_messages,
        official=typed(*MESSAGE),
    ),
    "Anthropic messages: count_tokens": Section(
        anthropic_wire.CountRequest,
        {"model": "m", "messages": MESSAGES},
        anthropic_read.read_count,
        official=typed(*COUNT),
    ),
    "Anthropic messages: text": Section(anthropic_wire.TextBlock, {"type": "text", "text": "a"}),
    "Anthropic messages: tool_use": Section(anthropic_wire.ToolUseBlock, USE),
    "Anthropic messages: tool_result": Section(
        anthropic_wire.ToolResultBlock, {"type": "tool_result", "tool_use_id": "a"}
    ),
    "Anthropic messages: thinking": Section(anthropic_wire.ThinkingBlock, {"type": "thinking", "thinking": "a"}),
    "Anthropic messages: tools": Section(anthropic_wire.AnthropicTool, {"name": "a", "input_schema": {}}),
    "Anthropic messages: tool_choice": Section(anthropic_wire.AnthropicToolChoice, {"type": "auto"}),
    "OpenAI responses": Section(
        responses_wire.ResponseRequest,
        {"model": "m", "input": "a"},
        responses_read.read_response,
        official=typed(*RESPONSE),
    ),
    "OpenAI responses: a message": Section(responses_wire.MessageItem, MESSAGES[0]),
    "OpenAI responses: input_text": Section(responses_wire.InputText, {"type": "input_text", "text": "a"}),
    "OpenAI responses: output_text": Section(responses_wire.OutputText, {"type": "output_text", "text": "a"}),
    "OpenAI responses: refusal": Section(responses_wire.Refusal, {"type": "refusal", "refusal": "a"}),
    "OpenAI responses: function_call": Section(
        responses_wire.FunctionCall, {"type": "function_call", "call_id": "a", "name": "b", "arguments": "{}"}
    ),
    "OpenAI responses: function_call_output": Section(
        responses_wire.FunctionOutput, {"type": "function_call_output", "call_id": "a", "output": "b"}
    ),
    "OpenAI responses: reasoning": Section(responses_wire.ReasoningItem, {"type": "reasoning"}),
    "OpenAI responses: tools": Section(responses_wire.ResponseTool, {"type": "function", "name": "a"}),
    "vLLM: detokenize": Section(tokens.DetokenizeRequest, {"tokens": [5]}),
    "TypeSafe: systemone with many states": Section(
        systemone_wire.SystemOneBatch,
        {"questions": {"q": {"type": "noul", "instructions": "a"}}},
        systemone_wire.read_questions,
    ),
    "TypeSafe: a line with a state": Section(systemone_wire.StateLine, {"state": "a"}),
}


def rows() -> Iterator[Row]:
    section = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif section and line.startswith("| `"):
            yield row(section, [cell.strip().replace(r"\|", "|") for cell in SPLIT.split(line)[1:-1]])


def row(section: str, cells: list[str]) -> Row:
    name, example, state, words = cells
    found = EXAMPLE.match(example)
    assert found, f"{section}: {name}: {example}"
    beside = json.loads(found["beside"] or "{}")
    return Row(section, name.strip("`"), json.loads(found["value"]), beside, state, words)


ROWS = list(rows())
KINDS = {section.kind for section in SECTIONS.values()}


# Rows of the tables


def body_of(row: Row) -> Any:
    section = SECTIONS[row.section]
    beside = {section.inside: row.beside} if section.inside else row.beside
    body = merged(copy.deepcopy(dict(section.body)), beside)
    *parents, last = row.field.split(".")
    place = body
    for parent in ([section.inside] if section.inside else []) + parents:
        name, listed = parent.removesuffix("[]"), parent.endswith("[]")
        inner = place.setdefault(name, [{}] if listed else {})
        place = inner[0] if listed else inner
    place[last] = row.value
    return body


def merged(body: Any, beside: Any) -> Any:
    if isinstance(body, dict) and isinstance(beside, dict):
        return {name: merged(body.get(name), beside[name]) if name in beside else body[name] for name in body | beside}
    return beside


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_effect_of_a_field_is_that_of_its_row(row: Row) -> None:
    section, body = SECTIONS[row.section], body_of(row)
    assert row.state in STATES
    if row.state in ("done", "harmless"):
        section.tried(body)
        return
    with pytest.raises(BadRequest) as caught:
        section.tried(body)
    if row.state == "refused":
        assert caught.value.message == row.words
    else:
        assert "is not a known field" in caught.value.message
        assert row.words, "why it is no part of the body"


# Completeness


def fields_of_section(name: str) -> set[str]:
    """The fields of a section, and those of its base classes."""
    kind = SECTIONS[name].kind
    sections = {other for other, section in SECTIONS.items() if issubclass(kind, section.kind)}
    return {row.field.replace("[]", "") for row in ROWS if row.section in sections}


def names(kind: type[Wire]) -> set[str]:
    return {*kind.unsupported, *(field.alias or name for name, field in kind.model_fields.items())}


def fields(kind: type[Wire]) -> Iterator[str]:
    """By their names in JSON; an object inside without a section of its own adds its fields, too."""
    yield from kind.unsupported
    for name, field in kind.model_fields.items():
        place = field.alias or name
        yield place
        for inner in within(field.annotation):
            shared = {name for base in KINDS if issubclass(inner, base) for name in names(base)}
            yield from (f"{place}.{each}" for each in fields(inner) if each.split(".")[0] not in shared)


def within(annotation: Any) -> Iterator[type[Wire]]:
    """The wire objects that a field may contain, alone or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, Wire):
        yield annotation
    for part in get_args(annotation):
        yield from within(part)


@pytest.mark.parametrize("name", SECTIONS)
def test_every_field_has_a_row(name: str) -> None:
    section = SECTIONS[name]
    own = vars(section.kind).get("__annotations__", {})  # not those of a base class
    redefined = own.keys() & section.kind.model_fields.keys()
    missing = {*fields(section.kind), *section.official} - fields_of_section(name)
    missing |= redefined - {row.field for row in ROWS if row.section == name} - {"body"}
    assert not missing, f"{name}: docs/dialects.md says nothing of {sorted(missing)}"


def test_every_table_is_tested() -> None:
    assert {row.section for row in ROWS} <= set(SECTIONS)
    headings = {line.removeprefix("## ") for line in PAGE.read_text().splitlines() if line.startswith("## ")}
    assert headings <= set(SECTIONS)


def test_every_wire_object_has_its_table() -> None:
    """Or it is part of one that has, or its base."""
    known = {base for kind in KINDS for base in kind.mro()}
    for kind in [kind for kind in known if isinstance(kind, type) and issubclass(kind, Wire)]:
        known |= reached(kind)
    assert not {kind for kind in subclasses(Wire) if kind.__module__ not in NOT_HERE} - known


def reached(kind: type[Wire]) -> set[type[Wire]]:
    inner = {each for field in kind.model_fields.values() for each in within(field.annotation)}
    return {kind, *(base for each in inner for base in each.mro() if isinstance(base, type))}.union(
        *map(reached, inner)
    )


def subclasses(kind: type[Wire]) -> set[type[Wire]]:
    return {kind, *kind.__subclasses__()}.union(*map(subclasses, kind.__subclasses__()))
