"""Wire objects of Ollama's API.  Names are those of its openapi.yaml and of the package `ollama`."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ...shared.dialect import (
    MAX_TEXTS,
    Count,
    EngineRequest,
    NeutralValues,
    Wire,
    between,
    max_items,
    must_be,
)
from ...shared.head_options import INT64_LIMIT, StopTexts
from ...shared.tool_options import CalledName

INT32_LIMIT = 1 << 31
MAX_MESSAGES, MAX_CALLS, MAX_TOOLS = 4096, 128, 128
Int32 = Annotated[int, between(-INT32_LIMIT, INT32_LIMIT - 1)]
KeepAlive = Annotated[
    Annotated[str, Field(max_length=64)] | Annotated[float, between(-1e9, 1e9)],
    must_be('a duration such as "5m", or a number of seconds'),
]
Think = Annotated[
    bool | Literal["low", "medium", "high", "max"], must_be('true, false, "low", "medium", "high" or "max"')
]
AnswerFormat = Annotated[Literal["", "json"] | dict[str, Any], must_be('"json" or a JSON schema as an object')]
ToolName = Annotated[str, Field(min_length=1, max_length=64)]


class OllamaOptions(Wire):
    """Sampling options, and settings of Ollama's runner, which have no effect here."""

    unsupported: ClassVar[NeutralValues] = {
        "mirostat": (0,),
        "mirostat_tau": (5,),
        "mirostat_eta": (0.1,),
        "tfs_z": (1,),
        "logits_all": (False,),
        "vocab_only": (False,),
        "embedding_only": (False, True),
        "penalize_newline": (True, False),  # the penalty is that of every token
        "draft_num_predict": (0,),
    }

    temperature: Annotated[float, between(0, 100)] = 0.8
    top_k: Annotated[int, between(0, INT32_LIMIT - 1)] = 40
    top_p: Annotated[float, between(0, 1)] = 0.9
    min_p: Annotated[float, between(0, 1)] = 0.0
    typical_p: Annotated[float, between(0.001, 1)] = 1.0
    repeat_penalty: Annotated[float, between(0.01, 100)] = 1.0
    repeat_last_n: Annotated[int, between(-1, INT32_LIMIT - 1)] = -1
    presence_penalty: Annotated[float, between(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, between(-2, 2)] = 0.0
    seed: Annotated[int, between(-INT64_LIMIT, INT64_LIMIT - 1)] = 0
    num_predict: Annotated[int, between(-2, INT32_LIMIT - 1)] = -1
    stop: StopTexts = Field(default_factory=list)
    # no effect: the server's settings decide
    num_ctx: Int32 = 0
    num_keep: Int32 = 0
    num_batch: Int32 = 0
    num_gpu: Int32 = 0
    main_gpu: Int32 = 0
    num_thread: Int32 = 0
    numa: bool = False
    low_vram: bool = False
    f16_kv: bool = True
    use_mmap: bool = True
    use_mlock: bool = False


def served_name(name: str) -> str:
    """The served name: Ollama's clients add the tag "latest"."""
    return name.removesuffix(":latest")


class OllamaRequest(EngineRequest):
    """A request to a model, which stays loaded whatever `keep_alive` says."""

    model: Annotated[str, Field(min_length=1)]
    options: OllamaOptions = OllamaOptions()
    keep_alive: KeepAlive = ""

    @property
    def model_name(self) -> str:
        return served_name(self.model)


class OllamaGenerationRequest(OllamaRequest):
    stream: bool = True
    format: AnswerFormat = ""
    think: Think | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, between(0, 20)] = 0


class OllamaGenerateRequest(OllamaGenerationRequest):
    """Without a prompt, the answer only says that the model is loaded."""

    unsupported: ClassVar[NeutralValues] = {
        "images": ([],),
        "template": ("",),  # a template is a program: only those of checkpoints are run
        "context": ([],),
        "width": (),
        "height": (),
        "steps": (),
        "shift": (),
        "truncate": (False,),
    }

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    raw: bool = False


class OllamaFunctionCall(Wire):
    name: CalledName
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: Int32 = 0  # no effect: the order of the list counts
    description: str = ""


class OllamaToolCall(Wire):
    id: str = ""
    type: Literal["function"] = "function"
    function: OllamaFunctionCall


class OllamaMessage(Wire):
    unsupported: ClassVar[NeutralValues] = {"images": ([],)}

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str = ""
    tool_calls: Annotated[list[OllamaToolCall], Field(fail_fast=True), max_items(MAX_CALLS)] = Field(
        default_factory=list
    )
    tool_name: str = ""
    tool_call_id: str = ""


class OllamaFunction(Wire):
    name: ToolName
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)


class OllamaTool(Wire):
    unsupported: ClassVar[NeutralValues] = {"items": ()}

    type: Literal["function"] = "function"
    function: OllamaFunction


class OllamaChatRequest(OllamaGenerationRequest):
    """Without messages, the answer only says that the model is loaded."""

    unsupported: ClassVar[NeutralValues] = {"truncate": (False,), "shift": (False,)}

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True), max_items(MAX_MESSAGES)] = Field(
        default_factory=list
    )
    tools: Annotated[list[OllamaTool], Field(fail_fast=True), max_items(MAX_TOOLS)] = Field(default_factory=list)


class OllamaEmbedRequest(OllamaRequest):
    """As in Ollama, a text that is too long is cut at its end unless `truncate` is false."""

    input: Annotated[
        str | Annotated[list[str], Field(fail_fast=True)],
        must_be("a string or a list of strings"),
        max_items(MAX_TEXTS),
    ]
    truncate: bool = True
    dimensions: Count = 0


class OllamaEmbeddingsRequest(OllamaRequest):
    """The older form of embed: one text, which is cut at its end if it is too long."""

    prompt: str


class OllamaShowRequest(Wire):
    unsupported: ClassVar[NeutralValues] = {"system": ("",), "template": ("",), "options": ({},)}

    model: str = ""
    name: str = ""  # the older name of `model`
    verbose: bool = False  # no effect: the answer is always whole
