"""The decisions of the engine, as pure functions and values.

The books of the encoder cache (`ledger`), the configuration, requests, steps, events and errors live here, and the
trace checker. `planning` plans the steps. The folder imports the standard library and attrs. Its code never waits,
never reads a clock, and knows neither trio nor torch: time comes in as an argument.
"""
