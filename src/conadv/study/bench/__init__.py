"""Benchmarks: candidates in turn within one run, repeated; ratios with their spread, never times against a memory.

alternate   the measurement       result     ratio, spread, goal        workload   what is computed
step        each method           attack     against foolbox            lars       against SGD
layout      roles on ranks: together, pieces (to compose), contender, reduction, profile, rank, ranks
command     flags, and all by name           table, progress, machine, extra
"""
