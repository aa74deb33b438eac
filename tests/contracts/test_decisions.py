"""Typed questions to a real server: the probabilities are those of transformers, whatever else is in the batch, and the
official client of OpenAI reads the answers."""

import asyncio
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers
import typesafe_sdk

from benchmarks import clients
from polyhead.service.text.decision_prompts import QuestionText
from tests.models.checkpoint.test_merged_adapter import adapted, generator
from tests.support import decision_models
from tests.support.edits import edited
from tests.support.label_models import make_variant
from tests.support.processes import Process

STATE = "The fox is a good animal. It lives near Paris, and it runs. " * 5
YES_OR_NO = {"type": "noul", "instructions": "Is the fox good?"}
PLACE = {"type": "choice", "instructions": "Where is it?", "criteria": {"Paris": "the town", "river": None}}
SPEED = {"type": "score", "instructions": "How fast?", "criteria": ["slow", "fast", "very fast"]}
QUESTIONS: dict[str, Any] = {"good": YES_OR_NO, "place": PLACE, "speed": SPEED}
MANY = {"type": "choice", "criteria": {f"option {number}": None for number in range(40)}}


@pytest.fixture(scope="module")
def entailer(tiny_classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    labels = {"0": "contradiction", "1": "neutral", "2": "entailment"}
    return edited(tiny_classifier, tmp_path_factory.mktemp("nli"), id2label=labels)


@pytest.fixture(scope="module")
def tenants(long_generator: Path, tiny_classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of `chat` and of `judge`, the latter with a head of its own, and below `merged` what peft merges."""
    folder = tmp_path_factory.mktemp("tenants")
    tone = transformers.AutoModelForSequenceClassification.from_pretrained(
        tiny_classifier, num_labels=2, id2label={0: "calm", 1: "angry"}, ignore_mismatched_sizes=True
    )
    merged = {
        "chat:pirate": adapted(generator(long_generator), folder / "pirate", target_modules=["q_proj", "v_proj"]),
        "judge:tone": adapted(tone, folder / "tone", target_modules=["query"], task_type="SEQ_CLS"),
    }
    for name, base in (("chat:pirate", long_generator), ("judge:tone", tiny_classifier)):
        merged[name].save_pretrained(folder / "merged" / name)
        transformers.AutoTokenizer.from_pretrained(base).save_pretrained(folder / "merged" / name)
    return {"chat:pirate": folder / "pirate", "judge:tone": folder / "tone", "merged": folder / "merged"}


@pytest.fixture(scope="module")
def server(
    long_generator: Path,
    tiny_classifier: Path,
    tiny_ranker: Path,
    tiny_embedder: Path,
    entailer: Path,
    tenants: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("deciders")
    process = Process(
        f"chat={long_generator}",
        f"judge={tiny_classifier}",
        f"ranker={tiny_ranker}",
        f"vectors={tiny_embedder}",
        f"nli={entailer}",
        f"texts={make_variant('texts', tmp_path_factory.mktemp('labels') / 'texts')}",
        *(f"{name}={decision_models.make_variant(name, folder / name)}" for name in decision_models.VARIANTS),
        *(f"{name}={tenants[name]}" for name in ("chat:pirate", "judge:tone")),
        *("--precision", "float32"),
    )
    process.ready()
    yield process
    assert process.stop() == 0, process.log


def ask(server: Process, **body: Any) -> Any:
    given = {"model": "chat", "state": STATE, "questions": QUESTIONS} | body
    reply = httpx.post(f"{server.url}/v1/systemone", json=given, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def next_logprobs(folder: Path, ids: list[int]) -> torch.Tensor:
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits: torch.Tensor = network(torch.tensor([ids])).logits[0, -1]
    return logits.log_softmax(dim=-1)


def prompt_of(server: Process, question: str) -> str:
    """What the model's own template makes of the text and a question, and the beginning of the answer."""
    messages = [{"role": "user", "content": f"{STATE}\n\n{question}"}]
    reply = httpx.post(f"{server.url}/v1/chat/template", json={"model": "chat", "messages": messages}, timeout=60)
    return f"{reply.json()['prompt']}Answer:"


def label_shares(folder: Path, prompt: str, labels: Sequence[str]) -> list[float]:
    """The probability of each label after the prompt: that of its tokens, one after the other."""
    words = transformers.AutoTokenizer.from_pretrained(folder)
    before, shares = words.encode(prompt, add_special_tokens=False), []
    for label in labels:
        path = words.encode(f"{prompt} {label}", add_special_tokens=False)[len(before) :]
        steps = (next_logprobs(folder, [*before, *path[:n]])[path[n]] for n in range(len(path)))
        shares.append(math.exp(float(sum(steps))))
    return shares


def test_probabilities_are_those_of_transformers(server: Process, long_generator: Path) -> None:
    found = ask(server)
    hint = "Answer only with the letter of the right option."
    prompt = prompt_of(server, f"Question: Where is it?\nOptions:\nA: Paris - the town\nB: river\n{hint}")
    first, second = label_shares(long_generator, prompt, "AB")
    shares = found["answers"]["place"]["probabilities"]
    assert shares["Paris"] == pytest.approx(first / (first + second), abs=1e-5)
    assert found["diagnostics"]["place"]["label_mass"] == pytest.approx(first + second, rel=1e-4)
    assert found["answers"]["place"]["confidence"] == pytest.approx(max(first, second), rel=1e-4)


def test_more_options_than_letters_are_scored_as_sequences(server: Process, long_generator: Path) -> None:
    shares = ask(server, questions={"many": MANY})["answers"]["many"]["probabilities"]
    assert list(shares) == list(MANY["criteria"])
    assert sum(shares.values()) == pytest.approx(1)
    labels = [chr(65 + n // 26) + chr(65 + n % 26) for n in range(40)]
    lines = "\n".join(f"{label}: {name}" for label, name in zip(labels, shares, strict=True))
    prompt = prompt_of(server, f"Options:\n{lines}\nAnswer only with the letter of the right option.")
    scores = label_shares(long_generator, prompt, [labels[0], labels[25], labels[39]])
    found = [shares["option 0"], shares["option 25"], shares["option 39"]]
    assert [each / found[0] for each in found] == pytest.approx([each / scores[0] for each in scores], rel=1e-3)


def test_permutations_average_over_orders(server: Process) -> None:
    turned = {**PLACE, "criteria": {"river": None, "Paris": "the town"}}
    first, second = (
        ask(server, questions={"q": each})["answers"]["q"]["probabilities"]["Paris"] for each in (PLACE, turned)
    )
    both = ask(server, questions={"q": {**PLACE, "permutations": 2}})["answers"]["q"]["probabilities"]["Paris"]
    assert both == pytest.approx((first + second) / 2)


def test_the_text_is_computed_once(server: Process) -> None:
    """The reads of a call share the text; a second call finds all full blocks of it."""
    body = {"model": "chat", "input": f"{STATE} once", "questions": []}
    body["questions"] = [{"type": "predicate", "instructions": f"number {n}"} for n in range(10)]
    usage = httpx.post(f"{server.url}/v1/decisions", json=body, timeout=60).json()["usage"]
    details = usage["input_tokens_details"]
    assert details["cached_tokens"] + details["cache_write_tokens"] == usage["input_tokens"]
    assert details["cached_tokens"] > 0.7 * usage["input_tokens"]


async def ask_together(server: Process, bodies: list[dict[str, Any]]) -> list[Any]:
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=64)) as client:
        replies = await asyncio.gather(*(client.post(f"{server.url}/v1/systemone", json=body) for body in bodies))
    assert {reply.status_code for reply in replies} == {200}
    return [reply.json() for reply in replies]


def test_an_adapter_answers_as_its_merged_model(server: Process, tenants: dict[str, Path]) -> None:
    hint = "Answer only with the letter of the right option."
    prompt = prompt_of(server, f"Question: Where is it?\nOptions:\nA: Paris - the town\nB: river\n{hint}")
    first, second = label_shares(tenants["merged"] / "chat:pirate", prompt, "AB")
    found = ask(server, model="chat:pirate", questions={"q": PLACE})["answers"]["q"]["probabilities"]
    assert found["Paris"] == pytest.approx(first / (first + second), abs=1e-5)
    assert found != ask(server, questions={"q": PLACE})["answers"]["q"]["probabilities"]
    labels = httpx.get(f"{server.url}/v1/models/judge:tone").json()["labels"]
    classify = transformers.pipeline("text-classification", str(tenants["merged"] / "judge:tone"), top_k=None)
    scores = {each["label"]: each["score"] for each in classify(["a fox"])[0]}
    wanted = dict(zip(labels, (scores["calm"], scores["angry"]), strict=True))  # an adapter's files name no labels
    question = {"type": "choice", "criteria": dict.fromkeys(labels)}
    found = ask(server, model="judge:tone", state="a fox", questions={"q": question})["answers"]["q"]
    assert found["probabilities"] == pytest.approx(wanted, abs=1e-5)
    choices = [{"value": label} for label in labels]
    body = {"questions": [{"type": "choice", "instructions": "Which?", "choices": choices}]}
    given = {"model": "judge:tone", "input": "a fox"} | body
    reply = httpx.post(f"{server.url}/v1/decisions", json=given, timeout=60).json()
    assert reply["model"] == "judge:tone"
    shares = {each["value"]: each["probability"] for each in reply["answers"][0]["probabilities"]}
    assert shares == found["probabilities"]


def test_a_base_model_and_its_adapters_do_not_disturb_each_other(server: Process) -> None:
    bodies = [{"model": name, "state": STATE[:240], "questions": QUESTIONS} for name in ("chat", "chat:pirate")]
    for name in ("judge", "judge:tone"):
        labels = httpx.get(f"{server.url}/v1/models/{name}").json()["labels"]
        question = {"type": "choice", "criteria": dict.fromkeys(labels)}
        bodies.append({"model": name, "state": "a fox", "questions": {"q": question}})
    alone = [ask(server, **body) for body in bodies]
    for one, each in zip(alone * 4, asyncio.run(ask_together(server, bodies * 4)), strict=True):
        assert (each["model"], each["answers"]) == (one["model"], one["answers"])


@pytest.mark.parametrize("model", ["chat", "nli", "ranker", "texts"])
def test_the_same_bits_alone_and_in_company(server: Process, model: str) -> None:
    body = {"model": model, "state": STATE[:240], "questions": QUESTIONS}
    first, again = ask(server, **body), ask(server, **body)
    others = [{**body, "state": f"{n} {STATE}"[: 40 + 9 * n]} for n in range(16)]
    crowd = asyncio.run(ask_together(server, [*others, body, *others, body]))
    for each in (again, crowd[16], crowd[33]):
        assert each["answers"] == first["answers"]
        assert each["diagnostics"] == first["diagnostics"]


def test_encoders_answer_by_their_heads(server: Process, tiny_classifier: Path) -> None:
    labels = httpx.get(f"{server.url}/v1/models/judge").json()["labels"]
    scores = httpx.post(
        f"{server.url}/models/judge", json={"inputs": "a fox", "parameters": {"top_k": None}}, timeout=60
    ).json()
    wanted = {each["label"]: each["score"] for each in scores[0]}
    question = {"type": "choice", "criteria": dict.fromkeys(labels)}
    found = ask(
        server, model="judge", state="a fox", questions={"q": question, "p": {**YES_OR_NO, "instructions": labels[1]}}
    )
    assert found["answers"]["q"]["probabilities"] == pytest.approx(wanted)
    assert found["answers"]["p"]["noul"] == pytest.approx(wanted[labels[1]])
    body = {"inputs": "a fox", "parameters": {"candidate_labels": ["good", "bad"], "hypothesis_template": "It is {}."}}
    pairs = httpx.post(f"{server.url}/models/nli", json=body, timeout=60).json()
    asked = {"type": "choice", "instructions": "It is {}.", "criteria": {"good": None, "bad": None}}
    found = ask(server, model="nli", state="a fox", questions={"q": asked})["answers"]["q"]
    assert [found["probabilities"][each["label"]] for each in pairs] == pytest.approx([each["score"] for each in pairs])
    ranked = ask(server, model="ranker", state="a fox", questions={"q": PLACE, "p": YES_OR_NO})["answers"]
    assert sum(ranked["q"]["probabilities"].values()) == pytest.approx(1)
    documents = {"model": "ranker", "query": "Is the fox good?", "documents": ["a fox"]}
    relevance = httpx.post(f"{server.url}/v1/rerank", json=documents, timeout=60).json()["results"][0]
    assert ranked["p"]["noul"] == pytest.approx(relevance["relevance_score"], abs=1e-6)


@pytest.mark.parametrize("model", ["chat", "nli", "ranker", "texts", "marks", "schema"])
def test_a_single_option_has_the_probability_one(server: Process, model: str) -> None:
    only = {"type": "choice", "instructions": "Where is it?", "criteria": {"Paris": None}}
    found = ask(server, model=model, state="a fox", questions={"q": only, "again": only})
    assert found["answers"]["q"]["probabilities"] == found["answers"]["again"]["probabilities"] == {"Paris": 1.0}
    level = {"type": "score", "instructions": "How good?", "criteria": ["good"]}
    assert ask(server, model=model, state="a fox", questions={"q": level})["answers"]["q"]["score"] == 0


def test_equal_inputs_of_a_head_are_computed_once(server: Process) -> None:
    labels = httpx.get(f"{server.url}/v1/models/judge").json()["labels"]
    one = {f"q{index}": {"type": "noul", "instructions": label} for index, label in enumerate(labels)}
    usage = ask(server, model="judge", state="a fox", questions=one)["usage"]
    assert usage == ask(server, model="judge", state="a fox", questions={"q0": one["q0"]})["usage"]


def test_fields_that_a_head_does_not_read_are_named(server: Process) -> None:
    labels = httpx.get(f"{server.url}/v1/models/judge").json()["labels"]
    described = {"true": "praise", "false": "blame"}
    for question, ignored in (
        ({"type": "choice", "instructions": "Which?", "criteria": dict.fromkeys(labels)}, "questions.q.instructions"),
        ({"type": "choice", "criteria": dict.fromkeys(labels, "praise")}, "questions.q.criteria"),
        ({"type": "noul", "instructions": labels[0], "criteria": described}, "questions.q.criteria"),
        ({"type": "choice", "criteria": dict.fromkeys(labels)}, None),
    ):
        body = {"model": "judge", "state": "a fox", "questions": {"q": question}}
        reply = httpx.post(f"{server.url}/v1/systemone", json=body, timeout=60)
        assert reply.headers.get("X-Polyhead-Ignored") == ignored
    choices = [{"value": label, "description": "praise"} for label in labels]
    asked = {
        "model": "judge",
        "input": "a fox",
        "questions": [{"type": "choice", "choices": choices, "instructions": "?"}],
    }
    reply = httpx.post(f"{server.url}/v1/decisions", json=asked, timeout=60)
    assert reply.headers["X-Polyhead-Ignored"] == "questions[0].instructions, questions[0].choices"


@pytest.mark.parametrize("model", ["chat", "nli"])
def test_the_chosen_option_is_explained(server: Process, model: str) -> None:
    found = ask(server, model=model, state="A good fox.", questions={"q": {**PLACE, "explain": {}}})["answers"]["q"]
    [attribution] = found["explanation"]["attributions"]
    assert attribution["target"]["option"] == found["choice"]
    assert attribution["target"]["probability"] == found["probabilities"][found["choice"]]
    spans = [(each["start"], each["end"]) for each in attribution["characters"]]
    assert spans
    assert all(0 <= start < end <= len("A good fox.") for start, end in spans)


@pytest.mark.parametrize("model", ["nli", "ranker"])
def test_questions_and_options_are_no_part_of_an_explanation(server: Process, model: str) -> None:
    """The baseline of an encoder has them as the text has, so the difference is divided among the characters."""
    asked = {**PLACE, "explain": {"method": "integrated_gradients", "steps": 10}}
    found = ask(server, model=model, state="A good fox.", instructions="Read.", questions={"q": asked})["answers"]["q"]
    [attribution] = found["explanation"]["attributions"]
    total = sum(each["score"] for each in attribution["characters"])
    assert total == pytest.approx(attribution["completeness"]["sum"], abs=1e-5)
    assert abs(total) > 1e-3


RAW = {"type": "choice", "instructions": "what is it", "criteria": {"animal": None, "person": "a person was born"}}
PREFIX = "Read this."  # before the state, for the model


@pytest.mark.parametrize(
    ("model", "kind"), [("texts", "choice"), ("texts", "noul"), ("marks", "choice"), ("schema", "noul")]
)
def test_models_that_read_options_beside_the_text_are_explained(server: Process, model: str, kind: str) -> None:
    """By integrated gradients, which are complete over the characters of the state; the score is that of the answer."""
    state = "The [MASK] fox\u2014İ runs over Marie Curie"
    question = RAW if kind == "choice" else YES_OR_NO
    why = {"steps": 150}
    body = {"model": model, "state": state, "instructions": PREFIX, "questions": {"q": question}}
    plain = ask(server, **body)["answers"]["q"]
    found = ask(server, **body | {"questions": {"other": SPEED, "q": {**question, "explain": why}}})["answers"]["q"]
    explanation = found.pop("explanation")
    assert found == plain
    assert explanation["method"] == "integrated_gradients"
    [attribution] = explanation["attributions"]
    shares = found["probabilities"]
    chosen = max(shares, key=shares.__getitem__)
    assert attribution["target"]["option"] == chosen
    assert attribution["target"]["probability"] == shares[chosen]
    completeness = attribution["completeness"]
    assert completeness["holds"]
    assert abs(completeness["difference"]) > 1e-3
    pieces = attribution["characters"]
    assert sum(each["score"] for each in pieces) == pytest.approx(completeness["sum"], abs=1e-4)
    covered = {place for each in pieces for place in range(each["start"], each["end"])}
    marks = range(state.index("["), state.index("]") + 1) if model == "marks" else range(0)
    assert covered | set(marks) >= {place for place, letter in enumerate(state) if letter.isalpha()}
    assert max(covered) < len(state)
    assert {each["text"] for each in pieces} == {0}
    if model == "texts" and kind == "noul":
        yes = 1 / (1 + math.exp(-attribution["target"]["score"]))
        assert shares["yes"] == pytest.approx(yes, abs=1e-5)


def test_the_explained_score_is_that_of_the_package(server: Process) -> None:
    """A logit of the package is the score divided by a temperature."""
    logits = decision_models.read_answers()["marks"][1]
    asked = {str(place): as_systemone(decision_models.QUESTIONS[place]) for place in (0, 1)}
    asked["0"] |= {"explain": {"method": "occlusion"}}
    asked["1"] |= {"explain": {"method": "gradient_x_input"}}
    found = ask(server, model="marks", state=decision_models.TEXTS[1], questions=asked)["answers"]
    for place, temperature in enumerate((1.5, 2.0)):
        [attribution] = found[str(place)]["explanation"]["attributions"]
        assert attribution["target"]["score"] / temperature == pytest.approx(max(logits[place]), abs=1e-4)


def test_the_official_client(server: Process) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    found = client.decisions.create(
        model="chat",
        input=[
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "a"}, {"type": "input_json", "data": {"b": 1}}],
            },
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "c"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "d"}]},
        ],
        questions=[
            {"type": "predicate", "instructions": "It is good.", "name": "first"},
            {
                "type": "choice",
                "instructions": "Which?",
                "choices": [{"value": True}, {"value": "true"}, {"value": "other", "description": "anything"}],
            },
            {"type": "score", "instructions": "How much?", "levels": [{"label": "low"}, {"label": "high"}]},
        ],
    )
    first, second, third = found.answers
    assert (first.type, first.name) == ("predicate", "first")
    assert second.type == "choice"
    assert [(type(each.value), each.value) for each in second.probabilities] == [
        (bool, True),
        (str, "true"),
        (str, "other"),
    ]
    assert sum(each.probability for each in second.probabilities) == pytest.approx(1)
    assert third.type == "score"
    assert 0 <= third.score <= 1
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    refused = client.decisions.create(
        model="chat",
        input="a",
        questions=[{"type": "predicate", "instructions": "b", "name": "n"}],
        extra_body={"min_confidence": 1},
    )
    assert (refused.answers[0].type, refused.answers[0].name) == ("refusal", "n")
    page = httpx.get(f"{server.url}/metrics").text
    assert 'polyhead_decision_questions_total{model="chat",outcome="refused",question="predicate"} 1.0' in page


