"""A union of wire objects that are distinguished by their field `type`.

The type selects the object before the rest is validated, so error messages are about that object alone, and an
unsupported type is rejected by its name.
"""

from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BeforeValidator, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from .dialect import Wire


@dataclass(frozen=True)
class TaggedUnion:
    """An annotation: an object of one of `kinds`, each of which has a field `type` with its names.

    `default_type` is the type of an object without that field.
    """

    kinds: tuple[type[Wire], ...]
    default_type: str = ""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices = {union_tag(name): handler.generate_schema(kind) for kind in self.kinds for name in type_names(kind)}
        one = core_schema.tagged_union_schema(choices, discriminator=lambda value: union_tag(self.type_of(value)))
        return core_schema.no_info_before_validator_function(self.check_type, one)

    def type_of(self, value: Any) -> str:
        """The type of a JSON value, or of a validated wire object."""
        given = getattr(value, "type", "") if isinstance(value, Wire) else read_type(value)
        return given or self.default_type

    def check_type(self, value: Any) -> Any:
        every = [name for kind in self.kinds for name in type_names(kind)]
        given = self.type_of(value)
        if not isinstance(value, dict | Wire) or not given:
            sentence = "an object of the type " + " or ".join(map(repr, every))
            raise PydanticCustomError("described", "must be {sentence}", {"sentence": sentence})
        if given not in every:
            known = f"there {'are' if len(every) > 1 else 'is'} {', '.join(map(repr, every))}"
            facts = {"field": "type", "value": given, "advice": known}
            raise PydanticCustomError("unsupported", "is not supported", facts)
        return value


def read_type(value: Any) -> str:
    """The type in a client's value; empty if the value is no object or its type is no string.

    A type may be any JSON value, and a list or an object cannot be looked up in a set or a dict.
    """
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else ""


def type_names(kind: type[Wire]) -> tuple[str, ...]:
    return get_args(kind.model_fields["type"].annotation)


def union_tag(name: str) -> str:
    """`service.api.shared.dialect.field_path` leaves such tags out."""
    return f"<{name}>"


def parts_validator(kind: str) -> Any:
    """A validator: a string stands for one text part of type `kind`."""

    def parts(content: Any) -> Any:
        if isinstance(content, str):
            return [{"type": kind, "text": content}]
        if isinstance(content, list):
            return content
        raise PydanticCustomError("described", "must be {sentence}", {"sentence": "a string or a list of text parts"})

    return BeforeValidator(parts)
