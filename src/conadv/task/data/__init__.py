"""Labelled images, on disk or in memory."""

from conadv.task.data.fit import Fit, keep
from conadv.task.data.open import open_data
from conadv.task.data.source import Arrays, DataSet, Source

__all__ = ["Arrays", "DataSet", "Fit", "Source", "keep", "open_data"]
