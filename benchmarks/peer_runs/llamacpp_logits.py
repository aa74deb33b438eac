"""Logits of llama.cpp for given token ids, written to a file; runs in its own environment.

    python -m benchmarks.peer_runs.llamacpp_logits MODEL WINDOWS.json OUT.npy [--threads 2] [--last]

WINDOWS.json is a list of lists of token ids, each computed by itself in one batch.  OUT.npy is [rows, V] float32: a row
for each token, or with `--last` for the last token of each window.
"""

import argparse
import ctypes
import json
from pathlib import Path

import llama_cpp
import numpy as np
from numpy.typing import NDArray


class Context:
    """A model with room for one window."""

    def __init__(self, model: Path, longest: int, threads: int) -> None:
        llama_cpp.llama_backend_init()
        loaded = llama_cpp.llama_model_load_from_file(str(model).encode(), llama_cpp.llama_model_default_params())
        if not loaded:
            raise SystemExit(f"{model} cannot be loaded")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = max(longest, 32)
        settings.n_threads = settings.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(loaded, settings)
        self.words: int = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(loaded))
        self._batch = llama_cpp.llama_batch_init(longest, 0, 1)

    def logits(self, tokens: list[int], *, last: bool) -> NDArray[np.float32]:
        """[T, V], or [1, V] of the last token; good until the next call."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        batch = self._batch
        batch.n_tokens = len(tokens)
        for n, token in enumerate(tokens):
            batch.token[n], batch.pos[n], batch.logits[n] = token, n, not last or n == len(tokens) - 1
            batch.n_seq_id[n], batch.seq_id[n][0] = 1, 0
        if llama_cpp.llama_decode(self._context, batch):
            raise SystemExit("llama_decode failed")
        rows = 1 if last else len(tokens)
        found = llama_cpp.llama_get_logits(self._context)
        numbers = ctypes.cast(found, ctypes.POINTER(ctypes.c_float * (rows * self.words))).contents
        return np.frombuffer(numbers, np.float32).reshape(rows, self.words)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("windows", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--last", action="store_true", help="only the last token's of each window")
    options = parser.parse_args()
    windows: list[list[int]] = json.loads(options.windows.read_text())
    context = Context(options.model, max(map(len, windows)), options.threads)
    rows = len(windows) if options.last else sum(map(len, windows))
    out = np.lib.format.open_memmap(options.out, mode="w+", dtype=np.float32, shape=(rows, context.words))
    done = 0
    for window in windows:
        logits = context.logits(window, last=options.last)
        out[done : done + len(logits)] = logits
        done += len(logits)
    out.flush()


if __name__ == "__main__":
    main()
