"""How Hugging Face's servers are asked to generate: one set of parameters, for text-generation-inference and for tasks.

Knows no routes and no answer.  The source of names is that server's own openapi.json; where it draws lines narrower
than need be (no seed together with best_of) they are not drawn.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field

from ...text.prompts import GenerationRequest
from .dialect import Count, NeutralValues, between
from .head_options import MAX_LABEL_CHARS, StopTexts
from .openai_sampling import MAX_ANSWERS
from .sampling_options import HfSamplingOptions, option_error, read_generation

MAX_BEST_OF = MAX_ANSWERS
MAX_TOP_TOKENS = 20
PARAMETERS_PREFIX = "parameters."


class GenerateParameters(HfSamplingOptions):
    unsupported: ClassVar[NeutralValues] = {**HfSamplingOptions.unsupported, "watermark": (False,)}

    best_of: Annotated[int, between(1, MAX_BEST_OF)] = 1
    truncate: Count = 0
    top_n_tokens: Annotated[int, between(0, MAX_TOP_TOKENS)] = 0
    stop_sequences: StopTexts = Field(default_factory=list)  # the older name of stop
    return_full_text: bool = False
    details: bool = False
    decoder_input_details: bool = False
    adapter_id: Annotated[str, Field(max_length=MAX_LABEL_CHARS)] = ""

    @property
    def wants_details(self) -> bool:
        return self.details or self.decoder_input_details

    @property
    def stop_texts(self) -> tuple[str, ...]:
        given = self.stop_sequences
        return (given,) if isinstance(given, str) else tuple(given)


def read_hf_parameters(prompts: tuple[str, ...], asked: GenerateParameters, *, stream: bool) -> GenerationRequest:
    """All of the best_of tries are answers: their details are told."""
    check_parameters(asked, stream=stream)
    continuation = read_generation("inputs", prompts, asked, PARAMETERS_PREFIX)
    scored = asked.wants_details or stream or asked.best_of > 1
    return replace(
        continuation,
        stops=(*continuation.stops, *asked.stop_texts),
        keep_stop=True,
        logprobs=asked.top_n_tokens if scored else -1,
        truncate=asked.truncate,
        count=max(asked.best_of, asked.num_return_sequences),
        count_field=f"{PARAMETERS_PREFIX}best_of" if asked.best_of > 1 else continuation.count_field,
        prompt_logprobs=0 if asked.decoder_input_details else -1,
    )


def check_parameters(asked: GenerateParameters, *, stream: bool) -> None:
    """What is right by itself and wrong together."""
    if asked.best_of > 1 and asked.num_return_sequences > 1:
        raise option_error(PARAMETERS_PREFIX, "best_of", "answers with one of them; leave out num_return_sequences")
    if asked.best_of > 1 and not asked.is_sampled:
        raise option_error(
            PARAMETERS_PREFIX, "best_of", "the tries would all be the same; give do_sample, temperature, ..."
        )
    alone: Mapping[str, bool] = {
        "best_of": asked.best_of > 1,
        "num_return_sequences": asked.num_return_sequences > 1,
        "decoder_input_details": asked.decoder_input_details,
    }
    for name, wanted in alone.items():
        if stream and wanted:
            raise option_error(
                PARAMETERS_PREFIX, name, "a stream has one answer and nothing of the prompt: not with stream: true"
            )
