"""How answers are drawn or searched for, by the names that transformers' `generate` has for it.

Knows no dialect: Hugging Face's and the Open Inference Protocol each say where their clients put these.  What that
library has no name for has the one of the OpenAI dialect.
"""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from ...core.errors import BadRequest
from ...core.model import Customs
from ...core.request import Beams, Sampling
from ...text.prompts import Continuation
from .dialect import Count, Neutral, TokenId, Wire, at_most, between
from .head_options import INT64, Stops
from .openai_sampling import MOST_ANSWERS, MOST_BEAMS, MOST_BIASED, MOST_WORDS, Bias, Penalty, Tokens, Word
from .response_formats import ValuedGrammar, grammar_of

LONGEST_ROW = 64  # tokens of one that must not come
SHAPES = frozenset(("temperature", "top_k", "top_p", "min_p", "typical_p"))
Row = Annotated[list[TokenId], Field(min_length=1, max_length=LONGEST_ROW)]


class Drawing(Wire):
    """The likeliest tokens, unless `do_sample` or what shapes a draw is given; with `num_beams` the likeliest texts."""

    unsupported: ClassVar[Neutral] = {
        "encoder_repetition_penalty": (1,),
        "epsilon_cutoff": (0,),
        "eta_cutoff": (0,),
        "penalty_alpha": (0,),
        "num_beam_groups": (1,),
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
    logit_bias: Bias = Field(default_factory=dict)
    allowed_token_ids: Tokens = Field(default_factory=list)
    suppress_tokens: Annotated[list[TokenId], Field(fail_fast=True), at_most(MOST_BIASED)] = Field(default_factory=list)
    bad_words: Annotated[list[Word], Field(fail_fast=True), at_most(MOST_WORDS)] = Field(default_factory=list)
    bad_words_ids: Annotated[list[Row], Field(fail_fast=True), at_most(MOST_WORDS)] = Field(default_factory=list)
    min_new_tokens: Annotated[int, between(0, (1 << 31) - 1)] = 0
    no_repeat_ngram_size: Annotated[int, between(0, LONGEST_ROW)] = 0
    max_new_tokens: Count = 0
    num_beams: Annotated[int, between(1, MOST_BEAMS)] = 1
    length_penalty: Annotated[float, between(-100, 100)] = 1.0
    early_stopping: bool = False
    num_return_sequences: Annotated[int, between(1, MOST_ANSWERS)] = 1
    seed: Annotated[int, between(-INT64, INT64 - 1)] = 0
    stop: Stops = Field(default_factory=list)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] = Field(default_factory=list)
    ignore_eos: bool = False
    grammar: ValuedGrammar | None = None

    @property
    def draws(self) -> bool:
        return self.do_sample if "do_sample" in self.model_fields_set else bool(self.model_fields_set & SHAPES)

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature if self.draws else 0.0,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed % INT64,
            typical_p=self.typical_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            bias=tuple(self.logit_bias.items()),
            allowed=tuple(sorted(set(self.allowed_token_ids))),
            banned=(*((token,) for token in self.suppress_tokens), *map(tuple, self.bad_words_ids)),
            min_tokens=self.min_new_tokens,
            once=self.no_repeat_ngram_size,
        )

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def customary(options: Drawing, customs: Customs) -> Drawing:
    """What is not said is as the checkpoint has it: a search, unless something is drawn."""
    said, usual, beams = options.model_fields_set, customs.sampling, customs.beams
    fields: dict[str, Any] = {
        "min_new_tokens": usual.min_tokens,
        "no_repeat_ngram_size": usual.once,
    }
    if usual.temperature and not said & {*SHAPES, "do_sample", "num_beams"}:
        fields |= {"temperature": usual.temperature, "top_k": usual.top_k, "top_p": usual.top_p}
    elif not options.draws and (options.num_beams > 1 or ("num_beams" not in said and beams.width > 1)):
        fields |= {"num_beams": beams.width, "length_penalty": beams.length_penalty, "early_stopping": beams.early}
    return options.model_copy(update={name: value for name, value in fields.items() if name not in said})


def continuing(field: str, prompts: tuple[str, ...], options: Drawing, inside: str = "parameters.") -> Continuation:
    """`field` is the wire's name for the prompts, `inside` what stands before the names of options."""
    check(options, inside)
    count = options.num_return_sequences
    searches = options.num_beams > 1
    return Continuation(
        field=field,
        prompts=prompts,
        sampling=options.sampling,
        seeded="seed" in options.model_fields_set,
        max_tokens=options.max_new_tokens,
        stops=options.stops,
        stop_tokens=frozenset(options.stop_token_ids),
        ignore_eos=options.ignore_eos,
        limit=f"{inside}max_new_tokens",
        count=count,
        counted=f"{inside}num_return_sequences",
        beams=Beams(options.num_beams, options.length_penalty, options.early_stopping) if searches else None,
        bad_words=tuple(options.bad_words),
        grammar=grammar_of(options.grammar, f"{inside}grammar") if options.grammar else None,
    )


def check(options: Drawing, inside: str) -> None:
    """What is right by itself and wrong together."""
    told, searches = options.model_fields_set, options.num_beams > 1
    if searches and options.draws:
        raise wrong(inside, "num_beams", "a beam search draws nothing; leave out do_sample, temperature, top_k, ...")
    if searches and options.num_return_sequences > options.num_beams:
        raise wrong(inside, "num_return_sequences", f"a search {options.num_beams} wide finds no more than that")
    if options.num_return_sequences > 1 and not searches and not options.draws:
        raise wrong(inside, "num_return_sequences", "would all be the same; give do_sample, or num_beams")
    for name in ("length_penalty", "early_stopping"):
        if name in told and not searches:
            raise wrong(inside, name, "only together with num_beams above 1")
    if "allowed_token_ids" in told and not options.allowed_token_ids:
        raise wrong(inside, "allowed_token_ids", "must not be empty")


def wrong(inside: str, name: str, said: str) -> BadRequest:
    return BadRequest(f"{inside}{name}: {said}", param=f"{inside}{name}")
