"""How Hugging Face's servers are asked to generate: one set of parameters, for text-generation-inference and for tasks.

Knows no routes and no answer.  The source of names is that server's own openapi.json; where it draws lines narrower
than need be (no seed together with best_of) they are not drawn.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field

from ...text.prompts import Continuation
from .dialect import Count, Neutral, between
from .head_options import LONGEST_WORD, Stops
from .openai_sampling import MOST_ANSWERS
from .sampling_options import Drawing, continuing, wrong

MOST_TRIES = MOST_ANSWERS
MOST_TOP = 20
INSIDE = "parameters."


class GenerateParameters(Drawing):
    unsupported: ClassVar[Neutral] = {**Drawing.unsupported, "watermark": (False,)}

    best_of: Annotated[int, between(1, MOST_TRIES)] = 1
    truncate: Count = 0
    top_n_tokens: Annotated[int, between(0, MOST_TOP)] = 0
    stop_sequences: Stops = Field(default_factory=list)  # the older name of stop
    return_full_text: bool = False
    details: bool = False
    decoder_input_details: bool = False
    adapter_id: Annotated[str, Field(max_length=LONGEST_WORD)] = ""

    @property
    def detailed(self) -> bool:
        return self.details or self.decoder_input_details

    @property
    def older_stops(self) -> tuple[str, ...]:
        given = self.stop_sequences
        return (given,) if isinstance(given, str) else tuple(given)


def generating(prompts: tuple[str, ...], asked: GenerateParameters, *, stream: bool) -> Continuation:
    """All of the best_of tries are answers: their details are told."""
    check(asked, stream=stream)
    continuation = continuing("inputs", prompts, asked, INSIDE)
    scored = asked.detailed or stream or asked.best_of > 1
    return replace(
        continuation,
        stops=(*continuation.stops, *asked.older_stops),
        keep_stop=True,
        logprobs=asked.top_n_tokens if scored else -1,
        truncate=asked.truncate,
        count=max(asked.best_of, asked.num_return_sequences),
        counted=f"{INSIDE}best_of" if asked.best_of > 1 else continuation.counted,
        prompt_logprobs=0 if asked.decoder_input_details else -1,
    )


def check(asked: GenerateParameters, *, stream: bool) -> None:
    """What is right by itself and wrong together."""
    if asked.best_of > 1 and asked.num_return_sequences > 1:
        raise wrong(INSIDE, "best_of", "answers with one of them; leave out num_return_sequences")
    if asked.best_of > 1 and not asked.draws:
        raise wrong(INSIDE, "best_of", "the tries would all be the same; give do_sample, temperature, ...")
    alone: Mapping[str, bool] = {
        "best_of": asked.best_of > 1,
        "num_return_sequences": asked.num_return_sequences > 1,
        "decoder_input_details": asked.decoder_input_details,
    }
    for name, wanted in alone.items():
        if stream and wanted:
            raise wrong(INSIDE, name, "a stream has one answer and nothing of the prompt: not with stream: true")
