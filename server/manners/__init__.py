"""The rules of who may use the server, and how much: API keys, origins and hosts, rates.

The modules decide by values alone, without I/O; the time is an argument. `triolet.server.gate` asks them before the
application gets a request. The folder imports nothing from the other folders of the server.
"""
