"""The part that lies on the disk: the files of a checkpoint, their settings, special tokens and weights.

A file that is damaged is reported by its name and setting. The folder imports `core`, and torch only inside functions
that read weights, so that a wrong folder is refused at once. It never allocates on the device."""
