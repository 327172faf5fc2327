// The curves of a run as they are known so far, and lines made of them.

export class Curves {
  constructor() {
    this.steps = { width: 1, step: [], time_s: [], columns: {} };
    this.warmup = { width: 1, step: [], time_s: [], columns: {} };
    this.evaluations = {};
  }

  /** Take news: they replace the steps from `news.from` on. */
  take(news) {
    if (!news.steps) return;
    this.evaluations = news.evaluations;
    this.warmup = news.warmup;
    const kept = this.steps.step.findIndex((step) => step >= news.from);
    const length = kept < 0 ? this.steps.step.length : kept;
    const next = { width: news.steps.width };
    const join = (held, fresh) => [...(held ?? []).slice(0, length), ...(fresh ?? [])];
    next.step = join(this.steps.step, news.steps.step);
    next.time_s = join(this.steps.time_s, news.steps.time_s);
    next.columns = {};
    const names = new Set([...Object.keys(this.steps.columns), ...Object.keys(news.steps.columns)]);
    for (const name of names) next.columns[name] = this.joined(name, length, news.steps);
    this.steps = next;
  }

  joined(name, length, fresh) {
    const blank = (count) => new Array(count).fill(null);
    const held = this.steps.columns[name] ?? {};
    const found = fresh.columns[name] ?? {};
    const column = {};
    for (const part of ["mean", "low", "high"]) {
      if (part !== "mean" && fresh.width === 1) continue;
      column[part] = [
        ...(held[part] ?? held.mean ?? blank(length)).slice(0, length),
        ...(found[part] ?? found.mean ?? blank(fresh.step.length)),
      ];
    }
    return column;
  }

  /** Return the last value of a quantity in a table, or null. */
  last(name, table = this.steps) {
    return table.columns[name]?.mean.findLast((value) => value !== null) ?? null;
  }

  /** Return the x axis of a table: steps, or seconds since the first step. */
  axis(table, by) {
    if (by === "step") return table.step;
    const begin = (table === this.warmup ? null : this.steps.time_s[0]) ?? table.time_s[0] ?? 0;
    return table.time_s.map((time) => Math.max(0, time - begin));
  }

  /** Return the names and labels of a chart's curves; of those that a prefix finds, the first eight. */
  labels({ curves, prefix }) {
    const found = prefix ? Object.keys(this.steps.columns).filter((name) => name.startsWith(prefix)).sort().slice(0, 8) : [];
    return [...Object.entries(curves), ...found.map((name) => [name, name.slice(prefix.length)])];
  }

  /** Return the line of a quantity in a chart, or null if no row has it. */
  line(name, label, by, { warmup } = {}) {
    const table = warmup ? this.warmup : this.steps;
    const column = table.columns[name];
    if (!column || column.mean.every((value) => value === null)) return null;
    const axis = this.axis(table, by);
    if (!warmup) return { label, x: axis, y: column.mean, low: column.low, high: column.high };
    const places = [...column.mean.keys()].filter((place) => column.mean[place] !== null); // held-out values are seldom
    const there = (values) => places.map((place) => values[place]);
    return { label, x: there(axis), y: there(column.mean), low: column.low && there(column.low), high: column.high && there(column.high) };
  }

  /** Return the scores of each data set as charts. */
  evaluationCharts(by) {
    return Object.entries(this.evaluations).map(([name, table]) => ({
      title: name === "held-out" ? "Held-out evaluation" : `Evaluation: ${name}`,
      unit: "mean reward; pass@k: fraction solved",
      lines: Object.entries(table.columns).map(([score, column]) =>
        ({ label: score, x: this.axis(table, by), y: column.mean, points: true })),
    }));
  }
}

/** Return values smoothed by an exponential mean whose weights sum to one at each point. */
export function smoothed(values, weight) {
  let sum = 0;
  let norm = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}
