"""The supported model families. No module outside of this folder names a family."""

from .albert import ALBERT
from .bart import BART
from .bert import BERT, DISTILBERT, ROBERTA, XLM_ROBERTA
from .deberta import DEBERTA
from .electra import ELECTRA
from .family import Family, HeadSpec, rename_weight
from .gemma import GEMMA3
from .gpt import GPT
from .gpt2 import GPT2
from .gpt_oss import GPT_OSS
from .llama import LLAMA, MISTRAL, QWEN2, QWEN3
from .marian import MARIAN
from .mixtral import MIXTRAL
from .modernbert import MODERNBERT
from .mpnet import MPNET
from .pegasus import PEGASUS
from .qwen_moe import DOTS1, GLM4_MOE, OLMOE, QWEN2_MOE, QWEN3_MOE
from .t5 import MT5, T5

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
        MIXTRAL,
        QWEN2_MOE,
        QWEN3_MOE,
        OLMOE,
        GLM4_MOE,
        DOTS1,
        GPT_OSS,
        T5,
        MT5,
        BART,
        MARIAN,
        PEGASUS,
    )
}  # by the checkpoint's `model_type`

__all__ = ["FAMILIES", "Family", "HeadSpec", "rename_weight"]
