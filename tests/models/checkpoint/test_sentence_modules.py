"""Folders of sentence-transformers: the modules after the network, compared with torch's own layers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from polyhead.models.checkpoint import Checkpoint, describe_source, load, save_folder
from polyhead.models.checkpoint.sentence_modules import read_pooling
from polyhead.models.core.errors import CheckpointError, UnsupportedError
from polyhead.models.invariant import make_invariant
from polyhead.models.network.ragged import RaggedBatch
from tests.support import checkpoints
from tests.support.edits import edited

WIDTH = 32
TANH, IDENTITY = "torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity"
TEXT = "the quick brown fox"


def write_module(folder: Path, kind: str, config: dict[str, Any], layer: nn.Module | None = None) -> None:
    """Add a module at the end of a folder."""
    modules = json.loads((folder / "modules.json").read_text())
    path = f"{len(modules)}_{kind}"
    modules.append({"type": f"sentence_transformers.models.{kind}", "path": path})
    checkpoints.write_json(folder / "modules.json", modules)
    checkpoints.write_json(folder / path / "config.json", config)
    if layer is not None:
        save_file(dict(layer.state_dict()), folder / path / "model.safetensors")


def pooled(folder: Path, target: Path, modes: Any, **more: Any) -> Path:
    """A copy of an embedder with these poolings and nothing after them."""
    shutil.copytree(folder, target)
    checkpoints.write_json(target / "modules.json", [{"type": "a.Transformer", "path": ""}])
    write_module(target, "Pooling", {"pooling_mode": modes, **more})
    return target


def dense_config(inputs: int, outputs: int, **more: Any) -> dict[str, Any]:
    return {"in_features": inputs, "out_features": outputs, "bias": True, "activation_function": TANH, **more}


class Projection(nn.Module):
    """A Dense module's parameters under the names of its file."""

    def __init__(self, inputs: int, outputs: int, *, residual: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        if residual:
            self.residual = nn.Linear(inputs, outputs, bias=False)


class Norm(nn.Module):
    """A LayerNorm module's parameters under the names of its file."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)


@torch.inference_mode()
def vector_and_states(loaded: Checkpoint, text: str = TEXT) -> tuple[torch.Tensor, torch.Tensor]:
    """The vector of a text [C], and the states it is made of [T, W]."""
    states = loaded.network(RaggedBatch.of([loaded.tokenizer.encode(text).ids]))
    rows, starts = loaded.head.needed_rows([0, len(states)])
    return loaded.head.postprocess(loaded.head(states[torch.tensor(rows)], starts))[0], states


def test_several_poolings_are_joined_in_the_order_of_the_file(tiny_embedder: Path, tmp_path: Path) -> None:
    modes = ["max", "cls", "mean_sqrt_len_tokens", "mean", "lasttoken"]
    loaded = load(str(pooled(tiny_embedder, tmp_path / "e", modes)))
    found, states = vector_and_states(loaded)
    parts = [states.amax(0), states[0], states.sum(0) / len(states) ** 0.5, states.mean(0), states[-1]]
    torch.testing.assert_close(found, torch.cat(parts), rtol=0, atol=1e-6)
    assert (loaded.width, loaded.pooling) == (5 * WIDTH, "max+cls+mean_sqrt+mean+last")


def test_older_names_of_poolings_have_their_own_order(tmp_path: Path) -> None:
    flags = {f"pooling_mode_{name}": True for name in ("lasttoken", "mean_tokens", "cls_token")}
    checkpoints.write_json(tmp_path / "config.json", {**flags, "include_prompt": True})
    assert read_pooling(tmp_path / "config.json") == (("cls", "mean", "last"), True)


@torch.inference_mode()
def test_layers_after_the_pooling(tiny_embedder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = pooled(tiny_embedder, tmp_path / "e", "mean")
    first, norm, second = Projection(WIDTH, 48, residual=True), Norm(48), Projection(48, 16)
    write_module(folder, "Dense", dense_config(WIDTH, 48, use_residual=True), first)
    write_module(folder, "Dropout", {"dropout": 0.5})
    write_module(folder, "LayerNorm", {"dimension": 48}, norm)
    write_module(folder, "Dense", dense_config(48, 16, activation_function=IDENTITY), second)
    write_module(folder, "Normalize", {})
    loaded = load(str(folder))
    found, states = vector_and_states(loaded)
    mean = states.mean(0)
    inner = norm.norm(first.linear(mean).tanh() + first.residual(mean))
    torch.testing.assert_close(found, F.normalize(second.linear(inner), dim=-1), rtol=0, atol=1e-6)
    assert loaded.width == 16
    raw = loaded.head(states, [0, len(states)])[0]
    torch.testing.assert_close(raw, second.linear(inner), rtol=0, atol=1e-6)


def test_vectors_of_layers_do_not_depend_on_the_batch(tiny_embedder: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    folder = pooled(tiny_embedder, tmp_path / "e", ["mean", "max"])
    gelu = "torch.nn.modules.activation.GELU"
    write_module(folder, "Dense", dense_config(2 * WIDTH, 40, activation_function=gelu), Projection(2 * WIDTH, 40))
    loaded = load(str(folder))
    make_invariant(loaded.network, loaded.head)
    states = [torch.randn(count, WIDTH) for count in (3, 1, 17)]
    starts = [0, 3, 4, 21]
    together = loaded.head(torch.cat(states), starts)
    alone = [loaded.head(each, [0, len(each)]) for each in states]
    assert torch.equal(together, torch.cat(alone))


def test_a_network_in_a_subfolder(tiny_embedder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "e"
    shutil.copytree(tiny_embedder, folder)
    (folder / "0_Transformer").mkdir()
    for file in [each for each in folder.iterdir() if each.is_file() and each.name != "modules.json"]:
        file.rename(folder / "0_Transformer" / file.name)
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    checkpoints.write_json(folder / "modules.json", modules)
    checkpoints.write_json(folder / "config_sentence_transformers.json", {"prompts": {"q": "query: "}})
    ours, whole = load(str(folder)), load(str(tiny_embedder))
    assert torch.equal(vector_and_states(ours)[0], vector_and_states(whole)[0])
    assert ours.prompts == {"q": "query: ", "": ""}
    with pytest.raises(UnsupportedError, match="its network lies in 0_Transformer"):
        save_folder.write_quantized(describe_source(str(folder)), tmp_path / "out")


def test_lower_case_of_the_settings_file(tiny_embedder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "e"
    shutil.copytree(tiny_embedder, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] = None
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert load(str(folder)).tokenizer.encode("THE fox").ids != load(str(folder)).tokenizer.encode("the fox").ids
    checkpoints.write_json(folder / "sentence_bert_config.json", {"do_lower_case": True})
    lowered = load(str(folder)).tokenizer
    assert lowered.encode("THE fox").ids == load(str(folder)).tokenizer.encode("the fox").ids


def test_a_prompt_that_is_not_pooled(tiny_embedder: Path, tmp_path: Path) -> None:
    loaded = load(str(pooled(tiny_embedder, tmp_path / "e", "mean", include_prompt=False)))
    assert loaded.excludes_prompt
    with pytest.raises(UnsupportedError, match="include_prompt: false with weightedmean"):
        load(str(pooled(tiny_embedder, tmp_path / "w", "weightedmean", include_prompt=False)))


@pytest.mark.parametrize(
    ("mode", "problem"),
    [
        (7, "pooling_mode is 7, which should be a string or a list of strings"),
        ([["a"]], r"pooling_mode is \[\['a'\]\], which should be a string"),
        ([1] * 100_000, r"pooling_mode is \[1, 1, .*\.\.\.\], which should be a string"),
        ([], "pooling none is not known"),
        (["mean", "first"], r"pooling 'first' is not known; known are cls, max, mean"),
        (["mean"] * 100_000, "pooling of 100000 kinds is not known"),
    ],
)
def test_poolings_of_the_wrong_kind(tmp_path: Path, mode: Any, problem: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"pooling_mode": mode}))
    with pytest.raises(UnsupportedError, match=problem):
        read_pooling(tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps({"pooling_mode": ["mean"]}))
    assert read_pooling(tmp_path / "config.json") == (("mean",), True)


def test_poolings_of_another_name_are_refused(tmp_path: Path) -> None:
    checkpoints.write_json(tmp_path / "config.json", {"pooling_mode_middle_token": True})
    with pytest.raises(UnsupportedError, match="pooling 'pooling_mode_middle_token' is not known"):
        read_pooling(tmp_path / "config.json")
    checkpoints.write_json(tmp_path / "config.json", {"pooling_mode_cls_token": "yes"})
    with pytest.raises(CheckpointError, match="pooling_mode_cls_token is 'yes', which should be true or false"):
        read_pooling(tmp_path / "config.json")


@pytest.mark.parametrize("path", ["1_Pooling\0", "x" * 5000, "é" * 200, ".."])
def test_folders_of_modules_that_no_folder_can_have(tiny_embedder: Path, tmp_path: Path, path: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_embedder, folder)
    modules = [{"type": "a.Transformer", "path": ""}, {"type": "b.Pooling", "path": path}]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match="is no folder inside this one"):
        describe_source(str(folder))


@pytest.mark.parametrize("path", ["1", "~root", "modules.json"])
def test_a_network_in_a_folder_that_is_missing_is_refused(tiny_embedder: Path, tmp_path: Path, path: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(tiny_embedder, folder)
    (folder / "modules.json").write_text(
        json.dumps([{"path": path, "type": "sentence_transformers.models.Transformer"}])
    )
    with pytest.raises(CheckpointError, match=rf"{path}/config\.json: (is not there, and is needed|cannot be read)"):
        load(str(folder))


@pytest.mark.parametrize("model_type", ["SentenceTransformer", "CrossEncoder", "ColBERT", "MultiVectorEncoder"])
def test_a_list_of_no_modules_is_refused(tiny_embedder: Path, tmp_path: Path, model_type: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_embedder, folder)
    checkpoints.write_json(folder / "modules.json", [])
    checkpoints.write_json(folder / "config_sentence_transformers.json", {"model_type": model_type})
    with pytest.raises(CheckpointError, match=r"modules\.json: it lists no modules; the first should be a Transformer"):
        describe_source(str(folder))


def test_a_cross_encoder_with_a_mask_head_is_refused(tiny_embedder: Path, tmp_path: Path) -> None:
    folder = edited(tiny_embedder, tmp_path / "model", architectures=["BertForMaskedLM"])
    checkpoints.write_json(folder / "modules.json", [{"type": "a.Transformer", "path": ""}])
    checkpoints.write_json(folder / "config_sentence_transformers.json", {"model_type": "CrossEncoder"})
    with pytest.raises(UnsupportedError, match="its modules make no weights of words"):
        describe_source(str(folder))


@pytest.mark.parametrize(
    ("kind", "config", "problem"),
    [
        ("Dense", dense_config(WIDTH, 0), "out_features is 0, which should be a whole number from 1 to 65536"),
        ("Dense", dense_config(WIDTH, 1 << 40), "out_features is 1099511627776, which should be"),
        ("Dense", dense_config(64, 8), "layer 0 takes vectors of 64 numbers and gets vectors of 32"),
        ("Dense", dense_config(WIDTH, 8, bias="no"), "bias is 'no', which should be true or false"),
        ("Dense", dense_config(WIDTH, 8, activation_function="os.system"), "activation_function 'os.system' is not"),
        ("Dense", dense_config(WIDTH, 8, module_input_name="scores"), "module_input_name 'scores' of Dense is not"),
        ("Dense", dense_config(WIDTH, 8, module_output_name="scores"), "module_output_name is 'scores'"),
        ("LayerNorm", {"dimension": 7}, "layer 0 takes vectors of 7 numbers and gets vectors of 32"),
        (
            "Pooling",
            {"pooling_mode": "cls"},
            r"models\.Pooling' is not known in this place",
        ),
        ("CNN", {}, "CNN' is a convolution over tokens, which is not computed here"),
        ("Router", {}, "structure has 0 routes and types 0 modules; 1 to 64 are known"),
        ("Blender", {}, "Blender' is not known; known are Transformer"),
    ],
)
def test_modules_that_are_refused(
    tiny_embedder: Path, tmp_path: Path, kind: str, config: dict[str, Any], problem: str
) -> None:
    folder = pooled(tiny_embedder, tmp_path / "e", "mean")
    write_module(folder, kind, config, {"Dense": Projection(WIDTH, 8), "LayerNorm": Norm(7)}.get(kind))
    with pytest.raises(CheckpointError, match=problem):
        load(str(folder))


def test_weights_of_modules_that_are_refused(tiny_embedder: Path, tmp_path: Path) -> None:
    folder = pooled(tiny_embedder, tmp_path / "e", "mean")
    write_module(folder, "Dense", dense_config(WIDTH, 8))
    with pytest.raises(CheckpointError, match=r"2_Dense.*no weights: model.safetensors is not there"):
        load(str(folder))
    (folder / "2_Dense" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedError, match=r"only pickled weights \(pytorch_model.bin\).*never opened"):
        load(str(folder))
    save_file(dict(Projection(WIDTH, 9).state_dict()), folder / "2_Dense" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"2_Dense.*its shape is \[9"):
        load(str(folder))
    save_file({"linear.weight": torch.zeros(8, WIDTH)}, folder / "2_Dense" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 tensors are missing: 2_Dense/linear\.bias"):
        load(str(folder))


def test_settings_of_the_network_that_are_refused(tiny_embedder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "e"
    shutil.copytree(tiny_embedder, folder)
    for settings, problem in (
        ({"transformer_task": "fill-mask"}, "transformer_task 'fill-mask' is not known"),
        ({"modality_config": {"message": {}}}, "modality_config: only texts that are read without a chat template"),
        ({"modality_config": 1}, "modality_config is 1, which should be an object"),
    ):
        checkpoints.write_json(folder / "sentence_bert_config.json", settings)
        with pytest.raises(CheckpointError, match=problem):
            load(str(folder))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"config_args": {"num_hidden_layers": 1}}, "config_args.num_hidden_layers is 1, .* write it into config.json"),
        ({"config_kwargs": {"hidden_act": "relu"}}, "config_kwargs.hidden_act is 'relu'"),
        ({"model_args": {"is_decoder": True}}, "model_args.is_decoder is True"),
        ({"model_kwargs": {"dtype": "float16", "peft": 1}}, "model_kwargs.peft is 1"),
        ({"tokenizer_args": {"do_lower_case": True}}, "tokenizer_args.do_lower_case .* into tokenizer_config.json"),
        ({"tokenizer_kwargs": {"model_max_length": 9}}, "tokenizer_kwargs.model_max_length is 9"),
        ({"processor_kwargs": {"add_prefix_space": True}}, "processor_kwargs.add_prefix_space is True"),
        ({"model_args": [1]}, r"model_args is \[1\], which should be an object"),
    ],
)
def test_arguments_of_the_network_that_are_not_applied_are_refused(
    tiny_embedder: Path, tmp_path: Path, settings: dict[str, Any], problem: str
) -> None:
    """sentence-transformers merges them into config.json and tokenizer_config.json."""
    folder = Path(shutil.copytree(tiny_embedder, tmp_path / "e"))
    checkpoints.write_json(folder / "sentence_bert_config.json", {"max_seq_length": 64, **settings})
    with pytest.raises(CheckpointError, match=problem):
        describe_source(str(folder))


def test_arguments_that_change_no_vector_are_ignored(tiny_embedder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_embedder, tmp_path / "e"))
    arguments = {
        "model_args": {"torch_dtype": "float32", "attn_implementation": "sdpa", "add_pooling_layer": False},
        "config_args": {"trust_remote_code": True, "revision": "main"},
        "tokenizer_args": {"use_fast": True, "padding_side": "left", "local_files_only": True},
        "model_kwargs": {},
    }
    checkpoints.write_json(folder / "sentence_bert_config.json", {"max_seq_length": 64, **arguments})
    assert describe_source(str(folder)).max_tokens == 64
