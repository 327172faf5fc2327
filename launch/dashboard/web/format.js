// Numbers as a human reads them.

export const UNKNOWN = "–";

/** Return a value with at most four significant digits: 950, 0.1235, 12.3k. */
export function value(number) {
  if (number === null || number === undefined || !Number.isFinite(number)) return UNKNOWN;
  const size = Math.abs(number);
  if (size >= 1e9) return `${trimmed(number / 1e9)}G`;
  if (size >= 1e6) return `${trimmed(number / 1e6)}M`;
  if (size >= 1e4) return `${trimmed(number / 1e3)}k`;
  if (size !== 0 && size < 1e-3) return number.toExponential(1);
  return trimmed(number);
}

function trimmed(number) {
  const text = number.toPrecision(4);
  return text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text;
}

/** Return seconds as 0.5 ms, 12 s, 5 min 03 s, 2 h 10 min or 3 d 04 h. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return UNKNOWN;
  if (seconds > 0 && seconds < 0.1) return `${trimmed(Number((1000 * seconds).toPrecision(2)))} ms`;
  if (seconds < 60) return `${seconds < 10 && seconds % 1 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${pad(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 24 ? `${hours} h ${pad(minutes % 60)} min` : `${Math.floor(hours / 24)} d ${pad(hours % 24)} h`;
}

/** Return a short time for an axis: 30s, 5m, 2h, 3d. */
export function shortDuration(seconds) {
  for (const [length, unit] of [[86400, "d"], [3600, "h"], [60, "m"]]) {
    if (seconds >= length) return `${trimmed(seconds / length)}${unit}`;
  }
  return `${trimmed(seconds)}s`;
}

const pad = (number) => String(Math.floor(number)).padStart(2, "0");

/** Return how long ago a moment was, which is given in seconds since the epoch. */
export function ago(timeS) {
  return timeS === null || timeS === undefined ? UNKNOWN : `${duration(Math.max(0, Date.now() / 1000 - timeS))} ago`;
}

/** Return a date of ISO 8601 as the reader's place writes it. */
export function moment(iso) {
  return iso ? new Date(iso).toLocaleString(undefined, { month: "short", day: "numeric", hour: "numeric", minute: "2-digit" }) : UNKNOWN;
}

const STAGES = { rl: "training", warmup: "warm-up" };

/** Return the stage of a learner in a reader's words. */
export const stageName = (stage) => STAGES[stage] ?? stage ?? UNKNOWN;
