"""`dsde bench`: policies side by side on real models, real prompts and a real clock.

`Setting` says what to measure, `Bench` measures it round by round, `Results` holds everything that was found, and the
reports and plots are made from `Results` alone. Knows the engine; nothing below knows it.
"""
