"""Folders whose only vocabulary is a SentencePiece model: which ids its pieces have, and what is around a text.

The model's file says how texts are normalised and split. Each class of tokenizers adds pieces of its own, and some
change the text first; these facts are those of transformers' classes of the same names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer, normalizers, processors

from ..core.errors import UnsupportedError, show_value
from .sentencepiece import CONTROL, UNKNOWN, UNUSED, Piece, build_model_backend, read_model
from .vocabulary import add_boundary_tokens

FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model")
MAX_EXTRA_IDS = 10_000
Json = Mapping[str, Any]
Arrange = Callable[[Sequence[Piece], Json], list[Piece]]
Ends = Literal["settings", "end", "around", "pair", "segments"]


def keep_pieces(pieces: Sequence[Piece], _: Json) -> list[Piece]:
    return list(pieces)


def control(*texts: str) -> list[Piece]:
    return [Piece(text, 0.0, CONTROL) for text in texts]


def unused(*texts: str) -> list[Piece]:
    return [Piece(text, 0.0, UNUSED) for text in texts]


def fairseq_pieces(pieces: Sequence[Piece], _: Json) -> list[Piece]:
    """XLM-RoBERTa's: four pieces of its own in the place of the model's first three."""
    return [*control("<s>", "<pad>", "</s>"), Piece("<unk>", 0.0, UNKNOWN), *pieces[3:], *control("<mask>")]


def camembert_pieces(pieces: Sequence[Piece], _: Json) -> list[Piece]:
    first = [*unused("<s>NOTUSED"), *control("<pad>"), *unused("</s>NOTUSED"), Piece("<unk>", 0.0, UNKNOWN)]
    return [*first, *unused("<unk>NOTUSED"), *pieces[1:], *control("<mask>")]


def t5_pieces(pieces: Sequence[Piece], settings: Json) -> list[Piece]:
    """T5's sentinels in reverse order behind the model's pieces, unless it has them."""
    count = settings.get("extra_ids", 100)
    if type(count) is not int or not 0 <= count <= MAX_EXTRA_IDS:
        raise ValueError(f"extra_ids is {show_value(count)}, which should be a number up to {MAX_EXTRA_IDS}")
    known = {piece.text for piece in pieces}
    names = [f"<extra_id_{index}>" for index in reversed(range(count))]
    return [*pieces, *control(*(name for name in names if name not in known))]


def pegasus_pieces(pieces: Sequence[Piece], settings: Json) -> list[Piece]:
    """Pegasus's: room for masks between the first two pieces and the rest."""
    offset = settings.get("offset", 103)
    if type(offset) is not int or not 2 <= offset <= MAX_EXTRA_IDS:
        raise ValueError(f"offset is {show_value(offset)}, which should be a number up to {MAX_EXTRA_IDS}")
    masks = control("<mask_1>", "<mask_2>", *(f"<unk_{index}>" for index in range(2, offset)))
    return [*control("<pad>", "</s>"), *masks, *pieces[2:]]


def with_mask(pieces: Sequence[Piece], _: Json) -> list[Piece]:
    """DeBERTa's: a mask behind the model's pieces."""
    return [*pieces, *([] if any(piece.text == "[MASK]" for piece in pieces) else control("[MASK]"))]


@dataclass(frozen=True)
class SentencePieceClass:
    """How a class of tokenizers uses a model.

    `arrange` makes the pieces in the order of their ids. `ends`: what is around a text: as the settings say
    ("settings"), an end token ("end"), RoBERTa's ("pair") or BERT's ("segments") first token and separators.
    """

    arrange: Arrange = keep_pieces
    roles: Mapping[str, str] = field(default_factory=dict)
    ends: Ends = "settings"
    changes_text: bool = False  # by do_lower_case and keep_accents


