/** What is known of the server: its requests, encoder outputs and models, by what `/events` tells. Knows no screen. */

import { isOfPage } from "./api.js";

const KEPT_SECONDS = 65; // what ended earlier is forgotten
const KEPT_WORKS = 10; // but for the latest
const MOST_FAILURES = 50;
const OUTCOMES = new Set(["finished", "failed", "aborted"]);
const GONE = "absent";
const PAUSE_SECONDS = 1; // between two requests of one piece of work

/** Something with a life in stages: a piece of work or an encoder output. Times in seconds of the server's clock. */
export class Track {
  constructor(id, model, from) {
    Object.assign(this, { id, model, from, segments: [], to: null, outcome: null, error: "", tokens: 0, bytes: 0 });
  }

  get isActive() {
    return this.to === null;
  }

  get stage() {
    return this.isActive ? this.segments.at(-1)?.stage : this.outcome;
  }

  enter(stage, at) {
    this.#close(at);
    this.to = this.outcome = null;
    this.segments.push({ stage, from: at, to: null });
  }

  end(outcome, at, error = "") {
    this.#close(at);
    Object.assign(this, { to: at, outcome, error: error || this.error });
  }

  /** Seconds in each stage so far. */
  spent(now) {
    const spent = new Map();
    for (const { stage, from, to } of this.segments) spent.set(stage, (spent.get(stage) ?? 0) + (to ?? now) - from);
    return spent;
  }

  #close(at) {
    const last = this.segments.at(-1);
    if (!last || last.to !== null) return;
    last.to = at;
    if (last.to <= last.from) this.segments.pop();
  }
}

/** The work that a request is a part of: a transcription makes a request for each window. */
export const workOf = (request) => request.split("/", 1)[0];

export class World {
  constructor() {
    this.clear();
  }

  clear() {
    this.now = 0;
    this.models = new Map(); // figures by name
    this.works = []; // tracks, by their beginnings
    this.entries = [];
    this.failures = []; // the latest first
    this.samples = []; // figures of the last minute
    this.lost = 0;
    this.requests = new Map(); // the request's track and tokens, while it is active
    this.latest = new Map(); // the latest track of a piece of work, by model and name
    this.outputs = new Map(); // the track of an encoder output, by model and key, until it is gone
  }

  /** Takes what the server tells. */
  take(told) {
    if (told.type === "state" && told.began !== this.began) this.clear(); // another server
    this.now = told.now;
    TAKES[told.type]?.(this, told);
    this.#forget();
  }

  #forget() {
    const since = this.now - KEPT_SECONDS;
    const stays = (track) => track.isActive || track.to > since;
    this.works = this.works.filter((track, index, all) => stays(track) || index >= all.length - KEPT_WORKS);
    this.entries = this.entries.filter(stays);
    for (const [name, track] of this.latest) if (!stays(track)) this.latest.delete(name);
    while (this.samples.length > 2 && this.samples[1].now < since) this.samples.shift();
  }
}

const TAKES = { state: takeState, changes: takeChanges, figures: takeFigures, lost: takeLost };

function takeState(world, told) {
  const isNew = told.began !== world.began;
  world.began = told.began;
  for (const { request, stage, at, tokens, error } of isNew ? [] : told.recent)
    endRequest(world, request, stage, at, tokens, error);
  const alive = new Set(told.requests.map((one) => one.request));
  for (const [id, { tokens }] of world.requests)
    if (!alive.has(id)) endRequest(world, id, "unknown", told.now, tokens, "");
  const there = new Set(told.entries.map((one) => nameOf(one)));
  for (const [name, track] of world.outputs) if (!there.has(name)) endOutput(world, name, track, told.now);
  const unknown = told.requests.filter(({ request }) => !world.requests.has(request));
  takeLives(world, isNew ? [...told.recent, ...unknown] : unknown);
  for (const one of told.requests) takeRequest(world, one);
  for (const one of told.entries) takeEntry(world, one);
}

/** Requests that were not known, from their beginnings, as if each of their stages were told now. */
function takeLives(world, requests) {
  const changes = requests.flatMap(({ stages, ...one }) => stages.map(([stage, at]) => ({ ...one, stage, at })));
  changes.sort((one, other) => one.at - other.at);
  for (const change of changes) takeRequest(world, change);
}

