"""Live sessions: audio goes in as it is heard, text comes out while somebody speaks.

The user feeds and reads a `session` with the settings of `options`. `audio` checks what was fed and hears voice in it.
`endpoints` decides what is read, and when. `reader` asks for the text of an utterance, `agreement` decides which of its
words are stable, and `timed_words` gives them their times. The folder imports `inputs`, `outputs` and `speech`. It
never calls the engine: callers pass it a function that runs a request.
"""
