/** Colours, and drawing on canvases. What waits is striped, what works is plain: colour is never the only sign. */

import { element, isExact } from "./dom.js";

/** How each stage looks: the name of its colour, and whether it is striped. `says` is the word for people; the name is
 * the engine's own. What is `rare` is in the legend beside the engine's own words alone. */
export const REQUEST_STAGES = {
  queued: { colour: "rest", striped: true, says: "waiting", means: "Waits for its encoder output, or for a place" },
  encoding: {
    colour: "encode",
    striped: false,
    says: "preparing",
    means: "Its audio or images are encoded",
  },
  ready: {
    colour: "encode",
    striped: true,
    says: "prepared",
    means: "Its audio or images are encoded; it waits for a place",
    rare: true,
  },
  reading: { colour: "read", striped: false, says: "reading", means: "Its prompt is read (prefill)" },
  decoding: { colour: "write", striped: false, says: "writing", means: "Its tokens are written, one in each step" },
  preempted: {
    colour: "yield",
    striped: true,
    says: "paused",
    means: "Gave its place to an earlier request, and waits again",
    rare: true,
  },
  suspected: {
    colour: "fault",
    striped: true,
    says: "trying again",
    means: "Was in a step that failed, and is tried again",
    rare: true,
  },
};

export const ENTRY_STATES = {
  reserved: { colour: "encode", striped: true, means: "Its bytes are taken; it waits for the encoder" },
  encoding: { colour: "encode", striped: false, means: "The encoder computes it" },
  held: { colour: "write", striped: false, means: "Requests read it, or are about to" },
  idle: { colour: "keep", striped: false, means: "Nobody holds it; it is kept for reuse" },
  freeing: { colour: "fault", striped: true, means: "It is being dropped; its bytes still count" },
};

const OUTCOMES_SAID = { aborted: "stopped" };

/** The word for a stage, a state or an outcome: the engine's own where its inside is shown. */
export const wordFor = (name, stages = {}) =>
  isExact() ? name : (stages[name]?.says ?? OUTCOMES_SAID[name] ?? name);

/** How a bar ends: a line, a cross or a ring. */
export const ENDS = { finished: "good", failed: "fault", aborted: "yield" };

const NAMES = ["rest", "encode", "read", "write", "keep", "yield", "fault", "ink", "good", "muted", "line", "fill"];
const STRIPE = 6; // pixels

/** The page's colours, as its style says them, and what is made of them; made anew when they change. */
export class Palette {
  #colours = {};
  #stripes = new Map();

  constructor() {
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#read());
    this.#read();
  }

  #read() {
    const style = getComputedStyle(document.documentElement);
    this.#colours = Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    this.#stripes.clear();
  }

  of(name) {
    return this.#colours[name];
  }

  /** The fill of a stage. Stripes move with `shift` (pixels), so that they stand still on what moves. */
  fill(context, { colour, striped }, shift) {
    if (!striped) return this.of(colour);
    if (!this.#stripes.has(colour)) this.#stripes.set(colour, stripes(this.of(colour)));
    const pattern = context.createPattern(this.#stripes.get(colour), "repeat");
    const scale = 1 / devicePixelRatio;
    pattern.setTransform(new DOMMatrix([scale, 0, 0, scale, shift % STRIPE, 0]));
    return pattern;
  }
}

/** One period of slanted stripes, in the device's pixels. */
function stripes(colour) {
  const size = Math.round(STRIPE * devicePixelRatio);
  const tile = new OffscreenCanvas(size, size);
  const context = tile.getContext("2d");
  context.globalAlpha = 0.3;
  context.fillStyle = colour;
  context.fillRect(0, 0, size, size);
  context.globalAlpha = 1;
  context.strokeStyle = colour;
  context.lineWidth = size * 0.36;
  for (const at of [-size, 0, size]) {
    context.beginPath();
    context.moveTo(at - 1, size + 1);
    context.lineTo(at + size + 1, -1);
    context.stroke();
  }
  return tile;
}

/** Makes the canvas as sharp as the screen is; gives its context and its size in pixels of the page. A canvas that is
 * not shown has no height. */
export function prepared(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const [wide, high] = [Math.round(width * devicePixelRatio), Math.round(height * devicePixelRatio)];
  if (canvas.width !== wide || canvas.height !== high) Object.assign(canvas, { width: wide, height: high });
  const context = canvas.getContext("2d");
  context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

/** A sample of a stage for a legend. */
export function swatch(palette, stage) {
  return sample((context, width, height) => {
    context.fillStyle = palette.fill(context, stage, 0);
    context.fillRect(0, 0, width, height);
  });
}

/** A sample of an end for a legend. */
export const endSwatch = (palette, outcome) =>
  sample((context, width, height) => drawEnd(context, palette, outcome, outcome === "finished" ? 5 : 1, 0, height));

/** The lines of a legend: how stages and ends look. */
export function legend(palette, stages, ends) {
  const kinds = Object.entries(stages)
    .filter(([, { rare }]) => !rare || isExact())
    .map(([name, { means, ...look }]) => element("li", { title: means }, swatch(palette, look), wordFor(name, stages)));
  return [...kinds, ...ends.map((outcome) => element("li", {}, endSwatch(palette, outcome), wordFor(outcome)))];
}

function sample(draw) {
  const canvas = document.createElement("canvas");
  canvas.className = "swatch";
  const redraw = () => {
    const { context, width, height } = prepared(canvas);
    if (height > 0) draw(context, width, height);
  };
  new ResizeObserver(redraw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  return canvas;
}

/** The end of a bar at `x`, between `top` and `top + high`. */
export function drawEnd(context, palette, outcome, x, top, high) {
  if (!ENDS[outcome]) return;
  const [middle, size] = [top + high / 2, Math.min(5, high / 2)];
  context.fillStyle = context.strokeStyle = palette.of(ENDS[outcome]);
  context.lineWidth = 2;
  context.beginPath();
  if (outcome === "finished") context.fillRect(x, top, 3, high);
  if (outcome === "failed") drawCross(context, x + 2, middle, size);
  if (outcome === "aborted") context.arc(x + 2 + size, middle, size - 1, 0, 7);
  context.stroke();
}

function drawCross(context, x, middle, size) {
  for (const slope of [1, -1]) {
    context.moveTo(x, middle - slope * size);
    context.lineTo(x + 2 * size, middle + slope * size);
  }
}
