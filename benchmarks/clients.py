"""Try clients whose packages are no part of this project, at pinned versions, against a real server.

    python -m benchmarks.clients [--install]

Each check is one thing that such a client does: litellm, KServe's and Triton's REST clients, text_generation,
ChatHuggingFace; what openai, typesafe-sdk, langchain-openai, pydantic-ai and litellm have for typed questions; hf.js
and the AI SDK by Vercel if npm is there.  `--install` makes their environments under .bench/.
The models are tiny and random, so only that and how something is answered is checked.  The exit status is 1 if a check
fails.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from benchmarks.serving import serve
from tests.support import checkpoints

BENCH = Path(__file__).parent.parent / ".bench"
PYTHON, DECIDER = (BENCH / name / "bin" / "python" for name in ("clients", "clients-decisions"))
NODE = BENCH / "clients-npm"
PACKAGES = ("litellm==1.106.2", "kserve==0.21.0", "langchain-huggingface==1.2.3", "tritonclient[http]==2.73.0")
DECISION_PACKAGES = (
    *("openai==3.54.0", "typesafe-sdk==0.7.5", "langchain-openai==1.7.4", "pydantic-ai-slim[openai]==2.68.0"),
    "litellm==1.109.1",
)
WITHOUT_REQUIREMENTS = ("text-generation==0.7.0",)  # it requires an old huggingface_hub, and works with a new one
NPM_PACKAGES = ("@huggingface/inference@4.13.30", "ai@6.0.326", "@ai-sdk/anthropic@3.0.140", "@ai-sdk/openai@3.0.141")

# Each program prints a JSON object: by the name of a check, "" or what went wrong.
CHECK = """
import asyncio, json, sys
url, found = sys.argv[1], {}

def check(name, call):
    try:
        assert call(), "the answer is empty or wrong"
        found[name] = ""
    except Exception as error:
        found[name] = f"{type(error).__name__}: {str(error)[:200]}"

"""
PYTHON_CHECKS = """
talk = [{"role": "user", "content": "Hello"}]
long = [{"role": "user", "content": "fox " * 400}]

import litellm
litellm.suppress_debug_info = True

def said(model, address, messages=talk):
    answer = litellm.completion(model=model, messages=messages, max_tokens=5, api_base=address, api_key="x")
    return answer.usage.completion_tokens > 0

def is_known_as_too_long(model, address):
    try:
        said(model, address, long)
    except litellm.ContextWindowExceededError:
        return True
    return False

for model, address in (("openai/chat", "/v1"), ("hosted_vllm/chat", "/v1"), ("anthropic/chat", "")):
    check(f"litellm {model}", lambda: said(model, url + address))
    check(f"litellm {model}: too long", lambda: is_known_as_too_long(model, url + address))
below, root = "/models/chat", ""
for model, address in (("huggingface/chat", below), ("huggingface/tgi", below), ("huggingface/tgi", root)):
    check(f"litellm {model} at {address or '/'}", lambda: said(model, url + address))

from kserve import InferInput, InferRequest, InferenceRESTClient, RESTConfig
import numpy as np

def inferred(binary):
    text = InferInput("text", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"good" if binary else "good"], dtype=object), binary_data=binary)
    request = InferRequest(model_name="judge", infer_inputs=[text])
    client = InferenceRESTClient(RESTConfig(protocol="v2", retries=0))
    return asyncio.run(client.infer(url, request, model_name="judge")).outputs

check("kserve infer", lambda: inferred(False))
check("kserve infer, binary", lambda: inferred(True))

import tritonclient.http as triton
client = triton.InferenceServerClient(url.removeprefix("http://"))

def tensors(**options):
    text = triton.InferInput("text", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"good"], dtype=object))
    return client.infer("judge", [text], **options).as_numpy("probabilities").shape == (1, 3)

for options in ({}, {"priority": 1}, *({"request_compression_algorithm": name} for name in ("gzip", "deflate"))):
    check(f"tritonclient infer {options or ''}", lambda: tensors(**options))

from text_generation import Client
check("text_generation generate", lambda: Client(f"{url}/models/chat").generate("Hi", max_new_tokens=5).details)
check("text_generation chat", lambda: Client(f"{url}/models/chat").chat(messages=talk, max_tokens=5).choices)
check("text_generation chat without a name", lambda: Client(url).chat(messages=talk, max_tokens=5).choices)

from langchain_huggingface import ChatHuggingFace, HuggingFaceEndpoint

