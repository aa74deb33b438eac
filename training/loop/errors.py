"""What can be wrong with what training is asked to do."""

from polyhead.models.core.errors import ModelError


class RecipeError(ModelError):
    """A recipe, or something it names, that cannot be used: the message names the field and what would be right."""
