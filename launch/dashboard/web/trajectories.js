// The trajectories of a run: a list with filters, and one of them with its tokens and siblings.

import { make, show } from "./dom.js";
import { UNKNOWN, value } from "./format.js";
import { ask, runPath } from "./source.js";
import { Tokens, visible } from "./tokens.js";

const ENDS = ["completed", "length", "turn_limit", "timeout", "environment_error", "tool_error", "reward_error", "engine_error", "cancelled"];
const TYPING_MS = 300;
const TRUSTED = ENDS.slice(0, 3);

export class Trajectories {
  constructor(run, content, connection, [chosen]) {
    this.run = run;
    this.chosen = chosen;
    connection(true);
    this.form = this.filters();
    this.found = make("p", { class: "hint", role: "status" }, "Reading …");
    this.list = make("ol", { class: "trajectories" });
    this.more = make("button", { type: "button", class: "plain", hidden: true, onclick: () => this.search(this.below) }, "Search older ones");
    this.detail = make("section", { class: "detail", "aria-label": "Trajectory" }, make("p", { class: "empty" }, "Choose a trajectory."));
    content.replaceChildren(
      make("div", { class: "section-head" }, make("h1", {}, "Trajectories"), this.form),
      make("div", { class: "browser" },
        make("section", { class: "listing", "aria-label": "List" }, this.found, this.list, this.more), this.detail));
  }

  filters() {
    const number = (name, label, step = "1") => make("label", {}, label, make("input", { type: "number", name, step }));
    return make("form", { class: "filters", "aria-label": "Filter", onsubmit: (event) => { event.preventDefault(); this.search(); }, oninput: () => this.searchSoon() },
      make("label", {}, "text", make("input", { type: "search", name: "text", maxlength: "200" })),
      make("label", {}, "source", make("input", { type: "text", name: "source", maxlength: "200", size: "10" })),
      make("label", {}, "task", make("input", { type: "text", name: "task", maxlength: "200", size: "10" })),
      number("step", "step"), number("version", "version"), number("least", "reward from", "any"), number("most", "to", "any"),
      number("ratio_least", "ratio from", "any"), number("ratio_most", "to", "any"),
      make("label", {}, "end", make("select", { name: "end" }, make("option", { value: "" }, "any"), ENDS.map((end) => make("option", { value: end }, words(end))))),
      make("label", { title: "Those of which the learner recorded log-probs" }, make("input", { type: "checkbox", name: "ratios" }), "with a ratio of each token"),
      make("label", { title: "Answers of the latest evaluations, which nothing trains on" }, make("input", { type: "checkbox", name: "held_out" }), "answers to held-out prompts"),
      make("label", {}, "held-out set", make("input", { type: "text", name: "data_set", maxlength: "40", size: "10" })));
  }

  async open() {
    document.title = `Trajectories of ${this.run} · Sluice`;
    await Promise.all([this.search(), this.chosen ? this.choose(this.chosen) : null]);
  }

