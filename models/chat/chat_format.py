"""What a chat template says of the answers to it: how they call tools, and how they tell thoughts from words.

Knows no request and no answer.  The one idea: a template that lists tools says in its own text how they are to be
called, and there are a few such ways, so a table of what is written where tells them apart.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolCallStyle:
    """How an answer spells calls: JSON objects with a "name" and, under `key`, the arguments.

    Each stands between `begin` and `end`, several are divided by `between`.  Without a `begin` calls are the whole
    answer, several of them in brackets if `listed`; `mark` may stand before the first.
    """

    key: str
    begin: str = ""
    end: str = ""
    between: str = "\n"
    listed: bool = False
    mark: str = ""


TAGGED = ToolCallStyle("arguments", "<tool_call>", "</tool_call>")  # Hermes, Qwen
BARE = ToolCallStyle("parameters", between="; ", mark="<|python_tag|>")  # Llama 3
LISTED = ToolCallStyle("arguments", between=", ", listed=True)  # whoever is told of it


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """`listing`: the template lists the tools it is given and writes earlier calls, in this style; else both have to
    be written into the messages.  Thoughts stand between `begin` and `end`; both are empty where it knows of none."""

    style: ToolCallStyle = LISTED
    listing: bool = False
    begin: str = ""
    end: str = ""

    @property
    def tags(self) -> frozenset[str]:
        """All that is part of what an answer says, though a vocabulary may have it as a control token."""
        tags = {self.begin, self.end}
        if self.listing:
            tags |= {self.style.begin, self.style.end, self.style.mark}
        return frozenset(tags - {""})


# what a template has, and has not, that calls tools in a style; several others write `<tool_call>` around no JSON
STYLES: tuple[tuple[ToolCallStyle, str, str], ...] = (
    (TAGGED, r"<tool_call>", r"<function=|<arg_key>|<parameter="),
    (BARE, r'"parameters": dictionary of argument name', r"<tool_call>"),
)
THOUGHTS = (("<think>", "</think>"),)


def detect_format(source: str) -> ChatFormat:
    """What the text of a template says."""
    begin, end = next((tags for tags in THOUGHTS if tags[1] in source), ("", ""))
    if re.search(r"\btools\b", source):
        for style, has, has_not in STYLES:
            if re.search(has, source) and not re.search(has_not, source):
                return ChatFormat(style, True, begin, end)
    return ChatFormat(begin=begin, end=end)
