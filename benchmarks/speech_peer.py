"""Transcribes files by faster-whisper, for benchmarks/speech.py: this file alone runs in the peer's interpreter.

::

    python benchmarks/speech_peer.py MODEL OPTIONS WAV ...

``MODEL`` is a folder in CTranslate2's layout, ``OPTIONS`` a JSON object: the arguments of ``transcribe``, and
``batched``, which chooses ``BatchedInferencePipeline``. Prints a JSON object a line for each file: ``seconds``,
``text``, and ``words`` as (text, start, end).
"""

from __future__ import annotations

import json
import sys
import time

from faster_whisper import BatchedInferencePipeline, WhisperModel


def main(model: str, options: str, *paths: str) -> None:
    arguments = json.loads(options)
    batched = arguments.pop("batched", False)
    threads = arguments.pop("threads", 1)
    whisper = WhisperModel(model, device="cpu", compute_type="float32", cpu_threads=threads, local_files_only=True)
    transcribe = (BatchedInferencePipeline(whisper) if batched else whisper).transcribe
    for path in paths:
        begun = time.perf_counter()
        segments, _ = transcribe(path, **arguments)
        found = list(segments)
        seconds = time.perf_counter() - begun
        words = [(word.word, float(word.start), float(word.end)) for segment in found for word in segment.words or ()]
        text = "".join(segment.text for segment in found)
        cuts = [(float(segment.start), float(segment.end), segment.text) for segment in found]
        answer = {"path": path, "seconds": seconds, "text": text, "words": words, "segments": cuts}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
