// The last minutes as lanes: what the learner did, how busy each actor's engines were, and changes of version.

import { choice, make, makeSvg } from "./dom.js";
import { ago, duration, shortDuration, value } from "./format.js";
import { ask, runPath } from "./source.js";

const PERIOD_MS = 3000;
const WINDOWS = [[60, "1 min"], [300, "5 min"], [1800, "30 min"]];
const KINDS = [["trains", "trains"], ["waits", "waits for the batch"], ["publishes", "waits for publication"]];
const WIDTH = 1000; // units of a lane's picture, stretched to its place
const MOST_ACTORS = 64;

export class Timeline {
  constructor(run, content, connection) {
    this.run = run;
    this.connection = connection;
    this.seconds = 60;
    this.lanes = make("div", { class: "lanes" });
    const key = [...KINDS, ["busy", "engines busy, by share"], ["mark", "new version (above)"], ["pause", "pause for weights (below)"]];
    content.replaceChildren(
      make("div", { class: "section-head" }, make("h1", {}, "Timeline"), make("div", { class: "controls" },
        choice("Length", WINDOWS, this.seconds, (seconds) => { this.seconds = seconds; this.refresh(); }))),
      make("ul", { class: "key" }, key.map(([kind, text]) => make("li", {}, make("span", { class: `block ${kind}`, "aria-hidden": "true" }), ` ${text}`))),
      this.lanes);
  }

  async open() {
    document.title = `Timeline of ${this.run} · Sluice`;
    await this.refresh();
    if (this.ended) return; // the reader left before the answer: nothing would clear the timer
    this.timer = setInterval(() => { if (!document.hidden) this.refresh(); }, PERIOD_MS);
  }

  async refresh() {
    try {
      const found = await ask(`${runPath(this.run)}/timeline?seconds=${this.seconds}`);
      if (this.ended) return;
      this.draw(found);
      this.connection(true);
    } catch {
      if (!this.ended) this.connection(false); // the next look shows it again
    }
  }

  draw(found) {
    if (found.end_s === null) {
      this.lanes.replaceChildren(make("p", { class: "empty" }, "Nothing is recorded here: the timeline is drawn on the host of the run's storage."));
      return;
    }
    const starts = [found.learner, ...found.actors.map((actor) => actor.spans)].flatMap((spans) => spans.slice(0, 1).map(([start]) => start));
    this.begin = Math.max(found.begin_s, Math.min(...starts, found.end_s - 1));
    this.length = found.end_s - this.begin;
    const actors = found.actors.slice(0, MOST_ACTORS);
    this.lanes.replaceChildren(this.learner(found), ...actors.map((actor) => this.actor(actor)), this.axis(found.end_s),
      ...found.actors.length > actors.length ? [make("p", { class: "hint" }, `and ${found.actors.length - actors.length} more actors`)] : []);
  }

  learner({ learner, versions }) {
    const parts = KINDS.map(([kind, text]) => [text, learner.filter((span) => span[2] === kind).reduce((sum, span) => sum + span[1] - span[0], 0)]);
    const all = parts.reduce((sum, [, seconds]) => sum + seconds, 0);
    const words = all ? parts.map(([text, seconds]) => `${text} ${value(Math.round(100 * seconds / all))} %`).join(", ") : "no step in this time";
    const shapes = learner.map(([start, stop, kind, step]) => this.block(start, stop, kind, `step ${step}: ${kind} ${duration(stop - start)}`));
    const marks = versions.map(([time, version]) => this.mark(time, "mark", `version ${version}`));
    return this.lane("learner", words, [...shapes, ...marks]);
  }

  actor({ source, spans, versions, pauses }) {
    const length = spans.reduce((sum, [start, stop]) => sum + stop - start, 0);
    const busy = spans.reduce((sum, [start, stop, share]) => sum + share * (stop - start), 0);
    const paused = pauses.reduce((sum, [, seconds]) => sum + seconds, 0);
    const last = versions.at(-1)?.[1];
    const words = [`engines busy ${length ? Math.round(100 * busy / length) : 0} %`, `${versions.length} new versions seen`,
      `paused ${duration(paused)} in all`, ...last === undefined ? [] : [`now v${last}`]].join(", ");
    const shapes = spans.map(([start, stop, share]) => {
      const block = this.block(start, stop, "busy", `engines busy ${Math.round(100 * share)} %`);
      block.setAttribute("fill-opacity", share);
      return block;
    });
    const marks = [...versions.map(([time, version]) => this.mark(time, "mark", `version ${version}`)),
      ...pauses.map(([time, seconds]) => this.mark(time, "pause", `pause of ${duration(seconds)}`))];
    return this.lane(source, words, [...shapes, ...marks]);
  }

  lane(name, words, shapes) {
    const picture = makeSvg("svg", { viewBox: `0 0 ${WIDTH} 30`, preserveAspectRatio: "none", role: "img", "aria-label": `${name}: ${words}` }, shapes);
    return make("section", { class: "lane" }, make("h2", {}, name), make("small", {}, words), picture);
  }

  block(start, stop, kind, title) {
    const x = this.place(start);
    return makeSvg("rect", { x, y: 5, width: Math.max(0.4, this.place(stop) - x), height: 20, class: kind }, makeSvg("title", {}, title));
  }

  mark(time, kind, title) {
    return makeSvg("rect", { x: this.place(time) - 0.6, y: kind === "pause" ? 25 : 0, width: 1.2, height: 5, class: kind }, makeSvg("title", {}, title));
  }

  place(time) {
    return Math.max(0, WIDTH * (time - this.begin) / this.length);
  }

  axis(end) {
    const ticks = [1, 0.75, 0.5, 0.25, 0].map((part) => (part ? `−${shortDuration(Math.round(part * this.length))}` : `${new Date(1000 * end).toLocaleTimeString()}, ${ago(end)}`));
    return make("p", { class: "axis" }, ticks.map((text) => make("span", {}, text)));
  }

  recolour() {}

  end() {
    this.ended = true;
    clearInterval(this.timer);
  }
}
