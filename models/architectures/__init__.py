"""The families we can read.  Outside this folder nobody mentions one by name."""

from models.architectures.albert import ALBERT
from models.architectures.bart import BART
from models.architectures.bert import BERT, DISTILBERT, ROBERTA, XLM_ROBERTA
from models.architectures.deberta import DEBERTA
from models.architectures.electra import ELECTRA
from models.architectures.family import Family, HeadSpec, rename
from models.architectures.gemma import GEMMA3
from models.architectures.gpt import GPT
from models.architectures.gpt2 import GPT2
from models.architectures.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from models.architectures.marian import MARIAN
from models.architectures.modernbert import MODERNBERT
from models.architectures.mpnet import MPNET
from models.architectures.pegasus import PEGASUS
from models.architectures.t5 import MT5, T5

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        BERT,
        ROBERTA,
        XLM_ROBERTA,
        DISTILBERT,
        ELECTRA,
        ALBERT,
        MPNET,
        DEBERTA,
        MODERNBERT,
        GPT,
        GPT2,
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        GEMMA3,
        T5,
        MT5,
        BART,
        MARIAN,
        PEGASUS,
    )
}  # by the checkpoint's `model_type`

__all__ = ["FAMILIES", "Family", "HeadSpec", "rename"]
