"""Which smaller model foretells what a served one says, and whether it can.

Knows descriptions, no weights.  The one idea: what is foretold are tokens, so both must mean the same by each.
"""

from polyhead.models import checkpoint
from polyhead.models.checkpoint.description import Description
from polyhead.models.checkpoint.folder_files import FolderCheck, accept_folder
from polyhead.models.core.errors import UnsupportedError

from ..config.settings import Settings
from .placement import choose_placement


def choose_draft_model(
    name: str, what: Description, settings: Settings, vet: FolderCheck = accept_folder
) -> Description | None:
    """The draft model of the one called `name`, if it has one.

    Raises ModelError: UnsupportedError where it cannot draft, and says why.
    """
    source = settings.drafts.get(name, "")
    if not source:
        return None
    draft = checkpoint.describe_source(source, vet=vet)
    if reason := draft_mismatch(what, draft, settings):
        raise UnsupportedError(f"{source} cannot draft for {name}: {reason}")
    return draft


def draft_mismatch(what: Description, draft: Description, settings: Settings) -> str:
    """Why one cannot draft for the other; empty: it can."""
    for which, each in (("the model", what), ("the draft", draft)):
        if each.head.task != "generate":
            return f"{which} has a head for {each.head.task!r}; both must generate text"
    ours, theirs = what.tokenizer, draft.tokenizer
    if not ours.has_same_tokens(theirs):
        counts = f"{theirs.vocab_size} tokens, the model has {ours.vocab_size}"
        return f"its vocabulary ({counts}) is another one; a draft must be of the same family, with the same tokenizer"
    size, other = (choose_placement(settings, each.default_precision, each.config).block_size for each in (what, draft))
    return "" if size == other else f"its cache has blocks of {other} tokens, the model's of {size}; set block_size"
