/** Numbers as people read them. */

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  let unit = 0;
  while (count >= 1024 && unit < UNITS.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${unit === 0 || count >= 100 ? Math.round(count) : count.toFixed(1)} ${UNITS[unit]}`;
}

export const whole = (count) => Math.round(count).toLocaleString("en");

export function seconds(count) {
  if (count < 1) return `${Math.max(0, Math.round(count * 1000))} ms`;
  if (count < 100) return `${count.toFixed(count < 20 ? 1 : 0)} s`;
  return `${Math.round(count / 60)} min`;
}

export function rate(count) {
  return count >= 10 || count === 0 ? whole(count) : count.toFixed(1);
}

export const percent = (share) => `${Math.round(share * 100)} %`;

export const plural = (count, word, one = "", many = "s") => `${whole(count)} ${word}${count === 1 ? one : many}`;

const srtTime = (count) => new Date(Math.round(count * 1000)).toISOString().slice(11, 23).replace(".", ",");

/** Subtitles: a number, the times and the text of each piece. */
export const subtitles = (pieces) =>
  pieces
    .map(({ start, end, text }, at) => `${at + 1}\n${srtTime(start)} --> ${srtTime(end)}\n${text.trim()}\n`)
    .join("\n");
