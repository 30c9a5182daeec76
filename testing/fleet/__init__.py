"""A fleet of replicas on virtual time, without a device: what routing does to a thousand engines.

Each replica keeps the real ledger of encoder outputs, acquires as the planner does, and shares its device between
encodings and steps as the runner does; its costs are those of the simulated device. Launches and steps that nothing
changes are one event. May use `core`, the names of the worker's jobs and the simulated device's costs; nothing of Ray.
"""
