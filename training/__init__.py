"""How the embedded draft was made: prompts, text that the target writes, distillation, measurement.

Not part of the installed package. Needs PyTorch; a CUDA device for anything but a trial run.
"""
