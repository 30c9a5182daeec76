"""From what callers bring to requests: audio, images, prompts, texts; each decoded, checked and keyed by its content.

The room imports `core`, `models` and no other room of `api`. What takes time runs in a worker thread (`threads`), never
on the event loop.
"""
