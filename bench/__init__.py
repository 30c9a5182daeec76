"""``triolet bench``: measures the speed of the engine on this machine, on any checkpoint, beside other engines.

Every contender is a process of its own (`contenders`), so that no one's threads or settings disturb another's. All are
open at a time and take turns (`rounds`), so that a change of the machine's speed hits all of them. The tasks are in
`scenarios` and `inputs`, the machine's limits in `machine` and `work`, the report is in `report`.
"""
