"""Tiny random checkpoints in the formats of real ones: a few thousand weights, a real tokenizer, no download.

The weights have a larger spread than those of a new network, so that answers differ from token to token and from
text to text."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as tf  # which imports a class when it is first named: many child processes name none
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "A good film, well acted and beautifully shot; I loved it.",
    "A bad film, dull and far too long. I want my money back!",
    "What is the capital of France? Paris, of course.",
    "Der schnelle braune Fuchs springt über den faulen Hund: größer, schöner, naïve café.",
    "0 1 2 3 4 5 6 7 8 9 10 + - * / = ( ) [ ] { } < > system user assistant",
    "日本語のテキスト и немного кириллицы 🙂",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LABELS = ("negative", "neutral", "positive")
ENTITIES = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC")
POSITIONS = 256  # context of the generator, input limit of the encoders
DISENTANGLED: dict[str, Any] = {  # attention of a DeBERTa, beside a BERT's shape
    "relative_attention": True,
    "share_att_key": True,
    "position_biased_input": False,
    "norm_rel_ebd": "layer_norm",
    "position_buckets": 8,
    "pos_att_type": ["p2c", "c2p"],
}


def byte_level_bpe(size: int = 384) -> "tf.PreTrainedTokenizerFast":
    """A byte-level BPE as GPT-2's and SmolLM's: any text is encodable, one character may be several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=POSITIONS,
    )


def word_piece(size: int = 300) -> "tf.PreTrainedTokenizerFast":
    """A lower-casing WordPiece as BERT's, with [CLS] a [SEP] b [SEP] around a pair."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=POSITIONS,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def roberta_bpe(size: int = 384) -> "tf.PreTrainedTokenizerFast":
    """A byte-level BPE as RoBERTa's, with <s> a </s></s> b </s> around a pair."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        cls_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_max_length=POSITIONS,
    )


def generator(folder: Path, *, seed: int = 0) -> Path:
    """A Llama with rotary positions, grouped keys, a tied head, and a chat template."""
    tokenizer = byte_level_bpe()
    config = tf.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    return save(tf.LlamaForCausalLM(config), tokenizer, folder)


def classifier(folder: Path, *, labels: tuple[str, ...] = LABELS, seed: int = 1) -> Path:
    """A BERT with one label for each text."""
    tokenizer = word_piece()
    config = bert_config(tokenizer)
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: index for index, label in enumerate(labels)}
    config.problem_type = "single_label_classification"
    torch.manual_seed(seed)
    return save(tf.BertForSequenceClassification(config), tokenizer, folder)


def ranker(folder: Path, *, seed: int = 2) -> Path:
    """A cross-encoder: a BERT that reads a pair and returns one score."""
    tokenizer = word_piece()
    config = bert_config(tokenizer)
    config.num_labels = 1
    torch.manual_seed(seed)
    return save(tf.BertForSequenceClassification(config), tokenizer, folder)


def embedder(folder: Path, *, seed: int = 3) -> Path:
    """A BERT with the files of sentence-transformers: mean pooling, then normalised to length one."""
    tokenizer = word_piece()
    torch.manual_seed(seed)
    save(tf.BertModel(bert_config(tokenizer)), tokenizer, folder)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    write_json(
        folder / "modules.json",
        [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (path, kind) in enumerate(modules)
        ],
    )
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": POSITIONS, "do_lower_case": False})
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    write_json(folder / "1_Pooling" / "config.json", pooling)
    return folder


def encoder(
    folder: Path, kind: "type[tf.PreTrainedModel]", *, labels: tuple[str, ...] = ENTITIES, seed: int = 4
) -> Path:
    """A BERT, DistilBERT, RoBERTa or XLM-R with the head of `kind`, and `labels` where the head has some."""
    plain = kind.config_class in (tf.BertConfig, tf.DistilBertConfig)
    tokenizer = word_piece() if plain else roberta_bpe()
    sizes = {"num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": len(tokenizer)}
    if kind.config_class is not tf.DistilBertConfig:
        sizes |= {"intermediate_size": 64, "type_vocab_size": 2 if plain else 1}
    config = kind.config_class(
        **sizes,
        max_position_embeddings=POSITIONS + (0 if plain else 2),
        pad_token_id=tokenizer.pad_token_id,
        **({"hidden_dim": 64} if kind.config_class is tf.DistilBertConfig else {}),
    )
    if "TokenClassification" in kind.__name__:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: index for index, label in enumerate(labels)}
    torch.manual_seed(seed)
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return save(model, tokenizer, folder)


def bert_config(tokenizer: "tf.PreTrainedTokenizerFast") -> "tf.BertConfig":
    return tf.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=POSITIONS,
        pad_token_id=tokenizer.pad_token_id,
    )


def save(model: "tf.PreTrainedModel", tokenizer: "tf.PreTrainedTokenizerFast", folder: Path) -> Path:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.25)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2))


def fill_in_middle_tokenizer(folder: Path, marks: Sequence[str | AddedToken]) -> None:
    """The tokenizer of `generator` with more tokens, which are control tokens unless an AddedToken says otherwise."""
    tokenizer = byte_level_bpe()
    tokenizer.add_tokens([AddedToken(each, special=True) if isinstance(each, str) else each for each in marks])
    tokenizer.save_pretrained(folder)
