/** Puts the page together. */

import { key, ownTitle, setKey } from "./api.js";
import { BytesChart, StateList } from "./bytes_chart.js";
import { Chat } from "./chat.js";
import { byId, element, isCalm, tellProblem, write } from "./dom.js";
import { Figures } from "./figures.js";
import { bytes, plural, seconds } from "./format.js";
import { follow } from "./live.js";
import { Models } from "./models.js";
import { ENDS, ENTRY_STATES, legend, Palette, REQUEST_STAGES, wordFor } from "./paint.js";
import { Speech } from "./speech.js";
import { Timeline } from "./timeline.js";
import { fail, requestName, World } from "./world.js";

const NOTHING = "No request yet. Each will have a bar here that shows what becomes of it.";
const UNHEARD = "The server has told nothing yet.";
const LOADING = "A model is being loaded; then the bars of its requests begin here.";
const DELAY = 0.2; // seconds that the picture is behind, so that what is told late is drawn in time
const FRAME = 30; // milliseconds
const CALM_FRAME = 1000;
const IS_NARROW = matchMedia("(max-width: 640px)").matches;
const SPAN = IS_NARROW ? 30 : 60; // seconds that the lanes show
const HINT = matchMedia("(hover: none)").matches
  ? "Touch a bar to read all about a request."
  : "Point at a bar, or walk the lanes with the arrow keys, to read all about a request.";

/** The server's clock, by the messages that came fastest. */
class Clock {
  #offset = Infinity;

