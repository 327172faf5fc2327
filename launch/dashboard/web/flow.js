// The way from prompts to weights: one card a place, with its rates, its queue and what it waits for.

import { make } from "./dom.js";
import { value } from "./format.js";

const WORDS = { works: "works", waits: "waits", trouble: "trouble", silent: "silent" };
const MARKS = { works: "●", waits: "◐", trouble: "▲", silent: "○" };

/** Return the picture as an ordered list. */
export function flowPicture(places) {
  return make("ol", { class: "flow", "aria-label": "From prompts to weights" }, places.map(card));
}

function card(place) {
  return make("li", { class: `place ${place.condition}` },
    make("div", { class: "place-head" },
      make("h3", {}, place.name),
      make("span", { class: `condition ${place.condition}` },
        make("span", { "aria-hidden": "true" }, `${MARKS[place.condition]} `), WORDS[place.condition])),
    make("p", { class: "doing" }, place.doing),
    make("dl", { class: "figures" }, place.figures.map(([number, label]) =>
      make("div", {}, make("dt", {}, label), make("dd", {}, number)))),
    place.queue ? queue(place.queue) : null,
    place.out ? make("p", { class: "out" }, make("span", { "aria-hidden": "true" }, "→ "), place.out) : null);
}

function queue({ label, used, bound }) {
  const fraction = bound ? Math.min(1, used / bound) : 0;
  const bar = make("span", { class: `fill${fraction >= 1 ? " full" : ""}` });
  bar.style.width = `${100 * fraction}%`;
  return make("div", { class: "queue" },
    make("p", {}, make("b", {}, `${value(used)} of ${value(bound)}`), ` ${label}`),
    make("div", { class: "track", "aria-hidden": "true" }, bar));
}
