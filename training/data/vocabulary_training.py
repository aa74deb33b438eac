"""Trains vocabularies on a recipe's texts and writes them as files that models.tokenizer reads.

Byte pair encoding (Sennrich et al. 2016, arXiv:1508.07909) over bytes as in GPT-2, so that any text has tokens; or
WordPiece (Schuster and Nakajima 2012) over lower-case letters as in BERT.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

END = "<|endoftext|>"
START, STOP, PAD = "<s>", "</s>", "<pad>"
RARE_LETTER = 100_000  # a letter is rare if it is less than one in so many
UNKNOWN = "[UNK]"
WORD_PIECES = ("[PAD]", UNKNOWN, "[CLS]", "[SEP]", "[MASK]")
SpecialTokens = dict[str, str]


def write_gpt_vocabulary(texts: Iterable[str], size: int, folder: Path) -> None:
    """Write byte pairs with an end token, which separates texts."""
    backend = train_byte_pairs(texts, size, (END,))
    write_tokenizer(folder, backend, {"bos_token": END, "eos_token": END, "unk_token": END})


def write_translator_vocabulary(texts: Iterable[str], size: int, folder: Path) -> None:
    """Write byte pairs; sources end with </s>, targets begin with <s> and end with </s>."""
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
    """Write word pieces in lower case, with BERT's special tokens.

    Letters are given in order beforehand: the library numbers them at random otherwise, and numbers decide ties between
    pieces.  A word with a rare letter becomes [UNK].
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
