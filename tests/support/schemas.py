"""JSON schemas that several tests ask answers for."""

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "size": {"enum": ["small", "large"]},
        "founded": {"type": "integer", "minimum": 100, "maximum": 2000},
    },
    "required": ["city", "size", "founded"],
    "additionalProperties": False,
}
NAMED_CITY = {"name": "city", "schema": CITY, "strict": True}
