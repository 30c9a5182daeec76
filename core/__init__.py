"""The decisions of the engine, as pure functions and values.

This folder has the books of the encoder cache (`ledger`), the configuration, requests, steps, events, errors, and the
trace checker. `planning` plans the steps. The folder imports only the standard library and attrs. Its code never waits,
never reads a clock, and knows neither trio nor torch. Functions get the time as an argument.
"""
