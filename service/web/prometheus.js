// The text format of Prometheus, and figures out of two looks at it.
//
// Knows no page.  The one idea: counters and histograms only grow, so what happened between two looks is the
// difference, and a percentile of these moments is read off the differences of the buckets.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const ESCAPED = { "\\n": "\n", '\\"': '"', "\\\\": "\\" };

export class Look {
  constructor(text, at) {
    this.at = at; // in milliseconds
    this.samples = text.split("\n").map((each) => SAMPLE.exec(each)).filter(Boolean).map(([, name, labels, value]) => ({
      name, labels: labelled(labels ?? ""), value: value === "+Inf" ? Infinity : Number(value),
    }));
  }

  of(name, wanted = {}) {
    return this.samples.filter((each) => each.name === name && Object.entries(wanted).every(([label, value]) => each.labels[label] === value));
  }

  total(name, wanted) {
    return this.of(name, wanted).reduce((sum, each) => sum + each.value, 0);
  }

  has(name) {
    return this.samples.some((each) => each.name === name);
  }

  // How many came to at most each bound.
  buckets(name, wanted) {
    const found = new Map();
    for (const { labels, value } of this.of(`${name}_bucket`, wanted)) {
      const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
      found.set(bound, (found.get(bound) ?? 0) + value);
    }
    return [...found].sort(([one], [other]) => one - other);
  }
}

function labelled(text) {
  return Object.fromEntries([...text.matchAll(LABEL)].map(([, name, value]) => [name, value.replace(/\\[n"\\]/g, (each) => ESCAPED[each])]));
}

// A second, between two looks.
export function rate(before, after, name, wanted) {
  const seconds = (after.at - before.at) / 1000;
  return seconds > 0 ? Math.max(0, after.total(name, wanted) - before.total(name, wanted)) / seconds : NaN;
}

// Below which a part `share` of what was seen between two looks lies; NaN if nothing was.  Within a bucket evenly.
export function quantile(before, after, name, share, wanted) {
  const earlier = new Map(before.buckets(name, wanted));
  const counts = after.buckets(name, wanted).map(([bound, count]) => [bound, count - (earlier.get(bound) ?? 0)]);
  const all = counts.at(-1)?.[1] ?? 0;
  if (!all) return NaN;
  let [least, below] = [0, 0];
  for (const [bound, count] of counts) {
    if (count >= share * all) {
      if (bound === Infinity) return least;
      return count === below ? bound : least + ((bound - least) * (share * all - below)) / (count - below);
    }
    [least, below] = [bound, count];
  }
  return NaN;
}