def chatted():
    endpoint = HuggingFaceEndpoint(endpoint_url=f"{url}/models/chat", max_new_tokens=5, huggingfacehub_api_token="x")
    return ChatHuggingFace(llm=endpoint, model_id="chat").invoke("Hi").response_metadata

check("ChatHuggingFace", chatted)
"""

# Those of langchain-openai and pydantic-ai, which tests run too.
FRAMEWORK_CHECKS = """
state = "The fox runs."
from langchain_core.messages import AIMessage, HumanMessage
from langchain_openai import decisions as lc

def asked_langchain(given):
    runnable = lc.OpenAIDecisions(model="chat", base_url=url + "/v1", api_key="x")
    questions = {
        "topic": lc.Choice(instructions="What is it about?", choices={"payment": "cards", "delivery": "parcels"}),
        "complaint": lc.Predicate(instructions="It is a complaint."),
        "urgency": lc.Score(instructions="How urgent?", levels=["low", "high"]),
    }
    answer = runnable.invoke({"input": given, "questions": questions})
    return answer.choices["topic"].choice in ("payment", "delivery") and answer.predicates and answer.scores

check("langchain OpenAIDecisions", lambda: asked_langchain(state))
check("langchain OpenAIDecisions, messages", lambda: asked_langchain([HumanMessage(state), HumanMessage("b")]))
check("langchain OpenAIDecisions, conversation", lambda: asked_langchain([HumanMessage(state), AIMessage("b")]))

from typing import Literal
from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.models.openai_decisions import OpenAIDecisionsModel
from pydantic_ai.models.system_one import SystemOneModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.providers.system_one import SystemOneProvider

class Handling(BaseModel):
    topic: Literal["payment", "delivery"] = Field(description="What the message is about")
    complaint: bool = Field(description="Is it a complaint?")

def decided(model):
    return isinstance(Agent(model, output_type=Handling).run_sync(state).output, Handling)

one = SystemOneModel("chat", provider=SystemOneProvider(base_url=url, api_key="x"))
two = OpenAIDecisionsModel("chat", provider=OpenAIProvider(base_url=url + "/v1", api_key="x"))
check("pydantic-ai SystemOneModel", lambda: decided(one))
check("pydantic-ai OpenAIDecisionsModel", lambda: decided(two))
"""

DECISION_CHECKS = """
import openai
from typesafe_sdk import AsyncTypeSafeClient, Choice, Noul, Score, TypeSafeClient, TypeSafeBadRequestError

PREDICATE = {"type": "predicate", "instructions": "It is a complaint.", "name": "complaint"}

def asked_openai():
    client = openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0)
    return 0 < client.decisions.create(model="chat", input=state, questions=[PREDICATE]).answers[0].probability < 1

check("openai decisions", asked_openai)
QUESTIONS = {
    "complaint": Noul(instructions="Is it a complaint?"),
    "topic": Choice(instructions="What is it about?", criteria={"payment": "cards", "delivery": None}),
    "urgency": Score(instructions="How urgent is it?", criteria=["low", "high"]),
}

def is_whole(answer):
    assert answer.usage.input_tokens and answer.choices["topic"].choice in ("payment", "delivery")
    return 0 < answer.nouls["complaint"].noul < 1 and 0 <= answer.scores["urgency"].score <= 1

def asked_typesafe(state):
    with TypeSafeClient(base_url=url, api_key="x", model="chat") as client:
        return is_whole(client.system_one(state=state, questions=QUESTIONS))

async def asked_async():
    async with AsyncTypeSafeClient(base_url=url, api_key="x", model="chat") as client:
        return is_whole(await client.system_one(state=state, questions=QUESTIONS))

def is_refused():
    with TypeSafeClient(base_url=url, api_key="x", model="chat") as client:
        try:
            client.system_one(state=" ", questions=QUESTIONS)
        except TypeSafeBadRequestError as error:
            return "state: is empty" in str(error)

def listed():
    with TypeSafeClient(base_url=url, api_key="x") as client:
        return "chat" in [model.name for model in client.models.list().models]

check("typesafe-sdk system_one", lambda: asked_typesafe(state))
check("typesafe-sdk system_one, JSON", lambda: asked_typesafe({"subject": state, "lines": ["a", 1]}))
check("typesafe-sdk system_one, async", lambda: asyncio.run(asked_async()))
check("typesafe-sdk error", is_refused)
check("typesafe-sdk models", listed)

