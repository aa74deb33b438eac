"""The architectures of transformers that read or write text, and what each needs that no table here describes.

It is a list for people: which of them are loaded follows from FAMILIES alone (`polyhead families --all`). A row without
a missing part needs a table, and perhaps a part of the network, that nobody has written.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

Kind = Literal["decoder", "encoder", "encoder-decoder", "multimodal"]
NO_TABLE = "no table is written for it"
TRANSFORMERS_RELEASE = "5.23"
CLOSE_SPELLING = 0.6  # of 1, as difflib measures it
# Parts of a network that no executor computes, unless a family that is loaded needs them, too.
NETWORK_PARTS: Mapping[str, str] = {
    "activation": "another activation function",
    "attention experts": "experts in attention (queries and outputs are chosen for each token)",
    "alternating updates": "several states a token (AltUp) and embeddings in every layer",
    "bottleneck": "layers with a bottleneck around attention",
    "channel decay": "linear attention whose features decay at rates of their own",
    "convolution": "convolutions over neighbouring tokens",
    "convolved keys": "convolutions of the queries, keys or values of attention",
    "differential": "differential attention",
    "dynamic convolution": "convolutions whose factors are computed from the text",
    "dynamic mask": "masks that are computed from values",
    "experts": "experts (an MLP is chosen for each token)",
    "head gate": "a gate for each head of attention",
    "heads by layer": "numbers and widths of heads that differ from layer to layer",
    "indexer": "an index that chooses the keys of each query",
    "iteration": "two stacks that are computed in turns several times",
    "layer embeddings": "embeddings of tokens for each layer",
    "latent": "latent attention (keys and values from one vector)",
    "lightning attention": "linear attention with a fixed decay of each head",
    "linear attention": "linear attention with a recurrent state",
    "merged attention": "one attention over the own tokens and those of the source",
    "no attention": "Fourier transforms in place of attention",
    "parallel mixers": "attention and a state space side by side in a layer",
    "pooling": "layers that pool tokens",
    "position scales": "queries that are scaled by their positions",
    "recurrence": "recurrent layers",
    "segments": "segments of a prompt with biases of their own",
    "selective scan": "state-space layers in which each channel has steps of its own (Mamba)",
    "shared blocks": "layers that share a block of attention beside parts of their own",
    "shared keys": "layers that read the keys and values of another layer",
    "soft gate": "a gate of each head on its mixed values, without an upper bound",
    "state space": "state-space layers (Mamba-2)",
    "two attentions": "two attentions in a layer, with experts beside the second",
    "two streams": "attention of several streams",
}
# What else an architecture may need.
OTHER_NEEDS: Mapping[str, str] = {
    "audio": "it reads or writes sound, and only text is served",
    "characters": "it reads characters or bytes in place of tokens",
    "composition": "it is two checkpoints put together, each with an architecture of its own",
    "draft": "it reads the states of another model, for which it drafts",
    "integers": "it was trained with arithmetic of integers",
    "languages": "it has a module for each language, chosen by the request",
    "layout": "it reads more than text: entities, positions on a page, markup or tables",
    "pronunciation": "it reads the shape and the pronunciation of characters",
    "proteins": "it reads proteins, and only text is served",
    "routing": "its reference computes experts 0 and 1 alone, whatever its router chooses, so nothing can be compared",
    "sparse attention": "its attention is sparse or approximate",
    "ternary": "its matrices are rounded to three values and their inputs to eight bits",
    "two vocabularies": "its source and its target have vocabularies of their own",
    "vision": "it reads pictures, and only text is served",
}


@dataclass(frozen=True)
class PublishedArchitecture:
    """`class_name` is the class of transformers that computes its main head, `missing` what it needs beside a table:
    keys of NETWORK_PARTS and OTHER_NEEDS.
    """

    class_name: str
    kind: Kind
    missing: tuple[str, ...] = ()


PUBLISHED_ARCHITECTURES: Mapping[str, PublishedArchitecture] = {
    "afmoe": PublishedArchitecture("AfmoeForCausalLM", "decoder", ("experts",)),
    "albert": PublishedArchitecture("AlbertForMaskedLM", "encoder"),
    "apertus": PublishedArchitecture("ApertusForCausalLM", "decoder", ("activation",)),
    "arcee": PublishedArchitecture("ArceeForCausalLM", "decoder"),
    "aria_text": PublishedArchitecture("AriaTextForCausalLM", "multimodal", ("vision",)),
    "audioflamingo3": PublishedArchitecture("AudioFlamingo3ForConditionalGeneration", "multimodal", ("audio",)),
    "axk1": PublishedArchitecture("AXK1ForCausalLM", "decoder", ("experts", "latent")),
    "axk2": PublishedArchitecture("AXK2ForCausalLM", "decoder", ("experts", "latent", "indexer")),
    "bailing_hybrid": PublishedArchitecture(
        "BailingHybridForCausalLM", "decoder", ("experts", "latent", "channel decay")
    ),
    "bamba": PublishedArchitecture("BambaForCausalLM", "decoder", ("state space",)),
    "bart": PublishedArchitecture("BartForConditionalGeneration", "encoder-decoder"),
    "beam": PublishedArchitecture("BeamForCausalLM", "decoder", ("experts", "position scales")),
    "bert": PublishedArchitecture("BertForMaskedLM", "encoder"),
    "bert-generation": PublishedArchitecture("BertGenerationDecoder", "decoder"),
    "big_bird": PublishedArchitecture("BigBirdForMaskedLM", "encoder", ("sparse attention",)),
    "bigbird_pegasus": PublishedArchitecture(
        "BigBirdPegasusForConditionalGeneration", "encoder-decoder", ("sparse attention",)
    ),
    "biogpt": PublishedArchitecture("BioGptForCausalLM", "decoder"),
    "bitnet": PublishedArchitecture("BitNetForCausalLM", "decoder", ("ternary",)),
    "blenderbot": PublishedArchitecture("BlenderbotForConditionalGeneration", "encoder-decoder"),
    "blenderbot-small": PublishedArchitecture("BlenderbotSmallForConditionalGeneration", "encoder-decoder"),
    "bloom": PublishedArchitecture("BloomForCausalLM", "decoder"),
    "blt": PublishedArchitecture("BltForCausalLM", "decoder", ("characters",)),
    "camembert": PublishedArchitecture("CamembertForMaskedLM", "encoder"),
    "canine": PublishedArchitecture("CanineForSequenceClassification", "encoder", ("characters",)),
    "codegen": PublishedArchitecture("CodeGenForCausalLM", "decoder"),
    "cohere": PublishedArchitecture("CohereForCausalLM", "decoder"),
    "cohere2": PublishedArchitecture("Cohere2ForCausalLM", "decoder"),
    "cohere2_moe": PublishedArchitecture("Cohere2MoeForCausalLM", "decoder", ("experts",)),
    "cohere_compass_text": PublishedArchitecture("CohereCompassForCausalLM", "decoder"),
    "convbert": PublishedArchitecture("ConvBertForMaskedLM", "encoder", ("dynamic convolution",)),
    "cpmant": PublishedArchitecture("CpmAntForCausalLM", "decoder", ("segments",)),
    "ctrl": PublishedArchitecture("CTRLLMHeadModel", "decoder"),
    "cwm": PublishedArchitecture("CwmForCausalLM", "decoder"),
    "data2vec-text": PublishedArchitecture("Data2VecTextForMaskedLM", "encoder"),
    "dbrx": PublishedArchitecture("DbrxForCausalLM", "decoder", ("experts",)),
    "deberta": PublishedArchitecture("DebertaForMaskedLM", "encoder"),
    "deberta-v2": PublishedArchitecture("DebertaV2ForMaskedLM", "encoder"),
    "deepseek_v2": PublishedArchitecture("DeepseekV2ForCausalLM", "decoder", ("experts", "latent")),
    "deepseek_v3": PublishedArchitecture("DeepseekV3ForCausalLM", "decoder", ("experts", "latent")),
    "deepseek_v32": PublishedArchitecture("DeepseekV32ForCausalLM", "decoder", ("experts", "latent", "indexer")),
    "deepseek_v4": PublishedArchitecture("DeepseekV4ForCausalLM", "decoder", ("experts", "indexer")),
    "diffllama": PublishedArchitecture("DiffLlamaForCausalLM", "decoder", ("differential",)),
    "distilbert": PublishedArchitecture("DistilBertForMaskedLM", "encoder"),
    "doge": PublishedArchitecture("DogeForCausalLM", "decoder", ("dynamic mask", "experts")),
    "dots1": PublishedArchitecture("Dots1ForCausalLM", "decoder", ("experts",)),
    "dots3_note": PublishedArchitecture("Dots3NoteForCausalLM", "multimodal", ("vision",)),
    "dots3_note_text": PublishedArchitecture("Dots3NoteForCausalLM", "decoder", ("experts", "latent", "indexer")),
    "electra": PublishedArchitecture("ElectraForMaskedLM", "encoder"),
    "emu3": PublishedArchitecture("Emu3ForCausalLM", "multimodal", ("vision",)),
    "encoder-decoder": PublishedArchitecture("EncoderDecoderModel", "encoder-decoder", ("composition",)),
    "ernie": PublishedArchitecture("ErnieForMaskedLM", "encoder"),
    "ernie4_5": PublishedArchitecture("Ernie4_5ForCausalLM", "decoder"),
    "ernie4_5_moe": PublishedArchitecture("Ernie4_5_MoeForCausalLM", "decoder", ("experts",)),
    "esm": PublishedArchitecture("EsmForMaskedLM", "encoder", ("proteins",)),
    "esmc": PublishedArchitecture("EsmcForMaskedLM", "encoder", ("proteins",)),
    "eurobert": PublishedArchitecture("EuroBertForMaskedLM", "encoder"),
    "exaone4": PublishedArchitecture("Exaone4ForCausalLM", "decoder"),
    "exaone_moe": PublishedArchitecture("ExaoneMoeForCausalLM", "decoder", ("experts",)),
    "falcon": PublishedArchitecture("FalconForCausalLM", "decoder"),
    "falcon_h1": PublishedArchitecture("FalconH1ForCausalLM", "decoder", ("parallel mixers", "state space")),
    "falcon_mamba": PublishedArchitecture("FalconMambaForCausalLM", "decoder", ("selective scan",)),
    "flaubert": PublishedArchitecture("FlaubertWithLMHeadModel", "encoder"),
    "flex_olmo": PublishedArchitecture("FlexOlmoForCausalLM", "decoder", ("experts",)),
    "flint": PublishedArchitecture("FlintForCausalLM", "decoder", ("experts",)),
    "fnet": PublishedArchitecture("FNetForMaskedLM", "encoder", ("no attention",)),
    "fsmt": PublishedArchitecture("FSMTForConditionalGeneration", "encoder-decoder", ("two vocabularies",)),
    "funnel": PublishedArchitecture("FunnelForMaskedLM", "encoder", ("pooling",)),
    "fuyu": PublishedArchitecture("FuyuForCausalLM", "multimodal", ("vision",)),
    "gemma": PublishedArchitecture("GemmaForCausalLM", "decoder"),
    "gemma2": PublishedArchitecture("Gemma2ForCausalLM", "decoder"),
    "gemma3": PublishedArchitecture("Gemma3ForConditionalGeneration", "multimodal", ("vision",)),
    "gemma3_text": PublishedArchitecture("Gemma3ForCausalLM", "decoder"),
    "gemma3n": PublishedArchitecture("Gemma3nForConditionalGeneration", "multimodal", ("vision",)),
    "gemma3n_text": PublishedArchitecture("Gemma3nForCausalLM", "decoder", ("alternating updates",)),
    "gemma4": PublishedArchitecture(
        "Gemma4ForConditionalGeneration", "multimodal", ("vision", "heads by layer", "layer embeddings", "shared keys")
    ),
    "gemma4_assistant": PublishedArchitecture("Gemma4AssistantForCausalLM", "decoder", ("draft",)),
    "gemma4_text": PublishedArchitecture(
        "Gemma4ForCausalLM", "decoder", ("experts", "heads by layer", "layer embeddings", "shared keys")
    ),
    "gemma4_unified": PublishedArchitecture(
        "Gemma4UnifiedForConditionalGeneration", "multimodal", ("vision", "heads by layer", "shared keys")
    ),
    "gemma4_unified_assistant": PublishedArchitecture("Gemma4UnifiedAssistantForCausalLM", "decoder", ("draft",)),
    "gemma4_unified_text": PublishedArchitecture(
        "Gemma4UnifiedForCausalLM", "decoder", ("heads by layer", "shared keys")
    ),
    "git": PublishedArchitecture("GitForCausalLM", "multimodal", ("vision",)),
    "glm": PublishedArchitecture("GlmForCausalLM", "decoder"),
    "glm4": PublishedArchitecture("Glm4ForCausalLM", "decoder"),
    "glm4_moe": PublishedArchitecture("Glm4MoeForCausalLM", "decoder", ("experts",)),
    "glm4_moe_lite": PublishedArchitecture("Glm4MoeLiteForCausalLM", "decoder", ("experts", "latent")),
    "glm_moe_dsa": PublishedArchitecture("GlmMoeDsaForCausalLM", "decoder", ("experts", "latent", "indexer")),
    "glmasr": PublishedArchitecture("GlmAsrForConditionalGeneration", "multimodal", ("audio",)),
    "got_ocr2": PublishedArchitecture("GotOcr2ForConditionalGeneration", "multimodal", ("vision",)),
    "gpt-sw3": PublishedArchitecture("GPT2LMHeadModel", "decoder"),
    "gpt2": PublishedArchitecture("GPT2LMHeadModel", "decoder"),
    "gpt_bigcode": PublishedArchitecture("GPTBigCodeForCausalLM", "decoder"),
    "gpt_neo": PublishedArchitecture("GPTNeoForCausalLM", "decoder"),
    "gpt_neox": PublishedArchitecture("GPTNeoXForCausalLM", "decoder"),
    "gpt_neox_japanese": PublishedArchitecture("GPTNeoXJapaneseForCausalLM", "decoder"),
    "gpt_oss": PublishedArchitecture("GptOssForCausalLM", "decoder", ("experts",)),
    "gptj": PublishedArchitecture("GPTJForCausalLM", "decoder"),
    "granite": PublishedArchitecture("GraniteForCausalLM", "decoder"),
    "granite_speech": PublishedArchitecture("GraniteSpeechForConditionalGeneration", "multimodal", ("audio",)),
    "granite_speech_plus": PublishedArchitecture("GraniteSpeechPlusForConditionalGeneration", "multimodal", ("audio",)),
    "granite_swa": PublishedArchitecture("GraniteSWAForCausalLM", "decoder"),
    "granitemoe": PublishedArchitecture("GraniteMoeForCausalLM", "decoder", ("experts",)),
    "granitemoe_swa": PublishedArchitecture("GraniteMoeSWAForCausalLM", "decoder", ("experts",)),
    "granitemoehybrid": PublishedArchitecture("GraniteMoeHybridForCausalLM", "decoder", ("experts", "state space")),
    "granitemoeshared": PublishedArchitecture("GraniteMoeSharedForCausalLM", "decoder", ("experts",)),
    "gte": PublishedArchitecture("GteForMaskedLM", "encoder"),
    "helium": PublishedArchitecture("HeliumForCausalLM", "decoder"),
    "hrm_text": PublishedArchitecture("HrmTextForCausalLM", "decoder", ("iteration",)),
    "hunyuan_v1_dense": PublishedArchitecture("HunYuanDenseV1ForCausalLM", "decoder"),
    "hunyuan_v1_moe": PublishedArchitecture("HunYuanMoEV1ForCausalLM", "decoder", ("experts",)),
    "hy_v3": PublishedArchitecture("HYV3ForCausalLM", "decoder", ("experts",)),
    "hy_v4": PublishedArchitecture("HYV4ForCausalLM", "decoder", ("experts", "latent", "indexer")),
    "hyperclovax": PublishedArchitecture("HyperCLOVAXForCausalLM", "decoder"),
    "ibert": PublishedArchitecture("IBertForMaskedLM", "encoder", ("integers",)),
    "inkling2_text": PublishedArchitecture("Inkling2ForCausalLM", "decoder", ("experts", "convolved keys")),
    "inkling_text": PublishedArchitecture("InklingForCausalLM", "decoder", ("experts", "convolved keys")),
    "internlm3": PublishedArchitecture("LlamaForCausalLM", "decoder"),
    "iquestcoder": PublishedArchitecture("LlamaForCausalLM", "decoder"),
    "jais2": PublishedArchitecture("Jais2ForCausalLM", "decoder"),
    "jamba": PublishedArchitecture("JambaForCausalLM", "decoder", ("experts", "selective scan")),
    "jetmoe": PublishedArchitecture("JetMoeForCausalLM", "decoder", ("experts", "attention experts")),
    "jina_embeddings_v3": PublishedArchitecture("JinaEmbeddingsV3ForMaskedLM", "encoder"),
    "kimi_linear": PublishedArchitecture("KimiLinearForCausalLM", "decoder", ("experts", "latent", "channel decay")),
    "kolibri1": PublishedArchitecture("Kolibri1ForCausalLM", "decoder", ("experts",)),
    "laguna": PublishedArchitecture("LagunaForCausalLM", "decoder", ("experts", "heads by layer", "soft gate")),
    "layoutlm": PublishedArchitecture("LayoutLMForMaskedLM", "encoder", ("layout",)),
    "layoutlmv2": PublishedArchitecture("LayoutLMv2ForSequenceClassification", "encoder", ("layout",)),
    "layoutlmv3": PublishedArchitecture("LayoutLMv3ForSequenceClassification", "encoder", ("layout",)),
    "led": PublishedArchitecture("LEDForConditionalGeneration", "encoder-decoder", ("sparse attention",)),
    "lfm2": PublishedArchitecture("Lfm2ForCausalLM", "decoder", ("convolution",)),
    "lfm2_moe": PublishedArchitecture("Lfm2MoeForCausalLM", "decoder", ("convolution", "experts")),
    "lfm3": PublishedArchitecture("Lfm3ForCausalLM", "decoder", ("convolution", "head gate")),
    "lilt": PublishedArchitecture("LiltForSequenceClassification", "encoder", ("layout",)),
    "llama": PublishedArchitecture("LlamaForCausalLM", "decoder"),
    "llama4": PublishedArchitecture("Llama4ForCausalLM", "multimodal", ("vision",)),
    "llama4_text": PublishedArchitecture("Llama4ForCausalLM", "decoder", ("experts",)),
    "longcat_flash": PublishedArchitecture(
        "LongcatFlashForCausalLM", "decoder", ("experts", "latent", "two attentions")
    ),
    "longformer": PublishedArchitecture("LongformerForMaskedLM", "encoder", ("sparse attention",)),
    "longt5": PublishedArchitecture("LongT5ForConditionalGeneration", "encoder-decoder", ("sparse attention",)),
    "luke": PublishedArchitecture("LukeForMaskedLM", "encoder", ("layout",)),
    "m2m_100": PublishedArchitecture("M2M100ForConditionalGeneration", "encoder-decoder"),
    "mamba": PublishedArchitecture("MambaForCausalLM", "decoder", ("selective scan",)),
    "mamba2": PublishedArchitecture("Mamba2ForCausalLM", "decoder", ("state space",)),
    "marian": PublishedArchitecture("MarianMTModel", "encoder-decoder"),
    "markuplm": PublishedArchitecture("MarkupLMForSequenceClassification", "encoder", ("layout",)),
    "mbart": PublishedArchitecture("MBartForConditionalGeneration", "encoder-decoder"),
    "megatron-bert": PublishedArchitecture("MegatronBertForMaskedLM", "encoder"),
    "mellum": PublishedArchitecture("MellumForCausalLM", "decoder", ("experts",)),
    "mimo_v2_flash": PublishedArchitecture("MiMoV2FlashForCausalLM", "decoder", ("experts",)),
    "minicpm3": PublishedArchitecture("MiniCPM3ForCausalLM", "decoder", ("latent",)),
    "minimax": PublishedArchitecture("MiniMaxForCausalLM", "decoder", ("experts", "lightning attention")),
    "minimax_m2": PublishedArchitecture("MiniMaxM2ForCausalLM", "decoder", ("experts",)),
    "minimax_m3_vl_text": PublishedArchitecture("MiniMaxM3VLForCausalLM", "decoder", ("experts", "indexer")),
    "ministral": PublishedArchitecture("MinistralForCausalLM", "decoder"),
    "ministral3": PublishedArchitecture("Ministral3ForCausalLM", "decoder"),
    "mistral": PublishedArchitecture("MistralForCausalLM", "decoder"),
    "mistral4": PublishedArchitecture("Mistral4ForSequenceClassification", "decoder", ("experts", "latent")),
    "mixtral": PublishedArchitecture("MixtralForCausalLM", "decoder", ("experts",)),
    "mllama": PublishedArchitecture("MllamaForCausalLM", "multimodal", ("vision",)),
    "mobilebert": PublishedArchitecture("MobileBertForMaskedLM", "encoder", ("bottleneck",)),
    "modernbert": PublishedArchitecture("ModernBertForMaskedLM", "encoder"),
    "modernbert-decoder": PublishedArchitecture("ModernBertDecoderForCausalLM", "decoder"),
    "modernvbert": PublishedArchitecture("ModernVBertForMaskedLM", "multimodal", ("vision",)),
    "moshi": PublishedArchitecture("MoshiForCausalLM", "multimodal", ("audio",)),
    "moss_transcribe_diarize": PublishedArchitecture(
        "MossTranscribeDiarizeForConditionalGeneration", "multimodal", ("audio",)
    ),
    "mpnet": PublishedArchitecture("MPNetForMaskedLM", "encoder"),
    "mpt": PublishedArchitecture("MptForCausalLM", "decoder"),
    "mra": PublishedArchitecture("MraForMaskedLM", "encoder", ("sparse attention",)),
    "mt5": PublishedArchitecture("MT5ForConditionalGeneration", "encoder-decoder"),
    "musicflamingo": PublishedArchitecture("MusicFlamingoForConditionalGeneration", "multimodal", ("audio",)),
    "musicgen": PublishedArchitecture("MusicgenForCausalLM", "multimodal", ("audio",)),
    "musicgen_melody": PublishedArchitecture("MusicgenMelodyForCausalLM", "multimodal", ("audio",)),
    "mvp": PublishedArchitecture("MvpForConditionalGeneration", "encoder-decoder"),
    "nanochat": PublishedArchitecture("NanoChatForCausalLM", "decoder"),
    "nemo_speechlm": PublishedArchitecture("Nemotron3_5TranscribeForConditionalGeneration", "multimodal", ("audio",)),
    "nemotron": PublishedArchitecture("NemotronForCausalLM", "decoder"),
    "nemotron_h": PublishedArchitecture("NemotronHForCausalLM", "decoder", ("experts", "state space")),
    "neomme": PublishedArchitecture("NeoMMEForMaskedLM", "multimodal", ("vision",)),
    "nllb-moe": PublishedArchitecture("NllbMoeForConditionalGeneration", "encoder-decoder", ("experts", "routing")),
    "nomic_bert": PublishedArchitecture("NomicBertForMaskedLM", "encoder"),
    "nystromformer": PublishedArchitecture("NystromformerForMaskedLM", "encoder", ("sparse attention",)),
    "olmo": PublishedArchitecture("OlmoForCausalLM", "decoder"),
    "olmo2": PublishedArchitecture("Olmo2ForCausalLM", "decoder"),
    "olmo3": PublishedArchitecture("Olmo3ForCausalLM", "decoder"),
    "olmo_hybrid": PublishedArchitecture("OlmoHybridForCausalLM", "decoder", ("linear attention",)),
    "olmoe": PublishedArchitecture("OlmoeForCausalLM", "decoder", ("experts",)),
    "openai-gpt": PublishedArchitecture("OpenAIGPTLMHeadModel", "decoder"),
    "opt": PublishedArchitecture("OPTForCausalLM", "decoder"),
    "pegasus": PublishedArchitecture("PegasusForConditionalGeneration", "encoder-decoder"),
    "pegasus_x": PublishedArchitecture("PegasusXForConditionalGeneration", "encoder-decoder", ("sparse attention",)),
    "perceiver": PublishedArchitecture("PerceiverForMaskedLM", "encoder", ("characters",)),
    "persimmon": PublishedArchitecture("PersimmonForCausalLM", "decoder"),
    "phi": PublishedArchitecture("PhiForCausalLM", "decoder"),
    "phi3": PublishedArchitecture("Phi3ForCausalLM", "decoder"),
    "phi4_multimodal": PublishedArchitecture("Phi4MultimodalForCausalLM", "multimodal", ("vision",)),
    "phimoe": PublishedArchitecture("PhimoeForCausalLM", "decoder", ("experts",)),
    "plbart": PublishedArchitecture("PLBartForConditionalGeneration", "encoder-decoder"),
    "prophetnet": PublishedArchitecture("ProphetNetForConditionalGeneration", "encoder-decoder"),
    "qwen2": PublishedArchitecture("Qwen2ForCausalLM", "decoder"),
    "qwen2_audio": PublishedArchitecture("Qwen2AudioForConditionalGeneration", "multimodal", ("audio",)),
    "qwen2_moe": PublishedArchitecture("Qwen2MoeForCausalLM", "decoder", ("experts",)),
    "qwen3": PublishedArchitecture("Qwen3ForCausalLM", "decoder"),
    "qwen3_5": PublishedArchitecture("Qwen3_5ForCausalLM", "multimodal", ("vision",)),
    "qwen3_5_moe": PublishedArchitecture("Qwen3_5MoeForCausalLM", "multimodal", ("vision",)),
    "qwen3_5_moe_text": PublishedArchitecture("Qwen3_5MoeForCausalLM", "decoder", ("experts", "linear attention")),
    "qwen3_5_text": PublishedArchitecture("Qwen3_5ForCausalLM", "decoder", ("linear attention",)),
    "qwen3_asr": PublishedArchitecture("Qwen3ASRForConditionalGeneration", "multimodal", ("audio",)),
    "qwen3_moe": PublishedArchitecture("Qwen3MoeForCausalLM", "decoder", ("experts",)),
    "qwen3_next": PublishedArchitecture("Qwen3NextForCausalLM", "decoder", ("experts", "linear attention")),
    "qwen4_exp": PublishedArchitecture("Qwen4ExpForCausalLM", "multimodal", ("vision",)),
    "qwen4_exp_text": PublishedArchitecture(
        "Qwen4ExpForCausalLM", "decoder", ("experts", "linear attention", "indexer")
    ),
    "recurrent_gemma": PublishedArchitecture("RecurrentGemmaForCausalLM", "decoder", ("recurrence",)),
    "reformer": PublishedArchitecture("ReformerForMaskedLM", "encoder", ("sparse attention",)),
    "rembert": PublishedArchitecture("RemBertForMaskedLM", "encoder"),
    "roberta": PublishedArchitecture("RobertaForMaskedLM", "encoder"),
    "roberta-prelayernorm": PublishedArchitecture("RobertaPreLayerNormForMaskedLM", "encoder"),
    "roc_bert": PublishedArchitecture("RoCBertForMaskedLM", "encoder", ("pronunciation",)),
    "roformer": PublishedArchitecture("RoFormerForMaskedLM", "encoder"),
    "rwkv": PublishedArchitecture("RwkvForCausalLM", "decoder", ("recurrence",)),
    "seamless_m4t": PublishedArchitecture("SeamlessM4TForTextToText", "multimodal", ("audio",)),
    "seamless_m4t_v2": PublishedArchitecture("SeamlessM4Tv2ForTextToText", "multimodal", ("audio",)),
    "seed_oss": PublishedArchitecture("SeedOssForCausalLM", "decoder"),
    "smollm3": PublishedArchitecture("SmolLM3ForCausalLM", "decoder"),
    "solar_open": PublishedArchitecture("SolarOpenForCausalLM", "decoder", ("experts",)),
    "squeezebert": PublishedArchitecture("SqueezeBertForMaskedLM", "encoder"),
    "stablelm": PublishedArchitecture("StableLmForCausalLM", "decoder"),
    "starcoder2": PublishedArchitecture("Starcoder2ForCausalLM", "decoder"),
    "switch_transformers": PublishedArchitecture(
        "SwitchTransformersForConditionalGeneration", "encoder-decoder", ("experts",)
    ),
    "t5": PublishedArchitecture("T5ForConditionalGeneration", "encoder-decoder"),
    "t5gemma": PublishedArchitecture("T5GemmaForConditionalGeneration", "encoder-decoder"),
    "t5gemma2": PublishedArchitecture("T5Gemma2ForConditionalGeneration", "encoder-decoder", ("merged attention",)),
    "tapas": PublishedArchitecture("TapasForMaskedLM", "encoder", ("layout",)),
    "trocr": PublishedArchitecture("TrOCRForCausalLM", "multimodal", ("vision",)),
    "ultrabert": PublishedArchitecture("UltrabertForMaskedLM", "encoder"),
    "ultravbert": PublishedArchitecture("UltraVBertForMaskedLM", "multimodal", ("vision",)),
    "umt5": PublishedArchitecture("UMT5ForConditionalGeneration", "encoder-decoder"),
    "vaultgemma": PublishedArchitecture("VaultGemmaForCausalLM", "decoder"),
    "vibevoice_asr": PublishedArchitecture("VibeVoiceAsrForConditionalGeneration", "multimodal", ("audio",)),
    "voxtral": PublishedArchitecture("VoxtralForConditionalGeneration", "multimodal", ("audio",)),
    "voxtral_realtime": PublishedArchitecture("VoxtralRealtimeForConditionalGeneration", "multimodal", ("audio",)),
    "whisper": PublishedArchitecture("WhisperForCausalLM", "multimodal", ("audio",)),
    "xglm": PublishedArchitecture("XGLMForCausalLM", "decoder"),
    "xlm": PublishedArchitecture("XLMWithLMHeadModel", "encoder"),
    "xlm-roberta": PublishedArchitecture("XLMRobertaForMaskedLM", "encoder"),
    "xlm-roberta-xl": PublishedArchitecture("XLMRobertaXLForMaskedLM", "encoder"),
    "xlnet": PublishedArchitecture("XLNetLMHeadModel", "decoder", ("two streams",)),
    "xlstm": PublishedArchitecture("xLSTMForCausalLM", "decoder", ("recurrence",)),
    "xmod": PublishedArchitecture("XmodForMaskedLM", "encoder", ("languages",)),
    "yoso": PublishedArchitecture("YosoForMaskedLM", "encoder", ("sparse attention",)),
    "youtu": PublishedArchitecture("YoutuForCausalLM", "decoder", ("latent",)),
    "zamba": PublishedArchitecture("ZambaForCausalLM", "decoder", ("selective scan", "shared blocks")),
    "zamba2": PublishedArchitecture("Zamba2ForCausalLM", "decoder", ("shared blocks", "state space")),
    "zaya": PublishedArchitecture("ZayaForCausalLM", "decoder", ("experts", "convolved keys")),
}  # by model_type, of transformers TRANSFORMERS_RELEASE


def close_names(name: str, known: Iterable[str]) -> list[str]:
    """Up to three names that are spelled like `name`, the closest first."""
    return get_close_matches(name.lower(), list(known), n=3, cutoff=CLOSE_SPELLING)


def missing_reason(name: str, loaded: Collection[str]) -> str:
    """Why a published architecture is not among the `loaded` families. A part that one of these needs is there."""
    known = {
        part for each in loaded if each in PUBLISHED_ARCHITECTURES for part in PUBLISHED_ARCHITECTURES[each].missing
    }
    missing = PUBLISHED_ARCHITECTURES[name].missing
    needs = [OTHER_NEEDS[part] for part in missing if part in OTHER_NEEDS]
    parts = [NETWORK_PARTS[part] for part in missing if part in NETWORK_PARTS and part not in known]
    if parts:
        needs.append(f"it needs {' and '.join(parts)}, which no executor computes")
    return "; ".join(needs) or NO_TABLE


def explain_model_type(name: object, loaded: Collection[str]) -> str:
    """Why a model_type is not among the `loaded` families, and which of these are close to it; a clause for a
    message."""
    if not isinstance(name, str):
        return "it should be the name of an architecture, as in config.json files that transformers writes"
    if name in PUBLISHED_ARCHITECTURES:
        reason = missing_reason(name, loaded)
    else:
        reason = f"no architecture of transformers {TRANSFORMERS_RELEASE} for text has this name"
    close = close_names(name, loaded)
    return f"{reason}; close to it are {', '.join(close)}" if close else reason
