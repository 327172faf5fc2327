// The text of a turn, token by token: coloured by log-prob, version or importance ratio, told by the mouse or the arrow keys.

import { choice, make } from "./dom.js";
import { value } from "./format.js";

const CLASSES = [[0.9, "p ≥ 0.9"], [0.5, "0.5 to 0.9"], [0.1, "0.1 to 0.5"], [0.01, "0.01 to 0.1"], [0, "below 0.01"]];
const RATIOS = [[2, "above 2"], [1.25, "1.25 to 2"], [0.8, "0.8 to 1.25"], [0.5, "0.5 to 0.8"], [0, "below 0.5"]];
const COLOURS = 6;
const NO_RATIOS = "The learner recorded no log-probs of this trajectory, so the ratio of each token is not known. It records those of a few " +
  "trajectories of some steps (learner.recorded_logprobs): the filter “with a ratio of each token” lists them.";

export class Tokens {
  constructor(parts, learner) {
    this.parts = parts;
    this.learner = learner;
    this.mode = "logprob";
    this.versions = [...new Set(parts.flatMap((part) => part.versions ?? []))].filter((one) => one >= 0).sort((a, b) => a - b);
    this.key = make("ul", { class: "key" });
    this.explanation = make("p", { class: "note", role: "status" });
    this.told = make("p", { class: "told", role: "status" }, "Point at a token, or move with the arrow keys.");
    this.blocks = make("div", { class: "turns" });
    this.element = make("section", { "aria-label": "Tokens" },
      make("div", { class: "section-head" },
        choice("Colour", [["logprob", "log-prob"], ["version", "version"], ["ratio", "importance ratio"], ["plain", "plain"]], this.mode, (mode) => { this.mode = mode; this.colour(); }),
        this.key),
      this.explanation, this.told, this.blocks);
    this.blocks.append(...parts.map((part) => (part.turn === null ? context(part) : this.turn(part))));
    this.colour();
  }

  turn(part) {
    const text = make("pre", { class: "tokens", tabindex: "0", role: "group", "aria-label": `Turn ${part.turn}, ${part.texts.length} tokens` });
    text.append(...part.texts.map((one, place) => {
      const token = make("span", { class: part.mask[place] ? "" : "unmasked" }, visible(one));
      token.dataset.place = place;
      return token;
    }));
    text.addEventListener("mouseover", (event) => this.choose(part, text, event.target));
    text.addEventListener("keydown", (event) => this.move(event, part, text));
    part.element = text;
    const details = [`tokens ${part.start} to ${part.stop}`, `ended by ${part.finish_reason}`, `temperature ${value(part.temperature)}`];
    if (part.reward !== null) details.push(`reward ${value(part.reward)}`);
    return make("article", { class: "turn" }, make("h3", {}, `Turn ${part.turn}`, make("small", {}, ` ${details.join(" · ")}`)), text);
  }

  colour() {
    for (const part of this.parts) {
      for (const token of part.element?.children ?? []) {
        const place = Number(token.dataset.place);
        token.dataset.shade = this.shade(part, place);
      }
    }
    this.blocks.dataset.mode = this.mode;
    this.key.replaceChildren(...this.explained());
    this.explanation.hidden = this.mode !== "ratio";
    this.explanation.textContent = this.mode !== "ratio" ? "" : this.learner === null ? NO_RATIOS :
      `Importance ratio: the learner's policy v${this.learner.version}, before step ${this.learner.step}, over the policy that sampled the token.`;
  }

  shade(part, place) {
    if (this.mode === "plain" || part.versions[place] < 0) return "";
    if (this.mode === "version") return `v${this.versions.indexOf(part.versions[place]) % COLOURS}`;
    if (this.mode === "ratio") {
      const ratio = part.ratios?.[place] ?? null;
      return ratio === null ? "" : `r${RATIOS.findIndex(([least]) => ratio >= least)}`;
    }
    const p = Math.exp(part.logprobs[place]);
    return `p${CLASSES.findIndex(([least]) => p >= least)}`;
  }

  explained() {
    const item = (shade, text) => make("li", {}, make("span", { class: "tokens sample", "data-shade": shade, "aria-hidden": "true" }, "ab"), ` ${text}`);
    const unmasked = make("li", {}, make("span", { class: "unmasked", "aria-hidden": "true" }, "ab"), " not trained");
    if (this.mode === "plain") return [unmasked];
    if (this.mode === "version") return [...this.versions.map((version, n) => item(`v${n % COLOURS}`, `v${version}`)), unmasked];
    if (this.mode === "ratio") return [...(this.learner === null ? [] : RATIOS.map(([, text], n) => item(`r${n}`, text))), unmasked];
    return [...CLASSES.map(([, text], n) => item(`p${n}`, text)), unmasked];
  }

  move(event, part, text) {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const now = text.querySelector(".chosen");
    const place = now ? Number(now.dataset.place) + step : 0;
    this.choose(part, text, text.children[Math.min(part.texts.length - 1, Math.max(0, place))]);
  }

  choose(part, text, token) {
    if (token?.dataset?.place === undefined) return;
    this.blocks.querySelector(".chosen")?.classList.remove("chosen");
    token.classList.add("chosen");
    const place = Number(token.dataset.place);
    const logprob = part.logprobs[place];
    const ratio = part.ratios?.[place] ?? null;
    this.told.textContent = part.versions[place] < 0 ? `Token ${part.start + place}: nobody sampled it.` :
      `Token ${part.start + place} “${part.texts[place]}”: log-prob ${value(logprob)} (p ${value(Math.exp(logprob))}), ` +
      `version ${part.versions[place]}, ${part.mask[place] ? "trained" : "not trained"}${ratio === null ? "" : `, importance ratio ${value(ratio)}`}`;
  }
}

function context(part) {
  return make("article", { class: "context" }, make("h3", {}, "Context", make("small", {}, ` tokens ${part.start} to ${part.stop} · not sampled, not trained`)),
    make("pre", { tabindex: "0", "aria-label": "Context" }, visible(part.text)));
}

/** Show what cannot be seen: control characters other than line breaks and tabs. */
export const visible = (text) => text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f]/g, "�");
