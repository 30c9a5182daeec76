"""Live sessions: audio goes in as it is heard, text comes out while somebody speaks.

The user feeds and reads a `session` with the settings of `options`; it detects voice in the chunks that are fed.
`endpoints` decides what is read, and when. `reader` requests the text of an utterance (`streamed_session` that of
streaming models), and `agreement` decides which of its words are stable, and when they were spoken. The folder imports
`inputs`, `outputs` and `speech`. It never calls the engine: callers pass it a function that runs a request.
"""
