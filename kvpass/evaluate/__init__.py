"""Quality through the cache: what recipes do to a model's predictions and answers."""

from __future__ import annotations

from kvpass.evaluate.quality import Quality as Quality
from kvpass.evaluate.quality import RecallPrompt as RecallPrompt
from kvpass.evaluate.quality import cache_bytes as cache_bytes
from kvpass.evaluate.quality import first_difference as first_difference
from kvpass.evaluate.quality import perplexity as perplexity
from kvpass.evaluate.quality import quality as quality
from kvpass.evaluate.quality import recall_accuracy as recall_accuracy
from kvpass.evaluate.report import sections as sections
from kvpass.evaluate.report import write_report as write_report
from kvpass.evaluate.runner import Evaluation as Evaluation
from kvpass.evaluate.runner import evaluate as evaluate
from kvpass.evaluate.settings import Settings as Settings
from kvpass.evaluate.tasks import TASKS as TASKS
