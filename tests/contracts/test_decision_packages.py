"""Folders that the packages laya and gliner2 save themselves, and prompts, beside the packages. Skipped without them:
`pip install --no-deps laya==0.4.15 gliner2==2.1.0`."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertModel,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedTokenizerFast,
)

from polyhead.models.checkpoint import Checkpoint, load
from polyhead.models.core.decision_prompt import SCHEMA_TOKENS, OptionMarkPrompt
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.service.core.errors import TooLong
from polyhead.service.core.model import Model
from polyhead.service.core.request import DEFAULT_TERMS, HeadOutput
from polyhead.service.engine.encoder_worker import EncoderWorker
from polyhead.service.text.decision_prompts import (
    EncodedDecision,
    QuestionedText,
    QuestionText,
    list_options,
    read_decision,
)
from polyhead.service.text.schema_words import split_schema_words
from tests.support.checkpoints import CORPUS
from tests.support.decision_models import QUESTIONS, TEXTS
from tests.support.engine_fakes import ask, finish
from tests.support.scripted import model

pytestmark = pytest.mark.thorough
laya = pytest.importorskip("laya")
gliner2 = pytest.importorskip("gliner2")

TOLERANCE = 1e-4  # of a logit
TURNED = tuple(
    replace(
        each, field=f"turned.{each.field}", instructions=f"now {each.instructions}", order=tuple(range(count))[::-1]
    )
    for each in QUESTIONS
    for count in [len(each.options) or 2]
)
ASKED = (*QUESTIONS, *TURNED)
SIZES: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    torch.manual_seed(5)
    with torch.no_grad():
        yield


def byte_pairs() -> PreTrainedTokenizerFast:
    """A byte-level BPE with a BERT's special tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    roles = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "cls", "sep", "pad", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **roles)


def spread(network: torch.nn.Module) -> None:
    for each in network.parameters():
        if each.dim() > 1:
            each.normal_(0, 1.2 / each.shape[-1] ** 0.5)
        else:
            each.add_(torch.randn_like(each) * 0.1)


def served(loaded: Checkpoint, tokenizer_folder: Path) -> Model:
    options = {"decision_prompt": loaded.decision_prompt, "max_tokens": loaded.max_tokens}
    return model(tokenizer_folder, "decider", "decide", vocab_size=loaded.config.vocab_size, **options)


def encode(one: Model, text: str, questions: tuple[QuestionText, ...] = ASKED) -> EncodedDecision:
    return read_decision(one, QuestionedText("state", text, questions), "call", DEFAULT_TERMS)


def answer(loaded: Checkpoint, one: Model, text: str) -> list[list[float]]:
    head: Any = loaded.head
    worker = EncoderWorker(TorchExecutor(loaded.network, None), head, model="decider", task="decide")
    read = encode(one, text)
    tickets = ask(worker, *read.requests)
    finish(worker)
    outputs = [event for ticket in tickets for event in ticket.events if isinstance(event, HeadOutput)]
    return read.read_logits([output.values for output in outputs])


def check(found: list[list[float]], expected: list[list[float]]) -> None:
    for own, wanted in zip(found, expected, strict=True):
        assert own == pytest.approx(wanted, abs=TOLERANCE)


def laya_question(question: QuestionText) -> dict[str, Any]:
    made: dict[str, Any] = {"type": question.kind, "instructions": question.instructions}
    if question.order:
        made["option_order"] = list(question.order)
    if question.kind == "choice":
        return made | {"criteria": dict(question.options)}
    if question.kind == "score":
        levels = enumerate(question.options)
        return made | {
            "criteria": [
                text if text and name == str(n) else f"{name}: {text}" if text else name for n, (name, text) in levels
            ]
        }
    if not question.options:
        return made
    keys = ("false", "true")
    labels, texts = ({key: option[part] for key, option in zip(keys, question.options, strict=True)} for part in (0, 1))
    return made | {"labels": labels, "criteria": texts}