  /** Search when the reader has stopped typing. */
  searchSoon() {
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => this.search(), TYPING_MS);
  }

  async search(below) {
    clearTimeout(this.waiting);
    const query = new URLSearchParams([...new FormData(this.form)].filter(([, text]) => text !== ""));
    if (below !== undefined) query.set("below", below);
    const search = this.searches = (this.searches ?? 0) + 1;
    let news;
    try {
      news = await ask(`${runPath(this.run)}/trajectories?${query}`);
      if (search !== this.searches) return; // a newer search was begun meanwhile
    } catch (error) {
      if (search !== this.searches) return;
      this.found.textContent = error.message;
      this.list.replaceChildren();
      return;
    }
    const items = news.trajectories.map((one) => this.item(one));
    if (below === undefined) this.list.replaceChildren(...items);
    else this.list.append(...items);
    this.below = news.below;
    this.searched = (below === undefined ? 0 : this.searched) + news.searched;
    this.more.hidden = news.below === null;
    const all = this.list.children.length;
    this.found.textContent = `${all} ${all === 1 ? "trajectory" : "trajectories"}, newest first, of ${value(news.complete)} complete groups` +
      (news.below === null ? "" : `; the search stopped after ${value(this.searched)} of them`) +
      (news.left_out && `; ${news.left_out}`);
    this.mark();
  }

  item(one) {
    return make("li", {}, make("a", { href: this.path(one.id), "data-id": one.id },
      make("span", { class: "row" }, make("b", {}, one.id), reward(one)),
      make("span", { class: "row small" }, make("span", {}, facts(one)), ending(one)),
      make("span", { class: "preview" }, one.preview.trim() || "(no text)")));
  }

  path(id) {
    return `#/runs/${encodeURIComponent(this.run)}/trajectories/${encodeURIComponent(id)}`;
  }

  /** Show another trajectory without reading the list again. */
  async go([chosen]) {
    if (chosen) await this.choose(chosen);
  }

  /** Show one trajectory, or its whole group for a name without a number, such as g00000012. */
  async choose(id) {
    this.chosen = id;
    this.mark();
    const group = /^[gh]0*(\d+)$/.exec(id);
    try {
      const found = await ask(`${runPath(this.run)}/${group ? `groups/${group[1]}${isHeldOut(id) ? "?held_out=on" : ""}` : `trajectories/${encodeURIComponent(id)}`}`);
      if (this.chosen === id) (group ? this.showGroup(found, id) : this.showOne(found));
    } catch (error) {
      if (this.chosen !== id) return;
      show(this.detail, make("p", { class: "sentence trouble", role: "alert" }, error.message));
    }
  }

  mark() {
    for (const link of this.list.querySelectorAll("a")) {
      if (link.dataset.id === this.chosen) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  }

  showOne({ trajectory: one, components, reward_source, metadata, label, advantage, training, ratios, group, learner, parts }) {
    const versions = one.versions ? (one.versions[0] === one.versions[1] ? `v${one.versions[0]}` : `v${one.versions.join(" to v")}`) : UNKNOWN;
    const figures = [["reward", rewardText(one)], ["end", words(one.end)], ["advantage", value(advantage)],
      ...Object.entries(components).map(([name, number]) => [`reward: ${name}`, value(number)]),
      ["importance ratio", known(ratios.importance_ratio, `${value(ratios.importance_ratio)} (${value(ratios.importance_ratio_min)} to ${value(ratios.importance_ratio_max)})`)],
      ["truncated", known(ratios.truncated_fraction, `${value(100 * ratios.truncated_fraction)} % of the tokens`)],
      ["sampled by", versions], ["tokens", `${value(one.tokens)}, ${value(one.masked)} in the mask`], ["agent", one.agent],
      ...label === null ? [] : [["label", label]]];
    const more = [["policy", one.policy], ["actor", one.actor || UNKNOWN], ["reward from", reward_source || "the actor"],
      ...Object.entries(metadata).map(([name, found]) => [name, typeof found === "string" ? found : JSON.stringify(found)])];
    this.detail.replaceChildren(
      make("h2", {}, one.id, one.parent ? make("small", {}, ` forked from ${one.parent.id} at token ${one.parent.token}`) : null),
      make("p", { class: "training" }, sentence(training)),
      make("dl", { class: "facts" }, figures.map(([name, shown]) => make("div", {}, make("dt", {}, name), make("dd", {}, shown)))),
      this.siblings(group, one), new Tokens(parts, learner).element,
      ...more.length ? [make("details", {}, make("summary", {}, "Policy, actor, metadata"),
        make("dl", { class: "metadata" }, more.map(([name, shown]) => make("div", {}, make("dt", {}, name), make("dd", {}, shown)))))] : []);
    this.detail.querySelectorAll(".facts dd")[1].classList.toggle("untrusted", !TRUSTED.includes(one.end));
  }

  /** Show the answers of a group side by side. */
  showGroup({ lease, label, prompt, answers }, id) {
    const shown = ["reward", "advantage", "components", "end", "tokens"];
    const fact = { reward: rewardText, advantage: (one) => value(one.advantage),
      components: (one) => Object.entries(one.components).map(([name, number]) => `${name} ${value(number)}`).join(", ") || UNKNOWN,
      end: (one) => words(one.end), tokens: (one) => value(one.tokens) };
    this.detail.replaceChildren(
      make("h2", {}, isHeldOut(id) ? `Answers to held-out prompt ${id}` : `Group of lease ${lease}`),
      ...label === null ? [] : [make("p", {}, `Label: ${label}`)],
      make("details", {}, make("summary", {}, "Prompt"), make("pre", { tabindex: "0", "aria-label": "Prompt" }, visible(prompt))),
      make("div", { class: "answers", tabindex: "0", role: "group", "aria-label": "Answers side by side" }, answers.map((one) =>
        make("article", {}, make("h3", {}, make("a", { href: this.path(one.id) }, one.id), one.agent === "solver" ? null : ` ${one.agent}`),
          make("dl", {}, shown.map((name) => make("div", {}, make("dt", {}, name === "components" ? "parts" : name), make("dd", {}, fact[name](one))))),
          make("p", { class: "small" }, sentence(one.training)), make("pre", {}, visible(one.text))))));
  }

  /** Return the group as a tree: its episodes, and in each the trajectories, those that forked below their parents. */
  siblings(group, chosen) {
    const episodes = Map.groupBy ? Map.groupBy(group, (one) => one.rollout) : grouped(group);
    return make("nav", { class: "siblings", "aria-label": "Episodes of this prompt" },
      make("a", { class: "side", href: this.path(chosen.id.split(".")[0]) }, "Side by side"), make("ul", {}, [...episodes].map(([rollout, members]) =>
      make("li", {}, make("span", { class: "episode" }, `episode ${rollout}`), this.branch(members, null, chosen)))));
  }

  branch(members, parent, chosen) {
    const ids = new Set(members.map((one) => one.id));
    const here = members.filter((one) => (one.parent && ids.has(one.parent.id) ? one.parent.id : null) === parent);
    if (!here.length) return null;
    return make("ul", {}, here.map((one) => make("li", {},
      make("a", { href: this.path(one.id), "aria-current": one.id === chosen.id ? "true" : false },
        make("span", {}, one.agent), " ", reward(one), one.advantage === null ? null : make("small", {}, ` advantage ${value(one.advantage)}`), one.parent ? make("small", {}, ` from token ${one.parent.token}`) : null),
      this.branch(members, one.id, chosen))));
  }

  recolour() {}

  end() {
    clearTimeout(this.waiting);
  }
}

function grouped(group) {
  const episodes = new Map();
  for (const one of group) episodes.set(one.rollout, [...(episodes.get(one.rollout) ?? []), one]);
  return episodes;
}

const known = (number, text) => (number === null ? UNKNOWN : text);
const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}.`;
const isHeldOut = (id) => id.startsWith("h");
const words = (end) => end.replaceAll("_", " ");
const rewardText = (one) => (one.reward !== null ? value(one.reward) : TRUSTED.includes(one.end) ? "due" : "none");
const reward = (one) => make("span", { class: "reward" }, rewardText(one));
const ending = (one) => make("span", { class: TRUSTED.includes(one.end) ? "" : "untrusted" }, words(one.end));

function facts(one) {
  const versions = one.versions ? `v${one.versions[0] === one.versions[1] ? one.versions[0] : one.versions.join("–")}` : "no version";
  const frozen = isHeldOut(one.id) ? " · held out" : one.trained ? "" : " · not trained";
  return `${one.agent} · ${one.turns} ${one.turns === 1 ? "turn" : "turns"} · ${value(one.tokens)} tokens · ${versions}${frozen}`;
}
