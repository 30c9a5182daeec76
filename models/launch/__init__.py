"""The ways to launch a network's layers: recorded as graphs, compiled, or in stages on several devices.

The folder imports `attention` and `memory`. What is computed stays the same, to the token; only the way of calling it
differs.
"""
