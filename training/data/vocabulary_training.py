"""Vocabularies learned from a recipe's own text, written as the files that models.tokenizer reads.

Knows neither networks nor objectives.  Byte pairs joined by how often they stand together (Sennrich et al. 2016,
arXiv:1508.07909), of bytes as GPT-2 has it, so that any text has tokens; or WordPiece (Schuster and Nakajima 2012) as
BERT has it, of lower-case letters.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

END = "<|endoftext|>"
START, STOP, PAD = "<s>", "</s>", "<pad>"
RARE_LETTER = 100_000  # a letter that is not one in so many
UNKNOWN = "[UNK]"
WORD_PIECES = ("[PAD]", UNKNOWN, "[CLS]", "[SEP]", "[MASK]")
SpecialTokens = dict[str, str]


def write_gpt_vocabulary(texts: Iterable[str], size: int, folder: Path) -> None:
    """Byte pairs with one more token, which stands between texts."""
    backend = train_byte_pairs(texts, size, (END,))
    write_tokenizer(folder, backend, {"bos_token": END, "eos_token": END, "unk_token": END})


def write_translator_vocabulary(texts: Iterable[str], size: int, folder: Path) -> None:
    """Byte pairs; what is read ends with </s>, what is written begins with <s> and ends with </s>."""
    backend = train_byte_pairs(texts, size, (PAD, START, STOP))
    stop = (STOP, backend.token_to_id(STOP))
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"$A {STOP}", pair=f"$A {STOP} $B {STOP}", special_tokens=[stop]),
        ]
    )
    write_tokenizer(folder, backend, {"bos_token": START, "eos_token": STOP, "pad_token": PAD})


def train_byte_pairs(texts: Iterable[str], size: int, special: tuple[str, ...]) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def write_tokenizer(folder: Path, backend: Tokenizer, roles: SpecialTokens) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    write_config(folder, {"tokenizer_class": "PreTrainedTokenizerFast", **roles})


def write_bert_vocabulary(texts: Sequence[str], size: int, folder: Path) -> None:
    """Pieces of words in lower case, and the tokens that stand around texts, between them, and for what is hidden.

    Letters are named beforehand, in their order: left to itself the library numbers them by chance, and ties between
    pieces are decided by numbers.  A word with a letter that is rare has no token but [UNK].
    """
    backend = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    plain = [backend.normalizer.normalize_str(text) for text in texts]
    counts = Counter(chain.from_iterable(plain))
    common = sorted(each for each, n in counts.items() if n * RARE_LETTER >= counts.total() and not each.isspace())
    rare = dict.fromkeys(map(ord, counts.keys() - set(common)), " ")
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=[*WORD_PIECES, *common, *(f"##{letter}" for letter in common)],
        show_progress=False,
    )
    backend.train_from_iterator((text.translate(rare) for text in plain), trainer)
    pieces = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece, _ in pieces), "utf-8")
    write_config(folder, {"tokenizer_class": "BertTokenizer", "do_lower_case": True})


def write_config(folder: Path, content: dict[str, object]) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(content, indent=2) + "\n")
