"""A fleet of replicas on virtual time, without a device. It shows the effects of routing on many engines.

Each replica has the engine's own planner, ledger and time share; its costs are those of the simulated device.
"""
