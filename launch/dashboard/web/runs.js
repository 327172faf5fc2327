// The list of runs, and the curves of several of them in the same charts.

import { Chart, COLOURS } from "./chart.js";
import { Curves } from "./curves.js";
import { choice, make } from "./dom.js";
import { ago, moment, UNKNOWN, value } from "./format.js";
import { ask, runPath } from "./source.js";

/** Columns of the list: title, and what it is sorted by, in ascending order of texts and descending of numbers. */
const COLUMNS = [
  ["run", (run) => run.run], ["state", (run) => run.state ?? ""], ["step", (run) => run.step], ["reward", (run) => run.reward],
  ["held-out", (run) => run.heldout], ["started", (run) => run.started && Date.parse(run.started)],
  ["last metrics", (run) => run.last_time_s], ["host", (run) => run.host ?? ""],
];

export class Runs {
  constructor(content, chosen) {
    this.chosen = chosen;
    this.sorted = "";
    this.by = "step";
    this.charts = new Map();
    this.curves = new Map();
    this.list = make("div", { class: "table-frame" });
    this.grid = make("div", { class: "charts" });
    this.comparison = make("section", { "aria-label": "Comparison", hidden: true },
      make("div", { class: "section-head" }, make("h2", {}, "Comparison"), make("div", { class: "controls" },
        choice("Horizontal axis", [["step", "steps"], ["time", "time"]], this.by, (by) => { this.by = by; this.draw(); }))),
      this.grid);
    this.hint = make("p", { class: "hint" }, `Choose up to ${COLOURS} runs to compare their curves.`);
    this.search = make("input", { type: "search", placeholder: "name or host", "aria-label": "Find runs", oninput: () => this.showList() });
    content.replaceChildren(
      make("div", { class: "section-head" }, make("h1", {}, "Runs"), make("div", { class: "controls" }, this.search)),
      this.hint, this.list, this.comparison);
  }

  async open() {
    const found = await ask("/api/runs");
    if (this.ended) return;
    this.runs = found.runs;
    this.directory = found.directory;
    this.showList();
    await this.compare();
  }

  showList() {
    const words = this.search.value.toLowerCase();
    const shown = this.runs.filter((run) => `${run.run} ${run.host ?? ""} ${run.state ?? ""} ${run.note}`.toLowerCase().includes(words));
    if (!this.runs.length) {
      this.list.replaceChildren(make("p", { class: "empty" }, `There is no run in ${this.directory} yet: `, make("code", {}, "launch local"), " starts one."));
      return;
    }
    const by = COLUMNS.find(([title]) => title === this.sorted)?.[1];
    if (by) shown.sort((a, b) => compared(by(a), by(b)));
    this.list.replaceChildren(make("table", { class: "runs" },
      make("thead", {}, make("tr", {}, make("th", { scope: "col" }, make("span", { class: "visually-hidden" }, "compare")),
        COLUMNS.map(([title]) => make("th", { scope: "col", "aria-sort": title === this.sorted ? "other" : "none" },
          make("button", { type: "button", class: "sorts", onclick: () => this.sort(title) }, title))))),
      make("tbody", {}, shown.map((run) => this.row(run)))));
  }

  /** Sort the list by a column, or as it came where it is sorted by that already. */
  sort(title) {
    this.sorted = this.sorted === title ? "" : title;
    this.showList();
    [...this.list.querySelectorAll("button.sorts")].find((one) => one.textContent === title)?.focus();
  }

