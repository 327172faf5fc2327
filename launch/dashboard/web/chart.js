// One chart: uPlot with a legend that tells the values at the cursor, and keys that move it.

import { make } from "./dom.js";
import { shortDuration, value } from "./format.js";
import { smoothed } from "./curves.js";

const HEIGHT = 168;
export const COLOURS = 6;
const DASHES = [[], [6, 3], [2, 3], [9, 3, 2, 3], [12, 4], [1, 2]];
const WIDE = 30;
const SPARSE = 40; // points up to which each is marked
const DASHED = 60; // points up to which lines are told apart by dashes, too: a dense line would become a smear

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const channels = (colour) => [1, 3, 5].map((place) => parseInt(colour.slice(place, place + 2), 16));
const translucent = (colour, alpha) => colour + Math.round(alpha * 255).toString(16).padStart(2, "0");

export class Chart {
  /** Make an empty chart; charts of one `group` share their cursor. With `shades` its lines are stacked. */
  constructor(title, unit, { log = false, group = "", shades = [] } = {}) {
    this.title = title;
    this.shades = shades;
    this.log = log;
    this.group = group;
    this.legend = make("ul", { class: "legend" });
    this.plot = make("div", { class: "plot" });
    const head = make("figcaption", {}, make("h3", {}, title), unit ? make("span", { class: "unit" }, unit) : null);
    this.element = make("figure", {
      class: "chart", tabindex: "0", onkeydown: (event) => this.move(event), onblur: () => this.leave(),
    }, head, this.plot, this.legend);
    this.watcher = new ResizeObserver(() => this.resize());
    this.watcher.observe(this.plot);
  }

  /** Draw lines over steps or seconds. A chart without any line is hidden. */
  draw(lines, by, { smoothing = 0 } = {}) {
    this.element.hidden = lines.length === 0;
    this.lines = lines;
    this.by = by;
    this.smoothing = smoothing;
    if (!lines.length) return;
    const { data, series, bands } = this.shades.length ? this.stacked() : this.tables();
    const shape = JSON.stringify([by, series.map((one) => [one.label, one.dash, Boolean(one.points?.show)]), bands.length]);
    if (this.uplot && shape === this.shape) this.uplot.setData(data);
    else this.build(data, series, bands);
    this.shape = shape;
    this.label();
  }

  tables() {
    const series = [{}];
    const bands = [];
    const tables = [];
    for (const [index, line] of this.lines.entries()) {
      const colour = line.bound ? style("--muted") : style(`--line-${(line.colour ?? index) % COLOURS}`);
      const base = { label: line.label, stroke: colour, width: line.bound ? 1 : 1.75, spanGaps: true, line };
      const sparse = line.x.length <= DASHED;
      const dash = line.bound ? [3, 4] : DASHES[sparse ? (line.colour ?? index) % DASHES.length : 0];
      const points = { show: Boolean(line.points) && line.y.length <= SPARSE, size: 5, fill: colour };
      const columns = [line.x, this.smoothing && !line.bound && !line.points ? smoothed(line.y, this.smoothing) : line.y];
      series.push({ ...base, dash, points });
      const band = line.low && this.lines.filter((one) => !one.bound).length === 1;
      if (band) {
        const hidden = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
        columns.push(line.high, line.low);
        series.push({ ...hidden, label: "high" }, { ...hidden, label: "low" });
        bands.push({ series: [series.length - 2, series.length - 1], fill: translucent(colour, 0.16) });
      } else if (this.smoothing && !line.bound && !line.points) {
        columns.push(line.y);
        series.push({ stroke: translucent(colour, 0.25), width: 1, points: { show: false }, spanGaps: true, label: "raw" });
      }
      tables.push(columns);
    }
    return { data: tables.length === 1 ? tables[0] : uPlot.join(tables), series, bands };
  }

  /** Return each line as the area between it and those below: the sums are drawn from the largest on. */
  stacked() {
    let sums = this.lines[0].x.map(() => 0);
    const areas = this.lines.map((line, index) => {
      sums = sums.map((sum, place) => sum + (line.y[place] ?? 0));
      const fill = shaded(this.shades[index]);
      return { column: sums, series: { label: line.label, stroke: fill, fill, width: 1, points: { show: false }, line } };
    }).reverse();
    return { data: [this.lines[0].x, ...areas.map((area) => area.column)], series: [{}, ...areas.map((area) => area.series)], bands: [] };
  }

