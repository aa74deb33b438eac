"""From a conversation to the prompt that a model was trained on, through the template of its checkpoint.

The one idea: a template is a program by a stranger.  It is compiled once, sees plain JSON values only, and runs where
it can neither reach anything nor take long (models/sandbox.py).  Knows no tokens: a prompt is text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from models.chat.functions import allow
from models.chat.sandbox import FAILURES, Sandbox
from models.errors import TemplateError
from models.tokenizer import well_formed

SOURCE = 200_000  # characters that a template may have


class ChatTemplate:
    """A compiled chat template; rendering changes nothing in it, so any number of threads may.

    TemplateError for a source that is no template.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        if len(source) > SOURCE:
            raise TemplateError(f"the chat template has {len(source):,} characters; at most {SOURCE:,} are read")
        self._sandbox = Sandbox()
        self._sandbox.start()
        try:
            self._template = self._sandbox.from_string(well_formed(source, "the chat template"))
        except jinja2.TemplateSyntaxError as problem:
            raise TemplateError(f"the chat template is wrong in line {problem.lineno}: {problem.message}") from problem
        except FAILURES as problem:
            raise TemplateError(f"the chat template cannot be read: {problem}") from problem

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **extra: Any) -> str:
        """The prompt for `messages`; `extra` are more variables for the template (`tools`, `documents`, ...).

        TemplateError if the template fails, refuses the messages or goes beyond a limit; EncodingError if a message
        is no text (lone surrogates).
        """
        values = {"tools": None, "documents": None, **extra, "messages": messages}
        try:
            given = {name: _plain(value, name) for name, value in values.items()}
            return self._written({**self._tokens, **given, "add_generation_prompt": add_generation_prompt})
        except FAILURES as problem:
            said = str(problem)[:500] or type(problem).__name__
            raise TemplateError(f"the chat template fails on these messages: {said}") from problem

    def _written(self, given: Mapping[str, Any]) -> str:
        parts, size = [], 0
        self._sandbox.start()
        for part in self._template.generate(given):
            size += len(part)
            allow(size)
            parts.append(part)
        return "".join(parts)


def _plain(value: Any, name: str) -> Any:
    """A copy made of JSON's own kinds of value, so that a template finds no methods but theirs."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return well_formed(str(value), name)
    if isinstance(value, Mapping):
        return {_plain(key, name): _plain(each, f"{name}.{key}") for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(each, f"{name}[{index}]") for index, each in enumerate(value)]
    raise TemplateError(f"{name} is a {type(value).__name__}; chat templates read JSON values only")
