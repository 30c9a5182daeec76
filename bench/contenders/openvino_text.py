"""The contender OpenVINO GenAI: ``openvino_text.py FOLDER NUMBERS THREADS``. FOLDER is an export of ``optimum-cli``.
Prompts join its continuous batch when they arrive."""

from __future__ import annotations

import sys
import time
from typing import Any

from openvino_settings import settings_of
from serve import serve

GIGABYTES = 1  # for keys and values


def open_model() -> tuple[Any, dict[str, str]]:
    import openvino_genai

    folder, numbers, threads = sys.argv[1:]
    settings = settings_of(numbers, threads)
    if numbers == "float32":
        settings["KV_CACHE_PRECISION"] = "f32"
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = GIGABYTES
    pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", settings)
    return pipeline, {"openvino-genai": openvino_genai.__version__}


def run(pipeline: Any, task: dict[str, Any]) -> list[dict[str, Any]]:
    from openvino_genai import GenerationConfig

    prompts, count, tokenizer = task["prompts"], task["tokens"], pipeline.get_tokenizer()
    asked = GenerationConfig(max_new_tokens=count, min_new_tokens=count, ignore_eos=True, do_sample=False)
    arrivals = task.get("arrivals") or [0.0] * len(prompts)
    found: list[dict[str, Any]] = [{"tokens": []} for _ in prompts]
    handles: dict[int, Any] = {}
    begun, come = time.perf_counter(), 0
    while come < len(prompts) or handles:
        if not handles:
            time.sleep(max(begun + arrivals[come] - time.perf_counter(), 0.0))
        while come < len(prompts) and begun + arrivals[come] <= time.perf_counter():
            fed = tokenizer.encode(prompts[come], add_special_tokens=False).input_ids
            handles[come] = pipeline.add_request(come, fed, asked)
            come += 1
        pipeline.step()
        for index in [index for index, handle in handles.items() if handle.can_read()]:
            told, since = found[index], time.perf_counter() - begun - arrivals[index]
            told.setdefault("first", since)
            told["tokens"] += handles[index].read()[0].generated_ids
            if len(told["tokens"]) >= count:
                told["total"] = since
                del handles[index]
    return [{**told, "text": tokenizer.decode(told["tokens"])} for told in found]


if __name__ == "__main__":
    serve(open_model, run)
