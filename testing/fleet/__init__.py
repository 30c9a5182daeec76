"""A fleet of replicas on virtual time, without a device: the effects of routing on many engines.

Each replica is the engine's own planner, ledger and time share; its costs are those of the simulated device. The fleet
is part of the repository, not of the wheel. It uses `core`, the names of the worker's jobs and the simulated device's
costs; nothing of Ray.
"""
