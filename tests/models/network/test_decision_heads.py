"""The head of questions: its layers are those of torch, and each sequence is computed on its own."""

import torch
from torch import nn

from polyhead.models.network.decision_heads import LabelSchemaHead, OptionLayer, OptionMarkHead, count_heads
from polyhead.models.network.model_config import ModelConfig


def config(width: int) -> ModelConfig:
    sizes = {"vocab_size": 8, "width": width, "depth": 1, "heads": 1, "kv_heads": 1, "head_width": width}
    return ModelConfig(**sizes, mlp_width=8, max_positions=8, causal=False)


def randomize(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for each in module.parameters():
        each.copy_(torch.randn(each.shape, generator=generator) / each.shape[-1] ** 0.5)


@torch.no_grad()
def test_a_layer_equals_that_of_torch() -> None:
    width = 192
    theirs = nn.TransformerEncoderLayer(width, count_heads(width), 4 * width, batch_first=True, norm_first=True).eval()
    randomize(theirs)
    mine = OptionLayer(width)
    names = {
        "self_attn.in_proj_weight": "fused.weight",
        "self_attn.in_proj_bias": "fused.bias",
        "self_attn.out_proj.weight": "output.weight",
        "self_attn.out_proj.bias": "output.bias",
        "linear1.weight": "mlp.inner.weight",
        "linear1.bias": "mlp.inner.bias",
        "linear2.weight": "mlp.out.weight",
        "linear2.bias": "mlp.out.bias",
        "norm1.weight": "attention_norm.weight",
        "norm1.bias": "attention_norm.bias",
        "norm2.weight": "mlp_norm.weight",
        "norm2.bias": "mlp_norm.bias",
    }
    mine.load_state_dict({names[name]: tensor for name, tensor in theirs.state_dict().items()})
    x = torch.randn(9, width, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(mine(x), theirs(x[None])[0], atol=1e-5, rtol=1e-5)
    assert (count_heads(16), count_heads(64), count_heads(768)) == (1, 1, 12)


@torch.no_grad()
def test_scores_are_those_of_the_marks_and_the_kind() -> None:
    states = torch.randn(7, 64, generator=torch.Generator().manual_seed(2))
    marks, schema = OptionMarkHead(config(64), 1), LabelSchemaHead(config(64))
    for head in (marks, schema):
        randomize(head)
        scores = head.score(states, (1, 3), 0)
        torch.testing.assert_close(head.score(states, (3,), 0), scores[1:])
        assert torch.equal(head(states, [0, 4, 7])[1], head.score(states[4:], (0, 2), 0))
        assert head(states, [0, 1, 7]).shape == (2, 2)
        assert torch.allclose(head.postprocess(scores).sum(), torch.ones(()))
    assert not torch.equal(marks.score(states, (1, 3), 1), marks.score(states, (1, 3), 0))
    assert not torch.equal(marks.score(states[:6], (1, 3), 0), marks.score(states, (1, 3), 0)), "it reads all rows"
    assert torch.equal(schema.score(states[:6], (1, 3), 2), schema.score(states, (1, 3), 0))
