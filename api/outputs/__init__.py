"""From sampled tokens to what callers read: text, its end at a stop string, streams, and results as frozen values.

The folder imports `core` and the messages of `actors`, and no other folder of `api`. It never calls the engine.
"""
