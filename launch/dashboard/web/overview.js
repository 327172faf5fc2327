// The overview of one run: what waits for what, the flow, and the curves.

import { Chart } from "./chart.js";
import { changes } from "./changes.js";
import { Curves } from "./curves.js";
import { choice, make, show } from "./dom.js";
import { flowPicture } from "./flow.js";
import { ago, duration, moment, stageName, UNKNOWN, value } from "./format.js";
import { ask, listen, runPath } from "./source.js";

const SMOOTHINGS = [[0, "raw"], [0.7, "smooth"], [0.93, "smoother"]];

/** How a run that is over is shown, by its state. */
const ENDED = {
  finished: ["works", "done", "The run is complete"],
  stopped: ["silent", "stopped", "The run was stopped, and the command that started it takes it up again"],
  failed: ["trouble", "failed", "The run failed"],
  lost: ["trouble", "lost", "The run's processes were killed, or their host went, before they could say why"],
};

export class Overview {
  constructor(run, content, connection) {
    this.run = run;
    this.connection = connection;
    this.curves = new Curves();
    this.by = "step";
    this.smoothing = 0;
    this.charts = new Map();
    this.words = make("section", { class: "words", "aria-live": "polite", "aria-labelledby": "words-title" });
    this.alerts = make("section", { class: "words", "aria-label": "Alerts", hidden: true });
    this.facts = make("dl", { class: "facts" });
    this.changed = make("p", { class: "note", hidden: true });
    this.changes = make("section", { "aria-label": "Note and removal" });
    this.flow = make("section", { "aria-label": "Flow" });
    this.grid = make("div", { class: "charts" });
    this.note = make("p", { class: "note", role: "status", hidden: true });
    this.more = make("details", { class: "more", ontoggle: () => this.showMore() }, make("summary", {}, "All other metrics"));
    content.replaceChildren(
      make("h1", { class: "visually-hidden" }, `Run ${run}`), this.words, this.alerts, this.facts, this.changed, this.flow,
      make("section", { "aria-label": "Curves" },
        make("div", { class: "section-head" }, make("h2", {}, "Curves"), make("div", { class: "controls" },
          choice("Horizontal axis", [["step", "steps"], ["time", "time"]], this.by, (by) => { this.by = by; this.draw(); }),
          choice("Smoothing", SMOOTHINGS, 0, (weight) => { this.smoothing = weight; this.draw(); }))),
        this.note, this.grid, this.more), this.changes);
  }

  async open() {
    this.status = null;
    this.known = await ask(runPath(this.run));
    if (this.ended) return; // the reader left before the answer: nothing would close what is opened below
    this.changes.replaceChildren(changes(this.known));
    this.tell();
    this.close = listen(`${runPath(this.run)}/live`, {
      curves: (news) => this.takeCurves(news),
      status: (status) => { this.status = status; this.tell(); if (!status?.report) this.askFiles(); },
      alerts: (news) => this.warn(news.alerts),
      connection: (there) => this.connection(there),
    });
  }

  /** Ask again what the run's files say: how it ended, where nothing answers any more. */
  async askFiles() {
    const known = await ask(runPath(this.run));
    if (this.ended) return;
    this.known = known;
    this.tell();
  }

  takeCurves(news) {
    this.curves.take(news);
    this.note.hidden = news.read === 1 && !news.problem;
    this.note.textContent = news.problem && !this.curves.steps.step.length ? `No metrics: ${news.problem}` :
      `Drawn from a sample of the steps; ${Math.round(100 * news.read)} % of the metrics read.`;
    if (news.problem && this.curves.steps.step.length) this.note.hidden = true;
    if (news.steps) this.draw();
    this.tell();
  }

  // --- words ---

  tell() {
    const report = this.status?.report;
    document.title = `${this.run} · Sluice`;
    show(this.words, make("h2", { id: "words-title" }, "What waits for what"), this.sentences(report));
    show(this.facts, this.figures(report).map(([label, shown, more]) =>
      make("div", {}, make("dt", {}, label), make("dd", {}, shown, more ? make("small", {}, ` ${more}`) : null))));
    this.changed.hidden = this.known.changed.length === 0;
    this.changed.textContent = `Settings that changed at the last start: ${this.known.changed.join(", ")}.`;
    show(this.flow, this.status?.live ? flowPicture(this.status.flow) : "");
  }

  sentences(report) {
    if (this.status === null) return sentence("waits", "asks", "The run is asked how it is.");
    if (!report) return this.over();
    const found = [
      ...report.problems.map((text) => sentence("trouble", "problem", capital(text))),
      ...report.waits.map((text) => sentence(report.stage === "done" ? "works" : "waits", report.stage === "done" ? "done" : "waits", capital(text))),
    ];
    return found.length ? found : sentence("works", "works", "Nobody waits: every part has what it needs.");
  }

  /** Show what wants attention; it is no live region, since its numbers change with every step. */
  warn(alerts) {
    this.alerts.hidden = alerts.length === 0;
    show(this.alerts, alerts.map((text) => sentence("trouble", "alert", capital(text))));
  }

