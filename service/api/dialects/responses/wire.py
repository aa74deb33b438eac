"""What the dialect of OpenAI's responses is asked: its wire objects.

Knows no engine and no answer.  The one idea: a field of the real API is done, or harmless, or refused by name at any
value that asks for something.  Nothing is kept between two calls, so whatever refers to an earlier one is refused.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from ...shared.dialect import Count, Neutral, Wire, Work, at_most, between
from ...shared.response_formats import TextFormat
from ...shared.tagged_unions import OneOf

MOST_ITEMS, MOST_PARTS, MOST_TOOLS = 4096, 256, 1024
LOGPROBS = "message.output_text.logprobs"
Includable = Literal[  # the others ask for what comes of tools and images that are refused, and for what is hidden
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
DIRECT: Neutral = {"caller": ({"type": "direct"},), "namespace": ("",)}

Status = Literal["", "in_progress", "completed", "incomplete"]  # harmless, of what comes back from an answer


# What goes in: text and earlier items


class CacheBreakpoint(Wire):
    mode: Literal["explicit"] = "explicit"
    ttl: Literal["30m", "12h"] = "30m"


class InputText(Wire):
    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: CacheBreakpoint = CacheBreakpoint()  # harmless: what is stored is found anyway


class OutputText(Wire):
    """As an answer has it."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[Any] = Field(default_factory=list)


class Refusal(Wire):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def content_of(kind: str) -> Any:
    """A string is short for one part of a text of this kind."""

    def parts(content: Any) -> Any:
        if isinstance(content, str):
            return [{"type": kind, "text": content}]
        if isinstance(content, list):
            return content
        raise PydanticCustomError("described", "must be {sentence}", {"sentence": "a string or a list of text parts"})

    return BeforeValidator(parts)


Part = InputText | OutputText | Refusal
Texts = Annotated[
    list[Annotated[Part, OneOf((InputText, OutputText, Refusal))]],
    Field(fail_fast=True),
    content_of("input_text"),
    at_most(MOST_PARTS),
]


class Message(Wire):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Texts
    id: str = ""
    status: Status = ""
    phase: Literal["", "commentary", "final_answer"] = ""


class FunctionCall(Wire):
    unsupported: ClassVar[Neutral] = {**DIRECT, "async": (False,)}

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str = ""
    status: Status = ""


class FunctionOutput(Wire):
    unsupported: ClassVar[Neutral] = DIRECT

    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[
        list[Annotated[InputText, OneOf((InputText,))]],
        Field(fail_fast=True),
        content_of("input_text"),
        at_most(MOST_PARTS),
    ]
    name: str = ""
    id: str = ""
    status: Status = ""


class ReasoningText(Wire):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(Wire):
    type: Literal["summary_text"]
    text: str


class Reasoning(Wire):
    """What was thought, in the open; its summary where only that is known."""

    unsupported: ClassVar[Neutral] = {"encrypted_content": ("",)}

    type: Literal["reasoning"]
    id: str = ""
    summary: Annotated[list[Annotated[SummaryText, OneOf((SummaryText,))]], at_most(MOST_PARTS)] = Field(
        default_factory=list
    )
    content: Annotated[list[Annotated[ReasoningText, OneOf((ReasoningText,))]], at_most(MOST_PARTS)] = Field(
        default_factory=list
    )
    status: Status = ""


Item = Message | FunctionCall | FunctionOutput | Reasoning
ITEMS = OneOf((Message, FunctionCall, FunctionOutput, Reasoning), unsaid="message")


def items(given: Any) -> Any:
    """A string is short for one message of the user."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if isinstance(given, list):
        return given
    raise PydanticCustomError("described", "must be {sentence}", {"sentence": "a string or a list of items"})


# How it is to be answered


class Tool(Wire):
    """Arguments keep to the schema, `strict` or not."""

    unsupported: ClassVar[Neutral] = {
        "allowed_callers": (["direct"],),
        "async": (False,),
        "defer_loading": (False,),
        "output_schema": (),
    }

    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool = True


class ChosenTool(Wire):
    type: Literal["function"]
    name: str


class AllowedTools(Wire):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[Annotated[ChosenTool, OneOf((ChosenTool,))]], Field(min_length=1), at_most(MOST_TOOLS)]


class AnyTool(Wire):
    """What stands as a word on the wire."""

    type: Literal["none", "auto", "required"]


def word(choice: Any) -> Any:
    return {"type": choice} if isinstance(choice, str) else choice


ToolChoice = Annotated[
    AnyTool | ChosenTool | AllowedTools, OneOf((AnyTool, ChosenTool, AllowedTools)), BeforeValidator(word)
]


class TextOptions(Wire):
    unsupported: ClassVar[Neutral] = {"verbosity": ("medium",)}

    format: TextFormat = TextFormat(type="text")


class ReasoningOptions(Wire):
    unsupported: ClassVar[Neutral] = {
        "context": ("auto",),
        "generate_summary": ("auto",),
        "mode": ("standard",),
        "summary": ("auto",),
    }

    effort: Literal["", "none", "minimal", "low", "medium", "high", "xhigh", "max"] = ""


class StreamOptions(Wire):
    include_obfuscation: bool = False  # harmless: there is nothing to hide the length of tokens from


class PromptCacheOptions(Wire):
    """Harmless: every beginning that is asked for again is found, as long as there is room for it."""

    unsupported: ClassVar[Neutral] = {"comparison_response_id": (), "prewarm": (False,)}

    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Literal["30m", "12h"] = "30m"


class ResponseRequest(Work):
    unsupported: ClassVar[Neutral] = {
        "access_programs": ({},),
        "background": (False,),
        "background_options": ({},),
        "context_management": ([],),
        "conversation": (),
        "image": ({},),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "store": (False,),
        "truncation": ("disabled",),
    }

    model: str
    input: Annotated[
        list[Annotated[Item, ITEMS]], Field(min_length=1, fail_fast=True), BeforeValidator(items), at_most(MOST_ITEMS)
    ]
    instructions: str = ""
    max_output_tokens: Count = 0
    temperature: Annotated[float, between(0, 2)] = 1.0
    top_p: Annotated[float, between(0, 1)] = 1.0
    top_logprobs: Annotated[int, between(0, 20)] = 0
    include: Annotated[list[Includable], at_most(64)] = Field(default_factory=list)
    text: TextOptions = TextOptions()
    tools: Annotated[list[Annotated[Tool, OneOf((Tool,))]], Field(fail_fast=True), at_most(MOST_TOOLS)] = Field(
        default_factory=list
    )
    tool_choice: ToolChoice = AnyTool(type="auto")
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = ReasoningOptions()
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    # harmless: nothing of the answer depends on them
    max_tool_calls: Count = 0  # of tools that run here, and there are none
    metadata: Annotated[dict[str, str], at_most(16)] = Field(default_factory=dict)
    prompt_cache_key: str = ""
    prompt_cache_options: PromptCacheOptions = PromptCacheOptions()
    prompt_cache_retention: Literal["", "in_memory", "24h"] = ""
    safety_identifier: str = ""
    service_tier: str = ""
    user: str = ""
