"""The users' side: `Engine` and `SyncEngine`, the way from inputs to requests, and the way from tokens to results.

Its folders are inputs, outputs, tools, speech, hosts and the command line. It imports `actors`, `models` and `core`.
Its code never decides when a request runs, and imports torch only inside functions: ``import triolet`` is to be quick.
"""
