"""The owners of tensors: keys and values, encoder outputs, weights of modules, and the order in which all go back.

Every tensor that outlives a call belongs to a `ResourceStack`. The folder imports `machine`. Of what is computed
here there is the places of a step's rows in pages (`rows`), and attention over slots (`slots`).
"""
