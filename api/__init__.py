"""The users' side: `Engine`, the way from callers' inputs to requests, and the way from sampled tokens to results.

Its folders are inputs, outputs, tools, speech, hosts and the command line. It imports `actors`, `models` and `core`.
Its code never decides when a request runs, and imports torch only inside functions: ``import triolet`` is to be quick.
"""
