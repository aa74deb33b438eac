"""What a user of `polyhead chat` has chosen."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .client import ApiClient


@dataclass(frozen=True)
class ChatOptions:
    """`model` is empty for the first generator.  `sampling` has only the fields of a request that were chosen: for the
    others the server uses the checkpoint's suggestions.  `system` is the system message; empty: none.  The answer to
    one question ends after `piped_pieces` pieces, each of a token or more; 0: it has no such limit.
    """

    model: str = ""
    system: str = ""
    sampling: Mapping[str, float] = field(default_factory=dict)
    renders_markdown: bool = True
    piped_pieces: int = 0

    @property
    def opening(self) -> list[dict[str, str]]:
        """The messages that every conversation begins with."""
        return [{"role": "system", "content": self.system}] if self.system else []

    def fields(self, client: ApiClient) -> dict[str, str | float]:
        """The fields of a request beside its messages."""
        return {"model": self.model or client.find_model("generate"), **self.sampling}
