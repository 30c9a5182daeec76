"""The ways to launch a network's layers: recorded as graphs, compiled, or in stages on several devices.

The folder imports `attention` and `memory`. All ways give the same tokens.
"""
