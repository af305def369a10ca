"""Attackers on Ray that may come and go.

pool = conadv.ray.Pool(make_model, attackers=8, resources={"num_gpus": 1})
method = conadv.ConAdv(model, F.cross_entropy, conadv.PGD(4 / 255), twins=pool)
for now, ahead in method.feed(loader): ...
"""

from .ranks.pool import Pool

__all__ = ["Pool"]
