"""Reads the requests of Ollama's API into those of the engine."""

from typing import Any

from ....core.errors import BadRequest
from ....core.grammar import Grammar
from ....core.model import Model
from ....core.request import Sampling
from ....text.encoder_inputs import EncodingRequest
from ....text.generation_request import (
    ChatMessages,
    FillInMiddle,
    GenerationRequest,
    Prompt,
    ReasoningSettings,
    ToolOptions,
)
from ...shared.head_options import INT64_LIMIT
from ...shared.open_options import SUGGESTED_OPTIONS
from ...shared.response_formats import schema_grammar
from ...shared.tool_options import EFFORT_BUDGETS, check_tool_names, make_tool
from .wire import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaGenerationRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaTool,
)

OPTION_NAMES = {
    "repetition_penalty": "repeat_penalty"
}  # where Ollama's name differs from that of core.request.Sampling


def read_chat(wire: OllamaChatRequest) -> GenerationRequest:
    messages = tuple(template_message(message, f"messages[{index}]") for index, message in enumerate(wire.messages))
    # A last message of the assistant is the beginning of the answer, as in Ollama.
    continues = any(last.role == "assistant" and not last.tool_calls for last in wire.messages[-1:])
    chat = ChatMessages(messages, continues_last=continues)
    return read_generation(wire, "messages", chat, read_tools(wire.tools))


def read_generate(wire: OllamaGenerateRequest, model: Model) -> GenerationRequest:
    return read_generation(wire, "prompt", read_prompt(wire, model), ToolOptions())


def read_prompt(wire: OllamaGenerateRequest, model: Model) -> Prompt:
    """The prompt: a message of the user, unless `raw` is given or the model has no chat template."""
    if wire.system and (wire.raw or wire.suffix or model.chat is None):
        other = "raw" if wire.raw else "suffix"
        reason = f"{model.name} has no chat template" if model.chat is None else f"not together with {other}"
        raise BadRequest(f"system: {reason}", param="system")
    if wire.suffix:
        return FillInMiddle(wire.prompt, wire.suffix)
    if wire.raw or model.chat is None:
        return wire.prompt
    system = [{"role": "system", "content": wire.system}] if wire.system else []
    return ChatMessages((*system, {"role": "user", "content": wire.prompt}))


def read_generation(wire: OllamaGenerationRequest, field: str, prompt: Prompt, tools: ToolOptions) -> GenerationRequest:
    options = wire.options
    check_options(wire)
    return GenerationRequest(
        field=field,
        prompts=(prompt,),
        sampling=read_sampling(options),
        open_options=SUGGESTED_OPTIONS
        - {name for name in SUGGESTED_OPTIONS if OPTION_NAMES.get(name, name) in options.model_fields_set},
        has_seed="seed" in options.model_fields_set,
        max_tokens=max(options.num_predict, 0),
        limit_field="options.num_predict",
        fits_context=True,
        stops=(options.stop,) if isinstance(options.stop, str) else tuple(options.stop),
        logprobs=wire.top_logprobs if wire.logprobs else -1,
        grammar=read_format(wire.format),
        tools=tools,
        reasoning=read_think(wire),
    )


def check_options(wire: OllamaGenerationRequest) -> None:
    """Raises BadRequest for options that exclude each other, or that would change the answer in another way here."""
    options = wire.options
    if wire.top_logprobs and not wire.logprobs:
        raise BadRequest("top_logprobs: only together with logprobs: true", param="top_logprobs")
    if options.num_predict == 0:
        raise BadRequest(
            "options.num_predict: must be at least 1, or -1 for no limit, got 0", param="options.num_predict"
        )
    if options.repeat_last_n > 0 and options.repeat_penalty != 1:
        message = f"repeat_penalty counts all tokens here; give -1, or 0 for no penalty, got {options.repeat_last_n}"
        raise BadRequest(f"options.repeat_last_n: {message}", param="options.repeat_last_n")


def read_sampling(options: OllamaOptions) -> Sampling:
    return Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed % INT64_LIMIT,
        typical_p=options.typical_p,
        repetition_penalty=1.0 if options.repeat_last_n == 0 else options.repeat_penalty,
        frequency_penalty=options.frequency_penalty,
        presence_penalty=options.presence_penalty,
    )


def read_format(format: str | dict[str, Any]) -> Grammar | None:
    if isinstance(format, dict):
        return schema_grammar(format, "format")
    return Grammar("object", "", "format") if format else None


def read_think(wire: OllamaGenerationRequest) -> ReasoningSettings:
    match wire.think:
        case None:
            return ReasoningSettings()
        case bool():
            return ReasoningSettings("on" if wire.think else "off", field="think", is_required=True)
        case effort:
            return ReasoningSettings("on", EFFORT_BUDGETS[effort], effort, "think", is_required=True)


def read_tools(tools: list[OllamaTool]) -> ToolOptions:
    found = tuple(
        make_tool(
            tool.function.name,
            tool.function.description,
            tool.function.parameters,
            f"tools[{index}].function.parameters",
        )
        for index, tool in enumerate(tools)
    )
    check_tool_names([each.name for each in found], "tools[{}].function.name")
    return ToolOptions(found)


def template_message(message: OllamaMessage, place: str) -> dict[str, Any]:
    """A message for the chat template.  `place` is its path in the body."""
    if message.role != "assistant":
        for name in ("tool_calls", "thinking"):
            if getattr(message, name):
                raise BadRequest(f"{place}.{name}: only in messages of the assistant", param=f"{place}.{name}")
    optional_fields = {
        "reasoning_content": message.thinking,
        "name": message.tool_name,
        "tool_call_id": message.tool_call_id,
        "tool_calls": [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ],
    }
    given = {key: value for key, value in optional_fields.items() if value}
    return {"role": message.role, "content": message.content, **given}


def read_embed(wire: OllamaEmbedRequest) -> EncodingRequest:
    """Vectors of length 1, as Ollama's are."""
    inputs = (wire.input,) if isinstance(wire.input, str) else tuple(wire.input)
    return EncodingRequest(
        field="input", inputs=inputs, truncate="right" if wire.truncate else "", dimensions=wire.dimensions, unit=True
    )


def read_embeddings(wire: OllamaEmbeddingsRequest) -> EncodingRequest:
    return EncodingRequest(field="prompt", inputs=(wire.prompt,), truncate="right")
