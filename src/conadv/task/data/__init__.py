"""Labelled images, and the batches that training and evaluation take from them."""

from conadv.task.data.fit import Fit, keep
from conadv.task.data.open import Share, open_data
from conadv.task.data.source import Arrays, DataSet, Source
from conadv.task.data.stream import Stream, evaluation_batches

__all__ = ["Arrays", "DataSet", "Fit", "Share", "Source", "Stream", "evaluation_batches", "keep", "open_data"]