  heard(now) {
    const offset = performance.now() / 1000 - now;
    if (offset < this.#offset || offset > this.#offset + 2) this.#offset = offset;
  }

  get now() {
    return performance.now() / 1000 - this.#offset - DELAY;
  }

  /** When it was `at`, by the clock on the wall here. */
  dateOf(at) {
    if (!Number.isFinite(this.#offset)) return new Date(); // nothing was heard yet
    return new Date(performance.timeOrigin + (at + this.#offset) * 1000);
  }
}

const stageList = (track, now, stages) =>
  [...track.spent(now)].map(([stage, spent]) => `${wordFor(stage, stages)} ${seconds(spent)}`).join(", ");

const titleOf = (id) => ownTitle(requestName(id));
const shownName = (id) => titleOf(id) ?? requestName(id);

function describeWork(track, now) {
  const spent = seconds((track.to ?? Math.max(now, track.from)) - track.from);
  const isPast = !track.isActive && track.to < now - SPAN; // no bar is left of it
  const state = `${wordFor(track.stage, REQUEST_STAGES)} ${isPast ? `${seconds(now - track.to)} ago` : spent}`;
  return [shownName(track.id), track.model, track.tokens ? `${track.tokens} tok` : "", state];
}

function explainWork(track, now) {
  const parts = [`${requestName(track.id)} (${track.model})`, stageList(track, now, REQUEST_STAGES)];
  if (track.tokens) parts.push(plural(track.tokens, "token"));
  if (!track.isActive) parts.push(`${wordFor(track.outcome)}${track.error ? `: ${track.error}` : ""}`);
  return parts.join(" · ");
}

function describeEntry(track) {
  return [track.id, track.model, bytes(track.bytes), track.isActive ? track.stage : "freed"];
}

function explainEntry(track, now) {
  const parts = [`${track.id} (${track.model})`, bytes(track.bytes), stageList(track, now, ENTRY_STATES)];
  return [...parts, ...(track.isActive ? [] : ["freed"])].join(" · ");
}

class Page {
  constructor() {
    const palette = new Palette();
    this.world = new World();
    this.clock = new Clock();
    this.models = new Models(() => this.#chosen());
    this.figures = new Figures(palette);
    this.bytes = new BytesChart(byId("cache-bytes"), palette);
    this.tellWords = () =>
      byId("requests-legend").replaceChildren(...legend(palette, REQUEST_STAGES, Object.keys(ENDS)));
    this.tellWords();
    byId("inside").addEventListener("toggle", () => this.tellWords());
    this.states = new StateList(byId("cache-states"), palette);
    this.works = new Timeline({
      ...places("requests"),
      palette,
      stages: REQUEST_STAGES,
      describe: describeWork,
      explain: explainWork,
      least: IS_NARROW ? 3 : 6,
      most: 64,
      title: "Requests, by lane",
      hint: HINT,
      nothing: UNHEARD,
      isOwn: (track) => titleOf(track.id) !== undefined,
    });
    this.entries = new Timeline({
      ...places("cache"),
      palette,
      stages: ENTRY_STATES,
      describe: describeEntry,
      explain: explainEntry,
      least: 12,
      most: 64,
      title: "Encoder outputs, by lane",
      hint: "Each line is one encoder output. It ends when its bytes are free again.",
      nothing: "No recording or image was encoded in the last minute.",
    });
    const failed = (...failure) => this.#failed(...failure);
    this.speech = new Speech(this.models, failed);
    this.chat = new Chat(this.models, failed);
    byId("failures-clear").addEventListener("click", () => this.#forgetFailures());
    byId("key-open").addEventListener("click", () => this.#askKey());
    this.keys = new Keys();
  }

  run() {
    follow({
      take: (told) => this.#take(told),
      tell: (state, text) => this.#connected(state, text),
      needKey: (fault) => this.#askKey(fault),
    });
    this.#frame();
  }

  #take(told) {
    this.clock.heard(told.now);
    this.world.take(told);
    if (told.type !== "figures") return;
    this.models.update(this.world.models);
    this.#update();
  }

  #update() {
    const { world, models } = this;
    const now = this.clock.now;
    this.figures.update(world.samples, models.shown);
    this.bytes.update(world.samples, models.shown);
    this.works.nothing = [...world.models.values()].some(({ waiting }) => waiting) ? LOADING : NOTHING;
    this.works.update(
      world.works.filter((track) => models.shown(track.model)),
      now,
    );
    const entries = world.entries.filter((track) => models.shown(track.model));
    this.entries.update(entries, now);
    this.states.update(entries);
    this.#showFailures();
  }

  #chosen() {
    this.works.lanes.clear();
    this.entries.lanes.clear();
    this.#update();
  }

  #frame() {
    const now = this.clock.now;
    if (Number.isFinite(now)) {
      this.works.draw(now, SPAN);
      this.entries.draw(now, SPAN);
      this.bytes.draw(now, SPAN);
    }
    setTimeout(() => requestAnimationFrame(() => this.#frame()), isCalm() ? CALM_FRAME : FRAME);
  }

  #connected(state, text) {
    const place = byId("connection");
    place.dataset.state = state;
    write(place, text);
  }

  // -- failures ------------------------------------------------------------------------------------------------------

  #showFailures() {
    const failures = this.world.failures;
    byId("failures").hidden = !failures.length;
    if (this.shownFailure === failures[0] && this.shownCount === failures.length) return;
    [this.shownFailure, this.shownCount] = [failures[0], failures.length];
    byId("failures-list").replaceChildren(...failures.map((one) => failureLine(one, this.clock.dateOf(one.at))));
  }

  /** Takes a request of this page that failed: the server reports what an engine had alone. */
  #failed(model, id, text) {
    fail(this.world, { model, at: Number.isFinite(this.clock.now) ? this.clock.now : 0, id, text });
    this.#showFailures();
  }

  #forgetFailures() {
    this.world.failures.length = 0;
    this.#showFailures();
  }

  // -- the key -------------------------------------------------------------------------------------------------------

  #askKey(fault) {
    this.#connected("lost", "needs a key");
    byId("key-open").hidden = false;
    return this.keys.ask(fault);
  }
}

const failureLine = ({ model, id, text }, date) =>
  element(
    "li",
    {},
    element("time", {}, date.toLocaleTimeString("en-GB")),
    element("b", {}, model),
    id ? element("span", { className: "name" }, shownName(id)) : "",
    element("span", { className: "problem" }, text),
  );

const places = (name) => ({ place: byId(`${name}-lanes`), detail: byId(`${name}-detail`) });

/** The dialog for the key. */
class Keys {
  constructor() {
    this.dialog = byId("key-dialog");
    this.field = byId("key-field");
    this.waiting = [];
    this.dialog.addEventListener("close", () => this.#take());
  }

  /** Resolves when a key was given, this time or later. */
  ask(fault) {
    tellProblem(byId("key-fault"), key() ? fault : null);
    this.field.value = key();
    if (!this.dialog.open) this.dialog.showModal();
    return new Promise((resolve) => this.waiting.push(resolve));
  }

  #take() {
    if (this.dialog.returnValue !== "set") return;
    setKey(this.field.value.trim());
    for (const resolve of this.waiting.splice(0)) resolve();
  }
}

/** A file that misses its place must not take the page's place. */
for (const kind of ["dragover", "drop"]) addEventListener(kind, (event) => event.preventDefault());

new Page().run();
