"""Try clients whose packages are no part of this project, at pinned versions, against a real server.

    python -m benchmarks.clients [--install]

Each check is one thing that such a client does: litellm, KServe's and Triton's REST clients, text_generation,
ChatHuggingFace; hf.js and the AI SDK by Vercel if npm is there.  `--install` makes their environments under .bench/.
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
PYTHON = BENCH / "clients" / "bin" / "python"
NODE = BENCH / "clients-npm"
PACKAGES = ("litellm==1.106.2", "kserve==0.21.0", "langchain-huggingface==1.2.3", "tritonclient[http]==2.73.0")
WITHOUT_REQUIREMENTS = ("text-generation==0.7.0",)  # it requires an old huggingface_hub, and works with a new one
NPM_PACKAGES = ("@huggingface/inference@4.13.30", "ai@6.0.326", "@ai-sdk/anthropic@3.0.140", "@ai-sdk/openai@3.0.141")

# Each program prints a JSON object: by the name of a check, "" or what went wrong.
PYTHON_CHECKS = """
import asyncio, json, sys
url, found = sys.argv[1], {}
talk = [{"role": "user", "content": "Hello"}]
long = [{"role": "user", "content": "fox " * 400}]

def check(name, call):
    try:
        assert call(), "the answer is empty or wrong"
        found[name] = ""
    except Exception as error:
        found[name] = f"{type(error).__name__}: {str(error)[:200]}"

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
print(json.dumps(found))
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
    if shutil.which("npm") and not (NODE / "node_modules").exists():
        NODE.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "install", "--silent", "--prefix", str(NODE), *NPM_PACKAGES], check=True)


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
            found = results([str(PYTHON), "-c", PYTHON_CHECKS, running.url])
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
