"""`eesd bench`: the same prompts through plain decoding, every controller and peer programs, in one run.

settings -> prompts -> contenders (engines and peers) -> turns (interleaved measuring) -> report (one JSON object) and
table (for people). disk, memory and machine measure what the report puts beside the speeds. Called by `cli/bench.py`.
"""
