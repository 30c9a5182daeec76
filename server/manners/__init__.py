"""The rules of who may use the server, and how much: API keys, origins and hosts, rates.

Each module decides by values, without I/O: the time comes in as an argument. `triolet.server.gate` asks them before the
application sees a request. May use nothing of the other rooms.
"""
