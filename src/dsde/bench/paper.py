"""What the DSDE paper reports (arXiv 2509.01083), to stand beside what is measured here.

Eight A100-80GB, vLLM in eager mode, 128 prompts a run, mean end-to-end latency over eight data sets (CNN/DM, XSum,
GSM8K, HotpotQA, NQ, HumanEval, ShareGPT, WMT14). Other machines, models and prompts than ours: compare ratios, not
seconds.
"""

from __future__ import annotations

SOURCE = "arXiv 2509.01083"
PAIR = "LLaMA-3.1-70B with 3.2-1B"

LATENCY_S: dict[float, dict[str, float | None]] = {
    0.0: {"off": 38.41, "best static": 13.44, "adaedl": 13.83, "dsde": 13.97},
    1.0: {"off": None, "best static": 18.02, "adaedl": 17.64, "dsde": 19.19},
}
"""mean end-to-end seconds by temperature; None: not known to us"""
STATIC_LENGTHS = (2, 4, 6, 8, 10)
"""among which the best was sought, for every data set"""
PROFILING_HOURS = 22
"""that the search took, for all data sets"""

LOW_ACCEPTANCE_PAIR = "Gemma-27B with 2B, CNN/DM"
LOW_ACCEPTANCE = {"best static": 1.00, "adaedl": 2.34, "dsde": 1.80}
"""latency, of that of the best static length"""

SCALING: dict[float, dict[str, float]] = {
    0.0: {"dsde:cap=off": 11.21, "dsde": 12.16},
    1.0: {"dsde:cap=off": 11.92, "dsde": 13.01},
}
"""throughput at batch 64 over that at batch 1, CNN/DM, by temperature"""

CORRELATION = {"draft entropy": -0.339, "mean KLD": -0.164, "WVIR": 0.128}
"""with acceptance at temperature 0; at temperature 1 all are near 0"""