def test_langchain_and_pydantic_ai(server: Process) -> None:
    """In a process of their own, since importing them takes seconds."""
    found = clients.run_checks(Path(sys.executable), clients.FRAMEWORK_CHECKS, server.url)
    assert found
    assert found == dict.fromkeys(found, "")


def test_the_client_of_typesafe(server: Process) -> None:
    questions = {
        "good": typesafe_sdk.Noul(instructions="Is the fox good?"),
        "place": typesafe_sdk.Choice(instructions="Where?", criteria={"Paris": "the town", "river": None}),
        "speed": typesafe_sdk.Score(instructions="How fast?", criteria=["slow", "fast"]),
    }
    with typesafe_sdk.TypeSafeClient(base_url=server.url, api_key="none", model="chat") as client:
        found = client.system_one(state={"text": STATE, "lines": [1, None]}, questions=questions)
        assert 0 < found.nouls["good"].noul < 1
        assert found.choices["place"].choice in ("Paris", "river")
        assert sum(found.scores["speed"].probabilities.values()) == pytest.approx(1)
        assert "chat" in [each.name for each in client.models.list().models]
        with pytest.raises(typesafe_sdk.TypeSafeBadRequestError, match="state: is empty"):
            client.system_one(state=" ", questions=questions)


def test_the_client_of_typesafe_sends_zstd(server: Process) -> None:
    questions = {letter * 256: typesafe_sdk.Noul(instructions="Is it good?") for letter in "abcde"}  # of over 1 KiB
    with typesafe_sdk.TypeSafeClient(base_url=server.url, api_key="none", model="chat", compression="zstd") as client:
        found = client.system_one(state=STATE, questions=questions)
    with typesafe_sdk.TypeSafeClient(base_url=server.url, api_key="none", model="chat", compression=False) as client:
        plain = client.system_one(state=STATE, questions=questions)
    assert found.nouls == plain.nouls
    assert list(found.nouls) == list(questions)


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        ("systemone", {"questions": {}}, "questions: must have at least 1"),
        ("systemone", {"questions": {"q": {"type": "box"}}}, "this server; there are 'noul', 'choice', 'score'"),
        ("systemone", {"questions": {"q": {**PLACE, "criteria": {}}}}, "questions.q.criteria"),
        ("systemone", {"questions": {"q": {**YES_OR_NO, "levels": 1}}}, "questions.q.levels: is not a known field"),
        ("systemone", {"joint": True}, "joint: chat reads each question on its own"),
        ("systemone", {"images": ["data:"]}, "images"),
        ("systemone", {"state": " "}, "state: is empty"),
        ("systemone", {"state": STATE * 1000}, "state: "),
        ("systemone", {"model": "vectors"}, "model"),
        (
            "systemone",
            {"model": "judge", "state": "a", "questions": {"q": PLACE}},
            "questions.q: judge is a classifier",
        ),
        (
            "systemone",
            {"questions": {"q": {**PLACE, "explain": {"method": "attention"}}}},
            "questions.q.explain.method",
        ),
        (
            "systemone",
            {"model": "texts", "questions": {f"q{number}": {**MANY, "permutations": 24} for number in range(99)}},
            "questions: they have 95040 options in all orders",
        ),
        ("decisions", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ("decisions", {"input": [{"type": "function_call_output", "call_id": "x", "output": "a"}]}, "input[0].call_id"),
        ("decisions", {"questions": [{"type": "predicate"}]}, "questions[0].instructions"),
        (
            "decisions",
            {"questions": [{"type": "choice", "instructions": "a", "choices": [{"value": "a"}, {"value": "a"}]}]},
            "questions[0].choices[1].value: occurs twice",
        ),
        (
            "decisions",
            {"questions": [{"type": "predicate", "instructions": "a"}] * 401},
            "questions: must have at most",
        ),
    ],
)
def test_errors_name_the_field(server: Process, path: str, change: dict[str, Any], words: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "systemone": {"model": "chat", "state": "a", "questions": QUESTIONS},
        "decisions": {"model": "chat", "input": "a", "questions": [{"type": "predicate", "instructions": "b"}]},
    }
    reply = httpx.post(f"{server.url}/v1/{path}", json=bodies[path] | change, timeout=60)
    assert 400 <= reply.status_code < 500, reply.text
    assert words in reply.json()["error"]["message"], reply.text


