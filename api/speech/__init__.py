"""Transcription: long audio window by window, as openai/whisper walks it.

`options` holds the caller's options, and `recipe` resolves them against a model. `windows` reads the tokens of one
window. `transcription` walks over the audio, and clients iterate over `segments`. `voice` defines what detects speech,
and `silero` is the default detector. `spans` decides where speech begins and ends, and `hearing` finds the speech of a
recording ahead of the walk. The folder imports `inputs` and `outputs`. It never calls the engine: callers pass it a
function that runs a request.
"""
