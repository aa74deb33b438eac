"""The error of training."""

from polyhead.models.core.errors import ModelError


class RecipeError(ModelError):
    """A recipe, or something it names, cannot be used.  The message names the field and what would be right."""
