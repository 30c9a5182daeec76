/** Lanes on a time axis: a line of text for each lane, and one canvas behind all of them. */

import { element, write } from "./dom.js";
import { Lanes } from "./lanes.js";
import { prepared, swatch } from "./paint.js";

const ENDS = { failed: "fault", aborted: "yield", finished: "ink" };
const LEAST_WIDTH = 1.5; // pixels of a bar

export class Timeline {
  /** `stages`: how each looks; `describe(track, now)`: the texts of a lane; `explain(track, now)`: all about a track. */
  constructor({ place, detail, legend, palette, stages, describe, explain, least, most, title }) {
    Object.assign(this, { detail, palette, stages, describe, explain, title });
    this.lanes = new Lanes(least, most);
    this.rows = [];
    this.pointed = null;
    this.#build(place);
    legend.replaceChildren(...Object.values(stages).map((stage) => element("li", {}, swatch(palette, stage), stage.says)));
  }

  #build(place) {
    this.axis = element("div", { className: "axis", aria: { hidden: "true" } });
    this.list = element("ol", { className: "rows", aria: { label: this.title } });
    this.canvas = element("canvas", { className: "bars", aria: { hidden: "true" } });
    this.more = element("p", { className: "more", hidden: true });
    this.body = element("div", { className: "body" }, this.canvas, this.list);
    place.append(this.axis, element("div", { className: "scroll" }, this.body), this.more);
    this.list.addEventListener("keydown", (event) => this.#walk(event));
    this.body.addEventListener("pointermove", (event) => this.#point(event));
    this.body.addEventListener("pointerleave", () => this.#show(null));
  }

  /** Takes the tracks as they are now: gives them lanes, and writes the texts. */
  update(tracks, now) {
    this.lanes.place(tracks, now);
    while (this.rows.length < this.lanes.rows.length) this.#addRow();
    while (this.rows.length > this.lanes.rows.length) this.rows.pop().line.remove();
    for (const [index, row] of this.rows.entries()) this.#write(row, this.lanes.rows[index].at(-1), now);
    this.more.hidden = !this.lanes.hidden;
    write(this.more, `${this.lanes.hidden} more`);
    if (this.pointed) write(this.detail, this.explain(this.pointed, now));
  }

  #addRow() {
    const parts = ["name", "model", "count", "state"].map((name) => element("span", { className: name }));
    const line = element("li", { tabIndex: this.rows.length ? -1 : 0, className: "row empty" }, ...parts);
    const row = { line, parts, track: null };
    line.addEventListener("focus", () => this.#show(row.track));
    line.addEventListener("blur", () => this.#show(null));
    this.list.append(line);
    this.rows.push(row);
  }

  #write(row, track, now) {
    row.track = track ?? null;
    row.line.className = `row ${track ? (track.isActive ? "active" : "over") : "empty"}`;
    row.line.dataset.outcome = track?.outcome ?? "";
    const texts = track ? this.describe(track, now) : [];
    row.parts.forEach((part, index) => write(part, texts[index] ?? ""));
  }

  // -- pointing ------------------------------------------------------------------------------------------------------

  #walk(event) {
    const step = { ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
    const from = this.rows.findIndex((row) => row.line === document.activeElement);
    if (!step || from < 0) return;
    event.preventDefault();
    const to = Math.max(0, Math.min(this.rows.length - 1, from + step));
    this.rows[from].line.tabIndex = -1;
    this.rows[to].line.tabIndex = 0;
    this.rows[to].line.focus();
  }

  #point(event) {
    const row = this.rows.find(({ line }) => line === event.target.closest?.("li"));
    if (!row) return;
    const box = this.canvas.getBoundingClientRect();
    const at = this.timeAt?.(event.clientX - box.left);
    const tracks = this.lanes.rows[this.rows.indexOf(row)] ?? [];
    const hit = tracks.findLast((track) => track.from <= at + 0.3 && (track.to ?? Infinity) >= at - 0.3);
    this.#show(hit ?? tracks.at(-1) ?? null);
  }

  #show(track) {
    this.pointed = track ?? null;
    write(this.detail, track ? this.explain(track, this.shownNow ?? 0) : "");
  }

  // -- drawing -------------------------------------------------------------------------------------------------------

  /** Draws the last `span` seconds before `now`. */
  draw(now, span) {
    this.shownNow = now;
    this.#drawAxis(span);
    const { context, width, height } = prepared(this.canvas);
    const scale = width / span;
    const view = { context, width, height, x: (time) => width - (now - time) * scale, shift: -now * scale };
    this.timeAt = (x) => now - (width - x) / scale;
    this.#drawGrid(view, span);
    this.rows.forEach(({ line }, index) => this.#drawLane(view, line, this.lanes.rows[index] ?? []));
  }

  #drawAxis(span) {
    if (this.span === span) return;
    this.span = span;
    const marks = Array.from({ length: span / 10 }, (_, index) => `−${span - index * 10} s`);
    this.axis.replaceChildren(...[...marks, "now"].map((mark) => element("span", {}, mark)));
  }

  #drawGrid({ context, width, height }, span) {
    context.fillStyle = this.palette.of("line");
    for (let mark = 0; mark < span; mark += 10) context.fillRect(Math.round((mark / span) * width), 0, 1, height);
  }

  #drawLane(view, line, tracks) {
    const style = this.barStyle ?? (this.barStyle = getComputedStyle(this.list));
    const top = line.offsetTop + parseFloat(style.getPropertyValue("--bar-top"));
    const high = parseFloat(style.getPropertyValue("--bar-high"));
    for (const track of tracks) this.#drawTrack(view, track, top, high);
  }

  #drawTrack({ context, x, shift, width }, track, top, high) {
    for (const { stage, from, to } of track.segments) {
      const [left, right] = [Math.max(-2, x(from)), Math.min(width, to === null ? width : x(to))];
      if (right < 0) continue;
      context.fillStyle = this.palette.fill(context, this.stages[stage] ?? this.stages.queued, shift);
      context.fillRect(left, top, Math.max(LEAST_WIDTH, right - left), high);
    }
    if (!track.isActive && x(track.to) > 0) this.#drawEnd(context, track, x(track.to), top, high);
  }

  /** How it ended: a bar, a cross or a ring. */
  #drawEnd(context, { outcome }, x, top, high) {
    const colour = ENDS[outcome];
    if (!colour) return;
    context.fillStyle = context.strokeStyle = this.palette.of(colour);
    if (outcome === "finished") {
      context.fillRect(x - 1, top - 1, 2, high + 2);
      return;
    }
    const [middle, size] = [top + high / 2, Math.min(5, high / 2)];
    context.lineWidth = 2;
    context.beginPath();
    if (outcome === "failed") {
      for (const slope of [1, -1]) {
        context.moveTo(x + 2, middle - slope * size);
        context.lineTo(x + 2 + 2 * size, middle + slope * size);
      }
    } else {
      context.arc(x + 2 + size, middle, size - 1, 0, 7);
    }
    context.stroke();
  }
}
