"""Sampling and beam search options by the names of transformers' `generate`.

Hugging Face's dialects and the Open Inference Protocol use them.  Options that transformers does not have are named as
in the OpenAI dialect.
"""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from ...core.errors import BadRequest
from ...core.model import GenerationDefaults
from ...core.request import BeamSearchOptions, Sampling
from ...text.generation_request import GenerationRequest
from .dialect import Count, NeutralValues, TokenId, Wire, between, max_items
from .head_options import INT64_LIMIT, StopTexts
from .openai_sampling import MAX_ANSWERS, MAX_BAD_WORDS, MAX_BEAMS, MAX_BIASES, BadWord, LogitBias, Penalty, TokenIdList
from .response_formats import TgiGrammar, convert_format

MAX_NGRAM = 64  # tokens of a banned sequence
SAMPLING_FIELDS = frozenset(("temperature", "top_k", "top_p", "min_p", "typical_p"))
TokenNgram = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_NGRAM)]


class HfSamplingOptions(Wire):
    """Greedy decoding, unless `do_sample` or a sampling option is given; beam search with `num_beams`."""

    unsupported: ClassVar[NeutralValues] = {
        "encoder_repetition_penalty": (1,),
        "epsilon_cutoff": (0,),
        "eta_cutoff": (0,),
        "penalty_alpha": (0,),
        "num_request_beams": (1,),
        "diversity_penalty": (0,),
        "max_length": (),
        "min_length": (0,),
        "max_time": (),
    }

    do_sample: bool = False
    temperature: Annotated[float, between(0, 100)] = 1.0
    top_k: Annotated[int, between(0, (1 << 31) - 1)] = 0
    top_p: Annotated[float, between(0, 1)] = 1.0
    min_p: Annotated[float, between(0, 1)] = 0.0
    typical_p: Annotated[float, between(0.001, 1)] = 1.0
    repetition_penalty: Annotated[float, between(0.01, 100)] = 1.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: LogitBias = Field(default_factory=dict)
    allowed_token_ids: TokenIdList = Field(default_factory=list)
    suppress_tokens: Annotated[list[TokenId], Field(fail_fast=True), max_items(MAX_BIASES)] = Field(
        default_factory=list
    )
    bad_words: Annotated[list[BadWord], Field(fail_fast=True), max_items(MAX_BAD_WORDS)] = Field(default_factory=list)
    bad_words_ids: Annotated[list[TokenNgram], Field(fail_fast=True), max_items(MAX_BAD_WORDS)] = Field(
        default_factory=list
    )
    min_new_tokens: Annotated[int, between(0, (1 << 31) - 1)] = 0
    no_repeat_ngram_size: Annotated[int, between(0, MAX_NGRAM)] = 0
    max_new_tokens: Count = 0
    num_beams: Annotated[int, between(1, MAX_BEAMS)] = 1
    length_penalty: Annotated[float, between(-100, 100)] = 1.0
    early_stopping: bool = False
    num_return_sequences: Annotated[int, between(1, MAX_ANSWERS)] = 1
    seed: Annotated[int, between(-INT64_LIMIT, INT64_LIMIT - 1)] = 0
    stop: StopTexts = Field(default_factory=list)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] = Field(default_factory=list)
    ignore_eos: bool = False
    grammar: TgiGrammar | None = None

    @property
    def is_sampled(self) -> bool:
        return self.do_sample if "do_sample" in self.model_fields_set else bool(self.model_fields_set & SAMPLING_FIELDS)

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature if self.is_sampled else 0.0,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed % INT64_LIMIT,
            typical_p=self.typical_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            bias=tuple(self.logit_bias.items()),
            allowed=tuple(sorted(set(self.allowed_token_ids))),
            banned=(*((token,) for token in self.suppress_tokens), *map(tuple, self.bad_words_ids)),
            min_tokens=self.min_new_tokens,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
        )

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def apply_defaults(options: HfSamplingOptions, defaults: GenerationDefaults) -> HfSamplingOptions:
    """Fill options that are not given with the checkpoint's: its beam search, unless sampling is requested."""
    given, sampling, beams = options.model_fields_set, defaults.sampling, defaults.beams
    fields: dict[str, Any] = {
        "min_new_tokens": sampling.min_tokens,
        "no_repeat_ngram_size": sampling.no_repeat_ngram_size,
    }
    if sampling.temperature and not given & {*SAMPLING_FIELDS, "do_sample", "num_beams"}:
        fields |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    elif not options.is_sampled and (options.num_beams > 1 or ("num_beams" not in given and beams.width > 1)):
        fields |= {
            "num_beams": beams.width,
            "length_penalty": beams.length_penalty,
            "early_stopping": beams.early_stopping,
        }
    return options.model_copy(update={name: value for name, value in fields.items() if name not in given})


def read_generation(
    field: str, prompts: tuple[str, ...], options: HfSamplingOptions, prefix: str = "parameters."
) -> GenerationRequest:
    """`field` is the name of the prompts in the body, `prefix` the prefix of the options' names."""
    check_options(options, prefix)
    count = options.num_return_sequences
    is_search = options.num_beams > 1
    beams = BeamSearchOptions(options.num_beams, options.length_penalty, options.early_stopping)
    return GenerationRequest(
        field=field,
        prompts=prompts,
        sampling=options.sampling,
        has_seed="seed" in options.model_fields_set,
        max_tokens=options.max_new_tokens,
        stops=options.stops,
        stop_tokens=frozenset(options.stop_token_ids),
        ignore_eos=options.ignore_eos,
        limit_field=f"{prefix}max_new_tokens",
        count=count,
        count_field=f"{prefix}num_return_sequences",
        beams=beams if is_search else None,
        bad_words=tuple(options.bad_words),
        grammar=convert_format(options.grammar, f"{prefix}grammar") if options.grammar else None,
    )


def check_options(options: HfSamplingOptions, prefix: str) -> None:
    """Raises BadRequest for options that exclude each other."""
    given, is_search = options.model_fields_set, options.num_beams > 1
    if is_search and options.is_sampled:
        raise option_error(
            prefix, "num_beams", "a beam search does not sample; leave out do_sample, temperature, top_k, ..."
        )
    if is_search and options.num_return_sequences > options.num_beams:
        raise option_error(prefix, "num_return_sequences", f"a search {options.num_beams} wide finds no more than that")
    if options.num_return_sequences > 1 and not is_search and not options.is_sampled:
        raise option_error(prefix, "num_return_sequences", "would all be the same; give do_sample, or num_beams")
    for name in ("length_penalty", "early_stopping"):
        if name in given and not is_search:
            raise option_error(prefix, name, "only together with num_beams above 1")
    if "allowed_token_ids" in given and not options.allowed_token_ids:
        raise option_error(prefix, "allowed_token_ids", "must not be empty")


def option_error(prefix: str, name: str, problem: str) -> BadRequest:
    return BadRequest(f"{prefix}{name}: {problem}", param=f"{prefix}{name}")
