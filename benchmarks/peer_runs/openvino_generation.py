"""OpenVINO GenAI, continuous batching over a GGUF file; runs in its own environment."""

from time import perf_counter

import numpy as np
import openvino_genai
from openvino import Tensor

from benchmarks.peer_runs.workload import Answer, Generate, asked, generation, print_figures

CACHE_GB = 2
STEP_TOKENS = 256  # its own default


def generator(pipeline: openvino_genai.ContinuousBatchingPipeline) -> Generate:
    def generate(prompts: list[list[int]], new: int) -> list[Answer]:
        settings = openvino_genai.GenerationConfig(max_new_tokens=new, min_new_tokens=new, ignore_eos=True)
        settings.do_sample = False
        answers = [Answer() for _ in prompts]
        inputs = [Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        began = perf_counter()
        handles = [pipeline.add_request(number, ids, settings) for number, ids in enumerate(inputs)]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = perf_counter() - began
            for answer, handle in zip(answers, handles, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        answer.tokens += output.generated_ids
                        answer.times += [now] * len(output.generated_ids)
        return answers

    return generate


def main() -> None:
    run = asked()
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.cache_size = CACHE_GB
    scheduling.max_num_batched_tokens = STEP_TOKENS
    began = perf_counter()
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        str(run.model), scheduling, "CPU", {"INFERENCE_NUM_THREADS": run.threads}
    )
    loaded = perf_counter() - began
    print_figures({"load": loaded, **generation(generator(pipeline), run.work)})


if __name__ == "__main__":
    main()
