"""The supported model families. No module outside of this folder names a family."""

from .afmoe import AFMOE
from .albert import ALBERT
from .apertus import APERTUS
from .baichuan import BAICHUAN
from .bamba import BAMBA
from .bart import BART
from .bert import CAMEMBERT, DISTILBERT, ROBERTA
from .bert_generation import BERT_GENERATION
from .bert_variants import DATA2VEC, ERNIE_BERT, MEGATRON_BERT, PRE_NORM_ROBERTA, REMBERT
from .biogpt import BIOGPT, XGLM
from .blenderbot import BLENDERBOT, BLENDERBOT_SMALL
from .bloom import BLOOM
from .cohere import COHERE, COHERE2, COMPASS, COMPASS_IMAGES
from .cohere_moe import COHERE2_MOE
from .ctrl import CTRL
from .dbrx import DBRX
from .deberta import DEBERTA, DEBERTA_FIRST
from .deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE, KIMI_K2, MINICPM3
from .electra import ELECTRA
from .ernie_moe import ERNIE4_5_MOE
from .eurobert import EUROBERT
from .exaone import EXAONE4
from .exaone_moe import EXAONE_MOE
from .falcon import FALCON
from .family import Family, HeadSpec, rename_weight
from .gemma import GEMMA, GEMMA2, GEMMA3, GEMMA3_IMAGES, VAULT_GEMMA
from .gemma4 import GEMMA4, GEMMA4_IMAGES, GEMMA4_UNIFIED, GEMMA4_UNIFIED_IMAGES
from .glm import GLM, GLM4
from .gpt import GPT
from .gpt2 import GPT2, GPT_SW3
from .gpt_neo import GPT_NEO
from .gpt_neox import GPT_NEOX, GPT_NEOX_JAPANESE
from .gpt_oss import GPT_OSS
from .gptj import CODEGEN, GPTJ
from .granite import GRANITE, GRANITE_SWA, HYPERCLOVA_X, MINICPM
from .granite_hybrid import GRANITE_HYBRID
from .granite_moe import GRANITE_MOE, GRANITE_MOE_SHARED, GRANITE_MOE_SWA
from .gte import GTE, GTE_PUBLISHED
from .helium import ERNIE, HELIUM
from .hunyuan import HUNYUAN
from .hunyuan_moe import HUNYUAN_MOE, HY3
from .internlm import INTERNLM2, INTERNLM3
from .jina import BERT, JINA_EMBEDDINGS_V3, XLM_ROBERTA
from .latent_variants import AXK1, MISTRAL4, YOUTU
from .led import LED
from .lfm2 import LFM2, LFM2_MOE
from .llama import LLAMA, MISTRAL, QWEN2, QWEN3
from .llama4 import LLAMA4, LLAMA4_IMAGES
from .llama_variants import CWM, IQUEST_CODER, JAIS2
from .long_bert import BIG_BIRD, LONGFORMER, XLM_ROBERTA_XL
from .mamba2 import MAMBA2
from .marian import MARIAN
from .mbart import M2M_100, MBART
from .mimo import MIMO_V2_FLASH
from .minimax import MINIMAX_M2
from .mistral import MINISTRAL, MINISTRAL3, MISTRAL_IMAGES
from .mixtral import MIXTRAL
from .modernbert import MODERNBERT, MODERNBERT_DECODER
from .mpnet import MPNET
from .mpt import MPT
from .mvp import MVP
from .nanochat import NANOCHAT
from .nemotron import ARCEE, NEMOTRON
from .nemotron_hybrid import NEMOTRON_HYBRID
from .neobert import NEOBERT
from .nomic import NOMIC_BERT
from .olmo import OLMO, OLMO2, OLMO3
from .olmo_hybrid import OLMO_HYBRID
from .opt import OPT
from .pegasus import BIGBIRD_PEGASUS, PEGASUS
from .persimmon import PERSIMMON
from .phi import PHI
from .phi3 import PHI3
from .phimoe import PHIMOE
from .plbart import PLBART
from .prophetnet import PROPHETNET
from .qwen_images import QWEN2_5_IMAGES, QWEN2_IMAGES, QWEN3_IMAGES, QWEN3_MOE_IMAGES
from .qwen_moe import DOTS1, FLEX_OLMO, GLM4_MOE, OLMOE, QWEN2_MOE, QWEN3_MOE, SOLAR_OPEN
from .qwen_next import QWEN3_5, QWEN3_5_IMAGES, QWEN3_5_MOE, QWEN3_5_MOE_IMAGES, QWEN3_NEXT
from .roformer import ROFORMER
from .seed_oss import SEED_OSS
from .smollm3 import SMOLLM3
from .squeezebert import SQUEEZEBERT
from .stablelm import STABLELM
from .starcoder import GPT_BIG_CODE, STARCODER2
from .switch import SWITCH
from .t5 import MT5, T5, UMT5
from .t5gemma import T5GEMMA
from .ultrabert import ULTRABERT
from .windowed_mixtures import FLINT, KOLIBRI1, MELLUM
from .xlm import FLAUBERT, XLM
from .xmod import XMOD

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        BERT,
        ROBERTA,
        XLM_ROBERTA,
        CAMEMBERT,
        DISTILBERT,
        DATA2VEC,
        ERNIE_BERT,
        MEGATRON_BERT,
        REMBERT,
        PRE_NORM_ROBERTA,
        ELECTRA,
        ALBERT,
        MPNET,
        DEBERTA,
        DEBERTA_FIRST,
        MODERNBERT,
        ROFORMER,
        SQUEEZEBERT,
        NOMIC_BERT,
        GTE,
        GTE_PUBLISHED,
        JINA_EMBEDDINGS_V3,
        EUROBERT,
        NEOBERT,
        XLM_ROBERTA_XL,
        LONGFORMER,
        BIG_BIRD,
        GPT,
        GPT2,
        GPT_SW3,
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        GEMMA,
        GEMMA2,
        GEMMA3,
        MIXTRAL,
        QWEN2_MOE,
        QWEN3_MOE,
        OLMOE,
        GLM4_MOE,
        DOTS1,
        GPT_OSS,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        KIMI_K2,
        GLM4_MOE_LITE,
        MINICPM3,
        GRANITE_MOE,
        GRANITE_MOE_SHARED,
        ERNIE4_5_MOE,
        FLEX_OLMO,
        PHIMOE,
        MINIMAX_M2,
        EXAONE_MOE,
        AFMOE,
        HUNYUAN_MOE,
        COHERE2_MOE,
        QWEN3_MOE_IMAGES,
        GPT_NEOX,
        OPT,
        GPTJ,
        CODEGEN,
        BLOOM,
        FALCON,
        GPT_BIG_CODE,
        STARCODER2,
        GPT_NEO,
        MPT,
        BIOGPT,
        XGLM,
        PERSIMMON,
        GEMMA3_IMAGES,
        GEMMA4,
        GEMMA4_IMAGES,
        GEMMA4_UNIFIED,
        GEMMA4_UNIFIED_IMAGES,
        PHI,
        PHI3,
        SMOLLM3,
        GRANITE,
        MINICPM,
        OLMO,
        OLMO2,
        OLMO3,
        COHERE,
        COHERE2,
        STABLELM,
        GLM,
        GLM4,
        EXAONE4,
        MINISTRAL,
        MINISTRAL3,
        MISTRAL_IMAGES,
        INTERNLM2,
        INTERNLM3,
        SEED_OSS,
        HELIUM,
        ERNIE,
        NEMOTRON,
        ARCEE,
        HUNYUAN,
        BAICHUAN,
        QWEN2_IMAGES,
        QWEN2_5_IMAGES,
        QWEN3_IMAGES,
        LFM2,
        LFM2_MOE,
        BAMBA,
        GRANITE_HYBRID,
        MAMBA2,
        NEMOTRON_HYBRID,
        QWEN3_NEXT,
        QWEN3_5,
        QWEN3_5_MOE,
        QWEN3_5_IMAGES,
        QWEN3_5_MOE_IMAGES,
        OLMO_HYBRID,
        IQUEST_CODER,
        CWM,
        JAIS2,
        VAULT_GEMMA,
        GRANITE_SWA,
        GRANITE_MOE_SWA,
        HYPERCLOVA_X,
        GPT_NEOX_JAPANESE,
        CTRL,
        BERT_GENERATION,
        MODERNBERT_DECODER,
        APERTUS,
        MIMO_V2_FLASH,
        LLAMA4,
        LLAMA4_IMAGES,
        COMPASS,
        COMPASS_IMAGES,
        NANOCHAT,
        SOLAR_OPEN,
        HY3,
        MELLUM,
        FLINT,
        KOLIBRI1,
        DBRX,
        MISTRAL4,
        YOUTU,
        AXK1,
        T5,
        MT5,
        UMT5,
        BART,
        MARIAN,
        PEGASUS,
        MBART,
        M2M_100,
        PLBART,
        BLENDERBOT,
        BLENDERBOT_SMALL,
        LED,
        MVP,
        BIGBIRD_PEGASUS,
        PROPHETNET,
        SWITCH,
        T5GEMMA,
        XLM,
        FLAUBERT,
        XMOD,
        ULTRABERT,
    )
}  # by the checkpoint's `model_type`

__all__ = ["FAMILIES", "Family", "HeadSpec", "rename_weight"]
