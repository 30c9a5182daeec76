"""The contenders: programs that are run by paths, in other interpreters perhaps, and import nothing of each other but
`serve`. Each opens a model, and then answers tasks, one JSON object a line on both sides.

A task of speech has ``paths`` of WAV files, and perhaps ``context`` (see `TranscribeOptions.encoder_context`),
``reuse`` (the language, the text and its translation are wanted of each), or ``arrivals`` (seconds after which each
path arrives).
A task of text has ``prompts``, ``tokens`` (how many to write), and perhaps ``arrivals``. Any task may have ``thread``:
a thread of the contender's process computes in Python meanwhile (`serve.beside`). The answer has ``seconds`` of the
whole, with a thread how far it ``counted`` in a second, and for each input ``tokens``, ``text``, ``first`` (seconds to
the first token, where it is known) and ``total`` from its arrival.
"""
