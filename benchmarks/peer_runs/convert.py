"""Convert the quick-start files to the peers' formats: GGUF in other formats, folders of transformers, ONNX.

    python -m benchmarks.peer_runs.convert KIND SOURCE TARGET

Runs in Polyhead's own environment. All formats hold the same numbers, those of the quick-start file, rounded once more
if a format is narrower.
"""

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from peft import PeftModel

BERT_BASE = transformers.BertConfig()  # 12 layers of 768, the defaults


def requantized(source: Path, target: Path, kind: Kind) -> None:
    """The GGUF file with all matrices as `kind`; the embeddings, which are the output layer too, as Q8_0."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        if field.name == "general.file_type":
            file_type = {Kind.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0, Kind.Q4_0: gguf.LlamaFileType.MOSTLY_Q4_0}[kind]
            writer.add_file_type(file_type)
            continue
        inner = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        wide: NDArray[np.float32] = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if wide.ndim < 2:
            writer.add_tensor(tensor.name, wide.astype(np.float32))
            continue
        narrow = Kind.Q8_0 if tensor.name == "token_embd.weight" else kind
        writer.add_tensor(tensor.name, gguf.quants.quantize(wide, narrow), raw_dtype=narrow)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()


def generator_folder(source: Path, target: Path) -> None:
    """The GGUF file as a folder of transformers, in float32."""
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    read = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    del read.config.quantization_config  # what was read is wide, and only a plain model can be saved
    plain = transformers.AutoModelForCausalLM.from_config(read.config)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(target)


def bert_base(source: Path, target: Path) -> None:
    """A folder with BERT-base's shapes, random weights and the tokenizer of `source`."""
    torch.manual_seed(0)
    transformers.BertModel(BERT_BASE).save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(target)


def classifier(source: Path, target: Path) -> None:
    """BASE+ADAPTER merged into a folder of transformers, in float32."""
    base, adapter = str(source).split("+")
    config = json.loads((Path(adapter) / "config.json").read_text())
    labels = {int(index): label for index, label in config["id2label"].items()}
    base = transformers.AutoModelForSequenceClassification.from_pretrained(
        base, dtype=torch.float32, id2label=labels, label2id=config["label2id"]
    )
    PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("kind", choices=("Q8_0", "Q4_0", "folder", "bert-base", "classifier"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    if options.kind == "folder":
        generator_folder(options.source, options.target)
    elif options.kind == "bert-base":
        bert_base(options.source, options.target)
    elif options.kind == "classifier":
        classifier(options.source, options.target)
    else:
        requantized(options.source, options.target, Kind[options.kind])


if __name__ == "__main__":
    main()
