"""Benchmarks: candidates timed alternately in one run, and the ratios of their times.

alternate  the measurement               result     ratios, times and their spread   workload  what is computed
step       each method, and its passes   layout     roles on ranks of their own      ranks     their processes
command    `conadv bench`                contender  what a rank does in a layout
"""
