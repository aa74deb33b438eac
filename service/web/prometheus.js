// The text format of Prometheus, and rates and quantiles between two scrapes.
//
// Counters and histograms only grow. A rate is the difference of two scrapes over the time between them, and a quantile
// is computed from the differences of the buckets.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const ESCAPED = { "\\n": "\n", '\\"': '"', "\\\\": "\\" };

export class Scrape {
  constructor(text, at) {
    this.at = at; // milliseconds
    this.samples = text.split("\n").map((each) => SAMPLE.exec(each)).filter(Boolean).map(([, name, labels, value]) => ({
      name, labels: parseLabels(labels ?? ""), value: value === "+Inf" ? Infinity : Number(value),
    }));
  }

  find(name, wanted = {}) {
    return this.samples.filter((each) => each.name === name && Object.entries(wanted).every(([label, value]) => each.labels[label] === value));
  }

  total(name, wanted) {
    return this.find(name, wanted).reduce((sum, each) => sum + each.value, 0);
  }

  has(name) {
    return this.samples.some((each) => each.name === name);
  }

  // [upper bound, cumulative count] of a histogram.
  buckets(name, wanted) {
    const counts = new Map();
    for (const { labels, value } of this.find(`${name}_bucket`, wanted)) {
      const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
      counts.set(bound, (counts.get(bound) ?? 0) + value);
    }
    return [...counts].sort(([one], [other]) => one - other);
  }
}

function parseLabels(text) {
  return Object.fromEntries([...text.matchAll(LABEL)].map(([, name, value]) => [name, value.replace(/\\[n"\\]/g, (each) => ESCAPED[each])]));
}

// The increase per second between two scrapes.
export function rate(before, after, name, wanted) {
  const seconds = (after.at - before.at) / 1000;
  return seconds > 0 ? Math.max(0, after.total(name, wanted) - before.total(name, wanted)) / seconds : NaN;
}

// The quantile `share` of the values between two scrapes, by linear interpolation in a bucket; NaN without values.
export function quantile(before, after, name, share, wanted) {
  const earlier = new Map(before.buckets(name, wanted));
  const counts = after.buckets(name, wanted).map(([bound, count]) => [bound, count - (earlier.get(bound) ?? 0)]);
  const total = counts.at(-1)?.[1] ?? 0;
  if (!total) return NaN;
  let [lower, below] = [0, 0];
  for (const [bound, count] of counts) {
    if (count >= share * total) {
      if (bound === Infinity) return lower;
      return count === below ? bound : lower + ((bound - lower) * (share * total - below)) / (count - below);
    }
    [lower, below] = [bound, count];
  }
  return NaN;
}
