"""Estimate time and cost on a cluster: ranks by role, time per step, hours and cost of each method in each layout.

request   the inputs, each a flag       devices    passes, duties, devices and models by name
network   links, all-reduce             lane       which rank waits for which
row       one method in one layout      planner    all of them, and the batch that stops paying
table     as text                       plot       as a picture
stragglers  the slowest of many ranks   measured   outputs of `conadv bench`, as inputs and to compare with
search    over counts of ranks and shares
"""

from .measured import Comparison, compare_layouts, read_measurement, render_comparison, times_in
from .planner import Plan, plan
from .plot import plot
from .request import PlanRequest
from .row import PlanRow
from .search import Search, search
from .table import render, render_search

__all__ = [
    "Comparison",
    "Plan",
    "PlanRequest",
    "PlanRow",
    "Search",
    "compare_layouts",
    "plan",
    "plot",
    "read_measurement",
    "render",
    "render_comparison",
    "render_search",
    "search",
    "times_in",
]
