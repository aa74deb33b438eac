"""CTranslate2, a batch of prompts; runs in its own environment."""

import json
from time import perf_counter

import ctranslate2

from benchmarks.peer_runs.workload import Answer, Generate, asked, generation, print_figures


def generator(model: ctranslate2.Generator, words: list[str]) -> Generate:
    def generate(prompts: list[list[int]], new: int) -> list[Answer]:
        answers = [Answer() for _ in prompts]
        began = perf_counter()

        def note(result: ctranslate2.GenerationStepResult) -> bool:
            answers[result.batch_id].tokens.append(result.token_id)
            answers[result.batch_id].times.append(perf_counter() - began)
            return False

        model.generate_batch(
            [[words[token] for token in prompt] for prompt in prompts],
            max_length=new,
            min_length=new,
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=note,
        )
        return answers

    return generate


def main() -> None:
    run = asked()
    words = json.loads((run.model / "vocabulary.json").read_text(encoding="utf-8"))
    began = perf_counter()
    model = ctranslate2.Generator(
        str(run.model), device="cpu", compute_type=run.precision, inter_threads=1, intra_threads=run.threads
    )
    loaded = perf_counter() - began
    print_figures({"load": loaded, **generation(generator(model, words), run.work)})


if __name__ == "__main__":
    main()
