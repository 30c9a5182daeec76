/** Lanes on a time axis: a line of text for each lane, and one canvas behind all of them. */

import { element, write } from "./dom.js";
import { Lanes } from "./lanes.js";
import { drawEnd, prepared } from "./paint.js";

const LEAST_WIDTH = 1.5; // pixels of a bar
const NEAR_SECONDS = 0.3; // of the pointer to a bar

export class Timeline {
  /** `stages`: how each looks; `describe(track, now)`: the texts of a lane; `explain(track, now)`: all of a track. */
  constructor({ place, detail, palette, stages, describe, explain, least, most, title, hint, nothing, isOwn }) {
    Object.assign(this, { place, detail, palette, stages, describe, explain, title, hint, nothing, isOwn });
    this.lanes = new Lanes(least, most);
    this.rows = [];
    this.#build(place);
    this.#setEmpty(true);
    this.#show(null);
  }

  #setEmpty(isEmpty) {
    this.isEmpty = isEmpty;
    this.place.classList.toggle("none", isEmpty);
  }

  #build(place) {
    this.axis = element("div", { className: "axis", aria: { hidden: "true" } });
    this.list = element("ol", { className: "rows", aria: { label: this.title } });
    this.canvas = element("canvas", { className: "bars", aria: { hidden: "true" } });
    this.more = element("p", { className: "more", hidden: true });
    this.body = element("div", { className: "body" }, this.canvas, this.list);
    place.prepend(this.axis);
    place.append(element("div", { className: "scroll" }, this.body), this.more);
    this.list.addEventListener("keydown", (event) => this.#walk(event));
    for (const kind of ["pointermove", "pointerdown"]) this.body.addEventListener(kind, (event) => this.#point(event));
    this.body.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.#show(null));
  }

  /** Takes the tracks as they are now: gives them lanes, and writes the texts. */
  update(tracks, now) {
    this.lanes.place(tracks);
    while (this.rows.length < this.lanes.rows.length) this.#addRow();
    while (this.rows.length > this.lanes.rows.length) this.rows.pop().line.remove();
    for (const [index, row] of this.rows.entries()) this.#write(row, this.lanes.rows[index].at(-1) ?? null, now);
    this.more.hidden = !this.lanes.hidden;
    write(this.more, `and ${this.lanes.hidden} more`);
    this.#setEmpty(!tracks.length);
    this.#tell(now);
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
    row.track = track;
    row.line.className = `row ${this.#kind(track)}`;
    row.line.dataset.outcome = track?.outcome ?? "";
    const texts = track ? this.describe(track, now) : [];
    row.parts.forEach((part, index) => write(part, texts[index] ?? ""));
  }

  #kind(track) {
    if (!track) return "empty";
    return `${track.isActive ? "active" : "over"} ${this.isOwn?.(track) ? "own" : ""}`;
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
    const hit = tracks.findLast(
      (track) => track.from <= at + NEAR_SECONDS && (track.to ?? Infinity) >= at - NEAR_SECONDS,
    );
    this.#show(hit ?? tracks.at(-1) ?? null);
  }

  #show(track) {
    this.pointed = track ?? null;
    this.#tell(this.shownNow ?? 0);
  }

  #tell(now) {
    const hint = this.isEmpty ? this.nothing : this.hint;
    write(this.detail, this.pointed ? this.explain(this.pointed, now) : hint);
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
    const measures = this.#measures();
    this.#drawGrid(view, span, measures);
    this.lanes.rows.forEach((tracks, index) =>
      this.#drawLane(view, tracks, index * measures.row + measures["bar-top"], measures["bar-high"]),
    );
  }

  /** A track that had to wait for its lane begins where the one before it has ended. */
  #drawLane(view, tracks, top, high) {
    let since = -Infinity;
    for (const track of tracks) {
      this.#drawTrack(view, track, since, top, high);
      since = track.to;
    }
  }

  #measures() {
    const style = getComputedStyle(this.list);
    const read = (name) => [name, parseFloat(style.getPropertyValue(`--${name}`))];
    return Object.fromEntries(["row", "bar-top", "bar-high", "grid"].map(read));
  }

  #drawAxis(span) {
    if (this.span === span) return;
    this.span = span;
    const marks = Array.from({ length: span / 10 }, (_, index) => `−${span - index * 10} s`);
    this.axis.replaceChildren(...[...marks, "now"].map((mark) => element("span", {}, mark)));
  }

  /** A line every ten seconds; without `grid`, where texts are above the bars, behind the bars alone. */
  #drawGrid({ context, width, height }, span, { row, grid, "bar-top": top, "bar-high": high }) {
    context.fillStyle = this.palette.of("line");
    for (let mark = 0; mark < span; mark += 10) {
      const x = Math.round((mark / span) * width);
      if (grid) context.fillRect(x, 0, 1, height);
      else for (let y = top; y < height; y += row) context.fillRect(x, y - 2, 1, high + 4);
    }
  }

  #drawTrack({ context, x, shift, width }, track, since, top, high) {
    for (const { stage, from, to } of track.segments) {
      const [left, right] = [Math.max(-2, x(Math.max(from, since))), Math.min(width, to === null ? width : x(to))];
      if (right < Math.max(0, left)) continue;
      context.fillStyle = this.palette.fill(context, this.stages[stage] ?? this.stages.queued, shift);
      context.fillRect(left, top, Math.max(LEAST_WIDTH, right - left), high);
    }
    if (!track.isActive && x(track.to) > 0) drawEnd(context, this.palette, track.outcome, x(track.to), top, high);
  }
}