  row(run) {
    const place = this.chosen.indexOf(run.run);
    const box = make("input", { type: "checkbox", "aria-label": `Compare ${run.run}`, onchange: () => this.choose(run.run) });
    box.checked = place >= 0;
    const swatch = make("span", { class: "chip" });
    if (place >= 0) swatch.style.background = `var(--line-${place})`;
    const cell = (label, ...content) => make("td", { "data-label": label }, ...content);
    return make("tr", {}, make("td", { class: "pick" }, box, swatch),
      make("th", { scope: "row" }, make("a", { href: `#/runs/${run.run}` }, run.run),
        run.origin ? make("small", {}, ` from ${run.origin}`) : null,
        run.note ? make("small", {}, ` ${run.note}`) : null),
      cell("state", run.state ?? UNKNOWN, run.problem ? make("small", {}, ` ${run.problem.slice(0, 120)}`) : null,
        run.waits_for ? make("small", {}, ` ${run.waits_for.slice(0, 120)}, since ${moment(1000 * run.waits_since)}`) : null),
      cell("step", run.step == null ? UNKNOWN : value(run.step), run.steps ? make("small", {}, ` of ${value(run.steps)}`) : null),
      cell("reward", value(run.reward)), cell("held-out", value(run.heldout)), cell("started", moment(run.started)),
      cell("last metrics", ago(run.last_time_s)), cell("host", run.host ?? UNKNOWN));
  }

  async choose(name) {
    const next = this.chosen.includes(name) ? this.chosen.filter((one) => one !== name) : [...this.chosen, name].slice(-COLOURS);
    this.chosen = next;
    history.replaceState(null, "", next.length ? `#/compare/${next.map(encodeURIComponent).join(",")}` : "#/");
    const place = document.activeElement?.getAttribute("aria-label");
    this.showList();
    if (place) this.list.querySelector(`[aria-label="${CSS.escape(place)}"]`)?.focus();
    await this.compare();
  }

  async compare() {
    for (const name of this.chosen) {
      if (this.curves.has(name)) continue;
      const [known, news] = await Promise.all([ask(runPath(name)), ask(`${runPath(name)}/curves`)]);
      if (this.ended) return;
      const curves = new Curves();
      curves.take({ from: 0, ...news });
      this.curves.set(name, curves);
      if (news.read < 1) this.hint.textContent = `${name} is long: its curves are drawn from a sample. Its overview reads all of it.`;
      this.definitions = known.charts;
    }
    this.draw();
  }

  draw() {
    this.comparison.hidden = this.chosen.length === 0;
    if (!this.chosen.length) return;
    const [reward, ...others] = this.definitions.filter((chart) => !chart.shades.length && !chart.prefix);
    const found = [...this.lines(reward), ...this.evaluations(), ...others.flatMap((chart) => this.lines(chart))];
    for (const { title, unit, log, lines } of found) {
      if (!this.charts.has(title)) {
        const chart = new Chart(title, unit, { log, group: "comparison" });
        this.charts.set(title, chart);
        this.grid.append(chart.element);
      }
      this.charts.get(title).draw(lines, this.by, {});
    }
    for (const [title, chart] of this.charts) if (!found.some((one) => one.title === title)) chart.draw([], this.by, {});
  }

  /** Return a chart's first curve of each run, of the supervised stage a chart of each curve: several of one run would not be told apart. */
  lines(chart) {
    const curves = Object.entries(chart.curves);
    return (chart.warmup ? curves : curves.slice(0, 1)).map(([name, label]) => {
      const lines = this.chosen.map((run, colour) => {
        const line = this.curves.get(run)?.line(name, run, this.by, chart);
        return line ? { ...line, colour } : null;
      });
      return { title: curves.length > 1 ? `${chart.title}, ${label}` : chart.title, unit: chart.unit, log: chart.log, lines: lines.filter(Boolean) };
    });
  }

  evaluations() {
    const charts = new Map();
    for (const [colour, run] of this.chosen.entries()) {
      for (const { title, unit, lines } of this.curves.get(run)?.evaluationCharts(this.by) ?? []) {
        if (!charts.has(title)) charts.set(title, { title, unit, lines: [] });
        if (lines.length) charts.get(title).lines.push({ ...lines[0], label: run, colour });
      }
    }
    return [...charts.values()];
  }

  recolour() {
    for (const chart of this.charts.values()) chart.recolour();
  }

  end() {
    this.ended = true;
    for (const chart of this.charts.values()) chart.close();
  }
}

/** Compare texts upwards and numbers downwards; what is missing comes last. */
function compared(a, b) {
  if (a == null || b == null || a === "" || b === "") return (a == null || a === "") - (b == null || b === "");
  return typeof a === "string" ? a.localeCompare(b) : b - a;
}
