"""The series of one server's page: one for every metric and combination of labels in use.

Looking up a series costs as much as counting in it, and a step does both for every token, so series are cached.
"""

import gzip
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as PLAIN_TEXT
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPEN_METRICS
from prometheus_client.samples import Sample

from .exposition import openmetrics_text, prometheus_text
from .metric_table import METRIC_PREFIX, Metric

OPENMETRICS_VERSION = re.compile(r"[1-9][0-9]{0,3}(\.[0-9]{1,4}){0,3}")  # of OpenMetrics, 1.0.0 and later

Families = Mapping[str, Family]
MetricT = TypeVar("MetricT", bound=MetricWrapperBase)


class SeriesCache(Generic[MetricT]):
    """The metrics of one kind, by name, and those of their series that were used."""

    def __init__(self, metrics: Mapping[str, MetricT]) -> None:
        self._metrics = metrics
        self._series: dict[tuple[str, ...], MetricT] = {}

    def __call__(self, name: str, *labels: str) -> MetricT:
        """The series with these labels.  A new one appears on the page at zero."""
        known = self._series.get((name, *labels))
        if known is None:
            metric = self._metrics[name]
            known = self._series[(name, *labels)] = metric.labels(*labels) if labels else metric
        return known

    def remove(self, name: str, *labels: str) -> None:
        """Remove a series from the page."""
        self._metrics[name].remove(*labels)
        self._series.pop((name, *labels), None)

    def remove_matching(self, places: Mapping[str, int], value: str) -> None:
        """Remove every series whose label at index `places[metric]` is `value`."""
        for name, *labels in list(self._series):  # a copy: other threads count
            if name in places and labels[places[name]] == value:
                self.remove(name, *labels)


class MetricSeries:
    """The series of a table of metrics.  Counters, gauges and histograms are called with a name and label values."""

    def __init__(self, declared: Sequence[Metric]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each, with its time of creation
        self._registry = page = CollectorRegistry()
        ProcessCollector(registry=page)
        GCCollector(registry=page)
        counters, gauges, histograms = {}, {}, {}
        for one in declared:
            named = METRIC_PREFIX + one.name, one.text, one.labels
            match one.kind:
                case "counter":
                    counters[one.name] = Counter(*named, registry=page)
                case "gauge":
                    gauges[one.name] = Gauge(*named, registry=page)
                case "histogram":
                    histograms[one.name] = Histogram(*named, buckets=one.buckets, registry=page)
        self.counter, self.gauge, self.histogram = SeriesCache(counters), SeriesCache(gauges), SeriesCache(histograms)
        self._extra_families: Callable[[Families], Iterable[Family]] = no_families
        self._by_name: Mapping[str, Callable[..., object]] = {
            **dict.fromkeys(counters, self.counter),
            **dict.fromkeys(gauges, self.gauge),
            **dict.fromkeys(histograms, self.histogram),
        }
        self._model_label_index = {one.name: one.labels.index("model") for one in declared if "model" in one.labels}

    def create(self, name: str, *labels: str) -> None:
        """Create a series, at zero."""
        self._by_name[name](name, *labels)

    def remove_model(self, model: str) -> None:
        """Remove every series of that model."""
        for kept in (self.counter, self.gauge, self.histogram):
            kept.remove_matching(self._model_label_index, model)

    def add_families(self, more: Callable[[Families], Iterable[Family]]) -> None:
        """Add to the page the families that `more` makes of the others."""
        self._extra_families = more

    def read(self, names: Iterable[str]) -> list[Sample]:
        """The samples with these names, as they are on the page."""
        return [sample for family in self._registry.restricted_registry(names).collect() for sample in family.samples]

    def render(self, is_openmetrics: bool) -> tuple[bytes, str]:
        """The page, in OpenMetrics or in the Prometheus text format, and its content type.

        Any thread may call it, while others count.
        """
        families = {family.name: family for family in self._registry.collect()}
        everything = [*families.values(), *self._extra_families(families)]
        if is_openmetrics:
            return openmetrics_text(everything), OPEN_METRICS
        return prometheus_text(everything), PLAIN_TEXT

    def render_gzipped(self, is_openmetrics: bool) -> tuple[bytes, str]:
        """The same, gzipped."""
        page, content_type = self.render(is_openmetrics)
        return gzip.compress(page, compresslevel=1), content_type


def accepts_openmetrics(accept: str) -> bool:
    """Whether an Accept header names OpenMetrics, in a version from 1.0 on or without one."""
    for part in accept.split(","):
        kind, *options = (option.strip() for option in part.split(";"))
        versions = [option.removeprefix("version=") for option in options if option.startswith("version=")]
        if kind == "application/openmetrics-text" and (not versions or OPENMETRICS_VERSION.fullmatch(versions[0])):
            return True
    return False


def no_families(families: Families) -> Iterable[Family]:  # noqa: ARG001
    """No further families, the default before `add_families`."""
    return ()
