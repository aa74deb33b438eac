"""Generation parameters of Hugging Face's servers, for text-generation-inference and for the inference tasks.

The names are those of text-generation-inference's openapi.json.  Its unnecessary restrictions (no seed together with
best_of) are left out.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field

from ...text.generation_request import GenerationRequest
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
    stop_sequences: StopTexts = Field(default_factory=list)  # the older name of `stop`
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


def read_hf_parameters(prompts: tuple[str, ...], parameters: GenerateParameters, *, stream: bool) -> GenerationRequest:
    """The generation request.  It returns all best_of tries, since their details are part of the response."""
    check_parameters(parameters, stream=stream)
    generation = read_generation("inputs", prompts, parameters, PARAMETERS_PREFIX)
    scored = parameters.wants_details or stream or parameters.best_of > 1
    return replace(
        generation,
        stops=(*generation.stops, *parameters.stop_texts),
        keep_stop=True,
        logprobs=parameters.top_n_tokens if scored else -1,
        truncate=parameters.truncate,
        count=max(parameters.best_of, parameters.num_return_sequences),
        count_field=f"{PARAMETERS_PREFIX}best_of" if parameters.best_of > 1 else generation.count_field,
        prompt_logprobs=0 if parameters.decoder_input_details else -1,
    )


def check_parameters(parameters: GenerateParameters, *, stream: bool) -> None:
    """Raises BadRequest for parameters that exclude each other."""
    if parameters.best_of > 1 and parameters.num_return_sequences > 1:
        raise option_error(PARAMETERS_PREFIX, "best_of", "answers with one of them; leave out num_return_sequences")
    if parameters.best_of > 1 and not parameters.is_sampled:
        raise option_error(
            PARAMETERS_PREFIX, "best_of", "the tries would all be the same; give do_sample, temperature, ..."
        )
    exclusive: Mapping[str, bool] = {
        "best_of": parameters.best_of > 1,
        "num_return_sequences": parameters.num_return_sequences > 1,
        "decoder_input_details": parameters.decoder_input_details,
    }
    for name, is_set in exclusive.items():
        if stream and is_set:
            raise option_error(
                PARAMETERS_PREFIX, name, "a stream has one answer and nothing of the prompt: not with stream: true"
            )
