"""An agent: the model chooses a tool, the program runs it, the model answers with its result.

    make serve                       # in another terminal
    python examples/agent.py "What is the weather in Vienna?"

The server compiles the tools' schemas to a grammar, so a call always has a known name and valid arguments, even from a
model of 135 million parameters. Whether it chooses well depends on the model: serve a larger one for real work.
"""

import argparse
import json
from typing import Any

from openai import APIConnectionError, OpenAI

WEATHER = {"Vienna": "14 degrees, rain", "Oslo": "-2 degrees, snow", "Lisbon": "22 degrees, sun"}
TOOLS = {"get_weather": lambda city: WEATHER[city]}
CITY = {"type": "string", "enum": list(WEATHER)}
PARAMETERS = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}
DESCRIPTION = {"name": "get_weather", "description": "The weather in a city now.", "parameters": PARAMETERS}


def call_tools(client: OpenAI, model: str, messages: list[Any]) -> list[Any]:
    """Let the model call a tool, run the calls, and return the conversation with their results."""
    tools = [{"type": "function", "function": DESCRIPTION}]
    asked = client.chat.completions.create(
        model=model, messages=messages, tools=tools, tool_choice="required", temperature=0, max_tokens=100
    )
    message = asked.choices[0].message
    results = []
    for call in message.tool_calls or []:
        result = TOOLS[call.function.name](**json.loads(call.function.arguments))
        print(f"call    {call.function.name}({call.function.arguments}) = {result}")
        results.append({"role": "tool", "tool_call_id": call.id, "content": result})
    again = {"role": "user", "content": "Answer my question in one sentence."}  # else a small model calls again
    return [*messages, message.model_dump(exclude_none=True), *results, again]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default="What is the weather in Vienna?")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server")
    parser.add_argument("--model", default="smollm2")
    given = parser.parse_args()
    client = OpenAI(base_url=f"{given.url}/v1", api_key="none")
    messages = call_tools(client, given.model, [{"role": "user", "content": given.question}])
    said = client.chat.completions.create(model=given.model, messages=messages, temperature=0, max_tokens=60)
    print(f"answer  {said.choices[0].message.content}")


if __name__ == "__main__":
    try:
        main()
    except APIConnectionError:
        raise SystemExit("No server answers: start one (make serve), or give its address (--url).") from None
