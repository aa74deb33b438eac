"""Wire objects of the OpenAI dialect, and the requests they are read into.

A field of the real API is supported, or has no effect here, or is rejected by name at any value that would change the
answer (the tables below).
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from ....core.errors import BadRequest
from ....core.request import OutputForm
from ....explain.explain_request import ExplainParameters
from ....text.encoder_inputs import EncodingRequest
from ....text.generation_request import ChatMessages, FillInMiddle, GenerationRequest, Prompt
from ...shared.dialect import (
    ClientName,
    Count,
    EngineRequest,
    NeutralValues,
    TextsOrIds,
    Wire,
    between,
    max_items,
    must_be,
    normalize_inputs,
)
from ...shared.explain_options import ExplainFields, read_explain_options
from ...shared.openai_sampling import SampledRequest, read_generation_options
from .chat_messages import ChatMessageList, check_call_arguments, check_continuable, template_message
from .tools import AUTO_CHOICE, ReasoningFields, ToolChoiceField, ToolList, read_reasoning, read_tools

MAX_VARIABLES, MAX_DOCUMENTS = 64, 1024

# fields of the real API that this server does not support -> the values at which they change nothing
UNSUPPORTED_CHAT: NeutralValues = {
    **SampledRequest.unsupported,
    "echo": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "moderation": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "chat_template": (),  # a template is a program: only those of checkpoints are run
    "add_special_tokens": (False,),  # the template writes special tokens
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
}


DEFAULT_MAX_TOKENS = 16  # the default of max_tokens for completions, as in OpenAI's and vLLM's servers


class CompletionRequest(SampledRequest):
    prompt: TextsOrIds
    suffix: str = ""  # the text after the answer
    echo: bool = False
    max_tokens: Annotated[int, between(0, (1 << 31) - 1)] = -1  # 0 scores the prompt alone, only with echo
    logprobs: Annotated[int, between(0, 20)] = -1
    explain: ExplainFields | None = None

    def read_explain(self) -> ExplainParameters | None:
        """The explain options.  Raises BadRequest unless there is exactly one answer, which is not streamed."""
        if self.explain is None:
            return None
        allowed = {"stream": not self.stream, "n": self.n == 1, "prompt": len(normalize_inputs(self.prompt)) == 1}
        if fields := [name for name, fits in allowed.items() if not fits]:
            raise BadRequest(f"explain: needs one complete answer: not with this {fields[0]}", param="explain")
        return read_explain_options(self.explain)


RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


def check_variables(value: Any) -> Any:
    """Variables that the template gets from fields of the body cannot be given again."""
    if isinstance(value, dict) and not value.keys().isdisjoint(RESERVED_VARIABLES):
        sentence = f"an object without the names of fields ({', '.join(RESERVED_VARIABLES)})"
        raise PydanticCustomError("described", "must be {sentence}", {"sentence": sentence})
    return value


TemplateVariables = Annotated[dict[str, Any], BeforeValidator(check_variables), max_items(MAX_VARIABLES)]
Documents = Annotated[list[dict[str, Any]], Field(fail_fast=True), max_items(MAX_DOCUMENTS)]


class ChatCacheOptions(Wire):
    """No effect: every prefix that comes again is found in the cache, as long as there is room for it."""

    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Literal["30m"] = "30m"


class Prediction(Wire):
    """A likely answer, with which OpenAI's servers are faster.  It has no effect here."""

    type: Literal["content"]
    content: Annotated[str | list[dict[str, Any]], must_be("a string or a list of parts"), max_items(256)]


class ChatRequest(SampledRequest, ReasoningFields):
    unsupported: ClassVar[NeutralValues] = UNSUPPORTED_CHAT

    messages: ChatMessageList
    max_completion_tokens: Count = 0
    logprobs: bool = False
    top_logprobs: Annotated[int, between(0, 20)] = 0
    tools: ToolList = Field(default_factory=list)
    tool_choice: ToolChoiceField = AUTO_CHOICE
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    documents: Documents = Field(default_factory=list)
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    prompt_cache_options: ChatCacheOptions = ChatCacheOptions()
    prediction: Prediction | None = None  # ignored


class EmbeddingRequest(EngineRequest):
    """`input_type` is that of Cohere, Voyage and NVIDIA; the outputs beside the vector have the names of
    FlagEmbedding."""

    model: str
    input: TextsOrIds
    dimensions: Count = 0
    encoding_format: Literal["float", "base64"] = "float"
    user: ClientName = ""
    input_type: Literal["query", "document", "passage"] | None = None
    return_dense: bool = True
    return_sparse: bool = False
    return_colbert_vecs: bool = False

    @property
    def forms(self) -> tuple[OutputForm, ...]:
        """The outputs that are asked for, in the order in which they are written."""
        asked = (self.return_dense, self.return_sparse, self.return_colbert_vecs)
        return tuple(form for form, is_asked in zip(EMBEDDING_FIELDS, asked, strict=True) if is_asked)