  build(data, series, bands) {
    this.uplot?.destroy();
    const text = style("--muted");
    const grid = { stroke: style("--grid"), width: 1 };
    const axis = { stroke: text, grid, ticks: { show: false }, font: `11px ${style("--font")}`, gap: 4 };
    const known = this.lines.flatMap((line) => line.y.filter((number) => number !== null));
    const [low, high] = known.reduce(([least, most], one) => [Math.min(least, one), Math.max(most, one)], [Infinity, -Infinity]);
    const wide = this.log && low > 0 && high / low > WIDE; // a logarithmic axis ends at powers of ten
    const options = {
      width: this.plot.clientWidth || 300, height: HEIGHT, series, bands, legend: { show: false },
      padding: [8, 8, 0, 0],
      scales: { x: { time: false }, y: this.shades.length ? { range: [0, 1] } : wide ? { distr: 3 } : {} },
      axes: [
        { ...axis, size: 24, space: 60, values: (_, ticks) => ticks.map((tick) => (this.by === "time" ? shortDuration(tick) : value(tick))) },
        { ...axis, size: 50, space: 28, values: (_, ticks, __, ___, step) => ticks.map((tick) => tickText(tick, step)) },
      ],
      cursor: { sync: this.group ? { key: this.group } : undefined, points: { size: 6 }, drag: { x: true, y: false } },
      hooks: { setCursor: [() => this.label()] },
    };
    this.uplot = new uPlot(options, data, this.plot);
  }

  /** Tell in the legend the values at the cursor, or the last ones. */
  label() {
    if (!this.uplot) return;
    const at = this.uplot.cursor.idx;
    const items = [];
    const words = [];
    for (const [number, series] of this.uplot.series.entries()) {
      if (!series.line) continue;
      const column = this.shades.length ? series.line.y : this.uplot.data[number];
      const found = at === null || at === undefined ? column.findLast((one) => one !== null && one !== undefined) : nearest(column, at);
      if (!series.line.bound) words.push(`${series.label} ${value(found)}`);
      items.push(make("li", {}, swatch(series), make("span", { class: "label" }, series.label), make("b", {}, value(found))));
    }
    if (this.shades.length) for (const list of [items, words]) list.reverse();
    this.legend.replaceChildren(...items);
    const x = at === null || at === undefined ? this.uplot.data[0].at(-1) : this.uplot.data[0][at];
    const where = this.by === "time" ? `after ${shortDuration(x ?? 0)}` : `at step ${x}`;
    this.element.setAttribute("aria-label", `${this.title} ${where}: ${words.join(", ")}. Arrow keys move along the curve.`);
  }

  move(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined || !this.uplot) return;
    event.preventDefault();
    const x = this.uplot.data[0];
    const at = Math.min(x.length - 1, Math.max(0, (this.uplot.cursor.idx ?? x.length - 1) + step));
    const y = this.uplot.data[1][at] ?? 0;
    this.uplot.setCursor({ left: this.uplot.valToPos(x[at], "x"), top: this.uplot.valToPos(y, "y") }, true, true);
  }

  leave() {
    this.uplot?.setCursor({ left: -10, top: -10 }, true, true);
  }

  resize() {
    const width = this.plot.clientWidth;
    if (this.uplot && width && width !== this.uplot.width) this.uplot.setSize({ width, height: HEIGHT });
  }

  /** Draw anew in the colours of now. */
  recolour() {
    this.shape = "";
    if (this.lines) this.draw(this.lines, this.by, { smoothing: this.smoothing });
  }

  close() {
    this.watcher.disconnect();
    this.uplot?.destroy();
  }
}

/** Return the colour of a shade: from that of the card to one colour below 0, to another above. */
function shaded(shade) {
  const [from, to] = [channels(style("--edge")), channels(style(shade < 0 ? "--line-1" : "--line-0"))];
  const mixed = from.map((low, place) => Math.round(low + (to[place] - low) * Math.abs(shade)));
  return `rgb(${mixed.join(" ")})`;
}

/** Return the text at a tick, with as many digits as tell it from the next one. */
function tickText(tick, step) {
  if (tick === null) return null;
  const digits = [0, 1, 2, 3, 4, 5].find((count) => Math.abs(step * 10 ** count - Math.round(step * 10 ** count)) < 1e-6);
  return Math.abs(tick) >= 1e4 || !step || digits === undefined ? value(tick) : tick.toFixed(digits);
}

/** Return the value at a place, or the nearest one before it. */
function nearest(column, at) {
  for (let place = at; place >= 0; place -= 1) {
    if (column[place] !== null && column[place] !== undefined) return column[place];
  }
  return null;
}

function swatch(series) {
  const colour = typeof series.stroke === "function" ? series.stroke() : series.stroke;
  const line = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  line.setAttribute("viewBox", "0 0 18 4");
  line.setAttribute("class", "swatch");
  line.setAttribute("aria-hidden", "true");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "line");
  for (const [name, number] of Object.entries({ x1: 0, y1: 2, x2: 18, y2: 2 })) path.setAttribute(name, number);
  path.setAttribute("stroke", colour);
  path.setAttribute("stroke-width", series.fill ? "4" : "2");
  path.setAttribute("stroke-dasharray", (series.dash ?? []).join(" "));
  line.append(path);
  return line;
}
