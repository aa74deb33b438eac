"""transformers in float32, a batch of prompts of one length; runs in Polyhead's own environment."""

from time import perf_counter

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from benchmarks.peer_runs.workload import Answer, Generate, asked, generation, print_figures


class Clock(BaseStreamer):
    """Hears of every step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(perf_counter())

    def end(self) -> None:
        pass


def generator(model: transformers.PreTrainedModel) -> Generate:
    @torch.inference_mode()
    def generate(prompts: list[list[int]], new: int) -> list[Answer]:
        began, clock = perf_counter(), Clock()
        inputs = torch.tensor(prompts)
        out = model.generate(  # type: ignore[operator]
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            streamer=clock,
        )
        times = [time - began for time in clock.times[1:]]  # the first is the prompt
        return [Answer(row, list(times)) for row in out[:, inputs.shape[1] :].tolist()]

    return generate


def main() -> None:
    run = asked()
    torch.set_num_threads(run.threads)
    began = perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32).eval()
    loaded = perf_counter() - began
    print_figures({"load": loaded, **generation(generator(model), run.work)})


if __name__ == "__main__":
    main()
