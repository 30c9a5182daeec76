"""From callers' inputs to requests: audio, images, prompts and texts, each decoded, checked and keyed by its content.

The folder imports `core`, `models` and no other folder of `api`. Slow work runs in a worker thread (`threads`), never
on the event loop.
"""
