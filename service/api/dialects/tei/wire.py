"""What text-embeddings-inference is asked: its wire objects, and what they ask of a model.

Knows no routes.  The source of names and defaults is that server's own openapi.json.
"""

from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from ....core.request import Form
from ....text.inputs import Reading
from ...shared.dialect import (
    MOST_IDS,
    MOST_TEXTS,
    Count,
    Ids,
    Neutral,
    TextsOrIds,
    Wire,
    Work,
    at_most,
    described,
    flat_or_short,
    names_of,
    several,
)
from ...shared.head_options import Cutting

OneOrTwo = Annotated[list[str], Field(min_length=1, max_length=2, fail_fast=True)]
Pairs = Annotated[
    str | OneOrTwo | Annotated[list[OneOrTwo], Field(fail_fast=True)],
    described("a string, a pair of strings, or a list of lists of one or two strings"),
    at_most(MOST_TEXTS),
]
Texts = Annotated[
    str | Annotated[list[str], Field(fail_fast=True)], described("a string or a list of strings"), at_most(MOST_TEXTS)
]
ManyTexts = Annotated[list[str], Field(fail_fast=True), at_most(MOST_TEXTS)]


class Many(Work, Cutting):
    """Of many texts, one that cannot be read may fail alone."""

    partial: bool = False


class PredictRequest(Many):
    unsupported: ClassVar[Neutral] = {"parameters": ({},)}

    inputs: Pairs
    raw_scores: bool = False


class EmbedRequest(Many):
    unsupported: ClassVar[Neutral] = {"encoding_format": ("float",)}

    inputs: TextsOrIds
    prompt_name: str = ""
    normalize: bool = True
    dimensions: Count = 0


class EmbedAllRequest(Many):
    inputs: TextsOrIds
    prompt_name: str = ""


class EmbedSparseRequest(Many):
    inputs: TextsOrIds
    prompt_name: str = ""


class RerankRequest(Work, Cutting):
    query: Annotated[str, Field(min_length=1)]
    texts: ManyTexts
    raw_scores: bool = False
    return_text: bool = False


class Compared(Wire):
    source_sentence: Annotated[str, Field(min_length=1)]
    sentences: ManyTexts


class SimilarityParameters(Cutting):
    prompt_name: str = ""


class SimilarityRequest(Work):
    inputs: Compared
    parameters: SimilarityParameters = SimilarityParameters()


class TokenizeRequest(Wire):
    unsupported: ClassVar[Neutral] = {"prompt_name": ()}

    inputs: Texts
    add_special_tokens: bool = True


class DecodeRequest(Wire):
    ids: Annotated[
        Ids | Annotated[list[Ids], Field(fail_fast=True)],
        described("a list of token ids or a list of lists of token ids"),
        BeforeValidator(flat_or_short),
        at_most(MOST_IDS),
    ]
    skip_special_tokens: bool = True

    @property
    def rows(self) -> list[list[int]]:
        alone = [id for id in self.ids if isinstance(id, int)]
        return [alone] if alone else [row for row in self.ids if isinstance(row, list)]


def read_predict(wire: PredictRequest) -> Reading:
    given = wire.inputs
    alone = [given] if isinstance(given, str) else [part for part in given if isinstance(part, str)]
    rows = [alone] if alone else [part for part in given if isinstance(part, list)]
    inputs = tuple(row[0] if len(row) == 1 else (row[0], row[1]) for row in rows)
    return Reading(field="inputs", inputs=inputs, raw=wire.raw_scores, truncate=wire.side, partial=wire.partial)


def is_one(wire: PredictRequest) -> bool:
    """Whether the inputs are one text or pair, which is answered without a list around it."""
    return isinstance(wire.inputs, str) or any(isinstance(part, str) for part in wire.inputs)


def read_embed(wire: EmbedRequest) -> Reading:
    return Reading(
        field="inputs",
        inputs=several(wire.inputs),
        raw=not wire.normalize,
        unit=wire.normalize,
        dimensions=wire.dimensions,
        prompt=wire.prompt_name,
        truncate=wire.side,
        partial=wire.partial,
    )


def read_form(wire: EmbedAllRequest | EmbedSparseRequest, form: Form) -> Reading:
    return Reading(
        field="inputs",
        inputs=several(wire.inputs),
        form=form,
        prompt=wire.prompt_name,
        truncate=wire.side,
        partial=wire.partial,
    )


def read_rerank(wire: RerankRequest) -> Reading:
    """For a model that looks at pairs."""
    names, pairs = names_of("texts", wire.texts), tuple((wire.query, text) for text in wire.texts)
    return Reading(field="texts", inputs=pairs, names=names, raw=wire.raw_scores, truncate=wire.side)


def read_query(wire: RerankRequest) -> Reading:
    """For one that does not: the query first."""
    names = ("query", *names_of("texts", wire.texts))
    return Reading(field="texts", inputs=(wire.query, *wire.texts), names=names, unit=True, truncate=wire.side)


def read_similarity(wire: SimilarityRequest) -> Reading:
    """The source first."""
    compared = wire.inputs
    names = ("inputs.source_sentence", *names_of("inputs.sentences", compared.sentences))
    inputs = (compared.source_sentence, *compared.sentences)
    how = wire.parameters
    return Reading(
        field="inputs.sentences", inputs=inputs, names=names, unit=True, prompt=how.prompt_name, truncate=how.side
    )
