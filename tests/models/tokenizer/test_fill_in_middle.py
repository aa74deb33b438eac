"""Control tokens for a text between two others."""

from pathlib import Path

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from polyhead.models.tokenizer import Tokenizer
from polyhead.models.tokenizer.fill_in_middle import KNOWN_MARKS, FillMarks
from tests.support.checkpoints import fill_in_middle_tokenizer

BEFORE, AFTER = "def größer(a):\n    return ", "\n\nprint(größer(3))\n"


@pytest.mark.parametrize("marks", KNOWN_MARKS, ids=lambda marks: str(marks.prefix))
def test_the_marks_are_found_and_the_prompt_is_tokenised_as_by_the_reference(marks: FillMarks, tmp_path: Path) -> None:
    fill_in_middle_tokenizer(tmp_path, marks.tokens)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.fill_marks is not None
    assert tokenizer.fill_marks.tokens == marks.tokens
    text = tokenizer.fill_marks.join(tokenizer.quote(BEFORE), tokenizer.quote(AFTER))
    ids = [id for part in tokenizer.encode_quoted(text) for id in part.ids]
    reference = AutoTokenizer.from_pretrained(tmp_path)
    order = (marks.suffix, AFTER, marks.prefix, BEFORE) if marks.suffix_first else None
    written = "".join(order or (marks.prefix, BEFORE, marks.suffix, AFTER, marks.middle))
    assert ids == reference(written, add_special_tokens=False).input_ids


def test_marks_that_are_ordinary_text_do_not_count(tmp_path: Path, tiny_generator: Path) -> None:
    assert Tokenizer.from_folder(tiny_generator).fill_marks is None
    fill_in_middle_tokenizer(tmp_path, KNOWN_MARKS[0].tokens[:2])
    assert Tokenizer.from_folder(tmp_path).fill_marks is None
    plain = [AddedToken(piece, special=False) for piece in KNOWN_MARKS[0].tokens]
    fill_in_middle_tokenizer(tmp_path, plain)
    assert Tokenizer.from_folder(tmp_path).fill_marks is None
