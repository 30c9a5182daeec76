"""Live sessions: audio goes in as it is heard, text comes out while somebody speaks.

The user feeds and reads a `session` with the settings of `options`. `audio` checks the chunks that are fed and detects
voice in them. `endpoints` decides what is read, and when. `reader` requests the text of an utterance, `agreement`
decides which of its words are stable, and `timed_words` adds the times of the words. The folder imports `inputs`,
`outputs` and `speech`. It never calls the engine: callers pass it a function that runs a request.
"""