import litellm
litellm.suppress_debug_info = True
NOUL = {"complaint": {"type": "noul", "instructions": "Is it a complaint?"}}
for provider in ("typesafe", "hosted_vllm"):
    base = url if provider == "typesafe" else url + "/v1"
    call = lambda: litellm.systemone(model=f"{provider}/chat", state=state, questions=NOUL, api_base=base, api_key="x")
    check(f"litellm systemone {provider}", lambda: call().answers)
def asked_litellm():
    from litellm.decisions.main import decisions
    return decisions(model="openai/chat", input=state, questions=[PREDICATE], api_base=url + "/v1", api_key="x").answers
check("litellm decisions openai", asked_litellm)
"""

NODE_CHECKS = """
import {InferenceClient} from "@huggingface/inference"
import {createAnthropic} from "@ai-sdk/anthropic"
import {createOpenAI} from "@ai-sdk/openai"
import {generateText, streamText} from "ai"
const url = process.argv[2], found = {}, messages = [{role: "user", content: "Hello"}]
async function check(name, call) {
  try { found[name] = (await call()) ? "" : "the answer is empty or wrong" }
  catch (error) { found[name] = `${error.name}: ${String(error.message).slice(0, 200)}` }
}
for (const path of ["/models/chat", "/models/chat/v1/chat/completions", "/v1", ""]) {
  const client = new InferenceClient("x", {endpointUrl: url + path})
  const asked = {messages, max_tokens: 5}
  await check(`hf.js at ${path || "/"}`, async () => (await client.chatCompletion(asked)).choices[0])
}
const where = {baseURL: `${url}/v1`, apiKey: "x"}, openai = createOpenAI(where)
const models = {anthropic: createAnthropic(where)("chat"), responses: openai("chat"), chat: openai.chat("chat")}
for (const [name, model] of Object.entries(models)) {
  const asked = {model, prompt: "Hello", maxOutputTokens: 16, maxRetries: 0}
  await check(`AI SDK ${name}`, async () => (await generateText(asked)).finishReason)
  await check(`AI SDK ${name}, streamed`, async () => {
    let failed
    const answer = streamText({...asked, onError: ({error}) => { failed = error }})
    for await (const piece of answer.textStream) continue
    if (failed) throw failed
    return await answer.finishReason
  })
}
console.log(JSON.stringify(found))
"""


def install() -> None:
    if not PYTHON.exists():
        venv.create(BENCH / "clients", with_pip=True)
        ours = next(path for path in sys.path if path.endswith("site-packages"))
        next((BENCH / "clients").glob("lib/*/site-packages")).joinpath("ours.pth").write_text(ours)
        pip = [str(PYTHON), "-m", "pip", "install", "-q"]
        subprocess.run([*pip, *PACKAGES], check=True)
        subprocess.run([*pip, "--no-deps", *WITHOUT_REQUIREMENTS], check=True)
    if not DECIDER.exists():
        venv.create(BENCH / "clients-decisions", with_pip=True)
        subprocess.run([str(DECIDER), "-m", "pip", "install", "-q", *DECISION_PACKAGES], check=True)
    if shutil.which("npm") and not (NODE / "node_modules").exists():
        NODE.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "install", "--silent", "--prefix", str(NODE), *NPM_PACKAGES], check=True)


def run_checks(python: Path, checks: str, url: str) -> dict[str, str]:
    """The results of Python's checks, with the packages of an environment."""
    return results([str(python), "-c", f"{CHECK}{checks}print(json.dumps(found))", url])


def results(command: list[str], limit_s: float = 300.0) -> dict[str, str]:
    """By check, what went wrong."""
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "0", "OPENAI_API_KEY": "x"}
    done = subprocess.run(command, env=os.environ | offline, stdout=subprocess.PIPE, timeout=limit_s, check=True)
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true")
    if parser.parse_args().install:
        install()
    with tempfile.TemporaryDirectory() as name:
        chat, judge = Path(name, "chat"), Path(name, "judge")
        chat.mkdir()
        judge.mkdir()
        checkpoints.generator(chat)
        checkpoints.classifier(judge)
        with serve(f"chat={chat}", f"judge={judge}") as running:
            found = run_checks(PYTHON, PYTHON_CHECKS, running.url)
            found |= run_checks(DECIDER, FRAMEWORK_CHECKS + DECISION_CHECKS, running.url)
            if (NODE / "node_modules").exists():
                program = NODE / "checks.mjs"
                program.write_text(NODE_CHECKS)
                found |= results(["node", str(program), running.url])
    for check, problem in found.items():
        print(f"{check:60s} {problem or 'ok'}")
    if any(found.values()):
        sys.exit("a client fails")


if __name__ == "__main__":
    main()