def save_laya(folder: Path, kind: str) -> Path:
    from laya.common import DecisionModel
    from laya.train import save_checkpoint

    made = byte_pairs()
    network: Any
    if kind == "modernbert":
        ids = {"pad_token_id": 3, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
        config = ModernBertConfig(vocab_size=len(made), hidden_size=192, **SIZES, **ids, max_position_embeddings=600)
        network = ModernBertModel(config)
    else:
        network = BertModel(BertConfig(vocab_size=len(made), hidden_size=128, **SIZES))
    whole = DecisionModel(network, head_layers=2, n_act=3).eval()
    spread(whole)
    fields = {"encoder": "tiny", "head_layers": 2, "act_costs": {"a": 1, "b": 2}, "max_len": 512, "head_max_len": 192}
    fields |= {"temperature": [0.9, 1.1, 0.3], "temperature_by_options": {"noul:2": 1.7, "choice:11+": 7}}
    save_checkpoint(whole, made, fields, str(folder))
    return folder


@pytest.mark.parametrize("kind", ["modernbert", "bert"])
def test_laya_saves_and_answers_alike(tmp_path: Path, kind: str) -> None:
    from laya.agent import Agent
    from laya.common import QTYPES, collate_items, temp_bucket

    folder = save_laya(tmp_path / "saved", kind)
    agent, loaded = Agent(str(folder), device="cpu"), load(str(folder))
    one = served(loaded, folder / "tokenizer")
    asked = {question.field: laya_question(question) for question in ASKED}
    internal = {name: agent._to_internal(each) for name, each in asked.items()}
    for text in (*TEXTS[:2], *CORPUS):
        items = agent._encode_state(text, list(asked), internal)
        assert [list(request.tokens) for request in encode(one, text).requests] == [each["ids"] for each in items]
        logits, _ = agent._forward(collate_items([items], agent.tok.pad_token_id))
        expected = []
        for row, question in enumerate(ASKED):
            kind_number, count = QTYPES[question.kind], len(items[row]["markers"])
            name = temp_bucket(kind_number, count)
            temperature = agent.temperature_by_options.get(name, agent.temperature[kind_number])
            found = (logits[row][:count] / temperature).tolist()
            order = question.order or tuple(range(count))
            expected.append([found[order.index(option)] for option in range(count)])
        check(answer(loaded, one, text), expected)


def test_what_laya_would_cut_off_is_refused(tmp_path: Path) -> None:
    """Prompts of random sizes: the same tokens, or an error exactly where the package drops some."""
    from laya.common import build_sequence, encode_text

    made = byte_pairs()
    made.save_pretrained(tmp_path)
    roles: tuple[Any, ...] = (made.cls_token_id, made.sep_token_id, made.mask_token_id)
    rng, refused = random.Random(3), 0
    words = " ".join(CORPUS).split()
    for _ in range(300):
        most, limit = rng.choice((24, 48, 96, 192)), rng.choice((128, 256, 512))
        prompt = OptionMarkPrompt(*roles, question_tokens=most)
        one = model(tmp_path, "decider", "decide", decision_prompt=prompt, max_tokens=limit)

        def draw(longest: int) -> str:
            return " ".join(rng.choice(words) for _ in range(rng.randint(1, longest)))

        longest = rng.choice((1, 2, 4, 12))
        options = tuple((f"{n} {draw(longest)}", "") for n in range(rng.choice((1, 2, 5, 20, 50))))
        question = QuestionText("questions[0]", "choice", draw(rng.choice((2, 20))), options)
        text = draw(rng.choice((3, 40, 200)))
        internal = {"t": "choice", "ins": question.instructions, "crit": dict.fromkeys(name for name, _ in options)}
        ids, markers, state = build_sequence(made, text, internal, limit, most, return_truncation_stats=True)
        whole, _ = build_sequence(made, text, internal, 10**6, 10**6)
        sizes = [len(encode_text(made, f" {name}", add_special_tokens=False)["input_ids"]) for name, _ in options]
        is_cut = ids != whole or max(sizes) > 48
        assert is_cut or not state["truncated"]
        try:
            [request] = encode(one, text, (question,)).requests
        except TooLong:
            assert is_cut
            refused += 1
        else:
            assert (list(request.tokens), list(request.label_rows)) == (ids, markers)
            assert not is_cut
    assert 50 < refused < 250


def test_gliner2_saves_and_answers_alike(tmp_path: Path) -> None:
    from gliner2.auto import AutoExtractor
    from gliner2.classification import ClassificationSchema
    from gliner2.classification.scoring import ClassificationScorer
    from gliner2.configuration import ExtractorConfig

    schema = ClassificationSchema()
    for question in ASKED:
        known = list_options(question)
        read = [known[index] for index in question.order or range(len(known))]
        options = {name: text or None for name, text in read}
        (schema.ordinal if question.kind == "score" else schema.single)(question.instructions, options)
    for architecture in ("span", "boundary"):
        made = byte_pairs()
        made.add_special_tokens({"additional_special_tokens": list(SCHEMA_TOKENS)})
        config = ExtractorConfig(model_name="tiny", architecture=architecture, counting_layer="count_lstm_v2")
        network = BertConfig(vocab_size=len(made), hidden_size=32, **SIZES, max_position_embeddings=2048)
        whole = AutoExtractor.from_config(config, encoder_config=network, tokenizer=made).eval()
        spread(whole)
        folder = tmp_path / architecture
        whole.save_pretrained(folder)
        if not (folder / "encoder_config").is_dir():
            whole.encoder.config.save_pretrained(folder / "encoder_config")
            made.save_pretrained(folder)
        loaded = load(str(folder))
        one, scorer = served(loaded, folder), ClassificationScorer(whole)
        for text in (*TEXTS, *CORPUS):
            tasks = scorer.score(text, schema).tasks
            expected = [
                [tasks[question.instructions][name] for name, _ in list_options(question)] for question in ASKED
            ]
            check(answer(loaded, one, text), expected)


def test_words_are_those_of_gliner2() -> None:
    from gliner2.processing.word_splitter import WhitespaceTokenSplitter

    split, rng = WhitespaceTokenSplitter(), random.Random(4)
    pieces = ("a", "B", "é", "e\u0301", "@", ".", "-", "_", "%", "+", "1", "co", " ", "http://", "www.", "\u200d")
    pieces += ("\u0130", "\u017f", "\U0001f642", "\u0e01\u0e31", "\n", ",", "x@y.de", "https://")
    for _ in range(20_000):
        text = "".join(rng.choice(pieces) for _ in range(rng.randint(0, 14)))
        assert list(split_schema_words(text)) == [(start, end) for _, start, end in split(text)], repr(text)