# By the form of an output, the field of an answer that has it.
EMBEDDING_FIELDS: Mapping[OutputForm, str] = {
    "": "embedding",
    "words": "sparse_embedding",
    "tokens": "colbert_vecs",
}
# By the type of an input, the names of prompts that sentence-transformers looks for.
PROMPT_NAMES: Mapping[str, tuple[str, ...]] = {
    "query": ("query",),
    "document": ("document", "passage", "corpus"),
    "passage": ("passage", "document", "corpus"),
}

# Reading


def read_completion(wire: CompletionRequest) -> GenerationRequest:
    if not wire.max_tokens and not wire.echo:
        raise BadRequest("max_tokens: must be at least 1, or 0 together with echo: true, got 0", param="max_tokens")
    logprobs = wire.logprobs if wire.explain is None else max(wire.logprobs, 0)  # an explanation needs the tokens
    generation = read_generation_options(wire, "prompt", read_prompts(wire), max(wire.max_tokens, 0), logprobs)
    scores = {wire.logprobs if wire.echo else -1, wire.prompt_logprobs} - {-1}
    if len(scores) > 1:
        message = "prompt_logprobs: with echo, logprobs says how many there are of the prompt, too; the two differ"
        raise BadRequest(message, param="prompt_logprobs")
    scoring = not wire.max_tokens
    return replace(
        generation, default_max_tokens=DEFAULT_MAX_TOKENS, only_scores=scoring, prompt_logprobs=max(scores, default=-1)
    )


def read_prompts(wire: CompletionRequest) -> tuple[Prompt, ...]:
    """The prompts; with a suffix, the answer is the text between each and the suffix."""
    prompts = normalize_inputs(wire.prompt)
    if not wire.suffix:
        return prompts
    if field := next((name for name in ("echo", "explain") if getattr(wire, name)), ""):
        raise BadRequest(f"suffix: not together with {field}", param="suffix")
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise BadRequest("suffix: only together with a prompt of text, not of token ids", param="suffix")
    return tuple(FillInMiddle(prompt, wire.suffix) for prompt in prompts if isinstance(prompt, str))


def read_chat(wire: ChatRequest) -> GenerationRequest:
    if wire.top_logprobs and not wire.logprobs:
        raise BadRequest("top_logprobs: only together with logprobs: true", param="top_logprobs")
    limits = {wire.max_tokens, wire.max_completion_tokens} - {0}
    if len(limits) > 1:
        message = "max_tokens: is the older name of max_completion_tokens; the two differ, give one"
        raise BadRequest(message, param="max_tokens")
    logprobs = wire.top_logprobs if wire.logprobs else -1
    generation = read_generation_options(wire, "messages", (read_conversation(wire),), max(limits, default=0), logprobs)
    tools = read_tools(wire.tools, wire.tool_choice, parallel=wire.parallel_tool_calls)
    reasoning = replace(read_reasoning(wire), is_shown=wire.include_reasoning)
    return replace(generation, tools=tools, reasoning=reasoning)


def read_conversation(wire: ChatRequest) -> ChatMessages:
    if wire.continue_final_message:
        check_continuable(wire.messages)
        if "add_generation_prompt" in wire.model_fields_set and wire.add_generation_prompt:
            problem = "not together with continue_final_message: the answer has begun"
            raise BadRequest(f"add_generation_prompt: {problem}", param="add_generation_prompt")
    check_call_arguments(wire.messages)
    return ChatMessages(
        messages=tuple(template_message(message, f"messages[{index}]") for index, message in enumerate(wire.messages)),
        variables=wire.chat_template_kwargs | ({"documents": wire.documents} if wire.documents else {}),
        continues_last=wire.continue_final_message,
        opens_answer=wire.add_generation_prompt,
    )


def read_embedding(wire: EmbeddingRequest) -> EncodingRequest:
    if not wire.forms:
        message = "return_dense: false needs return_sparse: true or return_colbert_vecs: true, else there is no answer"
        raise BadRequest(message, param="return_dense")
    inputs = normalize_inputs(wire.input)
    return EncodingRequest(
        field="input",
        inputs=inputs,
        dimensions=wire.dimensions,
        form=wire.forms[0],
        more_forms=wire.forms[1:],
        queries=len(inputs) if wire.input_type == "query" else 0,
    )


def choose_prompt(wire: EmbeddingRequest, prompts: Collection[str]) -> str:
    """The name of the model's prompt for this type of input; empty: that of every text."""
    return next((name for name in PROMPT_NAMES.get(wire.input_type or "", ()) if name in prompts), "")
