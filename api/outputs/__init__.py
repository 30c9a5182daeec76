"""From sampled tokens to what callers read: text, its end at a stop string, streams, and results as frozen values.

The room imports `core` and the messages of `actors`, and no other room of `api`. Nothing here asks the engine for
anything.
"""
