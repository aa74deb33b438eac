"""Malicious model folders and files, each made by a function of a table, and the process that tries to load them.

As a program it loads every source of a list, one after the other, and prints for each the outcome, its cost, and
what it touched: `python hostile.py CASES.json` where CASES are [name, source] pairs."""

import json
import os
import shutil
import struct
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from polyhead.models import checkpoint
from polyhead.models.checkpoint.load_estimate import estimate_load
from polyhead.models.core.errors import ModelError
from polyhead.service.runtime import tokenizer_check as vetting

OUTSIDE = "the-outside-file"  # which no checkpoint may reach
SECRET = "{what stands in it}"
HUGE = 10**9
SCRIPT = "import pathlib\npathlib.Path({canary!r}).touch()\n"
FLOATS = {"F64": 8, "F32": 4, "F16": 2}


@dataclass
class Outcome:
    """`touched`: files that were opened, code that was run or objects that were unpickled against the rules."""

    name: str
    said: str = ""
    kind: str = ""
    seconds: float = 0.0  # of processor time
    mebibytes: float = 0.0  # growth of the process, at most
    touched: list[str] = field(default_factory=list)


# Files


def header(content: bytes | Mapping[str, Any], data: bytes = b"", announced: int = -1) -> bytes:
    """A safetensors file."""
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(raw) if announced < 0 else announced) + raw + data


def tensor(begin: int, end: int, shape: list[Any], kind: str = "F32") -> dict[str, Any]:
    return {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}


def sparse(path: Path, size: int, begin: bytes = b"") -> None:
    """A long file that takes no space on disk."""
    with path.open("wb") as file:
        file.write(begin)
        file.truncate(size)


def describe(folder: Path, file: str = "config.json", **changes: Any) -> None:
    path = folder / file
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(values | changes))


