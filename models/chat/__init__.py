"""From a conversation to the prompt that a model was trained on, through the template of its checkpoint.

The one idea: a template is a program by a stranger.  It is compiled once, sees plain JSON values only, and runs where
it can neither reach anything nor take long (models/sandbox.py).  Knows no tokens: a prompt is text.
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

NONE: Mapping[str, Any] = {}
SOURCE = 200_000  # characters that a template may have
CONTINUATION_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # put where a message is to be gone on with, to find the place again


class ChatTemplate:
    """A compiled chat template; rendering changes nothing in it, so any number of threads may.

    Some checkpoints have another one for when there are tools, `tool_use`.  TemplateError for a source that is no
    template.
    """

    def __init__(self, source: str, *, tool_use: str = "", bos_token: str = "", eos_token: str = "") -> None:
        self.source, self.format = source, detect_format(source + tool_use)
        self.parts = source, tool_use, bos_token, eos_token  # all that it is made of
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._sandbox = Sandbox()
        self._template = self._compile(source)
        self._tool_use = self._compile(tool_use) if tool_use else self._template

    @classmethod
    def from_parts(cls, source: str, tool_use: str, bos_token: str, eos_token: str) -> "ChatTemplate":
        """What has these `parts`."""
        return cls(source, tool_use=tool_use, bos_token=bos_token, eos_token=eos_token)

    def _compile(self, source: str) -> jinja2.Template:
        if len(source) > SOURCE:
            raise TemplateError(f"the chat template has {len(source):,} characters; at most {SOURCE:,} are read")
        self._sandbox.start_clock()
        try:
            return self._sandbox.from_string(require_well_formed(source, "the chat template"))
        except jinja2.TemplateSyntaxError as problem:
            raise TemplateError(f"the chat template is wrong in line {problem.lineno}: {problem.message}") from problem
        except FAILURES as problem:
            raise TemplateError(f"the chat template cannot be read: {problem}") from problem

    def uses_variable(self, name: str) -> bool:
        """Whether it mentions a variable."""
        return re.search(rf"\b{re.escape(name)}\b", self.source) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continued: bool = False,
        variables: Mapping[str, Any] = NONE,
        quote: Callable[[str], str] = str,
    ) -> str:
        """The prompt for `messages`; `variables` are more of what the template may read (`tools`, `documents`, ...).

        With `continued` it ends in the middle of the last message, which has a text to be gone on with.  Every text
        that the template is given, but for the checkpoint's own tokens, is `quote`d first.

        TemplateError if the template fails, refuses the messages, leaves the last one out, or goes beyond a limit;
        EncodingError if a message is no text (lone surrogates).
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
            said = str(problem)[:500] or type(problem).__name__
            raise TemplateError(f"the chat template fails on these messages: {said}") from problem
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


def _cut_at_mark(written: str, last: str) -> str:
    """What was written before the mark; space that the template took from the message's end is no part of it."""
    at = written.rfind(CONTINUATION_MARK.strip())
    if at < 0 or last.strip() not in written:
        raise TemplateError("the chat template does not write the last message as it is, so it cannot be gone on with")
    return written[:at] if written.startswith(CONTINUATION_MARK, at) else written[:at].rstrip()


def _copy_json(value: Any, name: str, quote: Callable[[str], str]) -> Any:
    """A copy made of JSON's own kinds of value, so that a template finds no methods but theirs."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return quote(require_well_formed(str(value), name))
    if isinstance(value, Mapping):
        return {_copy_json(key, name, quote): _copy_json(each, f"{name}.{key}", quote) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_copy_json(each, f"{name}[{index}]", quote) for index, each in enumerate(value)]
    raise TemplateError(f"{name} is a {type(value).__name__}; chat templates read JSON values only")
