// Makes elements. Text is always set as text, never as HTML: what a model wrote must not become markup.

/** Return a new element; an attribute that is false or null is left out, `on...` adds a listener. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Return a new element of SVG. */
export function makeSvg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.flat());
  return element;
}

/** Replace the children of an element, and only if something differs: a reader's focus and place stay. */
export function show(element, ...children) {
  const fresh = make("div", {}, ...children);
  if (element.innerHTML !== fresh.innerHTML) element.replaceChildren(...fresh.childNodes);
}

/** Return a group of buttons of which one is chosen, with `choose(value)` called for another. */
export function choice(label, options, chosen, choose) {
  const buttons = options.map(([value, text]) =>
    make("button", {
      type: "button", "aria-pressed": String(value === chosen),
      onclick: (event) => {
        for (const button of buttons) button.setAttribute("aria-pressed", String(button === event.currentTarget));
        choose(value);
      },
    }, text));
  return make("div", { class: "choice", role: "group", "aria-label": label }, ...buttons);
}
