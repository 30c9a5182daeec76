"""Checkpoints on the disk: their files, settings, special tokens and weights.

Errors name the damaged file and its setting. The package imports `core` and `machine`, and imports torch only inside
functions that read weights, so that a wrong folder is refused at once. It never allocates memory on the device."""
