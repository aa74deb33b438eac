"""Wire objects of the Anthropic dialect.

A field of the real API is supported, or has no effect here, or is rejected by name at any value that would change the
answer.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from ...shared.dialect import Count, EngineRequest, NeutralValues, Wire, between, max_items
from ...shared.head_options import StopText
from ...shared.tagged_unions import TaggedUnion
from ...shared.tool_options import CalledName

MAX_MESSAGES, MAX_BLOCKS, MAX_TOOLS, MAX_STOP_SEQUENCES = 4096, 256, 1024, 64


class CacheControl(Wire):
    """No effect: every prefix that comes again is found in the cache, as long as there is room for it."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: Literal["5m", "1h"] = "5m"


class Cacheable(Wire):
    cache_control: CacheControl = CacheControl()


class TextBlock(Cacheable):
    unsupported: ClassVar[NeutralValues] = {"citations": ([],)}

    type: Literal["text"]
    text: str


class ToolUseBlock(Cacheable):
    unsupported: ClassVar[NeutralValues] = {"caller": ({"type": "direct"},), "toolset_name": ()}

    type: Literal["tool_use"]
    id: str
    name: CalledName
    input: dict[str, Any]


class ThinkingBlock(Wire):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""  # ignored: this server does not sign thinking blocks


def as_blocks(content: Any) -> Any:
    """A string stands for one text block."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list):
        return content
    raise PydanticCustomError("described", "must be {sentence}", {"sentence": "a string or a list of blocks"})


TextBlocks = Annotated[
    list[Annotated[TextBlock, TaggedUnion((TextBlock,))]],
    Field(fail_fast=True),
    BeforeValidator(as_blocks),
    max_items(MAX_BLOCKS),
]


class ToolResultBlock(Cacheable):
    unsupported: ClassVar[NeutralValues] = {"toolset_name": ()}

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextBlocks = Field(default_factory=list)
    is_error: bool = False


Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock
BLOCK_UNION = TaggedUnion((TextBlock, ToolUseBlock, ToolResultBlock, ThinkingBlock))


class AnthropicMessage(Wire):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[Annotated[Block, BLOCK_UNION]], Field(fail_fast=True), BeforeValidator(as_blocks), max_items(MAX_BLOCKS)
    ]


class AnthropicTool(Cacheable):
    """Arguments follow the schema, and are streamed as they are generated.

    With `strict: false` objects may have keys that the schema does not name.
    """

    unsupported: ClassVar[NeutralValues] = {
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


class AnthropicToolChoice(Wire):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class ThinkingEnabled(Wire):
    type: Literal["enabled"]
    budget_tokens: Count
    display: Literal["summarized"] = "summarized"  # the full text is returned as the summary


class ThinkingDisabled(Wire):
    type: Literal["disabled"]


class ThinkingAdaptive(Wire):
    type: Literal["adaptive"]
    display: Literal["summarized"] = "summarized"


class ThinkingUnset(Wire):
    """As the template does by default."""

    type: Literal["unsaid"] = "unsaid"


ThinkingOption = ThinkingEnabled | ThinkingDisabled | ThinkingAdaptive | ThinkingUnset


class OutputFormat(Wire):
    type: Literal["json_schema"]
    body: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Wire):
    """`effort` limits the reasoning before an answer; it is passed to templates that use it."""

    effort: Literal["", "low", "medium", "high", "xhigh", "max"] = ""
    format: OutputFormat | None = None


class Metadata(Wire):
    user_id: str = ""


class Conversation(EngineRequest):
    """The fields that /v1/messages and /v1/messages/count_tokens have in common."""

    unsupported: ClassVar[NeutralValues] = {
        "billing_policy": ({"type": "billing_policy"}, {"type": "billing_policy", "bill_to": "self"}),
        "compaction": (),
        "container": (),
        "context_management": (),
        "mcp_servers": ([],),
        "speed": ("standard",),
    }

    model: str
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, fail_fast=True), max_items(MAX_MESSAGES)]
    system: TextBlocks = Field(default_factory=list)
    tools: Annotated[
        list[Annotated[AnthropicTool, TaggedUnion((AnthropicTool,), default_type="custom")]],
        Field(fail_fast=True),
        max_items(MAX_TOOLS),
    ] = Field(default_factory=list)
    tool_choice: AnthropicToolChoice = AnthropicToolChoice(type="auto")
    thinking: Annotated[ThinkingOption, TaggedUnion((ThinkingEnabled, ThinkingDisabled, ThinkingAdaptive))] = (
        ThinkingUnset()
    )
    output_config: OutputConfig = OutputConfig()
    cache_control: CacheControl = CacheControl()  # no effect, as in a block


class MessagesRequest(Conversation):
    unsupported: ClassVar[NeutralValues] = {
        **Conversation.unsupported,
        "diagnostics": ({"previous_message_id": None},),
        "fallback_credit_token": (),
        "fallbacks": ([], "default"),
        "inference_geo": ("global",),
        "thread": (),
    }
    advice: ClassVar[Mapping[str, str]] = {
        "thread": "send the whole conversation, or use /v1/responses with previous_response_id, where the server "
        "keeps conversations"
    }

    max_tokens: Count
    temperature: Annotated[float, between(0, 1)] = 1.0
    top_p: Annotated[float, between(0, 1)] = 1.0
    top_k: Annotated[int, between(0, (1 << 31) - 1)] = 0
    stop_sequences: Annotated[list[StopText], Field(fail_fast=True), max_items(MAX_STOP_SEQUENCES)] = Field(
        default_factory=list
    )
    stream: bool = False
    # ignored: the answer does not depend on them
    metadata: Metadata = Metadata()
    service_tier: Literal["auto", "standard_only"] = "auto"


class CountRequest(Conversation):
    """Fields about the answer have no effect here."""
