"""The models that transcribe: implementations of `core.speech.SpeechModel`, and which checkpoints have one.

They turn a window of audio into the prompt of a request, and the tokens of an answer into spans of text. The package
imports `architectures`. It runs no step.
"""
