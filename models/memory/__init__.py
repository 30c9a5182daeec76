"""Who owns which tensors: keys and values, encoder outputs, weights of modules, and the order in which all go back.

Every tensor that outlives a call belongs to a `ResourceStack`. The folder imports `machine`. Of what is computed
here there is the places of tokens in pages, and attention over pages and slots: Whisper's (`kv`), and over
slots of different lengths (`slots`).
"""
