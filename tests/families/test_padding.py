"""Classifiers on causal networks read a text's last token that is not padding, as in transformers: where a tokenizer
ends every text with its padding token, that is not the last one."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from polyhead.models import checkpoint
from polyhead.models.architectures import FAMILIES
from polyhead.models.architectures.family import PADDING
from polyhead.models.core.errors import UnsupportedError
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.explain import InputTokens, InstrumentedNetwork
from polyhead.service.core.request import Encode, ExplainTextRequest, ExplanationResult, HeadOutput
from polyhead.service.engine.encoder_worker import EncoderWorker
from polyhead.service.engine.explain_worker import ExplainWorker
from polyhead.training.tasks.task import TaskBatch, score_batch
from tests.families import conformance
from tests.support import checkpoints
from tests.support.edits import edited
from tests.support.engine_fakes import ask, finish

PAD = 2
TEXTS = [[5, 6, 7, 8], [5, 6, 7, PAD], [5, PAD, PAD], [PAD, PAD], [PAD, 5, 6, PAD], [9, PAD, 8]]
LAST = [3, 2, 0, 0, 2, 2]  # the token that is read
SHAPE = dict(vocab_size=384, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
CONFIGS: dict[str, Any] = {
    "Llama": (tf.LlamaConfig, SHAPE | {"max_position_embeddings": 64}),
    "GPT2": (tf.GPT2Config, dict(vocab_size=384, n_embd=32, n_layer=2, n_head=4, n_positions=64)),
    "ModernBertDecoder": (tf.ModernBertDecoderConfig, SHAPE | {"max_position_embeddings": 64}),
}


@pytest.fixture(params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    shape, fields = CONFIGS[request.param]
    torch.manual_seed(3)
    model = getattr(tf, f"{request.param}ForSequenceClassification")(shape(**fields, num_labels=3, pad_token_id=PAD))
    conformance.randomise(model)
    return checkpoints.save(model, checkpoints.byte_level_bpe(), tmp_path)


@torch.no_grad()
def reference(folder: Path) -> Tensor:
    """[N, 3] raw scores of the texts by transformers."""
    theirs = tf.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    texts = map(torch.tensor, TEXTS)
    return torch.cat([theirs(text[None], attention_mask=torch.ones_like(text[None])).logits for text in texts])


def test_the_last_token_that_is_not_padding_is_read(folder: Path) -> None:
    loaded: Any = checkpoint.load(str(folder))
    expected = reference(folder)
    worker = EncoderWorker(TorchExecutor(loaded.network), loaded.head, model="judge", task="classify")
    tickets = ask(worker, *(Encode("text", tuple(text)) for text in TEXTS))
    finish(worker)
    answers = [next(event for event in ticket.events if isinstance(event, HeadOutput)) for ticket in tickets]
    served = torch.tensor([[*answer.values] for answer in answers])
    assert served.sub(expected.softmax(-1)).abs().max() < 1e-5
    # What explains and trains reads the same.
    instrumented = InstrumentedNetwork(loaded.network, loaded.head)
    explained = torch.cat([instrumented.scores(InputTokens(tuple(text))) for text in TEXTS])
    assert explained.sub(expected).abs().max() < 1e-4
    batch = TaskBatch(TEXTS, [[0] * len(text) for text in TEXTS], [*range(len(TEXTS))], [0] * len(TEXTS))
    trained = score_batch(loaded.network, loaded.head, batch)
    assert trained.sub(expected).abs().max() < 1e-4


def test_an_explanation_names_the_token_that_is_read(folder: Path) -> None:
    loaded: Any = checkpoint.load(str(folder))
    instrumented = InstrumentedNetwork(loaded.network, loaded.head)
    worker = ExplainWorker(instrumented, loaded.head, model="judge", answers="classify", piece=10)
    goal = (((0, 1),),)
    tickets = ask(
        worker, *(ExplainTextRequest("why", tuple(each), "occlusion", goals=goal, baseline=0) for each in TEXTS)
    )
    finish(worker)
    found = [next(event for event in ticket.events if isinstance(event, ExplanationResult)) for ticket in tickets]
    assert [each.head_rows for each in found] == [(row,) for row in LAST]
    scores = [each.attributions[0].score for each in found]
    assert scores == pytest.approx(reference(folder)[:, 1].tolist(), abs=1e-4)


def test_without_a_padding_token_the_last_token_is_read(folder: Path) -> None:
    edited(folder, folder, pad_token_id=-1)  # no token
    loaded: Any = checkpoint.load(str(folder))
    raw = InstrumentedNetwork(loaded.network, loaded.head).scores(InputTokens((5, 6, PAD)))
    theirs = tf.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        assert raw.sub(theirs(torch.tensor([[5, 6, PAD]])).logits).abs().max() < 1e-4


def test_a_padding_token_that_is_no_number_is_refused(folder: Path) -> None:
    edited(folder, folder, pad_token_id="<pad>")
    with pytest.raises(UnsupportedError, match="pad_token_id is '<pad>', which should be the number of a token"):
        checkpoint.load(str(folder))


def test_the_default_padding_tokens_are_those_of_transformers() -> None:
    seen = set()
    for name, family in FAMILIES.items():
        for kind in (kind for kind, spec in family.heads.items() if spec.task == "classify" and hasattr(tf, kind)):
            config = getattr(tf, kind).config_class
            if config.model_type != name or family.heads[kind].reads_decoder:
                continue
            scoring = family.heads[kind].scoring({"model_type": name})
            if scoring.pooling == "last" and not name.startswith(("xlm", "roformer")):
                assert scoring.padding == config().get_text_config().pad_token_id, kind
                seen.add(name)
    assert seen >= PADDING.keys() - {"gemma3_text", "cohere_compass_text"}
    assert len(seen) > 40
