"""Requests made of callers' inputs: audio, images, prompts and texts, each decoded, checked and keyed by its content.

Audio has several modules: `sources` (what may be given), `decoding` (files to frames, with `containers` and
`timeline`), `audio` (frames to mono samples at one rate), `recording` (hours of audio, bit by bit). The folder imports
`core`, `models` and no other folder of `api`. Slow work runs in a worker thread (`threads`), never on the event loop.
"""
