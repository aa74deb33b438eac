"""A GGUF file in another format, by llama.cpp's own quantiser; runs in its own environment.

    python -m benchmarks.peer_runs.llamacpp_quantize KIND SOURCE TARGET

KIND is one of llama.cpp's file types, such as Q4_K_M.  A source that is quantised already is rounded once more.
"""

import argparse

import llama_cpp


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind")
    parser.add_argument("source")
    parser.add_argument("target")
    options = parser.parse_args()
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{options.kind}")
    settings.allow_requantize = True
    if llama_cpp.llama_model_quantize(options.source.encode(), options.target.encode(), settings):
        raise SystemExit(f"{options.source} could not be quantised as {options.kind}")


if __name__ == "__main__":
    main()
