"""Tiny random networks to explain, beside the same networks in transformers."""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import transformers as tf
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from polyhead.models.checkpoint import load
from polyhead.models.explain import Explanation, InstrumentedNetwork
from tests.support import checkpoints

T = TypeVar("T")
WORDS = checkpoints.word_piece()
TOKENS = (2, 10, 41, 12, 57, 33, 9, 3)
SHAPE = dict(num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=40, hidden_size=32)
BERT = dict(SHAPE, intermediate_size=48)
LLAMA = dict(BERT, num_key_value_heads=2)
GPT2 = dict(n_layer=2, n_head=4, n_embd=32, n_positions=40)
GEMMA = dict(LLAMA, head_dim=16, query_pre_attn_scalar=24, sliding_window=4)
GEMMA_LAYERS = ["sliding_attention", "full_attention"]
DEBERTA = BERT | checkpoints.DISENTANGLED
KINDS: dict[str, tuple[type[tf.PreTrainedConfig], dict[str, Any], Any]] = {
    "bert": (tf.BertConfig, BERT, tf.BertForSequenceClassification),
    "bert-tags": (tf.BertConfig, BERT, tf.BertForTokenClassification),
    "bert-words": (tf.BertConfig, BERT, tf.BertForMaskedLM),
    "bert-span": (tf.BertConfig, BERT, tf.BertForQuestionAnswering),
    "bert-vector": (tf.BertConfig, BERT, tf.BertModel),
    "roberta": (tf.RobertaConfig, BERT, tf.RobertaForSequenceClassification),
    "distilbert": (
        tf.DistilBertConfig,
        dict(dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=40),
        tf.DistilBertForSequenceClassification,
    ),
    "electra": (tf.ElectraConfig, dict(BERT, embedding_size=24), tf.ElectraForSequenceClassification),
    "albert": (tf.AlbertConfig, dict(BERT, embedding_size=24), tf.AlbertForSequenceClassification),
    "mpnet": (tf.MPNetConfig, BERT, tf.MPNetForSequenceClassification),
    "deberta": (tf.DebertaV2Config, DEBERTA, tf.DebertaV2ForSequenceClassification),
    "modernbert": (
        tf.ModernBertConfig,
        dict(BERT, num_hidden_layers=4, local_attention=4),
        tf.ModernBertForSequenceClassification,
    ),
    "gpt2": (tf.GPT2Config, GPT2, tf.GPT2LMHeadModel),
    "gpt2-labels": (tf.GPT2Config, GPT2, tf.GPT2ForSequenceClassification),
    "llama": (tf.LlamaConfig, LLAMA, tf.LlamaForCausalLM),
    "mistral": (tf.MistralConfig, dict(LLAMA, sliding_window=3), tf.MistralForCausalLM),
    "qwen2": (tf.Qwen2Config, LLAMA, tf.Qwen2ForCausalLM),
    "qwen3": (tf.Qwen3Config, dict(LLAMA, head_dim=16), tf.Qwen3ForCausalLM),
    "gemma3": (tf.Gemma3TextConfig, dict(GEMMA, layer_types=GEMMA_LAYERS), tf.Gemma3ForCausalLM),
}


def both(kind: str, folder: Path) -> tuple[Any, InstrumentedNetwork]:
    """The same network twice: in transformers, and instrumented for explanations, with its eval mode set as in a
    server."""
    make, shape, made = KINDS[kind]
    torch.manual_seed(4)
    theirs = made(make(vocab_size=len(WORDS), pad_token_id=WORDS.pad_token_id, **shape)).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0, 0.2)
    theirs.save_pretrained(folder)
    WORDS.save_pretrained(folder)
    theirs.set_attn_implementation("eager")
    with torch.inference_mode():
        loaded = load(str(folder))
    return theirs, InstrumentedNetwork(loaded.network, loaded.head)


def driven(steps: Generator[None, None, T]) -> tuple[T, int]:
    """The result of an explanation, and the number of its steps, driven as by an engine."""
    count = 0
    with torch.inference_mode():
        while True:
            try:
                next(steps)
            except StopIteration as last:
                return last.value, count
            count += 1


def explained(steps: Generator[None, None, Explanation]) -> Explanation:
    return driven(steps)[0]


class PlainTracker(ModuleTracker):
    """Counts all operations as one total: torch's own counter hooks each module's inputs, which may not be autograd
    leaves.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parents = {"Global"}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        pass


def count_operations(run: Callable[[], object]) -> int:
    """Floating-point operations of `run` as torch counts them."""
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = PlainTracker()
    with counter:
        run()
    return counter.get_total_flops()


def measure_peak(run: Callable[[], object]) -> int:
    """The most bytes that torch holds at once of those that it allocates in `run`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    allocated = peak = 0
    for event in seen.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return peak
