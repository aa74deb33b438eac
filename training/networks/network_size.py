"""The size of a transformer, as a recipe gives it."""

from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, NonNegativeInt, PositiveInt

from polyhead.models.network.model_config import ModelConfig

from ..loop.dropout import DropoutRate
from ..loop.errors import RecipeError


@dataclass(frozen=True, kw_only=True)
class TransformerSize:
    """Width, layers, heads and MLP width (0: four times the width) of a transformer."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    width: PositiveInt
    depth: PositiveInt
    heads: PositiveInt
    mlp_width: NonNegativeInt = 0
    dropout: DropoutRate = 0.0

    def model_config(self, tokens: int, max_tokens: int, **others: Any) -> ModelConfig:
        """Return the configuration for `tokens` vocabulary entries and sequences of `max_tokens` tokens.  Raises
        RecipeError if heads don't divide the width.
        """
        if self.width % self.heads:
            raise RecipeError(f"network.heads: {self.width} features cannot be shared evenly among {self.heads} heads")
        return ModelConfig(
            vocab_size=tokens,
            width=self.width,
            depth=self.depth,
            heads=self.heads,
            kv_heads=self.heads,
            head_width=self.width // self.heads,
            mlp_width=self.mlp_width or 4 * self.width,
            max_positions=max_tokens,
            **others,
        )
