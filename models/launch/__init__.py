"""The ways to launch a network's layers: recorded as graphs, or in stages on several devices.

The folder imports `attention` and `memory`. Both give the same tokens.
"""
