"""transformers' encoder, padded, in float32 or with torch's dynamic int8; runs in Polyhead's own environment."""

from time import perf_counter

import torch
import transformers

from benchmarks.peer_runs.workload import Encode, asked, encoding, print_figures


def encoder(model: torch.nn.Module) -> Encode:
    @torch.inference_mode()
    def encode(batch: list[list[int]]) -> list[list[float]]:
        longest = max(map(len, batch))
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in batch])
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in batch])
        states = model(input_ids=ids, attention_mask=mask).last_hidden_state  # [N, K, W]
        weights = mask.unsqueeze(-1).float()
        pooled = (states * weights).sum(1) / weights.sum(1)
        vectors: list[list[float]] = torch.nn.functional.normalize(pooled).tolist()
        return vectors

    return encode


def main() -> None:
    run = asked()
    torch.set_num_threads(run.threads)
    began = perf_counter()
    model: torch.nn.Module = transformers.AutoModel.from_pretrained(run.model, dtype=torch.float32).eval()
    if run.precision == "int8":
        model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, torch.qint8)
    loaded = perf_counter() - began
    print_figures({"load": loaded, **encoding(encoder(model))})


if __name__ == "__main__":
    main()
