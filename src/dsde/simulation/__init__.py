"""Policies without models: requests whose agreement is recorded or drawn, in virtual time. NumPy only.

For research and tests: a second of this shows what hours of a machine would, as far as the stream of agreement and the
costs are like the machine's. Knows policies; knows nothing of tokens, models and the engine.
"""

from dsde.simulation.comparison import Comparison, Row, compare
from dsde.simulation.costs import COSTS, Costs, Line, make_costs
from dsde.simulation.measured import MeasuredCosts
from dsde.simulation.requests import Requests, Stream
from dsde.simulation.simulator import Result, simulate
from dsde.simulation.streams import Iid, Mixed, Phases, make_stream
from dsde.simulation.traces import Recorded

__all__ = [
    "COSTS",
    "Comparison",
    "Costs",
    "Iid",
    "Line",
    "MeasuredCosts",
    "Mixed",
    "Phases",
    "Recorded",
    "Requests",
    "Result",
    "Row",
    "Stream",
    "compare",
    "make_costs",
    "make_stream",
    "simulate",
]
