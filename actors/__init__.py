"""The actors: they move messages, and decide nothing that `core` can decide.

`supervisor` opens the others, ends them in order and gives everything back; `scheduler` owns the planner,
`encoder_cache` the ledger, `gpu_runner` the device's worker. The folder imports `core` and trio; `gpu_runner` alone
reaches `models`. An actor never imports another one: they know each other's messages.
"""
