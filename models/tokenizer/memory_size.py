"""The memory that a tokenizer takes once it is read and used, computed from its pieces: an upper bound.

What the library keeps differs by the kind of its model, so each kind has its own count. The figures are those of the
resident memory of a process on 64-bit Linux (tokenizers 0.23), measured where a table has just been doubled. Regular
expressions and tables of characters are not counted here: the process that tries a tokenizer measures them.
"""

from collections.abc import Collection, Iterable

from tokenizers import Tokenizer, models

PIECE_BYTES = 400  # of a piece in both tables of a model, with its merge
LETTER_BYTES = 4  # of a byte of a piece, in both tables
NODE_BYTES = 368  # of a node in the tree of a unigram model, which has a table of its own
ADDED_BYTES = 1300  # of an added token: two encoders search for it, and for a control token two more
ADDED_LETTER_BYTES = 80  # of a byte of an added token, in these searches
SPELLED_BYTES = 360  # of a piece whose text was asked for, as the first token and as a later one
CHARACTER_BYTES = 50  # of a character of a token's text: most are nodes of the tree for grammars


def count_memory(backend: Tokenizer, pieces: Collection[str], size: int) -> int:
    """Bytes that a tokenizer takes which reads texts. `pieces`: its tokens, added ones included; `size`: its largest id
    and one more."""
    letters = sum(len(piece.encode(errors="replace")) for piece in pieces)
    added = [token.content.encode(errors="replace") for token in backend.get_added_tokens_decoder().values()]
    return (
        size * PIECE_BYTES
        + letters * LETTER_BYTES
        + (count_nodes(pieces) * NODE_BYTES if isinstance(backend.model, models.Unigram) else 0)
        + len(added) * ADDED_BYTES
        + sum(map(len, added)) * ADDED_LETTER_BYTES
    )


def count_spelled(size: int, text: int) -> int:
    """Bytes of the texts of all tokens, which only answers and grammars need. `text`: their characters, as they are
    decoded."""
    return size * SPELLED_BYTES + text * CHARACTER_BYTES


def count_nodes(pieces: Iterable[str]) -> int:
    """The nodes of a tree of the pieces' bytes: how many different beginnings they have."""
    count, last = 0, b""
    for piece in sorted(piece.encode(errors="replace") for piece in pieces):
        common, most = 0, min(len(piece), len(last))
        while common < most and piece[common] == last[common]:
            common += 1
        count, last = count + len(piece) - common, piece
    return count
