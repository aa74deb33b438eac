"""One of several wire objects, told apart by their field `type`.

Knows no dialect.  The one idea: the type chooses the object before anything else of it is looked at, so a complaint is
about that object alone, and a type that this server does not do is refused by its name.
"""

from dataclasses import dataclass
from typing import Any, get_args

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from .dialect import Wire


@dataclass(frozen=True)
class TaggedUnion:
    """An annotation: an object of one of `kinds`, each of which has a field `type` with its names; `unsaid` is the
    type of an object that has none."""

    kinds: tuple[type[Wire], ...]
    default_type: str = ""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices = {union_tag(name): handler.generate_schema(kind) for kind in self.kinds for name in type_names(kind)}
        one = core_schema.tagged_union_schema(choices, discriminator=lambda value: union_tag(self.type_of(value)))
        return core_schema.no_info_before_validator_function(self.check_type, one)

    def type_of(self, value: Any) -> str:
        """Of a wire object that was checked already, too."""
        given = getattr(value, "type", "") if isinstance(value, Wire) else read_type(value)
        return given or self.default_type

    def check_type(self, value: Any) -> Any:
        every = [name for kind in self.kinds for name in type_names(kind)]
        given = self.type_of(value)
        if not isinstance(value, dict | Wire) or not given:
            sentence = "an object of the type " + " or ".join(map(repr, every))
            raise PydanticCustomError("described", "must be {sentence}", {"sentence": sentence})
        if given not in every:
            raise PydanticCustomError("unsupported", "is not supported", {"field": "type", "value": given})
        return value


def read_type(value: Any) -> str:
    """The type that a client's value says it has; empty where it is no object, or where its type is no string.

    A type may be any JSON value, and a list or an object cannot be looked up in a set or a dict.
    """
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else ""


def type_names(kind: type[Wire]) -> tuple[str, ...]:
    return get_args(kind.model_fields["type"].annotation)


def union_tag(name: str) -> str:
    """As `service.api.shared.dialect.path` leaves it out."""
    return f"<{name}>"
