// Asks the server.

const LOGIN = "/login";
const AGAIN_MS = 5000;

/** Return the object at an address; with `change`, what comes of sending that. Throws an error with the server's words. */
export async function ask(path, change) {
  const sent = change && { method: "POST", body: JSON.stringify(change) };
  const answer = await fetch(path, { ...sent, headers: { Accept: "application/json", ...(change && { "Content-Type": "application/json" }) } });
  if (answer.status === 401) {
    location.href = LOGIN;
    throw new Error("the token is asked for");
  }
  if (answer.ok) return answer.json();
  const text = await answer.text();
  let told = text;
  try {
    told = JSON.parse(text).error ?? text;
  } catch { /* the answer is plain text */ }
  throw new Error(told);
}

/** Call `heard[name](value)` for the server's events until the returned function is called. */
export function listen(path, heard) {
  let events, again, ended = false;
  const connect = () => {
    events = new EventSource(path);
    for (const [name, call] of Object.entries(heard)) {
      if (name !== "connection") events.addEventListener(name, (event) => call(JSON.parse(event.data)));
    }
    events.onopen = () => heard.connection?.(true);
    events.onerror = () => {
      heard.connection?.(false);
      if (events.readyState === EventSource.CLOSED) refused(); // else the browser connects again by itself
    };
  };
  /** The server answered, but not with events: ask for the token if it wants that, or else try again later. */
  const refused = async () => {
    const answer = await fetch("/api/runs", { method: "HEAD" }).catch(() => null);
    if (ended) return;
    if (answer?.status === 401) location.href = LOGIN;
    else again = setTimeout(connect, AGAIN_MS);
  };
  connect();
  return () => {
    ended = true;
    clearTimeout(again);
    events.close();
  };
}

/** Return the part of an address that names a run. */
export const runPath = (name) => `/api/runs/${encodeURIComponent(name)}`;
