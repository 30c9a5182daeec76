"""The owners of tensors: keys and values, encoder outputs, weights of modules, and the order in which all are released.

Every tensor that outlives a call belongs to a `ResourceStack`. The folder imports `machine`. It computes two things:
the places of a step's rows in pages (`rows`), and attention over slots (`slots`).
"""
