"""Sampling options by the names of the OpenAI API and of vLLM's extensions, shared by completions and chat."""

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from ...core.errors import BadRequest
from ...core.request import BeamSearchOptions, Sampling
from ...text.generation_request import GenerationRequest, Prompt
from .dialect import ClientName, Count, MetadataPairs, NeutralValues, TokenId, Wire, between, max_items
from .head_options import INT64_LIMIT, StopTexts
from .open_options import open_options
from .response_formats import FormattedRequest, read_grammar

MAX_BIASES, MAX_BAD_WORDS, MAX_WORD_CHARS = 4096, 1024, 256
MAX_ANSWERS, MAX_BEAMS = 128, 64


def parse_token_keys(value: Any) -> Any:
    """The keys of a logit bias as integers.

    Raises for any other spelling of a number than the shortest: "0" and "00" would be two biases of one token.
    """
    if not isinstance(value, dict):
        return value
    for name in value:
        if not (name.isascii() and name.isdecimal() and len(name) < 10 and name == str(int(name))):
            sentence = {"sentence": f"an object from token ids to numbers; {name[:40]!r} is no token id"}
            raise PydanticCustomError("described", "must be {sentence}", sentence)
    return {int(name): bias for name, bias in value.items()}


LogitBias = Annotated[
    dict[int, Annotated[float, between(-100, 100)]], BeforeValidator(parse_token_keys), max_items(MAX_BIASES)
]
TokenIdList = Annotated[list[TokenId], Field(fail_fast=True), max_items(1 << 18)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_WORD_CHARS)]
Penalty = Annotated[float, between(-2, 2)]


class StreamOptions(Wire):
    include_usage: bool = False
    include_obfuscation: bool = False  # ignored: padding against traffic analysis


class SampledRequest(FormattedRequest):
    """The fields that completions and chat have in common."""

    unsupported: ClassVar[NeutralValues] = {
        "store": (False,),
        "logits_processors": ([],),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True, False),  # special tokens are never part of the text
        "truncate_prompt_tokens": (),
    }

    model: str
    n: Annotated[int, between(1, MAX_ANSWERS)] = 1
    best_of: Annotated[int, between(1, MAX_ANSWERS)] = 0
    max_tokens: Count = 0
    min_tokens: Annotated[int, between(0, (1 << 31) - 1)] = 0
    temperature: Annotated[float, between(0, 2)] = 1.0
    top_p: Annotated[float, between(0, 1)] = 1.0
    top_k: Annotated[int, between(-1, (1 << 31) - 1)] = 0
    min_p: Annotated[float, between(0, 1)] = 0.0
    typical_p: Annotated[float, between(0.001, 1)] = 1.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, between(0.01, 100)] = 1.0
    logit_bias: LogitBias = Field(default_factory=dict)
    allowed_token_ids: TokenIdList = Field(default_factory=list)
    bad_words: Annotated[list[BadWord], Field(fail_fast=True), max_items(MAX_BAD_WORDS)] = Field(default_factory=list)
    seed: Annotated[int, between(-INT64_LIMIT, INT64_LIMIT - 1)] = 0
    stop: StopTexts = Field(default_factory=list)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    use_beam_search: bool = False  # `best_of` beams
    length_penalty: Annotated[float, between(-100, 100)] = 1.0
    early_stopping: bool = False
    prompt_logprobs: Annotated[int, between(0, 20)] = -1
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] = ""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    # ignored: the answer does not depend on them
    user: ClientName = ""
    metadata: MetadataPairs = Field(default_factory=dict)
    service_tier: str = ""
    safety_identifier: ClientName = ""
    prompt_cache_key: ClientName = ""
    prompt_cache_retention: str = ""


def read_generation_options(
    wire: SampledRequest, field: str, prompts: tuple[Prompt, ...], max_tokens: int, logprobs: int
) -> GenerationRequest:
    check_sampling(wire)
    return GenerationRequest(
        field=field,
        prompts=prompts,
        sampling=read_sampling(wire),
        open_options=frozenset() if wire.use_beam_search else open_options(wire),
        has_seed="seed" in wire.model_fields_set,
        max_tokens=max_tokens,
        stops=(wire.stop,) if isinstance(wire.stop, str) else tuple(wire.stop),
        stop_tokens=frozenset(wire.stop_token_ids),
        ignore_eos=wire.ignore_eos,
        logprobs=logprobs,
        count=wire.n,
        best_of=wire.n if wire.use_beam_search else wire.best_of,
        beams=read_beams(wire) if wire.use_beam_search else None,
        keep_stop=wire.include_stop_str_in_output,
        prompt_logprobs=wire.prompt_logprobs,
        bad_words=tuple(wire.bad_words),
        grammar=read_grammar(wire),
        salt=wire.cache_salt,
    )


def read_sampling(wire: SampledRequest) -> Sampling:
    return Sampling(
        temperature=wire.temperature,
        top_k=max(wire.top_k, 0),
        top_p=wire.top_p,
        min_p=wire.min_p,
        seed=wire.seed % INT64_LIMIT,
        typical_p=wire.typical_p,
        repetition_penalty=wire.repetition_penalty,
        frequency_penalty=wire.frequency_penalty,
        presence_penalty=wire.presence_penalty,
        bias=tuple(wire.logit_bias.items()),
        allowed=tuple(sorted(set(wire.allowed_token_ids))),
        min_tokens=wire.min_tokens,
    )


def read_beams(wire: SampledRequest) -> BeamSearchOptions:
    """A beam search as wide as `n` and `best_of` require; beam search does not sample."""
    width = max(wire.n, wire.best_of)
    if width > MAX_BEAMS:
        raise BadRequest(f"best_of: a search is at most {MAX_BEAMS} wide, got {width}", param="best_of")
    return BeamSearchOptions(width, wire.length_penalty, wire.early_stopping)


def check_sampling(wire: SampledRequest) -> None:
    """Raises BadRequest for options that exclude each other."""
    given = wire.model_fields_set
    if "stream_options" in given and not wire.stream:
        raise BadRequest("stream_options: only together with stream: true", param="stream_options")
    if wire.best_of and wire.best_of < wire.n:
        raise BadRequest(f"best_of: must be at least n, which is {wire.n}, got {wire.best_of}", param="best_of")
    if wire.stream and wire.best_of > wire.n:
        raise BadRequest("best_of: the best is known when all are complete: not with stream: true", param="best_of")
    for name in ("length_penalty", "early_stopping"):
        if name in given and not wire.use_beam_search:
            raise BadRequest(f"{name}: only together with use_beam_search: true", param=name)
    if wire.use_beam_search and wire.temperature != 1 and wire.temperature:
        raise BadRequest("temperature: a beam search does not sample; leave it out", param="temperature")
    if "allowed_token_ids" in given and not wire.allowed_token_ids:
        raise BadRequest("allowed_token_ids: must not be empty", param="allowed_token_ids")
