"""The draft model of a served generator, for speculative decoding, and whether the two fit together. Only checkpoint
descriptions are read, no weights.
"""

from polyhead.models import checkpoint
from polyhead.models.checkpoint.description import Description
from polyhead.models.checkpoint.folder_files import FolderCheck, accept_folder
from polyhead.models.core.errors import UnsupportedError

from ..config.settings import Settings
from .placement import choose_placement

NO_RECURRENT_DRAFTS = "the states of recurrent layers cannot go back to the token before a rejected draft"


def choose_draft_model(
    name: str, description: Description, settings: Settings, folder_check: FolderCheck = accept_folder
) -> Description | None:
    """Describe the draft model that the setting `drafts` gives to the model called `name`; None if there is none.

    Raises ModelError if the draft cannot be described, and UnsupportedError with the reason if it cannot draft for this
    model.
    """
    source = settings.drafts.get(name, "")
    if not source:
        return None
    draft = checkpoint.describe_source(source, folder_check=folder_check)
    if reason := draft_mismatch(description, draft, settings):
        raise UnsupportedError(f"{source} cannot draft for {name}: {reason}")
    return draft


def draft_mismatch(description: Description, draft: Description, settings: Settings) -> str:
    """Return why `draft` cannot draft for `description`; empty if it can. Both must generate text, with the same
    tokenizer and the same cache block size.
    """
    for role, each in (("the model", description), ("the draft", draft)):
        if each.head.task != "generate":
            return f"{role} has a head for {each.head.task!r}; both must generate text"
        if each.config.is_recurrent:
            return f"{role} is recurrent, and {NO_RECURRENT_DRAFTS}"
    ours, theirs = description.tokenizer, draft.tokenizer
    if not ours.has_same_tokens(theirs):
        counts = f"{theirs.vocab_size} tokens, the model has {ours.vocab_size}"
        return f"its vocabulary ({counts}) is another one; a draft must be of the same family, with the same tokenizer"
    size, other = (
        choose_placement(settings, each.default_precision, each.config).block_size for each in (description, draft)
    )
    return "" if size == other else f"its cache has blocks of {other} tokens, the model's of {size}; set block_size"
