"""onnxruntime-genai, a batch of prompts of one length; runs in its own environment."""

import json
from time import perf_counter

import numpy as np
import onnxruntime_genai

from benchmarks.peer_runs.workload import Answer, Generate, asked, generation, print_figures


def generator(model: onnxruntime_genai.Model) -> Generate:
    def generate(prompts: list[list[int]], new: int) -> list[Answer]:
        began = perf_counter()
        length = len(prompts[0]) + new
        search = onnxruntime_genai.GeneratorParams(model)
        search.set_search_options(do_sample=False, batch_size=len(prompts), min_length=length, max_length=length)
        run = onnxruntime_genai.Generator(model, search)
        run.append_tokens(np.array(prompts, np.int32))
        answers = [Answer() for _ in prompts]
        for _ in range(new):
            run.generate_next_token()
            now = perf_counter() - began
            for answer, token in zip(answers, run.get_next_tokens().tolist(), strict=True):
                answer.tokens.append(token)
                answer.times.append(now)
        return answers

    return generate


def main() -> None:
    run = asked()
    config = onnxruntime_genai.Config(str(run.model))
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": run.threads}}}}))
    began = perf_counter()
    model = onnxruntime_genai.Model(config)
    loaded = perf_counter() - began
    print_figures({"load": loaded, **generation(generator(model), run.work)})


if __name__ == "__main__":
    main()