  over() {
    const { state, problem, last_time_s: last, here } = this.known;
    const when = last ? ` Its last metrics came ${ago(last)}.` : "";
    const why = this.status.why && state !== "finished" ? ` (${this.status.why})` : "";
    const [look, word, text] = ENDED[state] ?? ["silent", "silent", here ? "How the run is now is not known" : "Nothing is known of this run"];
    return sentence(look, word, `${text}${problem ? `: ${problem}` : ""}${why}.${when}`);
  }

  figures(report) {
    const last = (name) => value(this.curves.last(name));
    const [heldOut] = Object.values(this.curves.evaluations);
    const solved = heldOut?.columns.sampled?.mean.findLast((one) => one !== null);
    const steps = report?.versions.steps ?? this.known.steps;
    const { warmup } = this.curves;
    const supervised = !this.curves.steps.step.length && warmup.step.length > 0;
    const step = supervised ? warmup.step.at(-1) : report?.versions.trained_step ?? this.curves.steps.step.at(-1);
    const staleness = report?.staleness.bound ?? this.known.max_staleness;
    const times = (supervised ? warmup : this.curves.steps).time_s;
    const ofStage = supervised ? [
      ["loss", value(this.curves.last("train/loss", warmup))],
      ["held-out loss", value(this.curves.last("heldout/loss_nats", warmup))],
    ] : [
      ["reward", last("reward/mean")],
      ["held-out", value(solved), this.known.target_accuracy ? `target ${value(this.known.target_accuracy)}` : ""],
      ["staleness", last("staleness/max_versions"), staleness == null ? "" : `of ${staleness} allowed`],
    ];
    return [
      ["stage", stageName(report?.stage ?? this.known.stage)],
      ["step", step ? make("a", { href: `#/runs/${encodeURIComponent(this.run)}/steps/${step}` }, value(step)) : value(step), steps ? `of ${value(steps)}` : ""],
      ["policy", report?.versions.published == null ? versionOf(this.known) : `v${report.versions.published}`],
      ...ofStage,
      ["training", duration(times.length > 1 ? times.at(-1) - times[0] : null)],
      ["started", moment(this.known.started), this.known.host ? `on ${this.known.host}` : ""],
      ...(this.known.origin ? [["began with", this.known.origin]] : []),
    ];
  }

  // --- curves ---

  draw() {
    const [reward, ...others] = this.known.charts.map((chart) => this.chartOf(chart));
    const evaluations = this.curves.evaluationCharts(this.by);
    const target = this.known.target_accuracy;
    for (const chart of evaluations) {
      if (chart.title.startsWith("Held-out") && target) chart.lines.push(bound("target", chart.lines[0].x, target));
    }
    for (const chart of [reward, ...evaluations, ...others]) this.drawChart(chart);
  }

  chartOf(chart) {
    const lines = this.curves.labels(chart).map(([name, label]) => this.curves.line(name, label, this.by, chart)).filter(Boolean);
    const allowed = this.known.max_staleness;
    if (chart.title === "Staleness" && lines.length && allowed != null) lines.push(bound("allowed", lines[0].x, allowed));
    return { ...chart, lines };
  }

  drawChart({ title, unit, log, shades, warmup, lines }) {
    if (!this.charts.has(title)) {
      this.charts.set(title, new Chart(title, unit, { log, shades, group: warmup ? "supervised" : "overview" }));
      this.place();
    }
    this.charts.get(title).draw(lines, this.by, { smoothing: this.smoothing });
  }

  /** Put the charts in their order: evaluations follow the reward. */
  place() {
    const order = ["Reward", ...[...this.charts.keys()].filter((title) => title.includes("valuation")),
      ...this.known.charts.slice(1).map((chart) => chart.title)];
    const sorted = [...this.charts].sort(([a], [b]) => rank(order, a) - rank(order, b));
    this.grid.replaceChildren(...sorted.map(([, chart]) => chart.element));
  }

  async showMore() {
    if (!this.more.open || this.others) return;
    const all = new Curves();
    this.others = [];
    const grid = make("div", { class: "charts" });
    this.more.append(grid);
    all.take({ from: 0, ...await ask(`${runPath(this.run)}/curves?all=1`) });
    if (this.ended) return;
    const drawn = new Set(this.known.charts.flatMap((chart) => all.labels(chart).map(([name]) => name)));
    for (const name of Object.keys(all.steps.columns).sort()) {
      const line = drawn.has(name) ? null : all.line(name, name.split("/").slice(1).join("/"), this.by);
      if (!line) continue;
      const chart = new Chart(name, "", { group: "overview" });
      grid.append(chart.element);
      chart.draw([line], this.by, {});
      this.others.push(chart);
    }
  }

  recolour() {
    for (const chart of [...this.charts.values(), ...(this.others ?? [])]) chart.recolour();
  }

  end() {
    this.ended = true;
    this.close?.();
    for (const chart of [...this.charts.values(), ...(this.others ?? [])]) chart.close();
  }
}

const rank = (order, title) => (order.includes(title) ? order.indexOf(title) : order.length);
const bound = (label, x, y) => ({ label, x: [x[0], x.at(-1)], y: [y, y], bound: true });
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
const versionOf = (known) => (known.policy_version == null ? UNKNOWN : `v${known.policy_version}`);

function sentence(kind, word, text) {
  return make("p", { class: `sentence ${kind}` }, make("span", { class: `condition ${kind}` }, word), make("span", {}, text));
}
