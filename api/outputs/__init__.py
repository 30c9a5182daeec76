"""The outputs that callers read: text of sampled tokens up to a stop string, streams, results as frozen values.

The folder imports `core` and the messages of `actors`, and no other folder of `api`. It never calls the engine.
"""
