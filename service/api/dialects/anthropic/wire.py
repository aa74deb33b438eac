"""What the Anthropic dialect is asked: its wire objects, and the pure `read` of each.

Knows no engine and no answer.  The one idea: a field of the real API is done, or harmless, or refused by name at any
value that asks for something; templates know turns of text, so a turn's blocks are told apart here.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from ...shared.dialect import Count, Neutral, Wire, Work, at_most, between
from ...shared.head_options import StopString
from ...shared.tagged_unions import OneOf

MOST_MESSAGES, MOST_BLOCKS, MOST_TOOLS, MOST_STOPS = 4096, 256, 1024, 64


class CacheControl(Wire):
    """Harmless: every beginning that is asked for again is found, as long as there is room for it."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: Literal["5m", "1h"] = "5m"


class Cached(Wire):
    cache_control: CacheControl = CacheControl()


class TextBlock(Cached):
    unsupported: ClassVar[Neutral] = {"citations": ([],)}

    type: Literal["text"]
    text: str


class ToolUseBlock(Cached):
    unsupported: ClassVar[Neutral] = {"caller": ({"type": "direct"},), "toolset_name": ()}

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ThinkingBlock(Wire):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""  # harmless: nothing is signed here


def blocks(content: Any) -> Any:
    """A string is short for one block of text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list):
        return content
    raise PydanticCustomError("described", "must be {sentence}", {"sentence": "a string or a list of blocks"})


Texts = Annotated[
    list[Annotated[TextBlock, OneOf((TextBlock,))]],
    Field(fail_fast=True),
    BeforeValidator(blocks),
    at_most(MOST_BLOCKS),
]


class ToolResultBlock(Cached):
    unsupported: ClassVar[Neutral] = {"toolset_name": ()}

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = Field(default_factory=list)
    is_error: bool = False


Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock
BLOCKS = OneOf((TextBlock, ToolUseBlock, ToolResultBlock, ThinkingBlock))


class Message(Wire):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[Annotated[Block, BLOCKS]], Field(fail_fast=True), BeforeValidator(blocks), at_most(MOST_BLOCKS)
    ]


class Tool(Cached):
    """Arguments keep to the schema, `strict` or not, and are streamed as they are written."""

    unsupported: ClassVar[Neutral] = {
        "allowed_callers": (["direct"],),
        "defer_loading": (False,),
        "input_examples": ([],),
    }

    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
    description: str = ""
    input_schema: dict[str, Any]
    strict: bool = True
    eager_input_streaming: bool = True


class ToolChoice(Wire):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class Enabled(Wire):
    type: Literal["enabled"]
    budget_tokens: Count
    display: Literal["summarized"] = "summarized"  # as it is: a summary that leaves nothing out


class Disabled(Wire):
    type: Literal["disabled"]


class Adaptive(Wire):
    type: Literal["adaptive"]
    display: Literal["summarized"] = "summarized"


class Unsaid(Wire):
    """As the template does where nobody asks."""

    type: Literal["unsaid"] = "unsaid"


Thinks = Enabled | Disabled | Adaptive | Unsaid


class Format(Wire):
    type: Literal["json_schema"]
    body: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Wire):
    """An `effort` bounds the thoughts before an answer, and templates that know of it are told."""

    effort: Literal["", "low", "medium", "high", "xhigh", "max"] = ""
    format: Format | None = None


class Metadata(Wire):
    user_id: str = ""


class Conversation(Work):
    """What is asked and counted alike."""

    unsupported: ClassVar[Neutral] = {
        "container": (),
        "context_management": (),
        "mcp_servers": ([],),
        "speed": ("standard",),
    }

    model: str
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True), at_most(MOST_MESSAGES)]
    system: Texts = Field(default_factory=list)
    tools: Annotated[
        list[Annotated[Tool, OneOf((Tool,), unsaid="custom")]], Field(fail_fast=True), at_most(MOST_TOOLS)
    ] = Field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: Annotated[Thinks, OneOf((Enabled, Disabled, Adaptive))] = Unsaid()
    output_config: OutputConfig = OutputConfig()
    cache_control: CacheControl = CacheControl()  # harmless, as in a block


class MessagesRequest(Conversation):
    unsupported: ClassVar[Neutral] = {
        **Conversation.unsupported,
        "diagnostics": ({"previous_message_id": None},),
        "inference_geo": ("global",),
    }

    max_tokens: Count
    temperature: Annotated[float, between(0, 1)] = 1.0
    top_p: Annotated[float, between(0, 1)] = 1.0
    top_k: Annotated[int, between(0, (1 << 31) - 1)] = 0
    stop_sequences: Annotated[list[StopString], Field(fail_fast=True), at_most(MOST_STOPS)] = Field(
        default_factory=list
    )
    stream: bool = False
    # harmless: nothing of the answer depends on them
    metadata: Metadata = Metadata()
    service_tier: Literal["auto", "standard_only"] = "auto"


class CountRequest(Conversation):
    """Harmless here, what of it says how to answer."""
