"""vLLM for CPUs, bfloat16, its engine stepped in this process; runs in its own environment."""

from time import perf_counter

from vllm import LLM, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from benchmarks.peer_runs.workload import Answer, Generate, asked, generation, print_figures


def generator(engine: LLMEngine) -> Generate:
    def generate(prompts: list[list[int]], new: int) -> list[Answer]:
        settings = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        answers = {str(number): Answer() for number in range(len(prompts))}
        began = perf_counter()
        for name, prompt in zip(answers, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, settings)
        while engine.has_unfinished_requests():
            for output in engine.step():
                answer, now = answers[output.request_id], perf_counter() - began
                answer.times += [now] * (len(output.outputs[0].token_ids) - len(answer.tokens))
                answer.tokens = list(output.outputs[0].token_ids)
        return list(answers.values())

    return generate


def main() -> None:
    run = asked()
    began = perf_counter()
    model = LLM(str(run.model), dtype="bfloat16")
    loaded = perf_counter() - began
    print_figures({"load": loaded, **generation(generator(model.llm_engine), run.work)})


if __name__ == "__main__":
    main()
