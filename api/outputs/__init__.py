"""The outputs that callers read: the text of sampled tokens up to a stop string, streams, and results as frozen values.

The folder imports `core` and the messages of `actors`, and no other folder of `api`. It never calls the engine.
"""
