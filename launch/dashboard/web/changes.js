// The note of a run and its removal, for readers with the token.

import { make } from "./dom.js";
import { ask, runPath } from "./source.js";

/** Return the note as text, or what a reader with the token changes it and removes the run by. */
export function changes(known) {
  if (!known.may_change) return known.note ? make("p", { class: "note" }, known.note) : "";
  const told = make("span", { class: "note", role: "status" });
  const send = async (path, change, then) => {
    try {
      await ask(`${runPath(known.run)}/${path}`, change);
      then();
    } catch (error) {
      told.textContent = error.message;
    }
  };
  const note = make("input", { type: "text", name: "note", maxlength: "2000", "aria-label": "Note" });
  note.value = known.note;
  const keep = (event) => {
    event.preventDefault();
    send("note", { text: note.value }, () => { told.textContent = "The note is kept."; });
  };
  const again = make("input", { type: "text", name: "again", autocomplete: "off", "aria-label": "Name of the run once more" });
  const remove = (event) => {
    event.preventDefault();
    send("remove", { run: again.value }, () => { location.hash = "#/"; });
  };
  return make("details", { class: "more", open: Boolean(known.note) }, make("summary", {}, "Note and removal"),
    make("form", { class: "filters changes", onsubmit: keep }, note, make("button", {}, "Keep the note")),
    make("form", { class: "filters changes", onsubmit: remove }, again, make("button", {}, "Remove the run whose name this is")), told);
}
