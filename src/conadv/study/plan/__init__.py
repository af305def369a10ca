"""Before a cluster is rented: ranks by role, time a step, hours and cost of each method in each layout.

request   what is asked          flags      from the command line to a request
cost      passes and duties      network    links, all-reduce
path      who waits for whom     stragglers the slowest rank of many
row       one layout             planner    all of them, and the batch that stops paying
table     as text                plot       as a picture
paper     against the paper      measured   against `conadv bench layout`
"""

from .cost import PassTimes, read_measurement
from .flags import build_request
from .measured import Comparison, compare_layouts, render_comparison
from .network import Link, Machine
from .paper import Validation, render_validation, validate
from .planner import Plan, plan
from .plot import plot
from .request import PlanRequest
from .row import PlanRow
from .stragglers import Stragglers
from .table import render

__all__ = [
    "Comparison",
    "Link",
    "Machine",
    "PassTimes",
    "Plan",
    "PlanRequest",
    "PlanRow",
    "Stragglers",
    "Validation",
    "build_request",
    "compare_layouts",
    "plan",
    "plot",
    "read_measurement",
    "render",
    "render_comparison",
    "render_validation",
    "validate",
]
