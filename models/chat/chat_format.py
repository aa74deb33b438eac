"""The answer format that a chat template implies: how the model calls tools and how it marks thoughts. It is detected
by patterns in the template's source."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolCallStyle:
    """How an answer writes tool calls: JSON objects with a "name" and, under `key`, the arguments.

    Each call stands between `begin` and `end`; several are separated by `between`. Without a `begin` the calls are the
    whole answer, in brackets if `listed`; `mark` may stand before the first.
    """

    key: str
    begin: str = ""
    end: str = ""
    between: str = "\n"
    listed: bool = False
    mark: str = ""


TAGGED = ToolCallStyle("arguments", "<tool_call>", "</tool_call>")  # Hermes, Qwen
BARE = ToolCallStyle("parameters", between="; ", mark="<|python_tag|>")  # Llama 3
LISTED = ToolCallStyle("arguments", between=", ", listed=True)  # for models whose prompt describes the format


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """`listing`: the template lists the tools and writes earlier calls in this style; otherwise both are written into
    the messages. Thoughts stand between `begin` and `end`, both empty if the template has none."""

    style: ToolCallStyle = LISTED
    listing: bool = False
    begin: str = ""
    end: str = ""

    @property
    def tags(self) -> frozenset[str]:
        """All marks that are text of an answer, though a vocabulary may have them as control tokens."""
        tags = {self.begin, self.end}
        if self.listing:
            tags |= {self.style.begin, self.style.end, self.style.mark}
        return frozenset(tags - {""})


# for each style, a pattern that its templates contain and one that they do not; others put no JSON in `<tool_call>`
STYLES: tuple[tuple[ToolCallStyle, str, str], ...] = (
    (TAGGED, r"<tool_call>", r"<function=|<arg_key>|<parameter="),
    (BARE, r'"parameters": dictionary of argument name', r"<tool_call>"),
)
THOUGHTS = (("<think>", "</think>"),)


def detect_format(source: str) -> ChatFormat:
    """The format that the source of a template implies."""
    begin, end = next((tags for tags in THOUGHTS if tags[1] in source), ("", ""))
    if re.search(r"\btools\b", source):
        for style, has, has_not in STYLES:
            if re.search(has, source) and not re.search(has_not, source):
                return ChatFormat(style, True, begin, end)
    return ChatFormat(begin=begin, end=end)
