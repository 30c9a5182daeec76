"""Transcription: long audio window by window, as openai/whisper walks it.

`options` are the caller's; `recipe` meets them with a model; `windows` reads one window's tokens; `transcription`
walks; `segments` is what a reader iterates over. The room imports `inputs` and `outputs`. It never looks into the
engine: it is given a function that runs a request.
"""
