"""The measurements of ``triolet bench``: the speed of the engine on this machine, with any checkpoint, beside other
engines.

Every contender is a process of its own (`contenders`), so that no one's threads or settings disturb another's. All
contenders are open at the same time and take turns (`rounds`), so that a change of the machine's speed affects all of
them. The tasks are in `scenarios` and `inputs`, the machine's limits in `machine` and `work`, the report is in
`report`.

`triolet card` runs one model in its own process: `judges` measure a row of its card beside what transformers computes
(`reference`), `figures` goes through the rows, `page` writes them.
"""
