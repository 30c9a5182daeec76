"""A fleet of replicas on virtual time, without a device: the effects of routing on many engines.

Each replica is the engine's own planner, ledger and time share; its costs are those of the simulated device.
"""
