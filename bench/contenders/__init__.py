"""The contenders: programs that are run by their paths, perhaps in other interpreters. They import no module of this
package but those beside them. Each contender opens a model and then answers tasks; tasks and answers are JSON objects,
one a line.

A task of speech has ``paths`` of WAV files. It may also have ``context`` (see `TranscribeOptions.encoder_context`),
``reuse`` (the answer needs the language, the text and the translation of each file), or ``arrivals`` (the seconds after
which each path arrives). A task of text has ``prompts`` and ``tokens`` (how many to write), and may have ``arrivals``.
A task of vectors has ``texts``, and may have ``each`` (every text is asked for by itself) or ``arrivals``.

Any task may have ``thread``: then a thread of the contender's process computes in Python meanwhile (`serve.beside`).

An answer has the ``seconds`` of the whole task; with ``thread`` it also has ``counted``, how far the thread counted in
a second. For each input the answer has ``tokens``, ``text``, ``first`` (seconds to the first token, if known) and
``total`` (seconds from the arrival of the input); of vectors it has ``vector``, of length 1, in place of ``tokens`` and
``text``.
"""
