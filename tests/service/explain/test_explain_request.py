"""The method of an explanation where the request names none."""

from collections.abc import Mapping
from typing import Any

import pytest

from polyhead.models.core.decision_prompt import LabelSchemaPrompt
from polyhead.service.core.request import ExplainMethod, Task
from polyhead.service.explain.explain_request import ExplainParameters, TargetSpec, choose_method
from tests.support.label_models import tokenizer
from tests.support.scripted import model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("task", "given", "method"),
    [
        ("classify", {}, "integrated_gradients"),
        ("rank", {"steps": 20}, "integrated_gradients"),
        ("tag", {}, "integrated_gradients"),
        ("decide", {}, "integrated_gradients"),
        ("generate", {}, "gradient_x_input"),
        ("generate", {"layers": (0,)}, "attention"),
        ("classify", {"heads": (1,)}, "attention"),
        ("classify", {"top_k": 3}, "attention"),
        ("classify", {"as_base64": True}, "integrated_gradients"),
        ("embed", {}, "attention"),
        ("embed", {"target": TargetSpec(text="another")}, "integrated_gradients"),
    ],
)
def test_the_method_suits_the_model_and_the_request(
    folder: Any, task: Task, given: Mapping[str, Any], method: ExplainMethod
) -> None:
    served = model(folder, "m", task, decision_prompt=LabelSchemaPrompt() if task == "decide" else None)
    assert choose_method(served, ExplainParameters(suits_model=True, **given)).method == method
    assert choose_method(served, ExplainParameters(method="occlusion", **given)).method == "occlusion"
