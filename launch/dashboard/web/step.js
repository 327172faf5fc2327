// One step of a run: all its figures, and the trajectories that it trained on.

import { make } from "./dom.js";
import { moment, value } from "./format.js";
import { ask, runPath } from "./source.js";

export class Step {
  constructor(run, content, connection, [step]) {
    this.run = run;
    this.step = Number(step);
    this.content = content;
    connection(true);
  }

  async open() {
    document.title = `Step ${this.step} of ${this.run} · Sluice`;
    const figures = await ask(`${runPath(this.run)}/steps/${this.step}`);
    if (this.ended) return;
    const place = `#/runs/${encodeURIComponent(this.run)}`;
    const names = Object.keys(figures).filter((name) => name.includes("/") && typeof figures[name] === "number").sort();
    const trained = make("ul", { class: "trained" }, make("li", {}, "Reading …"));
    this.content.replaceChildren(
      make("div", { class: "section-head" }, make("h1", {}, `Step ${this.step}`), make("nav", { class: "controls", "aria-label": "Steps" },
        this.step > 1 ? make("a", { href: `${place}/steps/${this.step - 1}` }, "step before") : null,
        make("a", { href: `${place}/steps/${this.step + 1}` }, "step after"))),
      make("p", { class: "hint" }, `Trained ${moment(1000 * figures.time_s)}.`),
      make("dl", { class: "facts" }, names.map((name) => make("div", {}, make("dt", {}, name), make("dd", {}, value(figures[name]))))),
      make("section", { "aria-label": "Trajectories" }, make("h2", {}, "Trajectories that it trained on"), trained));
    try {
      const { trajectories } = await ask(`${runPath(this.run)}/trajectories?step=${this.step}`);
      trained.replaceChildren(...trajectories.map(({ id, preview }) =>
        make("li", {}, make("a", { href: `${place}/trajectories/${encodeURIComponent(id)}` }, id), ` ${preview.trim().slice(0, 80)}`)));
      if (!trajectories.length) trained.replaceChildren(make("li", {}, "None is in store any more."));
    } catch (error) {
      trained.replaceChildren(make("li", {}, error.message));
    }
  }

  async go([step]) {
    this.step = Number(step);
    await this.open();
  }

  recolour() {}

  end() {
    this.ended = true;
  }
}
