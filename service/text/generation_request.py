"""What every dialect reads a generation into: prompts, options, and for conversations tools and reasoning."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..core.grammar import Grammar, Thinking
from ..core.request import BeamSearchOptions, Sampling

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ChatMessages:
    """Messages for the chat template, with the `tools` and other `variables` that it may read.

    `continues_last`: the last message is the beginning of the answer. `opens_answer`: the prompt ends with the header
    of the answer.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    continues_last: bool = False
    opens_answer: bool = True


@dataclass(frozen=True, slots=True)
class FillInMiddle:
    """A text to be written between `before` and `after`, which is `suffix` in the request."""

    before: str
    after: str


Prompt = str | tuple[int, ...] | ChatMessages | FillInMiddle


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """A function and the JSON schema of its arguments, which calls must follow. `schema_path` is the field of the
    schema in the request. Unless `is_open`, objects that name their properties have no others.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: NO_PARAMETERS)
    schema_path: str = ""
    is_open: bool = False

    @property
    def grammar_kind(self) -> Literal["schema", "open_schema"]:
        """The kind of grammar that the arguments follow."""
        return "open_schema" if self.is_open else "schema"

    @property
    def as_template_object(self) -> dict[str, Any]:
        """The definition as chat templates expect it."""
        described = {"description": self.description} if self.description else {}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.parameters}}


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """The tools that an answer may call: `offered`, or those named in `only`; at most one call unless `parallel`.

    `field` is the name of the tools in the request. With the choice "none" the tools are not in the prompt.
    """

    offered: tuple[ToolDefinition, ...] = ()
    choice: Literal["none", "auto", "required"] = "auto"
    only: frozenset[str] = frozenset()
    parallel: bool = True
    field: str = "tools"

    @property
    def callable(self) -> tuple[ToolDefinition, ...]:
        if self.choice == "none":
            return ()
        return tuple(tool for tool in self.offered if not self.only or tool.name in self.only)


@dataclass(frozen=True, slots=True)
class ReasoningSettings:
    """Whether the model reasons before it answers ("": the template's default), for at most `budget` tokens (-1: no
    limit).

    `field` is the name of the option in the request. `effort` is a variable for templates. `is_shown`: the client gets
    the reasoning. `is_required`: a model that cannot reason refuses the request; otherwise it ignores the option.
    """

    mode: Literal["", "on", "off"] = ""
    budget: int = -1
    effort: str = ""
    field: str = ""
    is_shown: bool = True
    is_required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Prompts to be continued, all with the same options. A conversation is a single prompt, of type ChatMessages.

    `field` is the name of the prompts in the request, `limit_field` that of their token limit.

    Each prompt gets `count` answers (`count_field` in the request): the best of `best_of`, by the mean log probability
    of their tokens. `keep_stop` leaves a stop string at the end of the answer. Of a text prompt only the last
    `truncate` tokens are used; 0: all.
    """

    field: str
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    open_options: frozenset[str] = frozenset()  # of `sampling`: those that the checkpoint may set (Model.sampling)
    has_seed: bool = False  # the request has a seed; otherwise every answer gets a random one
    max_tokens: int = 0  # 0: not in the request
    default_max_tokens: int = 0  # the limit if max_tokens is 0, as far as the context allows; 0: no other limit
    stops: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int = -1  # as in Generate
    limit_field: str = "max_tokens"
    fits_context: bool = False  # max_tokens is reduced to the rest of the context
    truncate: int = 0
    drops_oldest: bool = False  # a conversation that is too long is cut (service.text.chat_truncation)
    count: int = 1
    count_field: str = "n"
    best_of: int = 0  # 0: as many as count
    beams: BeamSearchOptions | None = None
    keep_stop: bool = False
    prompt_logprobs: int = -1  # as in Generate
    only_scores: bool = False  # nothing is generated: only the prompt's log probabilities are requested
    bad_words: tuple[str, ...] = ()
    grammar: Grammar | None = None
    thinking: Thinking | None = None
    salt: str = ""
    tools: ToolOptions = ToolOptions()  # of a conversation, as `reasoning`
    reasoning: ReasoningSettings = ReasoningSettings()

    @property
    def token_limit(self) -> int:
        """The most tokens of an answer, as far as the context allows; 0: the rest of the context."""
        return self.max_tokens or self.default_max_tokens

    @property
    def attempts(self) -> int:
        return max(self.count, self.best_of)
