/** The figures above the lanes: rates with the last minute behind them, counts, and shares of what there is. */

import { element, write } from "./dom.js";
import { bytes, percent, plural, rate, whole } from "./format.js";
import { ENDS, ENTRY_STATES, endSwatch, prepared, swatch, wordFor } from "./paint.js";
import { growth, sum } from "./world.js";

const PAGE_PARTS = {
  used: { colour: "write", striped: false },
  cached: { colour: "keep", striped: false },
};
const SLOT_PARTS = {
  used: { colour: "write", striped: false },
  idle: { colour: "keep", striped: false },
};

/** A figure with its name, a line of small print, and a canvas. */
class Tile {
  constructor(id, name, palette) {
    this.palette = palette;
    this.value = element("strong", { className: "value" });
    this.unit = element("span", { className: "unit" });
    this.canvas = element("canvas", { aria: { hidden: "true" } });
    this.note = element("p", { className: "note" });
    const head = element("h2", {}, name);
    document
      .getElementById(id)
      .append(head, element("p", { className: "figure" }, this.value, this.unit), this.canvas, this.note);
  }

  tell(value, unit, note) {
    write(this.value, value);
    write(this.unit, unit);
    write(this.note, note);
  }
}

/** A rate and how it was over the last minute. */
class RateTile extends Tile {
  constructor(id, name, palette, read) {
    super(id, name, palette);
    this.canvas.className = "spark";
    this.read = read;
  }

  update(samples, shown) {
    const rates = samples.map((_, index) => growth(samples, index, shown, this.read));
    const most = Math.max(...rates, 0);
    this.tell(rate(rates.at(-1) ?? 0), "a second", most ? `most ${rate(most)}` : "");
    this.#draw(samples, rates, most);
  }

  #draw(samples, rates, most) {
    const { context, width, height } = prepared(this.canvas);
    if (samples.length < 2 || most <= 0) return;
    const last = samples.at(-1).now;
    const points = rates.map((value, index) => [
      width - ((last - samples[index].now) / 60) * width,
      height - 1 - (value / most) * (height - 3),
    ]);
    context.beginPath();
    points.forEach(([x, y]) => context.lineTo(x, y));
    context.strokeStyle = this.palette.of("write");
    context.lineWidth = 1.5;
    context.stroke();
    context.lineTo(width, height);
    context.lineTo(points[0][0], height);
    context.globalAlpha = 0.15;
    context.fillStyle = this.palette.of("write");
    context.fill();
    context.globalAlpha = 1;
  }
}

/** Parts of a whole, as a bar. */
class ShareTile extends Tile {
  constructor(id, name, palette, parts, { isListed = true } = {}) {
    super(id, name, palette);
    this.canvas.className = "share";
    this.parts = parts;
    this.note.className = "note parts";
    this.texts = {};
    if (isListed) for (const [part, look] of Object.entries(parts)) this.#list(part, look);
  }

  #list(part, look) {
    this.texts[part] = element("span");
    this.note.append(element("span", { className: "part" }, swatch(this.palette, look), this.texts[part]));
  }

  update(amounts, total, show) {
    const used = Object.values(amounts).reduce((one, other) => one + other, 0);
    write(this.value, total ? show(used) : "–");
    write(this.unit, total ? `of ${show(total)}` : "none here");
    this.note.hidden = !total;
    for (const [part, text] of Object.entries(this.texts)) write(text, `${show(amounts[part])} ${part}`);
    this.#draw(amounts, total || 1);
  }

  #draw(amounts, total) {
    const { context, width, height } = prepared(this.canvas);
    context.fillStyle = this.palette.of("fill");
    context.fillRect(0, 0, width, height);
    let left = 0;
    for (const [name, part] of Object.entries(this.parts)) {
      const wide = amounts[name] ? Math.max(2, (amounts[name] / total) * width) : 0;
      context.fillStyle = this.palette.fill(context, part, 0);
      context.fillRect(left, 0, wide, height);
      left += wide;
    }
  }
}

export class Figures {
  constructor(palette) {
    this.tokens = new RateTile("figure-tokens", "Tokens", palette, (engine) => engine.tokens);
    this.steps = new RateTile("figure-steps", "Steps", palette, (engine) => engine.steps);
    this.requests = new Tile("figure-requests", "Requests", palette);
    this.ended = {};
    const rows = Object.keys(ENDS).map((outcome) => {
      const [name, count] = [element("span", {}, wordFor(outcome)), element("dd")];
      this.ended[outcome] = [name, count];
      return element("div", {}, element("dt", {}, endSwatch(palette, outcome), name), count);
    });
    this.requests.canvas.replaceWith(element("dl", { className: "ended" }, ...rows));
    this.memory = new Tile("figure-memory", "Memory", palette);
    this.memory.canvas.remove();
    this.engines = new Tile("figure-engines", "In the engines", palette);
    this.engines.canvas.remove();
    this.pages = new ShareTile("figure-pages", "Pages", palette, PAGE_PARTS);
    this.slots = new ShareTile("figure-slots", "Cross slots", palette, SLOT_PARTS);
    this.cache = new ShareTile("figure-cache", "Encoder cache", palette, ENTRY_STATES, { isListed: false });
  }

  update(samples, shown) {
    if (!samples.length) return;
    const { models } = samples.at(-1);
    const of = (read) => sum(models, shown, read);
    this.tokens.update(samples, shown);
    this.steps.update(samples, shown);
    this.#requests(Object.entries(models).flatMap(([name, one]) => (shown(name) ? [one] : [])));
    const steps = `${whole(of((one) => one.waiting))} waiting, ${whole(of((one) => one.preemptions))} preempted so far`;
    this.engines.tell(whole(of((one) => one.running)), "running", steps);
    this.pages.update(
      { used: of((one) => one.pages[0] - one.pages[1]), cached: of((one) => one.pages[2]) },
      of((one) => one.pages[0]),
      whole,
    );
    this.slots.update(
      { used: of((one) => one.slots[1]), idle: of((one) => one.slots[2]) },
      of((one) => one.slots[0]),
      whole,
    );
    this.#cache(of);
  }

  /** Requests as their clients count them, since the server began; and what the models take. */
  #requests(models) {
    const of = (read) => models.reduce((all, one) => all + read(one), 0);
    const waiting = of((one) => one.waiting);
    const wait = waiting ? `now, ${whole(waiting)} waiting for a model` : "now";
    this.requests.tell(whole(of((one) => one.users)), wait, "");
    for (const [outcome, [name, count]] of Object.entries(this.ended)) {
      write(name, wordFor(outcome));
      write(count, whole(of((one) => one.ended[outcome] ?? 0)));
    }
    const loaded = models.filter((one) => one.engine);
    const total = loaded.reduce((all, one) => all + one.bytes, 0);
    const note = total ? `${plural(loaded.length, "model")} loaded` : "no model is loaded";
    this.memory.tell(total ? bytes(total) : "–", "", note);
  }

  #cache(of) {
    const amounts = {};
    for (const name of Object.keys(ENTRY_STATES)) amounts[name] = of((one) => one.cache.by_state[name] ?? 0);
    this.cache.update(
      amounts,
      of((one) => one.cache.capacity),
      bytes,
    );
    const [hits, acquires] = [of((one) => one.cache.hits), of((one) => one.cache.acquires)];
    write(
      this.cache.note,
      `${whole(of((one) => one.cache.encoded))} encoded, ${acquires ? percent(hits / acquires) : "no"} hits`,
    );
  }
}
