"""What a recipe says of a transformer's size."""

from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, NonNegativeInt, PositiveInt

from polyhead.models.network.model_config import ModelConfig

from ..loop.dropout import DropoutRate
from ..loop.errors import RecipeError


@dataclass(frozen=True, kw_only=True)
class TransformerSize:
    """A transformer's: features, layers, heads, features inside (0: four times those outside)."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    width: PositiveInt
    depth: PositiveInt
    heads: PositiveInt
    mlp_width: NonNegativeInt = 0
    dropout: DropoutRate = 0.0

    def model_config(self, tokens: int, most: int, **others: Any) -> ModelConfig:
        """Over so many tokens, of which `most` are read at once.  RecipeError if heads don't divide the width."""
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
            max_positions=most,
            **others,
        )
