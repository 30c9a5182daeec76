"""The work of the server for each request: a function for each endpoint, from the body to the engine and back.

A function gets Starlette's request and gives an answer; errors become answers in `triolet.server.problems`. May use the
bodies in `triolet.server.schemas`, and `triolet.server.body`, `event_stream`, `media` and `server` of the room above.
"""
