"""The machine that the process runs on: its cores, its memory, its devices, how the threads of OpenMP wait, how
many torch has, and the defaults of torch that a thread has for its own.

The folder imports `core` alone. Most of it works before torch is loaded, since torch reads some settings only when it
is loaded.
"""