SENTENCE = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
MASKED = SENTENCE | {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>", "mask_token": "<mask>"}
BERT = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "bos_token": "[CLS]", "eos_token": "[SEP]"}
LLAMA = SentencePieceClass(roles=SENTENCE)
GEMMA = SentencePieceClass(
    roles={"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
)
T5 = SentencePieceClass(t5_pieces, {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}, "end")
XLM_ROBERTA = SentencePieceClass(fairseq_pieces, MASKED, "pair")
ALBERT = SentencePieceClass(
    keep_pieces, BERT | {"pad_token": "<pad>", "unk_token": "<unk>"}, "segments", changes_text=True
)
DEBERTA = SentencePieceClass(
    with_mask, BERT | {"pad_token": "[PAD]", "unk_token": "[UNK]"}, "segments", changes_text=True
)
CLASSES: Mapping[str, SentencePieceClass] = {
    "LlamaTokenizer": LLAMA,
    "CodeLlamaTokenizer": LLAMA,
    "GemmaTokenizer": GEMMA,
    "T5Tokenizer": T5,
    "MT5Tokenizer": T5,
    "XLMRobertaTokenizer": XLM_ROBERTA,
    "CamembertTokenizer": replace(XLM_ROBERTA, arrange=camembert_pieces),
    "AlbertTokenizer": ALBERT,
    "DebertaV2Tokenizer": DEBERTA,
    "PegasusTokenizer": SentencePieceClass(
        pegasus_pieces, {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}, "end"
    ),
}
# The class of folders whose tokenizer_config.json names none, by the beginning of model_type; of all others: Llama's.
OF_MODEL_TYPES = {
    "gemma": "GemmaTokenizer",
    "t5": "T5Tokenizer",
    "mt5": "T5Tokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    "camembert": "CamembertTokenizer",
    "albert": "AlbertTokenizer",
    "deberta-v2": "DebertaV2Tokenizer",
    "pegasus": "PegasusTokenizer",
}
GENERIC_CLASSES = ("", "PreTrainedTokenizer", "TokenizersBackend", "SentencePieceBackend")


def find_model(folder: Path) -> Path | None:
    """The SentencePiece model of a folder; None if there is none."""
    return next((folder / name for name in FILES if (folder / name).is_file()), None)


def find_class(file: Path, settings: Json, config: Json) -> SentencePieceClass:
    """The class that the settings name, or else the one of the model_type in config.json. UnsupportedError if it is not
    known."""
    given = settings.get("tokenizer_class") or ""
    name = given.removesuffix("Fast") if isinstance(given, str) else show_value(given)
    if name in GENERIC_CLASSES:
        model_type = str(config.get("model_type", ""))
        name = next(
            (known for start, known in OF_MODEL_TYPES.items() if model_type.startswith(start)), "LlamaTokenizer"
        )
    if name not in CLASSES:
        known = ", ".join(CLASSES)
        message = f"is the SentencePiece model of a {name}, whose ids are not known here; known are {known}"
        raise UnsupportedError(f"{message}. Put the tokenizer.json of the same model beside it", file=str(file))
    return CLASSES[name]


def read_sentencepiece(file: Path, kind: SentencePieceClass, settings: Json) -> Tokenizer:
    """The tokenizer of a folder's SentencePiece model, without the tokens around a text. Raises as `read_model` does,
    and ValueError."""
    model = read_model(file)
    if settings.get("split_by_punct"):
        raise UnsupportedError("split_by_punct is not supported with a SentencePiece model", file=str(file))
    prefix = settings.get("add_prefix_space")
    model = replace(
        model,
        pieces=kind.arrange(model.pieces, settings),
        space_first=model.space_first if prefix is None else bool(prefix),
    )
    # As in published tokenizer.json files; `legacy: false` asks for a space at the beginning of a text only.
    backend = build_model_backend(model, every_section=settings.get("legacy") is not False)
    if kind.changes_text:
        steps = [*text_changes(settings, lowercase=kind is ALBERT), backend.normalizer]
        backend.normalizer = normalizers.Sequence([step for step in steps if step is not None])
    return backend


def text_changes(settings: Json, *, lowercase: bool) -> list[normalizers.Normalizer]:
    """What is done with a text before the model normalises it: ALBERT's quotes, accents and capitals."""
    steps: list[normalizers.Normalizer] = []
    if lowercase:
        steps += [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
        if not settings.get("keep_accents", False):
            steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if settings.get("do_lower_case", lowercase):
        steps.append(normalizers.Lowercase())
    return steps


def add_ends(backend: Tokenizer, kind: SentencePieceClass, settings: Json, roles: Mapping[str, str]) -> None:
    """Add the tokens around a text; `roles` are the pieces by their roles. ValueError if one of them is missing."""
    asked = {"bos": settings.get("add_bos_token", True), "eos": settings.get("add_eos_token", False)}
    pieces = {role: roles.get(f"{role}_token", "") for role in ("bos", "eos", "cls", "sep")}
    needed = {
        "settings": [role for role in ("bos", "eos") if asked[role]],
        "end": ["eos"],
        "pair": ["cls", "sep"],
        "segments": ["cls", "sep"],
    }[kind.ends]
    for role in needed:
        if backend.token_to_id(pieces[role]) is None:
            raise ValueError(f"it has no {role}_token {show_value(pieces[role])}, which is added to every text")
    if kind.ends == "segments":
        ids = {role: backend.token_to_id(pieces[role]) or 0 for role in needed}
        backend.post_processor = processors.BertProcessing((pieces["sep"], ids["sep"]), (pieces["cls"], ids["cls"]))
    elif kind.ends == "pair":
        add_boundary_tokens(backend, pieces["cls"], pieces["sep"], double=True)
    else:
        add_boundary_tokens(backend, *(pieces[role] if role in needed else "" for role in ("bos", "eos")))


def mark_special(backend: Tokenizer, roles: Mapping[str, str]) -> None:
    """Mark the tokens with a role as special; a mask takes the space before it."""
    backend.add_special_tokens(
        [
            AddedToken(piece, lstrip=role == "mask_token" and piece == "<mask>", normalized=False, special=True)
            for role, piece in roles.items()
            if backend.token_to_id(piece) is not None
        ]
    )
