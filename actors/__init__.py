"""The actors: they move messages, and decide nothing that `core` can decide.

`supervisor` starts the others, ends them in order and gives everything back; `scheduler` owns the planner,
`encoder_cache` the ledger, `gpu_runner` the device's worker. The folder imports `core` and trio; `gpu_runner` alone
imports `models` too. Only the supervisor imports other actors. The others know each other by messages alone.
"""