function takeChanges(world, told) {
  for (const change of told.changes) {
    if (change.request) takeRequest(world, change);
    else if (change.entry) takeEntry(world, change);
    else fail(world, { ...change, text: change.failure });
  }
}

function takeLost(world, told) {
  world.lost += told.count;
}

// -- requests ---------------------------------------------------------------------------------------------------------

function takeRequest(world, { request, model, stage, at, tokens = 0, error = "" }) {
  if (OUTCOMES.has(stage)) return endRequest(world, request, stage, at, tokens, error);
  const known = world.requests.get(request) ?? begin(world, request, model, at);
  known.tokens = tokens;
  known.track.enter(stage, at);
}

function begin(world, request, model, at) {
  const known = { track: trackOf(world, workOf(request), model, at), model, tokens: 0 };
  world.requests.set(request, known);
  return known;
}

/** The track that a new request goes on with, or a new one. */
function trackOf(world, id, model, at) {
  const name = `${model} ${id}`;
  const latest = world.latest.get(name);
  if (latest && !latest.isActive && at - latest.to < PAUSE_SECONDS) return latest;
  const track = new Track(id, model, at);
  track.before = 0; // tokens of its requests that have ended
  world.works.push(track);
  world.latest.set(name, track);
  return track;
}

function endRequest(world, request, outcome, at, tokens, error) {
  const known = world.requests.get(request);
  if (!known) return;
  world.requests.delete(request);
  const { track, model } = known;
  track.before += tokens;
  track.tokens = track.before;
  track.end(outcome, at, error);
  if (outcome === "failed") fail(world, { model, at, id: track.id, text: error });
}

/** As the client and the access log know it, without the engine's number. */
export const requestName = (id) => id.replace(/#\d+$/, "");

/** Remembers a failure. One of a request of this page is reported by its answer and by the server's events, and counts
 * once; other clients may use a name again. */
export function fail(world, { model, at, id = "", text }) {
  const name = requestName(id);
  if (isOfPage(name) && world.failures.some((one) => requestName(one.id) === name)) return;
  world.failures.unshift({ model, at, id, text });
  world.failures.length = Math.min(world.failures.length, MOST_FAILURES);
}

// -- encoder outputs --------------------------------------------------------------------------------------------------

const nameOf = ({ model, entry }) => `${model} ${entry}`;

function takeEntry(world, told) {
  const name = nameOf(told);
  const known = world.outputs.get(name);
  if (told.state === GONE) {
    if (known) endOutput(world, name, known, told.at);
    return;
  }
  const track = known ?? new Track(told.entry, told.model, told.at);
  if (!known) {
    track.bytes = told.bytes;
    world.outputs.set(name, track);
    world.entries.push(track);
  }
  track.enter(told.state, told.at);
}

function endOutput(world, name, track, at) {
  world.outputs.delete(name);
  track.end(GONE, at);
}

// -- figures ----------------------------------------------------------------------------------------------------------

function takeFigures(world, told) {
  for (const [name, { error }] of Object.entries(told.models)) {
    if (error && error !== world.models.get(name)?.error) fail(world, { model: name, at: told.now, text: error });
  }
  world.models = new Map(Object.entries(told.models));
  world.samples.push(told);
  for (const { engine } of world.models.values()) {
    for (const [request, tokens] of Object.entries(engine?.written ?? {})) {
      const known = world.requests.get(request);
      if (known) known.track.tokens = known.track.before + (known.tokens = tokens);
    }
  }
}

/** The sum of a figure over the shown models that are open. */
export function sum(models, shown, read) {
  let total = 0;
  for (const [name, { engine }] of Object.entries(models)) if (engine && shown(name)) total += read(engine);
  return total;
}

/** How fast a counter grew, a second, over the last `span` seconds before the sample `index`. A model that was opened
 * anew counts from 0. */
export function growth(samples, index, shown, read, span = 2) {
  let first = index;
  while (first > 0 && samples[index].now - samples[first].now < span) first -= 1;
  const time = samples[index].now - samples[first].now;
  if (time <= 0) return 0;
  let grown = 0;
  for (const [name, { engine }] of Object.entries(samples[index].models)) {
    if (!engine || !shown(name)) continue;
    const before = samples[first].models[name]?.engine;
    grown += Math.max(0, read(engine) - (before ? read(before) : 0));
  }
  return grown / time;
}
