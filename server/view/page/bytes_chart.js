/** The encoder cache beside its lanes: bytes by state over time, and what there is of each state now. */

import { element, write } from "./dom.js";
import { bytes, plural } from "./format.js";
import { ENTRY_STATES, prepared, swatch } from "./paint.js";
import { sum } from "./world.js";

const ORDER = ["held", "idle", "encoding", "reserved", "freeing"]; // from below

export class BytesChart {
  constructor(place, palette) {
    this.palette = palette;
    this.canvas = element("canvas", { aria: { hidden: "true" } });
    this.taken = element("b");
    this.room = element("span");
    place.append(element("p", { className: "amount" }, this.taken, this.room), this.canvas);
    this.points = [];
  }

  /** Takes the figures of the last minute. */
  update(samples, shown) {
    this.points = samples.map(({ now, models }) => ({
      now,
      parts: ORDER.map((state) => sum(models, shown, (engine) => engine.cache.by_state[state] ?? 0)),
    }));
    const capacity = sum(samples.at(-1).models, shown, (engine) => engine.cache.capacity);
    const most = Math.max(...this.points.map(({ parts }) => total(parts)));
    this.capacity = capacity;
    this.top = most > capacity / 4 ? capacity * 1.05 : most * 1.3;
    write(this.taken, capacity ? bytes(total(this.points.at(-1).parts)) : "");
    write(this.room, capacity ? ` of ${bytes(capacity)}, most ${bytes(most)}` : "No model with an encoder is loaded.");
  }

  draw(now, span) {
    const { context, width, height } = prepared(this.canvas);
    if (!this.points.length || !this.top || !height) return;
    const view = {
      context,
      height,
      x: (time) => width - ((now - time) / span) * width,
      y: (count) => height - (count / this.top) * height,
    };
    const shift = (-now * width) / span;
    for (const [index, state] of ORDER.entries())
      this.#drawPart(view, index, this.palette.fill(context, ENTRY_STATES[state], shift), now);
    this.#drawCapacity(context, width, view.y(this.capacity));
  }

  /** The part `index` on those below it; a figure holds until the next one. */
  #drawPart({ context, x, y }, index, fill, now) {
    context.fillStyle = fill;
    this.points.forEach(({ now: from, parts }, at) => {
      if (!parts[index]) return;
      const below = total(parts.slice(0, index));
      const [left, right] = [x(from), x(this.points[at + 1]?.now ?? Math.max(now, from))];
      const top = y(below + parts[index]);
      if (right > 0) context.fillRect(left, top, right - left + 0.5, Math.max(1, y(below) - top));
    });
  }

  #drawCapacity(context, width, y) {
    if (y < 0) return;
    context.strokeStyle = this.palette.of("muted");
    context.setLineDash([4, 3]);
    context.beginPath();
    context.moveTo(0, y);
    context.lineTo(width, y);
    context.stroke();
    context.setLineDash([]);
  }
}

/** How many encoder outputs are in each state, and their bytes. */
export class StateList {
  constructor(place, palette) {
    this.texts = {};
    for (const [state, { means, ...look }] of Object.entries(ENTRY_STATES)) {
      this.texts[state] = [element("dd"), element("dd")];
      place.append(
        element("div", { title: means }, element("dt", {}, swatch(palette, look), state), ...this.texts[state]),
      );
    }
  }

  update(tracks) {
    for (const [state, [count, size]] of Object.entries(this.texts)) {
      const found = tracks.filter((track) => track.isActive && track.stage === state);
      write(count, found.length ? plural(found.length, "entr", "y", "ies") : "–");
      write(size, found.length ? bytes(total(found.map((track) => track.bytes))) : "");
    }
  }
}

const total = (parts) => parts.reduce((one, other) => one + other, 0);
