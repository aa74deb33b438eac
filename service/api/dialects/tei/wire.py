"""Wire objects of text-embeddings-inference, and the requests they are read into.

Names and defaults are those of its openapi.json.
"""

from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from ....core.errors import BadRequest
from ....core.request import OutputForm
from ....text.encoder_inputs import EncodingRequest
from ...shared.dialect import (
    MAX_IDS,
    MAX_TEXTS,
    Count,
    EngineRequest,
    Ids,
    NeutralValues,
    TextsOrIds,
    Wire,
    check_text_count,
    item_paths,
    max_items,
    must_be,
    normalize_inputs,
)
from ...shared.head_options import TruncateOptions

ROLES = ("query", "document")  # of texts of a late-interaction model
OneOrTwo = Annotated[list[str], Field(min_length=1, max_length=2, fail_fast=True)]
Pairs = Annotated[
    str | OneOrTwo | Annotated[list[OneOrTwo], Field(fail_fast=True)],
    must_be("a string, a pair of strings, or a list of lists of one or two strings"),
    max_items(MAX_TEXTS),
]
Texts = Annotated[
    str | Annotated[list[str], Field(fail_fast=True)], must_be("a string or a list of strings"), max_items(MAX_TEXTS)
]
ManyTexts = Annotated[list[str], Field(fail_fast=True), max_items(MAX_TEXTS)]


class BatchRequest(EngineRequest, TruncateOptions):
    """A request with many texts; with `partial` an invalid text fails alone."""

    partial: bool = False


class PredictRequest(BatchRequest):
    unsupported: ClassVar[NeutralValues] = {"parameters": ({},)}

    inputs: Pairs
    raw_scores: bool = False


class EmbedRequest(BatchRequest):
    unsupported: ClassVar[NeutralValues] = {"encoding_format": ("float",)}

    inputs: TextsOrIds
    prompt_name: str = ""
    normalize: bool = True
    dimensions: Count = 0


class EmbedAllRequest(BatchRequest):
    inputs: TextsOrIds
    prompt_name: str = ""


class EmbedSparseRequest(BatchRequest):
    inputs: TextsOrIds
    prompt_name: str = ""


class TeiRerankRequest(EngineRequest, TruncateOptions):
    query: Annotated[str, Field(min_length=1)]
    texts: ManyTexts
    raw_scores: bool = False
    return_text: bool = False


class SimilarityInputs(Wire):
    source_sentence: Annotated[str, Field(min_length=1)]
    sentences: ManyTexts


class SimilarityParameters(TruncateOptions):
    prompt_name: str = ""


class SimilarityRequest(EngineRequest):
    inputs: SimilarityInputs
    parameters: SimilarityParameters = SimilarityParameters()


class TokenizeRequest(Wire):
    unsupported: ClassVar[NeutralValues] = {"prompt_name": ()}

    inputs: Texts
    add_special_tokens: bool = True


class DecodeRequest(Wire):
    ids: Annotated[
        Ids | Annotated[list[Ids], Field(fail_fast=True)],
        must_be("a list of token ids or a list of lists of token ids"),
        BeforeValidator(check_text_count),
        max_items(MAX_IDS),
    ]
    skip_special_tokens: bool = True

    @property
    def rows(self) -> list[list[int]]:
        ids = [id for id in self.ids if isinstance(id, int)]
        return [ids] if ids else [row for row in self.ids if isinstance(row, list)]


def read_predict(wire: PredictRequest) -> EncodingRequest:
    given = wire.inputs
    single = [given] if isinstance(given, str) else [part for part in given if isinstance(part, str)]
    rows = [single] if single else [part for part in given if isinstance(part, list)]
    inputs = tuple(row[0] if len(row) == 1 else (row[0], row[1]) for row in rows)
    return EncodingRequest(field="inputs", inputs=inputs, raw=wire.raw_scores, truncate=wire.side, partial=wire.partial)


def is_single(wire: PredictRequest) -> bool:
    """Whether there is one text or pair, which is answered without a list around it."""
    return isinstance(wire.inputs, str) or any(isinstance(part, str) for part in wire.inputs)


def read_embed(wire: EmbedRequest) -> EncodingRequest:
    inputs = normalize_inputs(wire.inputs)
    return EncodingRequest(
        field="inputs",
        inputs=inputs,
        queries=len(inputs) if wire.prompt_name == ROLES[0] else 0,
        raw=not wire.normalize,
        unit=wire.normalize,
        dimensions=wire.dimensions,
        prompt=wire.prompt_name,
        truncate=wire.side,
        partial=wire.partial,
    )


def read_token_form(wire: EmbedAllRequest | EmbedSparseRequest, form: OutputForm) -> EncodingRequest:
    inputs = normalize_inputs(wire.inputs)
    return EncodingRequest(
        field="inputs",
        inputs=inputs,
        form=form,
        prompt=wire.prompt_name,
        queries=len(inputs) if wire.prompt_name == ROLES[0] else 0,
        truncate=wire.side,
        partial=wire.partial,
    )


def read_roles(wire: EmbedAllRequest) -> EncodingRequest:
    """For a late-interaction model: texts are documents, unless `prompt_name` is "query"."""
    if wire.prompt_name not in ("", *ROLES):
        roles = " or ".join(ROLES)
        raise BadRequest(f"prompt_name: should be {roles}, got {wire.prompt_name[:60]!r}", param="prompt_name")
    return replace(read_token_form(wire, "tokens"), prompt="")


def read_rerank_pairs(wire: TeiRerankRequest) -> EncodingRequest:
    """For a cross-encoder: pairs of query and text."""
    names, pairs = item_paths("texts", wire.texts), tuple((wire.query, text) for text in wire.texts)
    return EncodingRequest(field="texts", inputs=pairs, names=names, raw=wire.raw_scores, truncate=wire.side)


def read_rerank_query(wire: TeiRerankRequest) -> EncodingRequest:
    """For an embedder: the query comes first."""
    names = ("query", *item_paths("texts", wire.texts))
    inputs = (wire.query, *wire.texts)
    return EncodingRequest(field="texts", inputs=inputs, names=names, unit=True, truncate=wire.side, queries=1)


def read_late_rerank(wire: TeiRerankRequest) -> EncodingRequest:
    """For a late-interaction model: the query comes first."""
    return replace(read_rerank_query(wire), form="tokens", unit=False)


def read_similarity(wire: SimilarityRequest) -> EncodingRequest:
    """The source sentence comes first."""
    compared = wire.inputs
    names = ("inputs.source_sentence", *item_paths("inputs.sentences", compared.sentences))
    inputs = (compared.source_sentence, *compared.sentences)
    options = wire.parameters
    return EncodingRequest(
        field="inputs.sentences",
        inputs=inputs,
        names=names,
        unit=True,
        prompt=options.prompt_name,
        truncate=options.side,
    )
