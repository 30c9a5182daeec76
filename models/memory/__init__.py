"""Who owns which tensors: keys and values, encoder outputs, weights of modules, and the order in which all go back.

Every tensor that outlives a call belongs to a `ResourceStack`. The room imports `machine`. It never computes anything
with the tensors but their places.
"""
