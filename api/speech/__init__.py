"""Transcription: long audio window by window, as openai/whisper walks it.

`options` are the caller's; `recipe` resolves them against a model; `windows` reads one window's tokens; `transcription`
walks over the audio; readers iterate over `segments`. `voice` says what hears speech, `silero` does by default, `spans`
decides where speech begins and ends, `hearing` finds it ahead in a recording. The folder imports `inputs` and
`outputs`. It never calls the engine: callers pass it a function that runs a request.
"""
