"""GPT (2018) served from a folder: the tokens of transformers, by torch and by the compiled step."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from polyhead.models import checkpoint
from polyhead.models.native.library import runnable_targets
from polyhead.service.config.settings import Settings
from polyhead.service.core.request import Generate, GeneratedToken, Sampling
from polyhead.service.engine.engine import Engine
from polyhead.service.metrics import Metrics
from polyhead.service.runtime.registry import ModelRegistry
from tests.support.checkpoints import CORPUS

PROMPTS = ("What is the capital of", "a", "The quick brown fox jumps over the lazy dog. " * 3)
LENGTH = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, and a vocabulary whose words end in </w>, as in published folders."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.BPEDecoder(suffix="</w>")
    special = {"special_tokens": ["<unk>"], "end_of_word_suffix": "</w>"}
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, show_progress=False, **special))
    target = tmp_path_factory.mktemp("gpt")
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    torch.manual_seed(0)
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": len(tokenizer)}
    theirs = tf.OpenAIGPTLMHeadModel(tf.OpenAIGPTConfig(**shape))
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.25)
    theirs.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def greedy_answers(folder: Path, executor: str) -> list[list[int]]:
    """Greedy continuations of all prompts at once, through registry and engine."""

    async def run() -> list[list[int]]:
        settings = Settings(models={"gpt": str(folder)}, device="cpu", executor=executor, cache_tokens=1024)
        metrics = Metrics(settings.models)
        engine = Engine(metrics)
        engine.start()
        try:
            registry = ModelRegistry(engine, settings, observer=metrics)
            await registry.load_all()
            (model,) = registry.models()
            ids = [tuple(model.tokenizer.encode(prompt).ids) for prompt in PROMPTS]
            requests = [Generate(str(n), each, LENGTH, sampling=Sampling(temperature=0)) for n, each in enumerate(ids)]
            return [
                [e.id async for e in stream if isinstance(e, GeneratedToken)]
                for stream in registry.submit(model, requests)
            ]
        finally:
            await engine.close(0)

    return asyncio.run(run())


@torch.inference_mode()
def reference_answers(folder: Path) -> list[list[int]]:
    theirs, tokenizer = tf.AutoModelForCausalLM.from_pretrained(folder), tf.AutoTokenizer.from_pretrained(folder)
    answers = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt)["input_ids"]
        for _ in range(LENGTH):
            ids.append(int(theirs.eval()(torch.tensor([ids])).logits[0, -1].argmax()))
        answers.append(ids[-LENGTH:])
    return answers


@pytest.mark.parametrize("executor", ["torch", "native"])
def test_greedy_answers_equal_transformers(folder: Path, executor: str) -> None:
    if executor == "native" and not runnable_targets():
        pytest.skip("polyhead was installed without a compiler")
    answers = greedy_answers(folder, executor)
    assert answers == reference_answers(folder)
    assert len({tuple(answer) for answer in answers}) == len(PROMPTS), "the answer depends on the prompt"
    ours, theirs = checkpoint.load(str(folder)).tokenizer, tf.AutoTokenizer.from_pretrained(folder)
    assert [ours.decode(answer) for answer in answers] == [theirs.decode(answer) for answer in answers]


def test_a_folder_in_its_published_form_is_read(folder: Path, tmp_path: Path) -> None:
    """Tensor names without a prefix, attention masks among the weights, and unused configuration fields."""
    weights = {
        name.removeprefix("transformer."): value for name, value in load_file(folder / "model.safetensors").items()
    }
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 128, 128).tril() for layer in range(2)}
    save_file({**weights, **masks}, tmp_path / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"n_ctx": 128, "predict_special_tokens": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    ours, theirs = (checkpoint.load(str(each)) for each in (tmp_path, folder))
    assert ours.network.state_dict().keys() == theirs.network.state_dict().keys()
    for name, value in theirs.network.state_dict().items():
        assert torch.equal(ours.network.state_dict()[name], value)
    assert ours.tokenizer.decode(ours.tokenizer.encode("the lazy dog").ids) == "the lazy dog"
