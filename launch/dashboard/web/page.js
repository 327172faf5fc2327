// Finds the view that the address names: #/, #/compare/A,B, #/runs/NAME, #/runs/NAME/steps/12, #/runs/NAME/trajectories/ID.

import { make } from "./dom.js";
import { Overview } from "./overview.js";
import { Runs } from "./runs.js";
import { Step } from "./step.js";
import { Timeline } from "./timeline.js";
import { Trajectories } from "./trajectories.js";

const content = document.getElementById("content");
const runName = document.getElementById("run-name");
const views = document.getElementById("views");
const status = document.getElementById("connection");

const VIEWS = [["", "Overview", Overview], ["timeline", "Timeline", Timeline], ["trajectories", "Trajectories", Trajectories]];
let view = null;
let place = "";

function connection(there) {
  status.textContent = there ? "connected" : "the dashboard does not answer";
  status.className = `connection ${there ? "there" : "away"}`;
}

function header(run, chosen) {
  runName.textContent = run ?? "";
  const links = run ? VIEWS.map(([path, text]) =>
    [`#/runs/${encodeURIComponent(run)}${path ? `/${path}` : ""}`, text, path === chosen]) : [];
  views.replaceChildren(...[["#/", "Runs", !run], ...links].map(([href, text, current]) =>
    make("a", { href, "aria-current": current ? "page" : false }, text)));
}

const parts = () => location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);

function chosenView() {
  const [kind, name, path = "", ...rest] = parts();
  if (kind === "runs" && name) {
    const [, , View] = path === "steps" ? [path, "Step", Step] : VIEWS.find(([known]) => known === path) ?? VIEWS[0];
    header(name, path);
    return new View(name, content, connection, rest);
  }
  header(null, "");
  return new Runs(content, kind === "compare" && name ? name.split(",") : []);
}

async function open() {
  const [kind, name, path, ...rest] = parts();
  const next = [kind, name, path].join("/");
  if (view?.go && next === place) {
    await view.go(rest); // the same view of another thing
    return;
  }
  place = next;
  view?.end();
  status.textContent = "";
  document.title = "Sluice";
  view = chosenView();
  const opened = view;
  try {
    await opened.open();
  } catch (error) {
    if (opened === view) content.replaceChildren(make("p", { class: "sentence trouble", role: "alert" }, error.message));
  }
}

addEventListener("hashchange", open);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view?.recolour());
open();
