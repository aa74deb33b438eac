"""OpenVINO GenAI behind a minimal HTTP server that streams completions; runs in its own environment.

    python -m benchmarks.peer_runs.openvino_server MODEL PORT [--threads 2]

This is not OpenVINO's own server. One thread steps the pipeline and passes each token to the event loop.
"""

import argparse
import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator
from typing import Any

import openvino_genai
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from benchmarks.peer_runs.openvino_generation import CACHE_GB, STEP_TOKENS

END = -1
Asked = tuple[Any, int, "asyncio.Queue[list[int]]"]


class Pipeline:
    """A thread that steps while there is anything to do."""

    def __init__(self, model: str, threads: int) -> None:
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.cache_size, scheduling.max_num_batched_tokens = CACHE_GB, STEP_TOKENS
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            model, scheduling, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        self.tokenizer = self.pipeline.get_tokenizer()
        self.inbox: queue.Queue[Asked] = queue.Queue()
        self.running: list[tuple[Any, asyncio.Queue[list[int]]]] = []
        self.loop: asyncio.AbstractEventLoop
        self.count = 0

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while True:
            if not self.running:
                self.add(self.inbox.get())
            while not self.inbox.empty():
                self.add(self.inbox.get())
            self.pipeline.step()
            self.loop.call_soon_threadsafe(self.deliver, [self.read(*each) for each in self.running])
            self.running = [each for each in self.running if each[0].can_read() or not self.over(each[0])]

    def add(self, asked: Asked) -> None:
        ids, new, out = asked
        settings = openvino_genai.GenerationConfig(max_new_tokens=new, min_new_tokens=new, ignore_eos=True)
        settings.do_sample = False
        self.count += 1
        self.running.append((self.pipeline.add_request(self.count, ids, settings), out))

    def over(self, handle: Any) -> bool:
        return bool(handle.get_status() != openvino_genai.GenerationStatus.RUNNING)

    def read(self, handle: Any, out: "asyncio.Queue[list[int]]") -> tuple["asyncio.Queue[list[int]]", list[int]]:
        tokens: list[int] = []
        while handle.can_read():
            for output in handle.read().values():
                tokens += output.generated_ids
        return out, [*tokens, END] if self.over(handle) else tokens

    def deliver(self, answers: list[tuple["asyncio.Queue[list[int]]", list[int]]]) -> None:
        for out, tokens in answers:
            if tokens:
                out.put_nowait(tokens)


def application(pipeline: Pipeline) -> FastAPI:
    app = FastAPI(on_startup=[pipeline.start])

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"data": [{"id": "openvino"}]}

    @app.post("/v1/completions")
    async def completions(body: dict[str, Any]) -> StreamingResponse:
        out: asyncio.Queue[list[int]] = asyncio.Queue()
        pipeline.inbox.put((pipeline.tokenizer.encode(body["prompt"]).input_ids, body["max_tokens"], out))

        async def events() -> AsyncIterator[str]:
            while True:
                tokens = await out.get()
                for token in tokens:
                    if token == END:
                        yield "data: [DONE]\n\n"
                        return
                    text = pipeline.tokenizer.decode([token])
                    yield f"data: {json.dumps({'choices': [{'index': 0, 'text': text}]})}\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("port", type=int)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    served = application(Pipeline(options.model, options.threads))
    uvicorn.run(served, port=options.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
