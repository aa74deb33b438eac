"""Names of the formats of quantised matrices, from which models.checkpoint.default_precision chooses."""

PACKED_GROUP = 32  # inputs that share a scale in models.native


def integer_kind(bits: int, has_zeros: bool, width: int, inputs: int) -> str:
    """The name for integers of `bits` bits, of which `width` neighbouring inputs of `inputs` share a scale."""
    if bits > 4:
        return "int8"
    if width % PACKED_GROUP and width < inputs:
        return "int4 in small groups"
    return "int4 with zero points" if has_zeros else "int4"