def vocabulary(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads((folder / "tokenizer.json").read_text())
    change(values)
    (folder / "tokenizer.json").write_text(json.dumps(values))


def weights(content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "model.safetensors").write_bytes(content) and None


def said(file: str = "config.json", **changes: Any) -> Callable[[Path], None]:
    return lambda folder: describe(folder, file, **changes)


def swelling(folder: Path) -> None:
    """A matrix of 10^9 words that the file really has, as a sparse file."""
    content = (folder / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    entries = json.loads(content[8 : 8 + size])
    name = next(name for name in entries if name.endswith("word_embeddings.weight"))
    begin, end = entries[name]["data_offsets"]
    more = HUGE * 32 * 4 - (end - begin)
    entries[name] |= {"shape": [HUGE, 32]}
    for each, fields in entries.items():
        if each != "__metadata__":
            low, high = fields["data_offsets"]
            fields["data_offsets"] = [low + more * (low > begin), high + more * (low >= begin)]
    raw = json.dumps(entries).encode()
    sparse(folder / "model.safetensors", 8 + len(raw) + len(content) - 8 - size + more, header(raw))
    describe(folder, vocab_size=HUGE)


# Code in a checkpoint


def foreign_code(folder: Path) -> None:
    for name in ("modeling_mine.py", "tokenization_mine.py", "configuration_mine.py", "__init__.py", "setup.py"):
        (folder / name).write_text(SCRIPT.format(canary=str(canary(folder))))
    describe(folder, auto_map={"AutoModel": "modeling_mine.Mine", "AutoConfig": "configuration_mine.Mine"})


def code_of_a_tokenizer(folder: Path) -> None:
    foreign_code(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["auto_map"]
    (folder / "config.json").write_text(json.dumps(config))
    auto = {"AutoTokenizer": ["tokenization_mine.Mine", None]}
    describe(folder, "tokenizer_config.json", auto_map=auto, tokenizer_class="Mine")
    (folder / "tokenizer.json").rename(folder / "vocab.json")


def canary(folder: Path) -> Path:
    """A file that only code of the checkpoint writes."""
    return folder.parent / f"{folder.name}.canary"


def pickled(folder: Path) -> None:
    """A pickle that runs os.system when `torch.load` reads it."""
    command = f"touch {canary(folder)}".encode()
    code = b"cos\nsystem\n(S'" + command + b"'\ntR."
    (folder / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin", "optimizer.pt"):
        (folder / name).write_bytes(code)


def pickled_under_another_name(folder: Path) -> None:
    pickled(folder)
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")


TEMPLATES = {
    "calls the system": "{{ cycler.__init__.__globals__.os.popen('touch CANARY').read() }}",
    "climbs classes": "{% for c in ''.__class__.__mro__[1].__subclasses__() %}{{ c.__init__.__globals__ }}{% endfor %}",
    "includes a file": "{% include '/etc/passwd' %}",
    "imports": "{% import 'os' as os %}{{ os.system('touch CANARY') }}",
    "never ends while it is compiled": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "is far too long": "{{ 1 }}" * 100_000,
}


def templated(source: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "chat_template.jinja").write_text(source.replace("CANARY", str(canary(folder))))

    return write


# Links, and what is not a regular file


def outside(folder: Path) -> Path:
    path = folder.parent / OUTSIDE
    path.write_text(SECRET)
    return path


def linked(name: str) -> Callable[[Path], None]:
    def link(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(outside(folder))

    return link


def relative_link(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(f"../{outside(folder).name}")


def linked_folder(folder: Path) -> None:
    elsewhere = folder.parent / f"{OUTSIDE}-folder"
    elsewhere.mkdir(exist_ok=True)
    (elsewhere / "config.json").write_text("{}")
    modules = [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "1_Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").symlink_to(elsewhere)


def modules_outside(path: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        outside(folder)
        (folder.parent / "config.json").write_text("{}")
        modules = [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": path}]
        (folder / "modules.json").write_text(json.dumps(modules))

    return write


def pipe(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


def device(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("/dev/zero")

    return make


def long(name: str, content: bytes = b"") -> Callable[[Path], None]:
    return lambda folder: sparse(folder / name, 1 << 30, content)


def indexed(shard: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        outside(folder)
        (folder / "model.safetensors").unlink()  # it would be read without the index
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))

    return write


def long_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    long("model.safetensors.index.json", b"{")(folder)


def crowded(folder: Path) -> None:
    """Very many files, none of which is the needed one."""
    (folder / "model.safetensors").unlink()
    for number in range(20_000):
        (folder / f"{number:08}.bin").touch()


# Vocabularies


def patterned(expression: str) -> Callable[[Path], None]:
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    return lambda folder: vocabulary(folder, lambda values: values.update(pre_tokenizer=split))


def multiplying(values: dict[str, Any]) -> None:
    double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    values["normalizer"] = {"type": "Sequence", "normalizers": [double] * 60}


def numbered(values: dict[str, Any]) -> None:
    vocabulary = values["model"]["vocab"]
    vocabulary[next(reversed(vocabulary))] = (1 << 32) - 1


def nested(values: dict[str, Any]) -> None:
    for _ in range(150):
        values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [values["pre_tokenizer"]]}


def panicking_normalizer(values: dict[str, Any]) -> None:
    """The tokenizers library panics while it reads this."""
    values["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAAgP////8AAAAA"}


def panicking_template(values: dict[str, Any]) -> None:
    """The tokenizers library panics on every text: the template names a special token that is not listed."""
    text = {"Sequence": {"id": "A", "type_id": 0}}
    single = [{"SpecialToken": {"id": "[NOPE]", "type_id": 0}}, text]
    pair = [text, {"Sequence": {"id": "B", "type_id": 1}}]
    values["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": {}}


def normalized(*steps: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    return lambda values: values.update(normalizer={"type": "Sequence", "normalizers": list(steps)})


def cut(*steps: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    return lambda values: values.update(pre_tokenizer={"type": "Sequence", "pretokenizers": list(steps)})


def replacing(found: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": found}, "content": content}


def spelled(values: dict[str, Any]) -> None:
    """The decoder replaces every letter a of an answer by 2^40 letters."""
    values["decoder"] = {"type": "Sequence", "decoders": [replacing("a", "aa")] * 40}


def many_steps(letter: str) -> Callable[[dict[str, Any]], None]:
    """A normalizer that makes sixteen letters of one, which many steps replace by another and back."""
    there, back = replacing(letter, "\u0447"), replacing("\u0447", letter)
    return normalized(*[replacing(letter, letter * 2)] * 4, *[there, back] * 120)


def words_of_any_length(values: dict[str, Any]) -> None:
    """For each of them the vocabulary is searched from every letter to every other."""
    values["model"]["max_input_chars_per_word"] = 10**12


def pieces_of_any_length(values: dict[str, Any]) -> None:
    pieces = [["[UNK]", 0.0], ["[CLS]", 0.0], ["[SEP]", 0.0], *(["a" * size, -1.0] for size in range(1, 3000))]
    values["model"] = {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False}
    values["added_tokens"], values["post_processor"] = [], None


def templated_round(tokens: int, times: int, texts: int = 1) -> Callable[[dict[str, Any]], None]:
    """A template that adds so many tokens around a text, so many times, and repeats the text itself so many times."""
    special = {"[CLS]": {"id": "[CLS]", "ids": [2] * tokens, "tokens": ["[CLS]"] * tokens}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    single = [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}] * times + [first] * texts
    made = {"type": "TemplateProcessing", "single": single, "pair": [first, second], "special_tokens": special}
    return lambda values: values.update(post_processor=made)


def templated_pair(*ids: str) -> Callable[[dict[str, Any]], None]:
    """A template whose part for a pair has these texts."""

    def change(values: dict[str, Any]) -> None:
        texts = [{"Sequence": {"id": name, "type_id": 0}} for name in ids]
        values["post_processor"] = {
            "type": "TemplateProcessing",
            "single": texts[:1],
            "pair": texts,
            "special_tokens": {},
        }

    return change


def repeated_unseen(values: dict[str, Any]) -> None:
    """A template that repeats the text very often, over a vocabulary that has only a token for z."""
    ids = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "z": 5}
    values["model"] = {"type": "BPE", "vocab": ids, "merges": []}
    values["normalizer"] = values["pre_tokenizer"] = values["decoder"] = None
    templated_round(1, 1, 100_000)(values)
    values["post_processor"] = {"type": "Sequence", "processors": [BYTES, values["post_processor"]]}


def long_piece(size: int, decoder: dict[str, Any] | None = None) -> Callable[[dict[str, Any]], None]:
    """A vocabulary with one more piece of such a length."""

    def change(values: dict[str, Any]) -> None:
        known = values["model"]["vocab"]
        known["x" * size] = max(known.values()) + 1
        values["decoder"] = decoder or values["decoder"]

    return change


def many_pieces(values: dict[str, Any]) -> None:
    """Each is short enough, but a hundred times as long in a text; a file of a megabyte has a hundred of them."""
    known = values["model"]["vocab"]
    known |= {f"{number:06}{'x' * 30}": len(known) + number for number in range(20_000)}
    values["decoder"] = replacing("x", "y" * 100)


def unknown_named(name: str) -> Callable[[dict[str, Any]], None]:
    """A character that is not in the vocabulary becomes this token."""

    def change(values: dict[str, Any]) -> None:
        model = values["model"]
        model["vocab"][name] = model["vocab"].pop(model["unk_token"])
        model["unk_token"] = name
        values["added_tokens"] = [each for each in values["added_tokens"] if each["content"] in model["vocab"]]

    return change


def long_beginning(values: dict[str, Any]) -> None:
    """Two tokens, each short enough, at the beginning of every text."""
    known = values["model"]["vocab"]
    names = ["x" * 2500, "y" * 2500]
    known |= {name: len(known) + number for number, name in enumerate(names)}
    template = values["post_processor"] = {"type": "TemplateProcessing"}
    placed = [{"SpecialToken": {"id": name, "type_id": 0}} for name in names]
    template["single"] = [*placed, {"Sequence": {"id": "A", "type_id": 0}}]
    template["pair"] = [*template["single"], {"Sequence": {"id": "B", "type_id": 1}}]
    template["special_tokens"] = {name: {"id": name, "ids": [known[name]], "tokens": [name]} for name in names}


def long_added_token(values: dict[str, Any]) -> None:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    number = max(values["model"]["vocab"].values()) + 1
    values["added_tokens"].append({"id": number, "content": "x" * 1_000_000, **flags})


BERT_OPTIONS = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": False}
BYTES: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SPLIT: dict[str, Any] = {"type": "Split", "behavior": "Isolated", "invert": False}
TOKENIZERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "bytes as characters as bytes": normalized(*[{"type": "ByteLevel"}] * 20),
    "pieces of bytes as characters": cut(*[BYTES] * 24),
    "a replacement of nothing": normalized(replacing("", "x" * 256)),
    "a hundred thousand steps": normalized(*[replacing("zzz", "z")] * 100_000),
    "a million steps that are short": normalized(*[{"type": "Lowercase"}] * 300_000),
    "many long beginnings": normalized(*[{"type": "Prepend", "prepend": "x" * 256}] * 5000),
    "a normalizer that multiplies within bounds": normalized(*[replacing("a", "aa")] * 8),
    "a ligature of 18 letters that is replaced by itself": normalized(
        *[{"type": "NFKC"}, replacing("\u0644", "\ufdfa")] * 30
    ),
    "spaces around a sign that are replaced by it": normalized(
        *[{"type": "BertNormalizer"} | BERT_OPTIONS, replacing(" ", "\u4e2d")] * 30
    ),
    "a pattern that is cubic on a letter": cut(SPLIT | {"pattern": {"Regex": "\u0436+\u0436+[xy]"}}),
    "a pattern that is exponential on a letter": cut(SPLIT | {"pattern": {"Regex": "(?:\u0436+)+\u0449"}}),
    "three thousand patterns": cut(*[SPLIT | {"pattern": {"Regex": "(?=a)"}}] * 3000),
    "a pattern that looks back at every space": cut(SPLIT | {"pattern": {"Regex": r"\s+$|(\s*[^\s]\s*)+#"}}),
    "a pattern of many brackets": cut(SPLIT | {"pattern": {"Regex": "(" * 200 + "q" + "*)" * 200}}),
    "twenty thousand spaces before a word": cut(
        *[{"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": False}] * 20_000
    ),
    "an answer that multiplies": spelled,
    "many steps on one letter": many_steps("\u0436"),
    "words of any length": words_of_any_length,
    "pieces of any length": pieces_of_any_length,
    "a template with many texts": templated_round(1, 1, 100_000),
    "a template with many tokens": templated_round(10_000, 10_000),
    "a template with a long token": templated_round(300_000, 1),
    "a template with two texts": templated_round(1, 1, 2),
    "a template with no text": templated_round(1, 1, 0),
    "a template of many parts": templated_round(1, 100),
    "a template with a text of a pair twice": templated_pair("A", "A", "B"),
    "many texts, seen by a vocabulary of its own": repeated_unseen,
    "a piece of a megabyte": long_piece(1_000_000),
    "a piece that its decoder makes long": long_piece(1000, replacing("x", "x" * 100)),
    "an added token of a megabyte": long_added_token,
    "pieces that its decoder makes a hundred times as long": many_pieces,
    "an unknown token of 4,000 characters": unknown_named("[UNK" + "u" * 4000 + "]"),
    "long tokens before every text": long_beginning,
}


def of_json(file: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes(content) and None


def adapted(name: str) -> Callable[[Path], None]:
    """An adapter whose base is in another folder."""

    def write(folder: Path) -> None:
        outside(folder)
        describe(folder, "adapter_config.json", peft_type="LORA", base_model_name_or_path=name, r=1, lora_alpha=1)

    return write


def ranked(*patterns: str) -> Callable[[Path], None]:
    """An adapter with these rank patterns."""

    def write(folder: Path) -> None:
        adapter = {"peft_type": "LORA", "base_model_name_or_path": "base", "r": 1, "lora_alpha": 1}
        shutil.copytree(folder, folder / "base")
        describe(folder, "adapter_config.json", **adapter, rank_pattern=dict.fromkeys(patterns, 2))
        name = "base_model.model.bert.encoder.layer.0.attention.self.query.lora_{}.weight"
        tensors = {name.format("A"): tensor(0, 128, [1, 32]), name.format("B"): tensor(128, 256, [32, 1])}
        (folder / "adapter_model.safetensors").write_bytes(header(tensors, bytes(256)))

    return write


def embedding(**settings: Any) -> Callable[[Path], None]:
    """An embedder with these settings of sentence-transformers."""

    def write(folder: Path) -> None:
        describe(folder, architectures=["BertModel"])
        (folder / "modules.json").write_text(json.dumps([{"type": "a.Transformer", "path": ""}]))
        describe(folder, "config_sentence_transformers.json", **settings)

    return write


ONE = tensor(0, 4, [1])
FOLDERS: dict[str, Callable[[Path], object]] = {
    "auto_map with its code": foreign_code,
    "a tokenizer with its code": code_of_a_tokenizer,
    "only pickles": pickled,
    "a pickle called safetensors": pickled_under_another_name,
    "a header of 2^63 bytes": weights(header(b"{}", announced=1 << 63)),
    "a header of 2^64 - 1 bytes": weights(header(b"{}", announced=(1 << 64) - 1)),
    "a header longer than the file": weights(header(b"{}", announced=1000)),
    "a header of 100 MB": lambda folder: sparse(
        folder / "model.safetensors", 200 << 20, struct.pack("<Q", 100_000_000) + b'{"a":' + b" " * 1000
    ),
    "a header of 12 million lists": weights(header(b'{"a":[' + b"[]," * 5_500_000 + b"[]]}")),
    "a header of a hundred thousand brackets": weights(header(b'{"a":' + b"[" * 100_000)),
    "overlapping tensors": weights(header({"a": tensor(0, 8, [2]), "b": tensor(4, 12, [2])}, bytes(12))),
    "a gap between tensors": weights(header({"a": tensor(0, 4, [1]), "b": tensor(8, 12, [1])}, bytes(12))),
    "bytes that no tensor has": weights(header({"a": ONE}, bytes(400))),
    "a tensor beyond the file": weights(header({"a": tensor(0, 1 << 40, [1 << 38])}, bytes(4))),
    "offsets the wrong way round": weights(header({"a": tensor(4, 0, [1])}, bytes(4))),
    "negative offsets": weights(header({"a": tensor(-4, 0, [1])}, bytes(4))),
    "offsets of 2^80": weights(header({"a": tensor(0, 1 << 80, [1 << 78])}, bytes(4))),
    "a negative shape": weights(header({"a": tensor(0, 4, [-1])}, bytes(4))),
    "a shape that overflows": weights(header({"a": tensor(0, 4, [1 << 32, 1 << 32, 1 << 32])}, bytes(4))),
    "a shape of a million sides": weights(header({"a": tensor(0, 4, [1] * 1_000_000)}, bytes(4))),
    "a shape of booleans": weights(header({"a": tensor(0, 4, [True])}, bytes(4))),
    "a kind that does not fit the bytes": weights(header({"a": tensor(0, 4, [1], "F64")}, bytes(4))),
    "a kind that nobody knows": weights(header({"a": tensor(0, 4, [1], "PICKLE")}, bytes(4))),
    "one name twice": weights(
        header(b'{"a":%b,"a":%b}' % ((json.dumps(ONE).encode(),) * 2), bytes(4)),
    ),
    "an index that leads up": indexed(f"../{OUTSIDE}"),
    "an index that leads to the root": indexed("/etc/passwd"),
    "an index with a pipe": lambda folder: (indexed("shard")(folder), pipe("shard")(folder)),
    "a description that is linked": linked("config.json"),
    "a description that is linked from above": relative_link,
    "weights that are linked": linked("model.safetensors"),
    "a vocabulary that is linked": linked("tokenizer.json"),
    "settings of a tokenizer that are linked": linked("tokenizer_config.json"),
    "pooling in a linked folder": linked_folder,
    "pooling in the folder above": modules_outside(".."),
    "pooling in the folder above, further down": modules_outside("x/../.."),
    "pooling at the root": modules_outside("/etc"),
    "a pipe of weights": pipe("model.safetensors"),
    "a pipe of a description": pipe("config.json"),
    "a pipe of a vocabulary": pipe("tokenizer.json"),
    "a device of a description": device("config.json"),
    "a device of weights": device("model.safetensors"),
    "a description of 1 GiB": long("config.json", b"{"),
    "a vocabulary of 1 GiB": long("tokenizer.json", b"{"),
    "settings of a tokenizer of 1 GiB": long("tokenizer_config.json", b"{"),
    "an index of 1 GiB": long_index,
    "a description of five million lists": of_json("config.json", b'{"a":[' + b"[]," * 5_000_000 + b"[]]}"),
    "a description of a hundred thousand brackets": of_json("config.json", b"[" * 100_000),
    "a vocabulary of a hundred thousand brackets": of_json("tokenizer.json", b"[" * 100_000),
    "settings of a hundred thousand brackets": of_json("tokenizer_config.json", b"[" * 100_000),
    "a vocabulary of ten million lists": of_json("tokenizer.json", b'{"a":[' + b"[]," * 10_000_000 + b"[]]}"),
    "very many files": crowded,
    "10^9 wide": said(hidden_size=HUGE),
    "10^9 deep": said(num_hidden_layers=HUGE),
    "10^9 words": said(vocab_size=HUGE),
    "10^9 words, in a file of 128 GB": swelling,
    "2^62 positions": said(max_position_embeddings=1 << 62),
    "10^9 labels": said(id2label=None, num_labels=HUGE),
    "a number of four thousand digits": of_json("config.json", b'{"hidden_size":' + b"9" * 4000 + b"}"),
    "a type with a million letters": said(model_type="x" * 1_000_000),
    "a pattern that goes astray": patterned("(a+)+$"),
    "a pattern that goes astray on digits": patterned("([0-9]|[0-9][0-9])*$"),
    "a normalizer that multiplies": lambda folder: vocabulary(folder, multiplying),
    "a normalizer that panics": lambda folder: vocabulary(folder, panicking_normalizer),
    "a template that panics": lambda folder: vocabulary(folder, panicking_template),
    "ids up to 2^32": lambda folder: vocabulary(folder, numbered),
    "steps inside steps": lambda folder: vocabulary(folder, nested),
    **{f"a tokenizer: {name}": partial(vocabulary, change=change) for name, change in TOKENIZERS.items()},
    "a base that is linked up": adapted(f"../{OUTSIDE}"),
    "a base at the root": adapted("/etc"),
    "a pattern of ranks that holds up": ranked("(a+)+$"),
    "a pattern of ranks with two numbers of repeats": ranked("[ab]*a[ab]*b"),
    "a hundred thousand patterns of ranks": ranked(*(f"{number}.x" for number in range(100_000))),
    "a tensor with a long name": weights(header({"a" * 513: ONE}, bytes(4))),
    "a prompt of a megabyte": embedding(prompts={"q": "!" * 1_000_000}, default_prompt_name="q"),
    "a thousand prompts": embedding(prompts={str(number): "" for number in range(1000)}),
    "a prompt with a name of a megabyte": embedding(prompts={"q" * 1_000_000: "!"}),
    "a default prompt with a name of a megabyte": embedding(prompts={}, default_prompt_name="q" * 1_000_000),
}
GENERATORS: dict[str, Callable[[Path], object]] = {
    **{f"a template that {what}": templated(source) for what, source in TEMPLATES.items()},
    "a template of 1 GiB": long("chat_template.jinja", b"{{ 1 }}"),
    "a template that is linked": linked("chat_template.jinja"),
    "a template that is a pipe": lambda folder: (
        (folder / "chat_template.jinja").unlink(),
        pipe("chat_template.json")(folder),
    ),
    "ends that are linked": linked("generation_config.json"),
    "ends that are a pipe": pipe("generation_config.json"),
    "a million ends": said("generation_config.json", eos_token_id=list(range(1_000_000))),
    "a million ends in the description": said(eos_token_id=list(range(1_000_000))),
    "10^9 layers with windows": said(
        model_type="qwen2",
        architectures=["Qwen2ForCausalLM"],
        use_sliding_window=True,
        num_hidden_layers=HUGE,
        sliding_window=4,
    ),
    "10^9 layers with windows, the other way": said(
        model_type="gemma3_text", architectures=["Gemma3ForCausalLM"], num_hidden_layers=HUGE
    ),
}

# GGUF


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(values: bytes = b"", tensors: bytes = b"", *, counts: tuple[int, int] = (0, 0), rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, *counts) + values + tensors + rest


def placed(name: str, sides: list[int], offset: int, kind: int = 0) -> bytes:
    form = f"<I{len(sides)}QIQ"
    return text(name) + struct.pack(form, len(sides), *sides, kind, offset)


def string_field(key: str, value: str) -> bytes:
    return text(key) + struct.pack("<I", 8) + text(value)


def list_field(key: str, kind: int, count: int, content: bytes = b"") -> bytes:
    return text(key) + struct.pack("<IIQ", 9, kind, count) + content


LLAMA = string_field("general.architecture", "llama")
NAMELESS = gguf(tensors=placed("a", [4], 0), counts=(1, 0), rest=bytes(64))
MANY = 1 << 62
FILES: dict[str, bytes | tuple[int, bytes]] = {  # a length and the beginning, or all of it
    "2^63 fields": gguf(LLAMA, counts=(0, 1 << 63)),
    "2^63 tensors": gguf(LLAMA, counts=(1 << 63, 1)),
    "a string of 2^62 bytes": gguf(struct.pack("<Q", MANY), counts=(0, 1)),
    "a list of 2^62 strings": gguf(list_field("a", 8, MANY), counts=(0, 1)),
    "a list of 2^62 numbers": gguf(list_field("a", 4, MANY), counts=(0, 1)),
    "a list of lists": gguf(list_field("a", 9, 1, struct.pack("<IQ", 9, 1)), counts=(0, 1)),
    "a long file of empty fields": (1 << 40, gguf(counts=(0, 1 << 40))),
    "a long file of empty tensors": (1 << 40, gguf(counts=(1 << 40, 0))),
    "a string of 8 GiB that is there": (16 << 30, gguf(struct.pack("<Q", 8 << 30), counts=(0, 1))),
    "a list of 2^30 numbers that is there": (16 << 30, gguf(list_field("a", 0, 1 << 30), counts=(0, 1))),
    "a list of 2^30 strings that is there": (16 << 30, gguf(list_field("a", 8, 1 << 30), counts=(0, 1))),
    "2^32 dimensions": gguf(tensors=text("a") + struct.pack("<I", (1 << 32) - 1), counts=(1, 0)),
    "sides that overflow": gguf(tensors=placed("a", [1 << 40, 1 << 40, 1 << 40], 0), counts=(1, 0), rest=bytes(64)),
    "a tensor beyond the file": gguf(tensors=placed("a", [4], 1 << 60), counts=(1, 0), rest=bytes(64)),
    "tensors in the same bytes": gguf(
        tensors=placed("a", [4], 0) + placed("b", [4], 8), counts=(2, 0), rest=bytes(128)
    ),
    "one name twice": gguf(tensors=placed("a", [4], 0) + placed("a", [4], 32), counts=(2, 0), rest=bytes(128)),
    "one name twice behind 60,000 others": gguf(
        tensors=b"".join(placed(f"a{number % 60_000}", [0], 0) for number in range(1, 60_002)), counts=(60_001, 0)
    ),
    "one field twice": gguf(LLAMA + LLAMA, counts=(0, 2)),
    "a tensor with a long name": gguf(tensors=placed("a" * 513, [4], 0), counts=(1, 0), rest=bytes(64)),
    "a kind of 2^31": gguf(tensors=placed("a", [4], 0, 1 << 31), counts=(1, 0), rest=bytes(64)),
    "an alignment of 2^63": gguf(
        text("general.alignment") + struct.pack("<IQ", 10, 1 << 63), placed("a", [4], 0), counts=(1, 1), rest=bytes(64)
    ),
    "no alignment": gguf(
        text("general.alignment") + struct.pack("<II", 4, 0), placed("a", [4], 0), counts=(1, 1), rest=bytes(64)
    ),
    "no architecture": NAMELESS,
    "a name of a million letters": gguf(string_field("general.architecture", "x" * 1_000_000), counts=(0, 1)),
}


# Loading


class Watch:
    """Records everything that Python opens, runs and unpickles while it is `on`."""

    def __init__(self) -> None:
        self.on, self.events = False, list[str]()
        sys.addaudithook(self.record)

    def record(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open" and isinstance(arguments[0], str) and OUTSIDE in os.path.realpath(arguments[0]):
            self.events.append(f"opened {arguments[0]}")
        elif event == "subprocess.Popen" and vetting.__name__ in arguments[1]:
            return  # the process in which tokenizers are checked
        elif event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "pickle.find_class"):
            self.events.append(f"{event} {arguments[0]}")
        elif event in ("socket.connect", "socket.getaddrinfo"):
            self.events.append(f"{event} {arguments}")


def memory(what: str) -> float:
    """MiB: VmRSS is the memory now, VmHWM the maximum since it was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024


def tried(name: str, source: str, watch: Watch, vet: vetting.TokenizerCheck) -> Outcome:
    """Describe a source, then load it; if the description shows that it is too large for memory it is not read."""
    outcome = Outcome(name)
    Path("/proc/self/clear_refs").write_text("5")
    before, began = memory("VmRSS"), time.process_time()
    watch.events, watch.on = [], True
    try:
        needed = estimate_load(checkpoint.describe_source(source, folder_check=vet.check_folder)).weight_bytes(
            torch.float32
        )
        if needed > 1 << 30:
            raise ModelError(f"it needs {needed} bytes")
        template = checkpoint.load(source).chat
        if template is not None:
            template.render([{"role": "user", "content": "hello"}])
    except BaseException as error:  # noqa: BLE001  its type is part of the outcome
        outcome.said, outcome.kind = str(error), type(error).__name__
        if isinstance(error, ModelError):
            outcome.kind = "ModelError"
    watch.on = False
    outcome.seconds, outcome.mebibytes = time.process_time() - began, memory("VmHWM") - before
    outcome.touched = watch.events
    return outcome


def main(cases: Path) -> None:
    watch, vet = Watch(), vetting.TokenizerCheck()
    vetting.CPU_SECONDS = 2  # of processor time
    for name, source in json.loads(cases.read_text()):
        sys.stdout.write(json.dumps(asdict(tried(name, source, watch, vet))) + "\n")
        sys.stdout.flush()
    vet.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