def as_systemone(question: QuestionText) -> dict[str, Any]:
    asked: dict[str, Any] = {"type": question.kind, "instructions": question.instructions}
    match question.kind:
        case "noul":
            return asked
        case "choice":
            return asked | {"criteria": {name: text or None for name, text in question.options}}
        case "score":
            return asked | {"criteria": [text or name for name, text in question.options]}


@pytest.mark.parametrize("name", decision_models.LAYA_VARIANTS)
def test_models_made_for_questions_answer_as_their_package(server: Process, name: str) -> None:
    """Those of the package laya read each question on its own."""
    places = [0, 1, 2, 4]
    questions = {str(place): as_systemone(decision_models.QUESTIONS[place]) for place in places}
    for text, rows in zip(decision_models.TEXTS, decision_models.read_answers()[name], strict=True):
        found = ask(server, model=name, state=text, questions=questions)["answers"]
        for place in places:
            answer = found[str(place)]
            shares = answer["probabilities"]
            given = [shares["no"], shares["yes"]] if answer["type"] == "noul" else list(shares.values())
            expected = torch.tensor(rows[place], dtype=torch.float64).softmax(dim=0).tolist()
            assert given == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", decision_models.GLINER2_VARIANTS)
def test_models_that_read_all_questions_together(server: Process, name: str) -> None:
    """Those of the package gliner2 do it if `joint` is true, as the package; otherwise each answer stands alone."""
    named = {str(place): as_systemone(decision_models.QUESTIONS[place]) for place in (0, 2, 4)}
    apart = ask(server, model=name, state="a dog", questions=named)["answers"]
    for place in named:
        assert ask(server, model=name, state="a dog", questions={place: named[place]})["answers"][place] == apart[place]
    assert ask(server, model=name, state="a dog", questions=named, joint=True)["answers"] != apart
    alone = ask(server, model=name, state="a dog", questions={"place": PLACE})
    turned = ask(server, model=name, state="a dog", questions={"place": {**PLACE, "permutations": 2}})
    assert sum(alone["answers"]["place"]["probabilities"].values()) == pytest.approx(1)
    assert turned["answers"]["place"]["probabilities"] != alone["answers"]["place"]["probabilities"]
