"""Wire objects of OpenAI's responses API.

A field of the real API is supported, or has no effect here, or is rejected by name at any value that would change the
answer.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from ...shared.dialect import ClientName, Count, EngineRequest, MetadataPairs, NeutralValues, Wire, between, max_items
from ...shared.response_formats import TextFormat
from ...shared.tagged_unions import TaggedUnion, parts_validator
from ...shared.tool_options import CalledName

MAX_ITEMS, MAX_PARTS, MAX_TOOLS = 4096, 256, 1024
LOGPROBS = "message.output_text.logprobs"
# Only the first has an effect; the others belong to unsupported tools, to images and to encrypted reasoning.
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
DIRECT_CALLER: NeutralValues = {"caller": ({"type": "direct"},), "namespace": ("",)}

ItemStatus = Literal["", "in_progress", "completed", "incomplete"]  # ignored: it comes back from an earlier answer


# Input: text and earlier items


class InputCacheBreakpoint(Wire):
    mode: Literal["explicit"] = "explicit"
    ttl: Literal["30m", "12h"] = "30m"


class InputText(Wire):
    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: InputCacheBreakpoint = InputCacheBreakpoint()  # no effect: prefixes are always cached


class OutputText(Wire):
    """Text of an earlier answer."""

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


ContentPart = InputText | OutputText | Refusal
ContentParts = Annotated[
    list[Annotated[ContentPart, TaggedUnion((InputText, OutputText, Refusal))]],
    Field(fail_fast=True),
    parts_validator("input_text"),
    max_items(MAX_PARTS),
]


class MessageItem(Wire):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: ContentParts
    id: str = ""
    status: ItemStatus = ""
    phase: Literal["", "commentary", "final_answer"] = ""


class FunctionCall(Wire):
    unsupported: ClassVar[NeutralValues] = {**DIRECT_CALLER, "async": (False,)}

    type: Literal["function_call"]
    call_id: str
    name: CalledName
    arguments: str
    id: str = ""
    status: ItemStatus = ""


class FunctionOutput(Wire):
    unsupported: ClassVar[NeutralValues] = DIRECT_CALLER

    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[
        list[Annotated[InputText, TaggedUnion((InputText,))]],
        Field(fail_fast=True),
        parts_validator("input_text"),
        max_items(MAX_PARTS),
    ]
    name: str = ""
    id: str = ""
    status: ItemStatus = ""


class ReasoningText(Wire):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(Wire):
    type: Literal["summary_text"]
    text: str


class ReasoningItem(Wire):
    """Earlier reasoning as plain text, or its summary."""

    unsupported: ClassVar[NeutralValues] = {"encrypted_content": ("",)}

    type: Literal["reasoning"]
    id: str = ""
    summary: Annotated[list[Annotated[SummaryText, TaggedUnion((SummaryText,))]], max_items(MAX_PARTS)] = Field(
        default_factory=list
    )
    content: Annotated[list[Annotated[ReasoningText, TaggedUnion((ReasoningText,))]], max_items(MAX_PARTS)] = Field(
        default_factory=list
    )
    status: ItemStatus = ""


InputItem = MessageItem | FunctionCall | FunctionOutput | ReasoningItem
ITEM_UNION = TaggedUnion((MessageItem, FunctionCall, FunctionOutput, ReasoningItem), default_type="message")


def as_items(given: Any) -> Any:
    """A string stands for one user message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if isinstance(given, list):
        return given
    raise PydanticCustomError("described", "must be {sentence}", {"sentence": "a string or a list of items"})


# Options


class ResponseTool(Wire):
    """Arguments follow the schema.  With `strict: false` objects may have keys that it does not name."""

    unsupported: ClassVar[NeutralValues] = {
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
    tools: Annotated[list[Annotated[ChosenTool, TaggedUnion((ChosenTool,))]], Field(min_length=1), max_items(MAX_TOOLS)]


class ToolMode(Wire):
    """A choice that is a string in the body."""

    type: Literal["none", "auto", "required"]


def as_choice_object(choice: Any) -> Any:
    return {"type": choice} if isinstance(choice, str) else choice


ResponseToolChoice = Annotated[
    ToolMode | ChosenTool | AllowedTools,
    TaggedUnion((ToolMode, ChosenTool, AllowedTools)),
    BeforeValidator(as_choice_object),
]


class ResponseTextOptions(Wire):
    unsupported: ClassVar[NeutralValues] = {"verbosity": ("medium",)}

    format: TextFormat = TextFormat(type="text")


class ReasoningOptions(Wire):
    unsupported: ClassVar[NeutralValues] = {
        "context": ("auto",),
        "generate_summary": ("auto",),
        "mode": ("standard",),
        "summary": ("auto",),
    }

    effort: Literal["", "none", "minimal", "low", "medium", "high", "xhigh", "max"] = ""


class ResponseStreamOptions(Wire):
    include_obfuscation: bool = False  # ignored: padding against traffic analysis


class ResponseCacheOptions(Wire):
    """No effect: every prefix that comes again is found in the cache, as long as there is room for it."""

    unsupported: ClassVar[NeutralValues] = {"comparison_response_id": (), "prewarm": (False,)}

    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Literal["30m", "12h"] = "30m"


class ResponseRequest(EngineRequest):
    unsupported: ClassVar[NeutralValues] = {
        "access_programs": ({},),
        "background": (False,),
        "background_options": ({},),
        "context_management": ([],),
        "conversation": (),
        "image": ({},),
        "moderation": (),
        "prompt": (),
    }

    model: str
    input: Annotated[
        list[Annotated[InputItem, ITEM_UNION]],
        Field(min_length=1, fail_fast=True),
        BeforeValidator(as_items),
        max_items(MAX_ITEMS),
    ]
    instructions: str = ""
    previous_response_id: str = ""  # of a response whose conversation this one continues
    store: bool = True  # where it is not given, as the server keeps responses or not
    max_output_tokens: Count = 0
    temperature: Annotated[float, between(0, 2)] = 1.0
    top_p: Annotated[float, between(0, 1)] = 1.0
    top_logprobs: Annotated[int, between(0, 20)] = 0
    include: Annotated[list[Includable], max_items(64)] = Field(default_factory=list)
    text: ResponseTextOptions = ResponseTextOptions()
    tools: Annotated[
        list[Annotated[ResponseTool, TaggedUnion((ResponseTool,))]], Field(fail_fast=True), max_items(MAX_TOOLS)
    ] = Field(default_factory=list)
    tool_choice: ResponseToolChoice = ToolMode(type="auto")
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = ReasoningOptions()
    truncation: Literal["disabled", "auto"] = "disabled"
    stream: bool = False
    stream_options: ResponseStreamOptions = ResponseStreamOptions()
    # ignored: the answer does not depend on them
    max_tool_calls: Count = 0  # a limit on built-in tools, of which there are none
    metadata: MetadataPairs = Field(default_factory=dict)
    prompt_cache_key: ClientName = ""
    prompt_cache_options: ResponseCacheOptions = ResponseCacheOptions()
    prompt_cache_retention: Literal["", "in_memory", "24h"] = ""
    safety_identifier: ClientName = ""
    service_tier: str = ""
    user: ClientName = ""
