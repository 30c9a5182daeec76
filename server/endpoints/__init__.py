"""The work of the server for each request: each endpoint has a function that reads the body, uses the engine and makes
the answer.

A function gets Starlette's request and returns an answer; `triolet.server.problems` turns errors into answers. The
folder may use the bodies in `triolet.server.schemas`, and the modules `body`, `event_stream`, `media` and `server` of
the folder above.
"""
