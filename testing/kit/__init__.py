"""The kit for builders of other engines: a manager or scheduler behind an adapter of a few lines is played with by
clients and a device that the kit simulates, and every promise that it breaks is reported, the worst first, with the
shortest history and a regression test. Seeded, without files, and without Hypothesis.
"""
