"""A fleet of replicas on virtual time, without a device: what routing does to a thousand engines.

Each replica keeps the real ledger of encoder outputs and the real share of the device between encodings and steps; its
costs are those of the simulated device. May use `core` and the simulated device's costs; imports nothing of Ray.
"""
