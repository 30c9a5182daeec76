"""Requests made of callers' inputs: audio, images, prompts and texts, each decoded, checked and keyed by its content.

Audio has rooms of its own: `sources` (what may be given), `wav_header` and `decoding` (files to frames), `blocks`
(frames to mono samples at one rate), `audio` (all of them at once), `recording` (hours of them, bit by bit). The folder
imports `core`, `models` and no other folder of `api`. Slow work runs in a worker thread (`threads`), never on the event
loop.
"""
