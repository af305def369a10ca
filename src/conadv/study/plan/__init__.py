"""Estimate time and cost on a cluster: ranks by role, time per step, hours and cost of each method in each layout.

request   the inputs, each a flag       devices    passes, duties, devices and models by name; the slowest of many
network   links, all-reduce             lane       which rank waits for which
row       one method in one layout      planner    all of them, and the batch size that stops paying
table     as text                       search     over counts of ranks and shares
plot      as a picture                  measured   outputs of `conadv bench`, as inputs and to compare with
"""
