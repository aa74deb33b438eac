"""A batch: requests in a file, which are answered in the background, into a file of answers and one of errors."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from .record_folder import FILE_ID, Number, Record

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
Endpoint = Literal[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/moderations",
    "/v1/rerank",
    "/v1/decisions",
    "/v1/systemone",
]
FileName = Annotated[str, Field(pattern=f"^({FILE_ID})?$")]
ENDED: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})
KEPT_BYTES, ERROR_BYTES, PAIR_BYTES = 3072, 1024, 128  # of a batch, each error, each pair of metadata: without texts
BYTES_PER_CHARACTER = 4
WINDOW_S = 24 * 3600  # in which a batch is answered; what is not answered by then is not answered at all


class BatchError(BaseModel):
    """Why a batch failed as a whole: what is wrong with a line of its file."""

    model_config = ConfigDict(frozen=True, strict=True)

    code: str
    message: str
    line: Number = 0  # from 1; 0: no line
    param: str = ""


class Batch(Record):
    """`output_file` and `error_file` are there from the first request on; clients learn of them at the end."""

    endpoint: Endpoint
    input_file: FileName
    status: Status = "validating"
    metadata: dict[str, str] = Field(default_factory=dict)
    output_seconds: Number = 0  # for which the files that it writes are kept; 0: until they are deleted
    times: dict[Status, Number] = Field(default_factory=dict)  # when it came to each status
    total: Number = 0  # requests
    completed: Number = 0
    failed: Number = 0
    errors: list[BatchError] = Field(default_factory=list)
    output_file: FileName = ""
    error_file: FileName = ""

    @property
    def expires_at(self) -> int:
        return self.created_at + WINDOW_S

    @property
    def kept_bytes(self) -> int:
        """About what it takes in memory."""
        texts = sum(PAIR_BYTES + BYTES_PER_CHARACTER * (len(key) + len(value)) for key, value in self.metadata.items())
        errors = sum(ERROR_BYTES + BYTES_PER_CHARACTER * len(error.message) for error in self.errors)
        return KEPT_BYTES + texts + errors

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def with_status(self, status: Status, now: float) -> "Batch":
        return self.model_copy(update={"status": status, "times": self.times | {status: int(now)}})
