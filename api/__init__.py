"""The users' side: `Engine` and `SyncEngine`, the way from inputs to requests, and the way from tokens to results.

Its folders are inputs, outputs, formats, tools, speech, live, hosts and the command line. It imports `actors`, `models`
and `core`. Its code never decides when a request runs. It imports torch only inside functions, so that
``import triolet`` is quick.
"""
