"""Every field of tokenizer.json replaced by other values; each file is loaded, checked and used.

As a program it tries COUNT of the mutations, sampled by SEED, in the folder FOLDER, which holds a classifier:
`python tokenizer_fields.py FOLDER SEED COUNT`. It writes a line of JSON with the mutation before each, and one with
the outcome after it. If the library ends the process, the last line names the mutation."""

import contextlib
import json
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from typer.testing import CliRunner

from polyhead.models.core.errors import ModelError
from polyhead.models.tokenizer import Tokenizer
from polyhead.models.tokenizer.vocabulary import sentencepiece_merges
from polyhead.service.cli import check
from polyhead.service.cli.main import app
from polyhead.service.runtime.tokenizer_check import TokenizerCheck
from tests.support import checkpoints
from tests.support.scripted import Registry, application, ask, echo, model

PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "added_tokens", "model")
ABSENT = "(absent)"
VALUES: tuple[Any, ...] = (
    *(None, True, False, [], {}, "", "x", " ", "\u2581", "(", "a" * 5000, [[]], [{}], [0], ["x"], {"x": 1}),
    *(0, -1, 1, 3, 2**31, 2**63, -(2**40), 1e308, ABSENT),
)
TEXTS = (
    "a",
    "The quick brown fox",
    "\u65e5\u672c\u8a9e \U0001f642 \u00e9",
    "[CLS] x </s>",
    " a  b ",
    "<0xE6>",
    "a" * 500,
)
Place = tuple[str | int, ...]


def unigram() -> str:
    """As that of T5 or XLM-RoBERTa."""
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("  ", " ")])
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<s>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(checkpoints.CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return str(backend.to_str())


def characters() -> str:
    """As that of Llama: characters, and bytes for characters without a piece."""
    pieces = {piece: index for index, piece in enumerate(("<unk>", "<s>", "</s>"))}
    for piece in (*(f"<0x{byte:02X}>" for byte in range(256)), *sorted(set("".join(checkpoints.CORPUS)))):
        pieces.setdefault(piece, len(pieces))
    return str(sentencepiece_merges(pieces, [], unknown="<unk>", prefix_space=True).to_str())


def bases() -> dict[str, str]:
    return {
        "WordPiece": checkpoints.word_piece()._tokenizer.to_str(),
        "byte-level BPE": checkpoints.byte_level_bpe()._tokenizer.to_str(),
        "RoBERTa's BPE": checkpoints.roberta_bpe()._tokenizer.to_str(),
        "Unigram": unigram(),
        "SentencePiece BPE": characters(),
    }


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    """All places; of long lists only those at the beginning, and none inside a vocabulary."""
    if place:
        yield place
    members = value.items() if isinstance(value, dict) else enumerate(value[:6]) if isinstance(value, list) else ()
    if place not in (("model", "vocab"), ("model", "merges")):
        for name, inner in members:
            yield from places(inner, (*place, name))


def mutated(values: Any, place: Place, new: Any) -> Any:
    values = deepcopy(values)
    inner = values
    for name in place[:-1]:
        inner = inner[name]
    if new is ABSENT:
        del inner[place[-1]]
    else:
        inner[place[-1]] = new
    return values


def mutations(seed: int, count: int) -> list[tuple[str, str, str]]:
    """The mutation, and the file."""
    found = []
    for name, base in bases().items():
        values = {part: value for part, value in json.loads(base).items() if part in PARTS and value is not None}
        found += [(name, base, place, new) for place in places(values) for new in VALUES]
    some = Random(seed).sample(found, min(count, len(found)))
    return [
        (f"{name}: {place} is {str(new)[:40]!r}", name, json.dumps(mutated(json.loads(base), place, new)))
        for name, base, place, new in some
    ]


def use(tokenizer: Tokenizer) -> None:
    """Call every method that a server uses."""
    for text in TEXTS:
        for special in (True, False):
            encoding = tokenizer.encode(text, special=special)
            tokenizer.check_list_lengths(encoding)
            tokenizer.join_pieces(encoding.pieces)
        tokenizer.encode(text, untrusted=True)
        tokenizer.encode_batch([(text, "b c")])
        tokenizer.encode_quoted(tokenizer.quote(text) + text)
    ids = [*range(min(tokenizer.vocab_size, 300)), 10**6, -1]
    for plain in (True, False):
        stream = tokenizer.stream(skip_special=plain)
        whole = "".join(map(stream.push, ids)) + stream.flush()
        assert whole == tokenizer.decode(ids, skip_special=plain)


def tried(folder: Path, name: str) -> str:
    """The error in the outcome; empty if there is none."""
    try:
        tokenizer = Tokenizer.from_folder(folder)
        loads = True
    except ModelError:
        loads = False
    if loads:
        with contextlib.suppress(ModelError):
            use(tokenizer)
        registry = Registry([model(folder, "judge", "classify", labels=("bad", "good"))], echo)
        answers = ask(
            application(registry),
            *(("/models/judge/tokenize", {"inputs": [text]}) for text in TEXTS),
            ("/models/judge", {"inputs": list(TEXTS)}),
            ("/models/judge", {"inputs": {"text": "a", "text_pair": "b"}}),
            ("/models/judge/decode", {"ids": list(range(9))}),
        )
        for answer in answers:
            if answer.status_code >= 500 and "made a mistake" in answer.text:
                return f"a request is answered {answer.status_code}: {answer.text[:200]}"
    if name == "WordPiece":
        result = CliRunner().invoke(app, ["check", f"sick={folder}"])
        if "Traceback" in result.output or (result.exception and not isinstance(result.exception, SystemExit)):
            return f"the check raised {result.exception!r}"
        if not loads and result.exit_code == 0:
            return "the check found nothing"
    return ""


class SharedCheck(TokenizerCheck):
    """Its child process serves all commands: to start one takes longer than to check a tokenizer."""

    def close(self) -> None:
        """Leave the child process to the next command."""


def main(folder: Path, seed: int, count: int) -> None:
    shared = SharedCheck()
    check.TokenizerCheck = lambda: shared  # type: ignore[assignment,misc]
    try:
        try_all(folder, seed, count)
    finally:
        TokenizerCheck.close(shared)


def try_all(folder: Path, seed: int, count: int) -> None:
    for what, name, content in mutations(seed, count):
        say(what)
        (folder / "tokenizer.json").write_text(content)
        try:
            wrong = tried(folder, name)
        except BaseException as problem:  # noqa: BLE001  # its type is part of the output
            wrong = f"it raised {type(problem).__name__}: {str(problem)[:200]}"
        say(wrong)


def say(line: str) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
