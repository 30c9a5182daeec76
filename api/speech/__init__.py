"""Transcription: long audio window by window, as openai/whisper walks it.

`options` holds the caller's options, and `recipe` resolves them against a model. `plan` decides which window is next,
`reader` asks for its text, `windows` judges the answers, and `words` times their words. `walk` reads one window after
the other, and `transcription` (or `parallel`) walks over the audio. `voice` defines what detects speech, and where it
begins and ends; `silero` is the default detector, and `hearing` finds the speech of a recording ahead of the walk.
`speakers` tells who speaks; `voices` is the default diarizer. `aligning` and `word_aligner` time the words of known
texts. The folder imports `inputs` and `outputs`. It never calls the engine: callers pass it a function that runs a
request.
"""
