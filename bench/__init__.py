"""``triolet bench``: how fast the engine is on this machine, on any checkpoint, beside other engines.

Every contender is a process of its own (`contenders`), so that no one's threads or settings disturb another's. All are
open at a time and take turns (`rounds`), so that a change of the machine's speed hits all of them. What is measured is
in `scenarios` and `inputs`, how far the machine's limit is in `machine` and `work`, what is shown in `report`.
"""
