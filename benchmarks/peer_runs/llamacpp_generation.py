"""llama.cpp through llama-cpp-python's low interface, all sequences in one batch; runs in its own environment."""

import ctypes
from functools import partial
from itertools import chain
from time import perf_counter

import llama_cpp
import numpy as np

from benchmarks.peer_runs.text_workload import loading, memory
from benchmarks.peer_runs.workload import Answer, Generate, Run, asked, generation, print_figures

STEP_TOKENS = 512  # a step of prompts, its own default of a physical batch
Row = tuple[int, int, int, bool]  # token, position, sequence, whether its logits are wanted


class Context:
    """A context with room for all sequences, and its one batch."""

    def __init__(self, run: Run) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            str(run.model).encode(), llama_cpp.llama_model_default_params()
        )
        settings = llama_cpp.llama_context_default_params()
        settings.n_seq_max = max(run.work.widths)
        settings.n_ctx = settings.n_seq_max * run.work.longest
        settings.n_batch = settings.n_ubatch = STEP_TOKENS
        settings.n_threads = settings.n_threads_batch = run.threads
        settings.kv_unified = False  # a cache for each sequence: many together are faster so
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(STEP_TOKENS, 0, 1)

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def step(self, rows: list[Row]) -> list[int]:
        """The likeliest next token after each row that is wanted."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for n, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[n], batch.pos[n], batch.logits[n] = token, position, wanted
            batch.n_seq_id[n], batch.seq_id[n][0] = 1, sequence
        if llama_cpp.llama_decode(self._context, batch):
            raise SystemExit("llama_decode failed")
        count = sum(row[3] for row in rows)
        if not count:
            llama_cpp.llama_synchronize(self._context)
            return []
        logits = llama_cpp.llama_get_logits(self._context)
        shape = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * (count * self._vocabulary))).contents
        likeliest: list[int] = np.frombuffer(shape, np.float32).reshape(count, -1).argmax(1).tolist()
        return likeliest


def prompt_steps(prompts: list[list[int]]) -> list[list[Row]]:
    """Whole prompts a step, as many as fit; longer ones in chunks."""
    rows = [
        [(token, position, number, position == len(prompt) - 1) for position, token in enumerate(prompt)]
        for number, prompt in enumerate(prompts)
    ]
    together = max(1, STEP_TOKENS // len(prompts[0]))
    flat = (list(chain.from_iterable(rows[start : start + together])) for start in range(0, len(rows), together))
    return [list(part) for step in flat for part in chunks(step)]


def chunks(rows: list[Row]) -> list[list[Row]]:
    return [rows[start : start + STEP_TOKENS] for start in range(0, len(rows), STEP_TOKENS)]


def generator(context: Context) -> Generate:
    def generate(prompts: list[list[int]], new: int) -> list[Answer]:
        context.clear()
        answers = [Answer() for _ in prompts]
        began = perf_counter()

        def note(rows: list[Row]) -> None:
            tokens = context.step(rows)
            now = perf_counter() - began
            members = [sequence for _, _, sequence, wanted in rows if wanted]
            for member, token in zip(members, tokens, strict=True):
                answers[member].tokens.append(token)
                answers[member].times.append(now)

        for rows in prompt_steps(prompts):
            note(rows)
        for step in range(new - 1):
            note(
                [(a.tokens[-1], len(p) + step, n, True) for n, (a, p) in enumerate(zip(answers, prompts, strict=True))]
            )
        return answers

    return generate


def main() -> None:
    run = asked()
    context, taken = loading(partial(Context, run))
    print_figures({**taken, **generation(generator(context), run.work), **memory("self")})


if __name__ == "__main__":
    main()
