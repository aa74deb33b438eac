"""Renders a conversation to the text of a prompt with the chat template of a checkpoint.

A template is an untrusted program. It is compiled once, gets plain JSON values only, and runs in a sandbox with limits
(models/chat/template_sandbox.py).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2

from ..core.errors import TemplateError
from ..tokenizer import require_well_formed
from .chat_format import detect_format
from .template_functions import check_size
from .template_sandbox import FAILURES, Sandbox

NO_VARIABLES: Mapping[str, Any] = {}
MAX_TEMPLATE_CHARACTERS = 200_000  # characters of a template at most
# Put at the place where a message is to be continued, to find it in the result.
CONTINUATION_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """A compiled chat template. It has no mutable state, so several threads may render at the same time.

    `tool_use` is a second template, which some checkpoints have for requests with tools. Raises TemplateError for a
    source that does not compile, and for one that is too long before anything reads it.
    """

    def __init__(self, source: str, *, tool_use: str = "", bos_token: str = "", eos_token: str = "") -> None:
        _check_length(source)
        _check_length(tool_use)
        self.source, self.format = source, detect_format(source + tool_use)
        self.parts = source, tool_use, bos_token, eos_token  # everything the template is made of
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._sandbox = Sandbox()
        self._template = self._compile(source)
        self._tool_use = self._compile(tool_use) if tool_use else self._template

    @classmethod
    def from_parts(cls, source: str, tool_use: str, bos_token: str, eos_token: str) -> "ChatTemplate":
        """The template with these `parts`."""
        return cls(source, tool_use=tool_use, bos_token=bos_token, eos_token=eos_token)

    def _compile(self, source: str) -> jinja2.Template:
        self._sandbox.start_clock()
        try:
            return self._sandbox.from_string(require_well_formed(source, "the chat template"))
        except jinja2.TemplateSyntaxError as problem:
            raise TemplateError(f"the chat template is wrong in line {problem.lineno}: {problem.message}") from problem
        except FAILURES as problem:
            raise TemplateError(f"the chat template cannot be read: {problem}") from problem

    def uses_variable(self, name: str) -> bool:
        """Whether the source uses a variable of this name."""
        return re.search(rf"\b{re.escape(name)}\b", self.source) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continued: bool = False,
        variables: Mapping[str, Any] = NO_VARIABLES,
        quote: Callable[[str], str] = str,
    ) -> str:
        """The prompt for `messages`; `variables` are further variables of the template (`tools`, `documents`, ...).

        With `continued` the prompt ends in the middle of the last message, whose text is to be continued. `quote` is
        applied to every text the template gets, except for the checkpoint's own tokens.

        Raises TemplateError if the template fails, refuses the messages, leaves the last one out, or exceeds a limit;
        EncodingError if a message has lone surrogates.
        """
        marked = (
            [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + CONTINUATION_MARK}]
            if continued
            else messages
        )
        values = {"tools": None, "documents": None, **variables, "messages": marked}
        try:
            given = {name: _copy_json(value, name, quote) for name, value in values.items()}
            written = self._render({**self._tokens, **given, "add_generation_prompt": add_generation_prompt})
        except FAILURES as problem:
            reason = str(problem)[:500] or type(problem).__name__
            raise TemplateError(f"the chat template fails on these messages: {reason}") from problem
        return _cut_at_mark(written, quote(messages[-1]["content"])) if continued else written

    def _render(self, given: Mapping[str, Any]) -> str:
        parts, size = [], 0
        self._sandbox.start_clock()
        template = self._tool_use if given["tools"] else self._template
        for part in template.generate(given):
            size += len(part)
            check_size(size)
            parts.append(part)
        return "".join(parts)


def _check_length(source: str) -> None:
    if len(source) > MAX_TEMPLATE_CHARACTERS:
        message = f"the chat template has {len(source):,} characters; at most {MAX_TEMPLATE_CHARACTERS:,} are read"
        raise TemplateError(message)


def _cut_at_mark(written: str, last: str) -> str:
    """The text before the mark, without the whitespace that the template removed from the end of the message."""
    at = written.rfind(CONTINUATION_MARK.strip())
    if at < 0 or last.strip() not in written:
        raise TemplateError("the chat template does not write the last message as it is, so it cannot be continued")
    return written[:at] if written.startswith(CONTINUATION_MARK, at) else written[:at].rstrip()


def _copy_json(value: Any, name: str, quote: Callable[[str], str]) -> Any:
    """A copy of plain JSON types, so that the template cannot call methods of other types."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return quote(require_well_formed(str(value), name))
    if isinstance(value, Mapping):
        return {_copy_json(key, name, quote): _copy_json(each, f"{name}.{key}", quote) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_copy_json(each, f"{name}[{index}]", quote) for index, each in enumerate(value)]
    raise TemplateError(f"{name} is a {type(value).__name__}; chat templates read JSON values only")
