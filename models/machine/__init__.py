"""The machine that the process runs on: its cores, its memory, its devices, and how the threads of OpenMP wait.

The folder imports `core` alone. Most of it works before torch is loaded, since torch reads some settings only when it
is loaded.
"""
